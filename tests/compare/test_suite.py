"""Benchmark suite: files of its parts, rows, and fingerprints of configurations."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fedstill.compare.comparison import ComparisonRun
from fedstill.compare.suite import (
    SuiteRow,
    config_fingerprint,
    find_parts,
    merge_rows,
    read_rows,
    row_schema,
    suite_parts,
    write_rows,
)
from fedstill.core.errors import ArgumentError, RunFolderError, UnknownName
from fedstill.methods.fedavg import FedAvg
from fedstill.runs.spec import RunSpec, from_dict, to_dict

PART = """
methods = ["fedavg", "fedkd-shared"]
[suite]
title = "digits"
main = "skewed"
liar = "skewed, one liar"
minutes = 1
[base]
public = { name = "held-out" }
[options.fedkd-shared]
name = "fedkd"
ensemble = "consensus"
[[settings]]
name = "skewed"
options = { fedavg = { rounds = 3 } }
[[settings]]
name = "skewed, one liar"
adversary = { name = "label-flipping", nodes = 1 }
"""


def write_part(folder: Path, text: str = PART) -> Path:
    (folder / "small_part.toml").write_text(text, encoding="utf-8")
    return folder


def row(label: str = "fedavg", seed: int = 0, **values: object) -> SuiteRow:
    return SuiteRow(
        suite="suite-v1",
        part="small-part",
        setting="skewed",
        label=label,
        method=label,
        seed=seed,
        config="0" * 32,
        **values,  # type: ignore[arg-type]
    )


def test_part_is_comparison_with_its_settings(tmp_path: Path) -> None:
    (part,) = suite_parts(write_part(tmp_path))
    assert (part.name, part.settings.main) == ("small-part", "skewed")
    plan = part.comparison(seeds=2)
    assert list(plan.methods) == ["fedavg", "fedkd-shared"]
    assert len(plan.planned_runs()) == 8
    assert part.recorded_rows() == []


def test_other_methods_run_in_same_settings(tmp_path: Path) -> None:
    (part,) = suite_parts(write_part(tmp_path))
    own, other = part.comparison(), part.comparison(["dsfl", "fedprox"])
    assert list(other.methods) == ["dsfl", "fedprox"]
    for name in ("skewed", "skewed, one liar"):
        ours, theirs = (
            plan.run_config(ComparisonRun(name, label, 0))
            for plan, label in ((own, "fedavg"), (other, "dsfl"))
        )
        assert (ours.adversary, ours.split, ours.public) == (theirs.adversary, theirs.split, theirs.public)
    with pytest.raises(ArgumentError, match="fedavg"):  # whose rows have the part's options
        part.comparison(["fedavg"])


def test_rejects_unknown_part_and_setting(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="smal"):
        find_parts(["smal-part"], write_part(tmp_path))
    write_part(tmp_path, PART.replace('liar = "skewed, one liar"', 'liar = "even"'))
    with pytest.raises(ArgumentError, match="even"):
        suite_parts(tmp_path)


@pytest.mark.parametrize(
    ("option", "value", "changes"),
    [
        ("seed", 7, False),
        ("data.root", "elsewhere", False),
        ("engine.threads", 3, False),
        ("engine.precision", "bfloat16", True),
        ("features.cache", "elsewhere", False),
        ("features.weights", "elsewhere/a.pth", True),
        ("split.alpha", 0.25, True),
        ("nodes.local.epochs", 2.5, True),
        ("method.rounds", 4, True),
    ],
)
def test_fingerprint_depends_on_what_a_run_measures(option: str, value: object, changes: bool) -> None:
    table = to_dict(RunSpec(method=FedAvg()))
    inner = table
    *path, last = option.split(".")
    for key in path:
        inner = inner[key]
    before, inner[last] = config_fingerprint(from_dict(to_dict(RunSpec(method=FedAvg())))), value
    assert (config_fingerprint(from_dict(table)) != before) is changes


def test_rows_are_read_back(tmp_path: Path) -> None:
    rows = [
        row(score=81.25, bytes_up=12.0, releases=("logits",), attacks={"membership_auc: LiRA": 55.5}),
        row("fedkd", 1, score=0.0),
        row("dsfl", not_run="refused: no public data"),
    ]
    write_rows(tmp_path / "deep" / "rows.jsonl", rows)
    assert read_rows(tmp_path / "deep" / "rows.jsonl") == rows
    lines = (tmp_path / "deep" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert "score" not in json.loads(lines[2])  # absent, as it was not measured


def test_rows_of_another_method_or_configuration_are_replaced() -> None:
    old = [row(seed=seed) for seed in range(3)]
    assert merge_rows(old, [row(seed=0, score=1.0)]) == [row(seed=0, score=1.0), *old[1:]]
    other = dataclasses.replace(row(seed=0), config="1" * 32)
    assert merge_rows([*old, row("fedkd")], [other]) == [row("fedkd"), other]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[suite]\n", "suite = 3\n[other]\n"),
        ('[[settings]]\nname = "skewed"\n', "[[settings]]\n"),
    ],
)
def test_broken_part_is_an_error_of_its_file(tmp_path: Path, before: str, after: str) -> None:
    with pytest.raises(ArgumentError):
        suite_parts(write_part(tmp_path, PART.replace(before, after)))


@pytest.mark.parametrize("line", ["[1]", "{", '{"seed": 0}', "null"])
def test_rejects_line_that_is_no_row(tmp_path: Path, line: str) -> None:
    write_rows(tmp_path / "rows.jsonl", [row()])
    with (tmp_path / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    with pytest.raises(RunFolderError, match="line 2"):
        read_rows(tmp_path / "rows.jsonl")


def test_schema_allows_each_recorded_row() -> None:
    """Types and names are compared by hand, as no validator is among the dependencies."""
    schema = row_schema()
    types: dict[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "array": list,
        "object": dict,
    }
    for part in suite_parts():
        lines = part.results_file.read_text(encoding="utf-8").splitlines() if part.recorded_rows() else []
        for line in lines:
            values = json.loads(line)
            assert set(schema["required"]) <= set(values) <= set(schema["properties"])
            for name, value in values.items():
                assert isinstance(value, types[schema["properties"][name]["type"]]), name
