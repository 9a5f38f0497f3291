"""Membership inference on the students of a comparison equals the attack on each replayed run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from fedstill.compare import comparison_runner
from fedstill.compare.comparison import read_comparison
from fedstill.core.registry import add_search_folders
from fedstill.report import write_report
from tests.support.packs import PRESETS

PLAN = """
seeds = 1
methods = ["standalone", "fedkd", "fedavg"]

[base]
data = { name = "digits", train_limit = 150 }
split = { nodes = 2, alpha = 5.0 }
public = { name = "held-out" }
nodes = { models = ["mlp:16"], local = { epochs = 8.0, lr = 1e-2 } }
student = { model = "mlp:16" }
engine = { threads = 1 }
evaluation = { every = 0 }

[options]
fedkd = { student.epochs = 2 }
fedavg = { rounds = 2 }

[leakage]
attacks = ["membership"]
membership = { shadows = 4, responses = 0 }
"""


@pytest.mark.slow
def test_metrics_equal_those_of_replayed_runs(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    plan, runs = read_comparison(tmp_path / "plan.toml"), tmp_path / "runs"
    comparison_runner.compare(plan, runs, command="", report=write_report, quiet=True)
    add_search_folders([str(PRESETS.parent)])
    results = {
        planned_run.folder: areas
        for planned_run, areas in importlib.import_module("membership").attack_students(runs, 4)
    }
    assert set(results) == {"fedkd-seed0", "fedavg-seed0"}  # standalone runs have no student
    for folder, areas in results.items():
        leakage = json.loads((runs / folder / "leakage.json").read_text())
        attacks = leakage["attacks"][0]["result"]["targets"][0]["attacks"]
        assert set(areas) == {each["name"] for each in attacks}
        for each in attacks:
            assert areas[each["name"]] == pytest.approx(each["auc"])
