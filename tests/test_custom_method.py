"""A plug-in package with a custom method; the library is not changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from fedstill.core.checkpoint import load_state
from tests.support.my_lab import MY_LAB, ROOT, SMALL, Lab, write_plates

KIND = "class logits"
NODES = SMALL["nodes"]
OWN = {  # a run with custom components only
    "task": {"name": "ordinal"},
    "data": {"name": "plates", "white": 16.0},
    "split": {"name": "quantity-skew", "nodes": 2},
    "nodes": NODES,
    "method": {"name": "feddistill", "rounds": 12},
}
DYING = """
import os, signal
from fedstill.core.run_writer import RunWriter
save, saves = RunWriter.save, []
def die(self, *given, **named):
    if len(saves) == 6:  # the first one has no progress, and nodes have changed since the last
        os.kill(os.getpid(), signal.SIGKILL)
    saves.append(save(self, *given, **named))
RunWriter.save, RunWriter.is_save_due = die, lambda self: True
"""


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Lab:
    """Return the lab after a run of the method, with data for a run with custom task, data and split."""
    lab.write("small.toml", nodes=NODES, method={"name": "feddistill", "rounds": 3})
    lab.run("whole")
    write_plates(lab.here / "data" / "plates.csv", slice(600))
    lab.write("own.toml", **OWN)
    return lab


@pytest.fixture(scope="module")
def unbroken(lab: Lab) -> str:
    """Return the folder of a run in which every component is custom."""
    lab.run("unbroken", file="own.toml")
    return "unbroken"


def test_runs_by_name_and_reports_its_release(lab: Lab) -> None:
    result = lab.result("whole")
    assert (result["method"], result["title"], result["iterations"]) == ("feddistill", "FedDistill", 3)
    assert result["releases"] == [KIND]
    assert result["bytes"]["by_kind"][KIND]["up"] == 3 * 2 * 4 * 10 * 10
    page = lab.text("whole/report.html")
    assert KIND in page
    assert "a mean score vector for each class" in page
    assert "No node released training data" not in page, "descriptions of kinds by plug-ins are not trusted"


def test_nodes_learn_shared_classes(lab: Lab) -> None:
    """The shared logits change training if gamma is positive."""
    lab.run("gamma 0", "--method.gamma", "0")
    moved = []
    for name in ("whole", "gamma 0"):
        lines = lab.text(f"{name}/metrics.jsonl").splitlines()
        rounds = [json.loads(line) for line in lines if "distillation" in line]
        moved.append([line["losses"]["moved"] for line in rounds])
    assert moved[0][0] == moved[1][0], "the first round has no shared logits"
    assert moved[0][1] != moved[1][1]


def test_method_by_module_and_name_needs_no_entry_point(lab: Lab) -> None:
    lab.run("by path", "--method.name", "my_lab.feddistill:FedDistill", "--method.rounds", "3")
    whole, by_path = lab.result("whole"), lab.result("by path")
    assert KIND in lab("list", "my_lab.feddistill:FedDistill")
    assert by_path["local"] == whole["local"]
    assert by_path["method"] == whole["method"] == "feddistill"  # both names are stored as one


@pytest.mark.slow
def test_example_of_the_page_passes_its_own_test(lab: Lab) -> None:
    """The test of docs/custom-method.md: engines agree, and a stopped run resumes."""
    words = [
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(lab.here),
        str(MY_LAB / "test_entropy.py"),
    ]
    path = os.pathsep.join(map(str, [lab.installed, ROOT]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", *words], cwd=lab.here, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout
    assert "2 passed" in run.stdout


def test_outputs_only_refuses_other_categories(lab: Lab) -> None:
    (lab.here / "records.py").write_text(
        "import dataclasses\nfrom fedstill.methods import PayloadKind\n"
        "from my_lab.feddistill import FedDistill\n\n"
        "@dataclasses.dataclass(frozen=True, kw_only=True)\nclass Records(FedDistill):\n"
        "    def queries(self, setting):\n"
        "        for query in super().queries(setting):\n"
        "            kinds = {name: PayloadKind('features') for name in query.releases}\n"
        "            yield dataclasses.replace(query, releases=kinds)\n"
    )
    line = lab.refused("--method.name", "records:Records")
    assert "outputs_only: features may not leave" in line


def test_compares_with_fedavg(lab: Lab) -> None:
    lab("compare", "feddistill", "fedavg", "--base", "small.toml", "--evaluation.every", "0", "--out", "both")
    table = lab.text("both/compare.csv")
    assert "feddistill" in table
    assert "fedavg" in table
    assert KIND in lab.text("both/compare.html")


def test_killed_run_resumes_to_equal_metrics(lab: Lab, unbroken: str) -> None:
    """Files of the run contain custom task, data and split, too."""
    words = ["run", "own.toml", "--quiet", "--out", "killed"]
    lab(*words, code=-signal.SIGKILL, begin=DYING)
    assert load_state(lab.here / "killed" / "state.safetensors")["metrics"] == 5
    before = lab.text("killed/metrics.jsonl").splitlines()[:5]
    assert not (lab.here / "killed" / "result.json").exists()
    lab("run", "--resume", "killed")
    after = lab.text("killed/metrics.jsonl").splitlines()
    assert after[:5] == before, "equal durations: no round is repeated"
    whole, again = lab.result(unbroken), lab.result("killed")
    for name in ("local", "nodes", "bytes", "queries", "iterations"):
        assert again[name] == whole[name], name
    assert again["local"]["mae"]["mean"] > 0
    assert "Report" in lab("report", "killed")


def test_budget_charges_each_class(lab: Lab) -> None:
    private = ["--nodes.privacy.mechanism", "noisy-outputs", "--nodes.privacy.epsilon", "8"]
    lab.run("private", *private, "--nodes.privacy.outputs.bound", "5")
    nodes = lab.result("private")["privacy"]["nodes"]
    assert all(node["guarantee"] and 7 < node["epsilon"] <= 8 for node in nodes)
    assert KIND in lab.text("private/report.html")
    plan = lab("privacy", "plan", "private/config.toml")
    assert "train_locally" in plan
    assert "10 x laplace" in plan
    line = lab.refused(*private, "--nodes.privacy.mechanism", "dp-sgd")
    assert KIND in line, "class means are not outputs of the network"


def test_attacks_run_on_custom_method(lab: Lab) -> None:
    printed = lab("attack", "whole", "--membership.shadows", "4", "--quiet")
    assert "membership" in printed
    assert "gradient inversion needs parameters, and none are released" in printed
    assert KIND in lab.text("whole/report.html")


@pytest.mark.slow
def test_node_responds_only_to_allowed_queries(lab: Lab, unbroken: str) -> None:
    """Nodes in FLARE processes run a custom method and task, or refuse them by their policies."""
    pytest.importorskip("nvflare")
    lab.run("flare", "--engine.backend", "flare", file="own.toml")
    assert lab.result("flare")["local"] == lab.result(unbroken)["local"]
    shutil.copytree(lab.here / "flare", lab.here / "refused")
    for rest in ("result.json", "report.html"):
        (lab.here / "refused" / rest).unlink()
    federation = lab.here / "refused" / "federation"
    shutil.rmtree(federation / "runs")
    for name, removed in (("node-0", "feddistill"), ("node-1", "ordinal")):
        node = federation / "nodes" / name
        shutil.rmtree(node / "runs")
        file, line = (node / "node.toml").read_text(), f'    "{removed}",\n'
        assert file.count(line) == 1
        (node / "node.toml").write_text(file.replace(line, ""))
    line = lab("run", "--resume", "refused", code=2)
    for option, name in (("method.name", "feddistill"), ("task.name", "ordinal")):
        assert f"invalid {option} = '{name}' (expected a name that policy.plugins of the node allows" in line
