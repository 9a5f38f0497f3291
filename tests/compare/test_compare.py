"""Comparisons: plans, refusals, attacks, and resuming after a kill at any moment."""

from __future__ import annotations

import csv
import dataclasses
import json
import signal
import time
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill.attacks.attack_runner import LeakageConfig
from fedstill.cli.main import main
from fedstill.compare import comparison_runner
from fedstill.compare.comparison import (
    Comparison,
    ComparisonRun,
    _build_comparison,
    plan_comparison,
    read_comparison,
    read_comparison_folder,
    released_kinds,
)
from fedstill.core.config_tables import option_types
from fedstill.core.errors import ArgumentError, FedstillError, RunFolderError, UnknownName
from fedstill.core.run_writer import lock_folder
from fedstill.data.builtin import Digits
from fedstill.methods.fedavg import FedAvg
from fedstill.privacy.config import DPTrainingConfig
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.pate import PATE, PateConfig
from fedstill.protocol.method import METHODS
from fedstill.protocol.payload_kinds import PRIVATE_DATA, PayloadKind
from fedstill.report import write_report
from fedstill.report.comparison_page import write_comparison
from fedstill.report.comparison_records import summarize
from fedstill.runs import run, spec
from fedstill.runs.spec import PaperMetric, RunSpec
from tests.support.processes import Command

QUICK: Mapping[str, Any] = {
    "split.nodes": 2,
    "data.train_limit": 200,
    "nodes.local.epochs": 1.0,
    "engine.threads": 1,
    "evaluation.every": 1,
}

PRESETS = Path(__file__).parents[2] / "experiments" / "presets"


def no_outputs(kinds: Sequence[PayloadKind]) -> set[PayloadKind]:
    """Return the kinds that are not outputs: data and model parameters."""
    return {kind for kind in kinds if kind.category == "model" or kind == PRIVATE_DATA}


def write_file(folder: Path, text: str, name: str = "mine.toml") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


FILE = """\
# One line on it.
seeds = [3, 5]
methods = ["standalone", "fedavg", "fedavg-short"]

[base]
extends = "digits-fediod"
split = { nodes = 4 }

[options.fedavg-short]
name = "fedavg"
rounds = 2

[runs.fedavg-short]
evaluation = { every = 1 }

[[settings]]
name = "alpha 0.1"
split = { alpha = 0.1 }

[[settings]]
name = "wide"
student = { model = "small-cnn:64" }

[[paper]]
method = "fedavg"
value = 80.5
source = "Someone 2020, Table 1"
setting = "alpha 0.1"
"""


# --- plans ------------------------------------------------------------------------------------------


def test_file_with_all_keys(tmp_path: Path) -> None:
    plan = read_comparison(write_file(tmp_path, FILE))
    assert (plan.name, plan.about, plan.seeds) == ("mine", "One line on it.", (3, 5))
    assert [planned_run.folder for planned_run in plan.planned_runs()][:4] == [
        "alpha-0.1/standalone-seed3",
        "alpha-0.1/fedavg-seed3",
        "alpha-0.1/fedavg-short-seed3",
        "alpha-0.1/standalone-seed5",
    ]
    assert len(plan.planned_runs()) == 2 * 2 * 3
    first = plan.run_config(ComparisonRun("alpha 0.1", "fedavg-short", 5))
    assert (first.split.nodes, first.split.alpha, first.seed) == (4, 0.1, 5)
    assert (first.method, first.evaluation.every) == (METHODS["fedavg"](rounds=2), 1)
    other = plan.run_config(ComparisonRun("wide", "fedavg", 3))
    assert (other.split.alpha, other.student.model) == (0.5, "small-cnn:64")
    assert other.method == METHODS["fedavg"]()
    assert other.evaluation.every != 1


def test_same_class_name_in_two_modules_gives_two_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("lab_a", "lab_b"):
        (tmp_path / f"{module}.py").write_text(
            "from dataclasses import dataclass\n"
            "from fedstill.methods.standalone import Standalone\n"
            "@dataclass(frozen=True, kw_only=True)\nclass Own(Standalone):\n    pass\n"
        )
    monkeypatch.chdir(tmp_path)
    plan = plan_comparison(["lab_a:Own", "fedavg", "lab_b:Own"])
    assert [planned_run.folder for planned_run in plan.planned_runs()] == [
        "lab_a.Own-seed0",
        "fedavg-seed0",
        "lab_b.Own-seed0",
    ]
    assert [plan.run_config(planned_run).method.registered_name for planned_run in plan.planned_runs()] == [
        "lab_a:Own",
        "fedavg",
        "lab_b:Own",
    ]
    assert read_comparison(write_file(tmp_path, plan.to_toml(), "compare.toml")) == plan
    with pytest.raises(ArgumentError, match=r"invalid methods = 'lab_a:Own, lab_a:Own' \(expected each once"):
        plan_comparison(["lab_a:Own", "lab_a:Own"])


def test_selects_methods_or_settings(tmp_path: Path) -> None:
    plan = read_comparison(write_file(tmp_path, FILE))
    (method, *_), (_, setting, *_) = plan.methods, plan.settings
    assert [planned_run.folder for planned_run in plan.planned_runs([method, setting])] == [
        ComparisonRun(setting, method, seed).folder for seed in plan.seeds
    ]
    assert plan.planned_runs([setting]) == [
        planned_run for planned_run in plan.planned_runs() if planned_run.setting == setting
    ]
    with pytest.raises(UnknownName, match="unknown method or setting 'fedov'"):
        plan.planned_runs(["fedov"])


def test_complete_file_round_trips(tmp_path: Path) -> None:
    for plan in (
        read_comparison(write_file(tmp_path, FILE), seeds=2, changes={"split.nodes": 6}),
        plan_comparison(["fediod", "fedavg"], seeds=[4], base="digits-fedavg", changes=QUICK),
        plan_comparison(["digits-fediod-paper", "standalone"]),
    ):
        again = read_comparison(write_file(tmp_path, plan.to_toml(), "compare.toml"))
        assert again == plan
        assert again.to_toml() == plan.to_toml()
        assert [again.run_config(planned_run) for planned_run in again.planned_runs()] == [
            plan.run_config(planned_run) for planned_run in plan.planned_runs()
        ]


PRIVATE = """\
methods = ["fedkd-votes", "fedkd-steps"]
[base]
public = { name = "held-out" }
[base.nodes.privacy]
mechanism = "pate"
pate = { teachers = 7 }
[options.fedkd-votes]
name = "fedkd"
[options.fedkd-steps]
name = "fedkd"
[runs.fedkd-steps.nodes.privacy]
mechanism = "dp-sgd"
training = { clip = 0.5 }
[[settings]]
name = "epsilon 2"
nodes = { privacy = { epsilon = 2.0 } }
[[settings]]
name = "no budget"
nodes = { privacy = { epsilon = inf } }
"""


def test_settings_may_vary_budget_and_methods_mechanism(tmp_path: Path) -> None:
    plan = read_comparison(write_file(tmp_path, PRIVATE))
    assert read_comparison(write_file(tmp_path, plan.to_toml(), "compare.toml")) == plan
    policies = {
        (planned_run.setting, planned_run.label): plan.run_config(planned_run).nodes.privacy
        for planned_run in plan.planned_runs()
    }
    assert policies == {
        ("epsilon 2", "fedkd-votes"): PATE(epsilon=2.0, pate=PateConfig(teachers=7)),
        ("epsilon 2", "fedkd-steps"): DPSGD(epsilon=2.0, training=DPTrainingConfig(clip=0.5)),
        ("no budget", "fedkd-votes"): PATE(pate=PateConfig(teachers=7)),
        ("no budget", "fedkd-steps"): DPSGD(training=DPTrainingConfig(clip=0.5)),
    }
    (note,) = (note for note in summarize(tmp_path, plan).notes if "fedkd-steps" in note)
    assert note.startswith("fedkd-steps has its own run options: nodes.privacy.mechanism = dp-sgd, ")


def test_methods_share_all_but_their_options() -> None:
    plan = plan_comparison(list(METHODS), seeds=2, base="fashion-fediod-skewed")
    tables = [spec.to_dict(plan.run_config(ComparisonRun("", label, 1))) for label in plan.methods]
    for table in tables:
        for own in ("method", "name"):
            del table[own]
        for lifted in ("outputs_only", "label_maps", "kinds"):
            del table["nodes"]["policy"][lifted]
    assert all(table == tables[0] for table in tables)
    assert tables[0]["data"]["name"] == "fashion-mnist"
    assert tables[0]["split"]["alpha"] == 0.1


def test_preset_contributes_only_method_options() -> None:
    plan = plan_comparison(["digits-fediod-paper", "fediod"], changes={"split.nodes": 3})
    preset, plain = (plan.run_config(ComparisonRun("", label, 0)) for label in plan.methods)
    assert preset.method == spec.load("digits-fediod-paper").method
    assert plain.method == METHODS["fediod"]()
    assert preset.nodes.local == plain.nodes.local
    assert preset.nodes.local.smoothing != spec.load("digits-fediod-paper").nodes.local.smoothing


def test_command_line_options_override_base_and_settings(tmp_path: Path) -> None:
    plan = read_comparison(
        write_file(tmp_path, FILE), changes={"split.alpha": 7.0, "nodes.local.epochs": 2.0}
    )
    for setting in plan.settings:
        planned = plan.run_config(ComparisonRun(setting, "fedavg", 3))
        assert (planned.split.alpha, planned.nodes.local.epochs) == (7.0, 2.0)
    assert plan.changed == ("nodes.local.epochs", "split.alpha")


def test_changing_split_keeps_skew_of_setting(tmp_path: Path) -> None:
    text = 'methods = ["fedavg"]\n[[settings]]\nname = "skewed"\nsplit = { alpha = 0.1 }\n'
    plan = read_comparison(write_file(tmp_path, text), changes={"split.name": "balanced-dirichlet"})
    split = plan.run_config(ComparisonRun("skewed", "fedavg", 0)).split
    assert (split.registered_name, split.specific_options) == ("balanced-dirichlet", {"alpha": 0.1})


def test_setting_may_override_method_options(tmp_path: Path) -> None:
    text = FILE.replace('name = "wide"', 'name = "wide"\noptions = { fedavg = { rounds = 7 } }')
    plan = read_comparison(write_file(tmp_path, text), changes={"split.nodes": 3})

    def rounds(setting: str, label: str) -> int:
        planned = plan.run_config(ComparisonRun(setting, label, 3))
        assert planned.split.nodes == 3
        method = planned.method
        assert isinstance(method, FedAvg)
        return method.rounds

    assert [rounds("wide", "fedavg"), rounds("alpha 0.1", "fedavg")] == [7, FedAvg().rounds]
    assert [rounds(setting, "fedavg-short") for setting in plan.settings] == [2, 2]
    (tmp_path / "again.toml").write_text(plan.to_toml())
    assert read_comparison(tmp_path / "again.toml") == plan


def test_outputs_only_is_lifted_for_methods_that_need_it() -> None:
    plan = plan_comparison(list(METHODS))
    for label in plan.methods:
        planned = plan.run_config(ComparisonRun("", label, 0))
        lifted = bool(no_outputs(released_kinds(planned)))
        assert planned.nodes.policy.outputs_only is not lifted, label
    lifted_for = [
        label
        for label in plan.methods
        if not plan.run_config(ComparisonRun("", label, 0)).nodes.policy.outputs_only
    ]
    assert {"fedavg", "centralized"} <= set(lifted_for)
    assert not {"fediod", "standalone", "ensemble"} & set(lifted_for)


def test_label_maps_are_released_only_by_methods_that_need_them() -> None:
    """The base is a preset of one of the methods."""
    names = [
        f"{PRESETS}/mri-segmentation-{name}.toml" for name in ("fediod", "fediod-drawn", "asyndgan", "fedavg")
    ]
    plan = plan_comparison([*names, "standalone"], base=names[0])
    assert plan.base["nodes"]["policy"]["label_maps"] is True
    out = [
        label
        for label in plan.methods
        if plan.run_config(ComparisonRun("", label, 0)).nodes.policy.label_maps
    ]
    assert out == ["mri-segmentation-fediod", "mri-segmentation-asyndgan"]


@pytest.mark.parametrize("value", [True, False])
def test_outputs_only_keeps_user_value(tmp_path: Path, value: bool) -> None:
    plan = plan_comparison(["fedavg", "fediod"], changes={"nodes.policy.outputs_only": value})
    again = read_comparison(write_file(tmp_path, plan.to_toml()))
    for planned in (plan, again):
        assert {
            planned.run_config(planned_run).nodes.policy.outputs_only
            for planned_run in planned.planned_runs()
        } == {value}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("methods = []", "invalid methods = [] (expected a list of methods"),
        ('methods = ["fedavg", "fedavg"]', "invalid methods = 'fedavg, fedavg' (expected each once"),
        ('methods = ["fedavgg"]', "unknown method or preset 'fedavgg': did you mean 'fedavg'?"),
        ('methods = ["a b"]', "invalid methods = 'a b' (expected letters"),
        ('methods = ["fedavg"]\nseed = 3', "unknown key 'seed': did you mean 'seeds'?"),
        ('methods = ["fedavg"]\nseeds = 0', "invalid seeds = 0 (expected a number of seeds"),
        (
            'methods = ["fedavg"]\nseeds = true',
            "invalid seeds = True (expected an integer or a list, each an integer",
        ),
        ('methods = ["fedavg"]\nseeds = [1, 1]', "invalid seeds = [1, 1] (expected a number of seeds"),
        ('methods = ["fedavg"]\n[base]\nseed = 3', "invalid seed of base = 3 (expected none"),
        ('methods = ["fedavg"]\n[base.splt]', "unknown key 'splt': did you mean 'split'?"),
        ('methods = ["fedavg"]\n[base]\nextends = "digit"', "unknown preset 'digit'"),
        (
            'methods = ["fedavg"]\n[options.fedprox]',
            "invalid options = 'fedprox' (expected options of listed methods",
        ),
        (
            'methods = ["fedavg"]\n[options.fedavg]\nroundz = 3',
            "fedavg: unknown key 'method.roundz': did you",
        ),
        (
            'methods = ["fedavg"]\n[options.fedavg]\nrounds = 0',
            "fedavg: invalid method.rounds = 0 (expected 1 or",
        ),
        (
            'methods = ["fedavg"]\n[runs.fedavg.method]\nrounds = 2',
            "invalid method of fedavg = {'rounds': 2} (expected none",
        ),
        (
            'methods = ["fedavg"]\n[[settings]]\nsplit.nodes = 2',
            "invalid settings = [None] (expected a list of tab",
        ),
        (
            'methods = ["fedavg"]\n[[settings]]\nname = "a b"\n[[settings]]\nname = "a-b"',
            "invalid settings = ['a b', 'a-b'] (expected a list of tables with different names",
        ),
        (
            'methods = ["fedavg"]\n[[settings]]\nname = "\u03b1 B"\n[[settings]]\nname = "\u03b1 b"',
            "invalid settings = ['\u03b1 B', '\u03b1 b'] (expected a list of tables with different names",
        ),
        (
            'methods = ["fedavg"]\n[[settings]]\nname = "few"\nnodes.local.batch = 0',
            "fedavg, few: invalid nodes.local.batch = 0",
        ),
        (
            'methods = ["fedavg"]\n[[settings]]\nname = "few"\noptions.fedprox.rounds = 2',
            "invalid options = 'fedprox' (expected options of listed methods",
        ),
        (
            'methods = ["fedavg"]\n[[settings]]\nname = "few"\noptions.fedavg.rounds = 0',
            "fedavg, few: invalid method.rounds = 0",
        ),
        (
            'methods = ["fedavg"]\n[[paper]]\nmethod = "fedavg"\nvalue = 3.0',
            "invalid paper[0].source = '' (expected a text",
        ),
        (
            'methods = ["fedavg"]\npaper = [{method = "fedavg", value = 101, source = "x"}]',
            "invalid paper.value = 101.0 (expected from 0 to 100",
        ),
        (
            'methods = ["fedavg"]\npaper = [{method = "fedavg", value = 1, source = "x", setting = "y"}]',
            "unknown setting of a published metric 'y'",
        ),
    ],
)
def test_invalid_plan_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(FedstillError) as refused:
        read_comparison(write_file(tmp_path, text))
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(line)


def test_rejects_method_options_as_shared_options() -> None:
    for name in ("method.rounds", "seed", "name", "split.node"):
        with pytest.raises(UnknownName):
            plan_comparison(["fedavg"], changes={name: 3})


# --- published metrics ------------------------------------------------------------------------------


def test_published_metrics_round_trip_and_are_not_options() -> None:
    metrics = (
        PaperMetric(method="fedavg", value=61.25, std=0.5, source='"A", Table 2', setting="alpha 1"),
        PaperMetric(method="fedkd", metric="local accuracy", value=70.0, source="B"),
    )
    planned = RunSpec(method=METHODS["fedavg"](), paper=metrics)
    again = spec.read_toml(spec.to_toml(planned))
    assert again == planned
    assert again.paper == metrics
    assert not [name for name in option_types(spec.RunSpec) if "paper" in name]


def test_rejects_invalid_published_metric(tmp_path: Path) -> None:
    for bad in ({"value": -1.0}, {"std": -0.1}, {"metric": "loss"}, {"source": ""}):
        with pytest.raises(ArgumentError, match=r"paper|published metric"):
            spec.from_dict(
                {"method": {"name": "fedavg"}, "paper": [{"method": "m", "value": 1.0, "source": "s", **bad}]}
            )
    text = 'methods = ["fedavg"]\npaper = [{ method = "m", metric = "los", value = 1.0, source = "s" }]'
    with pytest.raises(UnknownName, match="unknown published metric 'los'"):
        read_comparison(write_file(tmp_path, text))
    with pytest.raises(UnknownName, match=r"paper\[0\]\.valu"):
        spec.from_dict({"method": {"name": "fedavg"}, "paper": [{"valu": 3}]})


def test_base_contributes_published_metrics(tmp_path: Path) -> None:
    text = '[method]\nname = "fedavg"\n[[paper]]\nmethod = "fedavg"\nvalue = 70\nsource = "A, Table 1"\n'
    file = str(write_file(tmp_path, text, "base.toml"))
    options = {"fedavg-long": {"name": "fedavg", "rounds": 40}}
    plan = _build_comparison({"methods": ["fedavg", "fedavg-long"], "options": options, "base": {}}, "x", {})
    assert plan.published("", "fedavg", "accuracy") is None
    plan = plan_comparison(["fedavg", "fediod"], base=file)
    metric = plan.published("", "fedavg", "accuracy")
    assert metric is not None
    assert (metric.value, metric.source) == (70.0, "A, Table 1")
    assert plan.published("", "fedavg", "local accuracy") is None
    assert plan.published("", "fediod", "accuracy") is None


def test_published_metric_does_not_apply_to_variants() -> None:
    paper = [{"method": "fedavg", "value": 70, "source": "A"}]
    options = {"long": {"name": "fedavg", "rounds": 40}}
    both = _build_comparison({"methods": ["fedavg", "long"], "options": options, "paper": paper}, "x", {})
    assert both.published("", "fedavg", "accuracy") is not None
    assert both.published("", "long", "accuracy") is None
    # If no label is the method's name, the metric applies to the only variant.
    alone = _build_comparison({"methods": ["long"], "options": options, "paper": paper}, "x", {})
    assert alone.published("", "long", "accuracy") is not None


# --- running ----------------------------------------------------------------------------------------


def run_comparison(plan: Comparison, out: Path, **how: Any) -> None:
    """Run a comparison as the command does, with reports and files."""
    comparison_runner.compare(plan, out, report=write_report, **how)
    write_comparison(out, read_comparison_folder(out))


def resume_comparison(out: Path, **how: Any) -> None:
    run_comparison(read_comparison_folder(out), out, command="", **how)


def records(out: Path, name: str = "compare.csv") -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO((out / name).read_text(encoding="utf-8"))))


def rows_without_seconds(out: Path) -> list[dict[str, str]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in records(out)]


def quick_plan(**changes: Any) -> Comparison:
    return plan_comparison(["standalone", "fedavg"], changes={**QUICK, **changes})


def test_complete_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    plan = quick_plan()
    reads, arrays = [], Digits.arrays
    monkeypatch.setattr(Digits, "arrays", lambda self: reads.append(self) or arrays(self))
    run_comparison(plan, out, command="fedstill compare something")
    assert len(reads) == 1  # once, for the check and both runs
    lines = [line.rpartition("  ")[0].split("  ") for line in capsys.readouterr().err.splitlines()]
    assert lines == [["run 1 of 2", "standalone, seed 0"], ["run 2 of 2", "fedavg, seed 0"]]
    rows = {row["method"]: row for row in records(out)}
    for label in ("standalone", "fedavg"):
        folder = out / f"{label}-seed0"
        result = json.loads((folder / "result.json").read_text())
        row = rows[label]
        assert float(row["accuracy"]) == result["accuracy"]
        assert int(row["bytes_up"]) == result["bytes"]["up"]
        assert row["evaluated_model"] == result["evaluated_model"]
        assert row["releases"] == "; ".join(result["releases"])
        assert spec.load_toml(folder / "config.toml") == plan.run_config(ComparisonRun("", label, 0))
        assert (folder / "report.html").exists()
    assert read_comparison_folder(out) == plan
    assert comparison_runner.read_command(out) == "fedstill compare something"
    # A run of a comparison is a run like any other, with equal metrics.
    alone = run.run(
        spec.load_toml(out / "fedavg-seed0" / "config.toml"), tmp_path / "x", command="", progress=False
    )
    assert alone["accuracy"] == float(rows["fedavg"]["accuracy"])
    assert alone["bytes"]["up"] == int(rows["fedavg"]["bytes_up"])
    assert len(reads) == 2


def test_resumes_same_comparison_and_rejects_another(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = plan_comparison(["standalone"], changes=QUICK)
    run_comparison(plan, out, command="one", quiet=True)
    before = (out / "standalone-seed0" / "result.json").read_bytes()
    (out / "compare.html").unlink()
    run_comparison(plan, out, command="two", quiet=True)
    resume_comparison(out, quiet=True)
    assert (out / "compare.html").exists()
    assert (out / "standalone-seed0" / "result.json").read_bytes() == before  # nothing ran again
    for other, part in (
        (
            plan_comparison(["standalone", "fedavg"], changes=QUICK),
            r"methods \(fedavg.name was not set and is now fedavg\)",
        ),
        (plan_comparison(["standalone"], changes=QUICK, seeds=[1]), "seeds"),
        (
            plan_comparison(["standalone"], changes={**QUICK, "split.alpha": 1.0}),
            r"base \(split.alpha was 0.5 and is now 1.0\)",
        ),
    ):
        with pytest.raises(RunFolderError, match=f"holds a comparison that differs in its {part}: choose"):
            run_comparison(other, out, command="", quiet=True)
    more = plan_comparison(["standalone"], changes=QUICK, seeds=2)
    run_comparison(more, out, command="", quiet=True)
    assert (out / "standalone-seed0" / "result.json").read_bytes() == before
    assert (out / "standalone-seed1" / "result.json").exists()
    assert read_comparison_folder(out).seeds == (0, 1)


def test_resume_rejects_changed_data(tmp_path: Path) -> None:
    """The changed data have equal shape and size, so the table would not reveal them."""
    rng = np.random.default_rng(0)
    made = {"images": rng.random((200, 8, 8), dtype=np.float32), "labels": rng.integers(0, 3, 200)}
    file, out = tmp_path / "mine.npz", tmp_path / "out"
    np.savez(file, **made)
    plan = plan_comparison(["standalone", "fedavg"], changes={**QUICK, "data.name": str(file)})
    run_comparison(plan, out, command="", quiet=True, only=["standalone"])
    np.savez(file, **{**made, "images": 1 - made["images"]})
    with pytest.raises(RunFolderError, match=r"out began with other data '.*mine.npz'"):
        resume_comparison(out, quiet=True)
    np.savez(file, **made)
    resume_comparison(out, quiet=True)
    assert {row["method"] for row in records(out)} == {"standalone", "fedavg"}
    np.savez(file, **{**made, "images": 1 - made["images"]})
    more = plan_comparison(["standalone", "fedavg"], changes={**QUICK, "data.name": str(file)}, seeds=2)
    with pytest.raises(RunFolderError, match=r"out began with other data"):  # of a seed that was not there
        run_comparison(more, out, command="", quiet=True)


def test_resume_rejects_changed_custom_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seeds of different versions of a method must not be averaged."""
    monkeypatch.syspath_prepend(tmp_path)
    file, out = tmp_path / "a_lab_of_mine.py", tmp_path / "out"
    text = "from dataclasses import dataclass\nfrom fedstill.methods.standalone import Standalone\n"
    text += "@dataclass(frozen=True, kw_only=True)\nclass Mine(Standalone):\n    pass\n"
    file.write_text(text)
    one, two = (plan_comparison(["a_lab_of_mine:Mine"], changes=QUICK, seeds=seeds) for seeds in (1, 2))
    run_comparison(one, out, command="", quiet=True)
    file.write_text(text + "    # another idea\n")
    with pytest.raises(RunFolderError, match=r"out began with another version of a_lab_of_mine\.py"):
        run_comparison(two, out, command="", quiet=True)
    run_comparison(one, out, command="")
    assert (
        "began with another version of a_lab_of_mine.py: the results are of that version"
        in capsys.readouterr().err
    )
    file.write_text(text)
    run_comparison(two, out, command="", quiet=True)
    assert (out / "Mine-seed1" / "result.json").exists()


def test_rejects_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunFolderError, match="holds a run or other files"):
        run_comparison(quick_plan(), tmp_path, command="", quiet=True)
    with pytest.raises(RunFolderError, match="is a file"):
        run_comparison(quick_plan(), tmp_path / "thesis.tex", command="", quiet=True)
    with pytest.raises(RunFolderError, match="is not a comparison"):
        resume_comparison(tmp_path, quiet=True)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_rejects_run_that_differs_from_plan(tmp_path: Path) -> None:
    run_comparison(
        plan_comparison(["standalone"], changes=QUICK),
        tmp_path / "out",
        command="",
        quiet=True,
    )
    file = tmp_path / "out" / "standalone-seed0" / "config.toml"
    file.write_text(file.read_text().replace("seed = 0", "seed = 1", 1))
    with pytest.raises(RunFolderError, match="holds a run with other options"):
        resume_comparison(tmp_path / "out", quiet=True)


def test_rejects_second_process_on_same_comparison(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    held = lock_folder(tmp_path / "out", "comparison")
    with held, pytest.raises(RunFolderError, match="another process runs this comparison"):
        run_comparison(quick_plan(), tmp_path / "out", command="", quiet=True)


def test_refused_runs_are_in_table_before_first_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    models = {"nodes.models": ["small-cnn", "mlp"]}
    plan = plan_comparison(["fedavg", "standalone"], changes={**QUICK, **models})
    run_comparison(plan, out, command="", quiet=True)
    refused, finished = records(out)
    assert (refused["method"], refused["status"], refused["accuracy"]) == ("fedavg", "refused", "")
    assert "node-1" in refused["reason"]
    assert "architecture" in refused["reason"]
    assert refused["needs"] == "same architecture"
    assert (finished["method"], finished["status"]) == ("standalone", "finished")
    assert not (out / "fedavg-seed0").exists()
    assert refused["reason"] in (out / "compare.html").read_text().replace("&#39;", "'")
    reasons = comparison_runner.read_not_run(out)
    run_comparison(plan, out, command="", only=["standalone"], quiet=True)  # which asks nothing of FedAvg
    assert comparison_runner.read_not_run(out) == reasons == {"fedavg-seed0": refused["reason"]}


def exit_code(words: str) -> Any:
    """Return the exit code of a command."""
    with pytest.raises(SystemExit) as end:
        main(words.split())
    return end.value.code


def test_exit_code_reports_refused_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = "--split.nodes 2 --data.train_limit 200 --nodes.local.epochs 1 --engine.threads 1 --quiet"
    words = f"{quick} --nodes.models small-cnn mlp --out {tmp_path / 'out'}"
    assert exit_code(f"compare fedavg standalone {words}") == 1
    out, err = capsys.readouterr()
    assert "FedAvg: refused: " in " ".join(out.split())
    assert err == "fedstill: not all methods ran, the table says why: FedAvg\n"
    assert records(tmp_path / "out")[1]["status"] == "finished"
    assert exit_code(f"compare fedavg {words}2") == 2
    assert exit_code(f"compare standalone {words}3") == 0


def test_postponed_runs_are_not_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_comparison(["fedavg", "standalone"], changes={**QUICK, "nodes.models": ["small-cnn", "mlp"]})
    run_comparison(plan, tmp_path / "out", command="", only=["fedavg", "standalone"], quiet=True)
    for only, code in ((["standalone"], 0), ([], 1)):
        for form in ([], ["--json"]):
            words = ["--only", *only] if only else []
            with pytest.raises(SystemExit) as end:
                main(["compare", "--resume", str(tmp_path / "out"), *words, "--quiet", *form])
            assert end.value.code == code


def test_method_option_error_names_the_key_to_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code("compare fedavg fediod --method.rounds 3") == 2
    err = capsys.readouterr().err
    assert err.startswith("fedstill: --method.rounds is an option of one method, ")
    assert "say which, as --fediod.rounds, or" in err
    assert "below [options.METHOD], rounds = ..." in err


def test_creates_no_folder_if_nothing_can_run(tmp_path: Path) -> None:
    plan = plan_comparison(["fedavg"], changes={**QUICK, "nodes.models": ["small-cnn", "mlp"]})
    with pytest.raises(FedstillError, match="no method can run: FedAvg cannot run here"):
        run_comparison(plan, tmp_path / "out", command="", quiet=True)
    assert not (tmp_path / "out").exists()


def test_run_at_policy_limit_does_not_stop_others(tmp_path: Path) -> None:
    # FedAvg's parameters are more than this, which only the first round finds out.
    plan = plan_comparison(["fedavg", "standalone"], changes={**QUICK, "nodes.policy.max_bytes": 1000})
    run_comparison(plan, tmp_path / "out", command="", quiet=True)
    rows = {row["method"]: row for row in records(tmp_path / "out")}
    assert rows["fedavg"]["status"] == "stopped"
    assert "max_bytes" in rows["fedavg"]["reason"]
    assert rows["standalone"]["status"] == "finished"


# --- attacked runs ------------------------------------------------------------------------------------


class FakeAttack:
    """Replaces the attack: writes its files, records the folders, and fails on demand."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []  # folder, command
        self.failing: str | None = None

    def __call__(self, folder: Path, config: LeakageConfig, *, command: str, progress: bool) -> Any:
        self.calls.append((folder.name, command))
        if self.failing is not None and folder.name.startswith(self.failing):
            raise FedstillError("the run\nis not repeated here")
        row = {
            "target": "student",
            "attack": "Loss",
            "metric": "AUC",
            "value": 60.0,
            "column": "membership_auc",
        }
        record = {
            "config": config.to_table(),
            "audit": None,
            "attacks": [{"name": "membership", "rows": [row]}],
            "sentence": "One in <three> was found.",
        }
        (folder / "leakage.json").write_text(json.dumps(record))
        return record

    @property
    def folders(self) -> list[str]:
        return [folder for folder, _ in self.calls]


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> FakeAttack:
    attacks = FakeAttack()
    monkeypatch.setattr("fedstill.compare.comparison_runner.run_attacks", attacks)
    return attacks


def test_attack_options_are_part_of_plan(tmp_path: Path) -> None:
    text = f"{FILE}\n[leakage]\nseed = 4\nmembership = {{ shadows = 8 }}\n"
    plan = read_comparison(write_file(tmp_path, text))
    whole = LeakageConfig.from_table({"seed": 4, "membership": {"shadows": 8}}).to_table()
    assert plan.leakage == whole
    assert plan.leakage is not None
    assert set(plan.leakage) == set(LeakageConfig().to_table())  # no default is left out
    assert read_comparison(write_file(tmp_path, plan.to_toml(), "compare.toml")) == plan
    # The flag asks for what the file says, or for the defaults where it says nothing.
    assert read_comparison(write_file(tmp_path, text), leakage=True).leakage == whole
    assert read_comparison(write_file(tmp_path, FILE), leakage=True).leakage == LeakageConfig().to_table()
    assert plan_comparison(["fedavg"], leakage=True).leakage == LeakageConfig().to_table()
    for without in (
        plan_comparison(["fedavg"]),
        read_comparison(write_file(tmp_path, FILE)),
    ):
        assert without.leakage is None
        assert "leakage" not in without.to_toml()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("leakage = true", "invalid leakage = True (expected a table"),
        ("[leakage]\nseeds = 3", "unknown key 'leakage.seeds': did you mean 'leakage.seed'?"),
        ("[leakage.membership]\nshadows = -2", "invalid leakage.membership.shadows = -2 (expected "),
        ("[leakage]\nmembership = 3", "invalid leakage.membership = 3 (expected a table"),
    ],
)
def test_invalid_attack_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(FedstillError) as refused:
        read_comparison(write_file(tmp_path, f'methods = ["fedavg"]\n{text}'))
    assert str(refused.value).startswith(line)


def test_attacks_each_finished_run_once(
    tmp_path: Path, attacks: FakeAttack, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    plan = plan_comparison(["standalone", "fedavg"], changes=QUICK, leakage=True)
    run_comparison(plan, out, command="fedstill compare x --leakage")
    lines = [line.rpartition("  ")[0].split("  ") for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        ["run 1 of 2", "standalone, seed 0"],
        ["attack 1 of 2", "standalone, seed 0"],
        ["run 2 of 2", "fedavg, seed 0"],
        ["attack 2 of 2", "fedavg, seed 0"],
    ]
    assert attacks.calls[1] == ("fedavg-seed0", f"fedstill attack {out / 'fedavg-seed0'}")
    assert [row["membership_auc"] for row in records(out)] == ["60.0", "60.0"]
    assert "One in &lt;three&gt; was found." in (out / "compare.html").read_text(encoding="utf-8")
    # What has been attacked is not attacked again, unless by other options.
    run_comparison(plan, out, command="again", quiet=True)
    resume_comparison(out, quiet=True)
    assert len(attacks.calls) == 2
    file = out / "fedavg-seed0" / "leakage.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "config": {"seed": 9}}))
    assert [row.runs[0].leakage is not None for row in summarize(out, plan).entries] == [True, False]
    resume_comparison(out, quiet=True)
    assert attacks.folders == ["standalone-seed0", "fedavg-seed0", "fedavg-seed0"]


def test_finished_comparison_is_attacked_later(tmp_path: Path, attacks: FakeAttack) -> None:
    out = tmp_path / "out"
    plan = plan_comparison(["standalone"], changes=QUICK)
    run_comparison(plan, out, command="one", quiet=True)
    assert attacks.calls == []
    assert "membership_auc" not in records(out)[0]
    assert not (out / "not_attacked.json").exists()
    before = (out / "standalone-seed0" / "result.json").read_bytes()
    attacked = plan_comparison(["standalone"], changes=QUICK, leakage=True)
    run_comparison(attacked, out, command="two", quiet=True)
    assert (out / "standalone-seed0" / "result.json").read_bytes() == before  # nothing ran again
    assert attacks.folders == ["standalone-seed0"]
    assert read_comparison_folder(out) == attacked
    assert comparison_runner.read_command(out) == "two"
    # The same comparison without attacks keeps those that are there; others are refused.
    (out / "standalone-seed0" / "leakage.json").unlink()
    run_comparison(plan, out, command="three", quiet=True)
    assert attacks.folders == ["standalone-seed0"] * 2
    assert read_comparison_folder(out) == attacked
    other = dataclasses.replace(attacked, leakage=LeakageConfig(seed=7).to_table())
    with pytest.raises(RunFolderError, match=r"differs in its leakage \(seed was 0 and is now 7\): choose"):
        run_comparison(other, out, command="", quiet=True)


def test_failed_attack_is_noted_and_stops_nothing(
    tmp_path: Path, attacks: FakeAttack, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    attacks.failing = "standalone"
    plan = plan_comparison(["standalone", "fedavg"], changes=QUICK, leakage=True)
    run_comparison(plan, out, command="x")
    assert "not attacked: the run is not repeated here\n" in capsys.readouterr().err
    assert comparison_runner.read_not_attacked(out) == {"standalone-seed0": "the run is not repeated here"}
    rows = {row["method"]: row for row in records(out)}
    assert {label: row["status"] for label, row in rows.items()} == dict.fromkeys(plan.methods, "finished")
    assert (rows["standalone"]["membership_auc"], rows["fedavg"]["membership_auc"]) == ("", "60.0")
    message = "Standalone, seed 0: not attacked: the run is not repeated here."
    assert message in (out / "compare.html").read_text(encoding="utf-8")
    assert message in summarize(out, plan).notes
    # It is tried again, and the note goes once it is attacked.
    attacks.failing = None
    resume_comparison(out, quiet=True)
    assert comparison_runner.read_not_attacked(out) == {}
    assert attacks.folders == ["standalone-seed0", "fedavg-seed0", "standalone-seed0"]
    assert message not in (out / "compare.html").read_text(encoding="utf-8")


# --- killed -------------------------------------------------------------------------------------------

COMMAND = """compare standalone few.toml --base few.toml --seeds 2 --split.nodes 2
--data.train_limit 300 --nodes.local.epochs 2 --engine.threads 1
--evaluation.every 5 --out out"""


# A state is saved every five seconds of a run; here after each step, so that a kill finds one.
OFTEN = "from fedstill.core import run_writer; run_writer.SECONDS_BETWEEN = 0.2"


def start(folder: Path, words: list[str]) -> Command:
    return Command(words, folder, [Path(__file__).parents[2]], OFTEN)


def run_until_killed(folder: Path, words: list[str], sign: Path) -> None:
    """Run a command until a file is there, then kill it."""
    process = start(folder, words)
    deadline = time.monotonic() + 60
    while not sign.exists():
        assert process.runs, "it ended before the kill"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.kill() == -signal.SIGKILL


def test_resumed_comparison_reaches_equal_metrics(tmp_path: Path) -> None:
    words = COMMAND.split()
    (tmp_path / "whole").mkdir()
    for folder in (tmp_path, tmp_path / "whole"):
        write_file(folder, '[method]\nname = "fediod"\nsteps = 30\nbatch = 16', "few.toml")
    whole = start(tmp_path / "whole", words)

    out = tmp_path / "out"
    run_until_killed(tmp_path, words, out / "few-seed0" / "metrics.jsonl")  # written with the first state
    assert (out / "standalone-seed0" / "result.json").exists()
    assert not (out / "few-seed0" / "result.json").exists()
    finished = (out / "standalone-seed0" / "result.json").read_bytes()
    run_until_killed(tmp_path, words, out / "standalone-seed1" / "config.toml")  # the same command again
    assert start(tmp_path, ["compare", "--resume", "out"]).end()[0] == 0
    assert whole.end()[0] == 0

    assert (out / "standalone-seed0" / "result.json").read_bytes() == finished
    assert rows_without_seconds(out) == rows_without_seconds(tmp_path / "whole" / "out")
    assert [row["status"] for row in records(out)] == ["finished"] * 4
    assert not list(out.rglob("state.safetensors"))


def test_kill_during_first_write_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "standalone-seed0").mkdir(parents=True)
    (out / "compare.toml.part").write_text("half a f")
    (out / "standalone-seed0" / "config.toml.part").write_text("half a f")
    with pytest.raises(RunFolderError):  # a run's folder without its plan: not planned
        run_comparison(quick_plan(), out, command="", quiet=True)
    plan = quick_plan()
    (out / "compare.toml").write_text(f"# Made by: x\n\n{plan.to_toml()}")
    run_comparison(plan, out, command="", quiet=True)
    assert [row["status"] for row in records(out)] == ["finished", "finished"]


def test_xray_upper_bound_has_all_findings_and_public_images() -> None:
    """The upper bound corresponds to "Centralized" in FedKD's Table 4. Other methods know what nodes know."""
    plan = read_comparison(PRESETS.parent / "fedkd_table4.toml")
    for planned_run in plan.planned_runs():
        one = plan.run_config(planned_run)
        ceiling = planned_run.label == "centralized"
        assert one.split.findings == (0 if ceiling else 8)
        assert one.split.registered_name == ("iid" if planned_run.setting == "homogeneous" else "positives")
        assert getattr(one.method, "public", False) == ceiling
    assert plan.published("homogeneous", "centralized", "auc") is not None
    own = spec.load(f"{PRESETS}/xray-centralized.toml")
    assert (own.split.findings, own.method.public) == (0, True)


def test_names_unknown_key_of_setting(tmp_path: Path) -> None:
    text = 'methods = ["fedkd"]\n[base]\nextends = "demo"\n[[settings]]\nlabel = "a"\n'
    with pytest.raises(UnknownName, match="label"):
        read_comparison(write_file(tmp_path, text))
