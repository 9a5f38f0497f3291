"""Runs and comparisons from Python: the same as the command's, and as often as one likes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import fedstill
from fedstill.__main__ import main
from fedstill.core.errors import ArgumentError, FedstillError, RunFolderError, UnknownName

SMALL = {
    "data.train_limit": 60,
    "split.nodes": 2,
    "nodes.local.epochs": 1.0,
    "nodes.models": ["mlp"],
    "student.model": "mlp",
    "engine.threads": 1,
    "evaluation.centralized": False,
}


def words(options: dict[str, Any]) -> list[str]:
    """The options as a command line has them."""
    result = {name: value[0] if isinstance(value, list) else value for name, value in options.items()}
    return [word for name, value in result.items() for word in (f"--{name}", str(value).lower())]


def test_run_preset_equals_command(tmp_path: Path) -> None:
    options = {**SMALL, "method.rounds": 2, "seed": 3}
    result = fedstill.run_preset("digits-fedavg", options, out=tmp_path / "python")
    with pytest.raises(SystemExit, match="0"):
        main(["run", "digits-fedavg", *words(options), "--out", str(tmp_path / "command"), "--quiet"])
    results = json.loads((tmp_path / "command" / "result.json").read_text())
    assert result["accuracy"] == results["accuracy"]
    assert result["seed"] == results["seed"] == 3
    one, other = ((tmp_path / of / "config.toml").read_text() for of in ("python", "command"))
    assert one.partition("\n")[2] == other.partition("\n")[2]
    assert (tmp_path / "python" / "report.html").exists()
    before = (tmp_path / "python" / "result.json").stat().st_mtime_ns
    assert fedstill.run_preset("digits-fedavg", options, out=tmp_path / "python") == result
    assert (tmp_path / "python" / "result.json").stat().st_mtime_ns == before, "it ran again"
    with pytest.raises(RunFolderError, match=r"holds a run with other options"):
        fedstill.run_preset("digits-fedavg", {**options, "seed": 4}, out=tmp_path / "python")


def test_other_method_drops_options_of_preset(tmp_path: Path) -> None:
    options = {
        **SMALL,
        "method.name": "fedkd",
        "method.student.epochs": 1,
        "public.name": "noise",
        "public.limit": 16,
    }
    result = fedstill.run_preset("digits-fediod", options, out=tmp_path / "run")
    assert result["method"] == "fedkd"


def test_comparison_options_and_more_seeds(tmp_path: Path) -> None:
    options = {**SMALL, "fedavg.rounds": 2, "fedprox.rounds": 1}
    del options["evaluation.centralized"]
    comparison = fedstill.compare_methods(["fedavg", "fedprox"], options, out=tmp_path / "all")
    assert list(comparison.results) == ["fedavg-seed0", "fedprox-seed0"]
    assert [comparison.results[f"{name}-seed0"]["iterations"] for name in ("fedavg", "fedprox")] == [2, 1]
    assert comparison.not_run == {}
    again = fedstill.compare_methods(["fedavg", "fedprox"], options, out=tmp_path / "all", seeds=2)
    assert again.results["fedavg-seed0"] == comparison.results["fedavg-seed0"]
    with (again.folder / "compare.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["method"], row["seed"]) for row in rows] == [
        ("fedavg", "0"), ("fedavg", "1"), ("fedprox", "0"), ("fedprox", "1"),
    ]  # fmt: skip
    assert (again.folder / "compare.html").exists()


def test_compares_file_and_reports_failures(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('methods = ["standalone", "fedkd"]\n')
    comparison = fedstill.compare_methods(tmp_path / "mine.toml", SMALL, out=tmp_path / "all")
    assert list(comparison.results) == ["standalone-seed0"]
    assert list(comparison.not_run) == ["fedkd-seed0"]
    assert "public" in comparison.not_run["fedkd-seed0"]


def test_uses_base_and_seeds_of_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('methods = ["standalone"]\n')
    with pytest.raises(ArgumentError, match=r"invalid base = 'demo' \(expected None with .*mine\.toml"):
        fedstill.compare_methods(tmp_path / "mine.toml", SMALL, base="demo", out=tmp_path / "all")
    with pytest.raises(ArgumentError, match="seeds = 0"):
        fedstill.compare_methods("standalone", SMALL, seeds=0, out=tmp_path / "all")
    assert list(fedstill.compare_methods("standalone", SMALL, out=tmp_path / "all").results) == [
        "standalone-seed0"
    ]


def test_rejects_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for name in ("config.toml.part", "mine.txt"):
        (tmp_path / "folder" / name).write_text("mine")
    for part in ("file", "folder"):
        with pytest.raises(RunFolderError):
            fedstill.run_preset("digits-fedavg", SMALL, out=tmp_path / part)
    assert (tmp_path / "folder" / "config.toml.part").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "error", "expected"),
    [
        ({"method.roundz": 2}, UnknownName, "method.roundz"),
        ({"split.nodez": 2}, UnknownName, "split.nodez"),
        ({"method.rounds": "two"}, ArgumentError, "method.rounds = 'two'"),
        ({"split": 3}, FedstillError, "split"),
        ({"split": {"nodes": 2}, "split.nodes": 3}, ArgumentError, "split.nodes"),
        (
            {"method": "fedavg", "method.rounds": 2},
            ArgumentError,
            r"invalid method = 'fedavg' \(expected",
        ),
    ],
)
def test_invalid_option_creates_no_folder(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        fedstill.run_preset("digits-fedavg", options, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fediod.stepz": 2}, "stepz"),
        ({"fedkd.epochs": 2}, "fedkd"),
        ({"method.steps": 2}, "option of all methods"),
        ({"seed": 2}, "option of all methods"),
    ],
)
def test_rejects_invalid_option_of_comparison(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(FedstillError, match=expected):
        fedstill.compare_methods(["fediod", "fedavg"], options, out=tmp_path / "all")
    assert not (tmp_path / "all").exists()
