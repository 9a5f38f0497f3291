"""A third-party package with a custom attack: in terminals, in reports and in a comparison."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.attacks.transcript import load_run, replay_run
from tests.support.my_lab import Lab

ATTACK = "my_lab.majority:MajorityClass"
COMPARED = """
seeds = 1
methods = ["fedkd", "fedavg"]
[base]
data = { name = "digits", train_limit = 200 }
split = { nodes = 3, alpha = 0.2 }
student = { model = "mlp:8" }
engine = { batching = "one-by-one", threads = 1 }
public = { name = "held-out" }
nodes = { models = ["mlp:8"], local = { epochs = 5.0 } }
[options.fedkd]
student.epochs = 2
[options.fedavg]
rounds = 2
[leakage]
attacks = ["majority"]
[leakage.majority]
responses = 100
"""


@pytest.fixture(scope="module")
def run(lab: Lab) -> Path:
    """Run FedKD with few classes per node."""
    lab.write(
        "small.toml",
        split={"nodes": 3, "alpha": 0.2},
        public={"name": "held-out"},
        nodes={"models": ["mlp:8"], "local": {"epochs": 20}},
        method={"name": "fedkd", "student": {"epochs": 2}},
    )
    lab.run("skewed")
    return lab.here / "skewed"


def leakage(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "leakage.json").read_text())
    return record


def test_runs_attack_by_entry_point(lab: Lab, run: Path) -> None:
    printed = lab(
        "attack", "skewed", "--attacks", "majority", "counts", "--majority.responses", "100", "--quiet"
    )
    (first, second) = leakage(run)["attacks"]
    assert (first["name"], second["name"]) == ("majority", "counts")
    experiment, transcript, _ = replay_run(run, load_run(run), 100)
    for node, record in zip(experiment.nodes, first["result"]["nodes"], strict=True):
        responses = transcript.responses(node.name)
        assert responses is not None
        assert record["guess"] == str(int(torch.softmax(responses[1][-100:], 1).mean(0).argmax()))
        assert record["true"] == str(int(torch.bincount(node.data.targets, minlength=10).argmax()))
    right = sum(node["guess"] == node["true"] for node in first["result"]["nodes"])
    assert right >= 2, "each node has records of few classes"
    share = f"{100 * right / 3:.0f}%"
    assert f"majority 3 nodes right {share} 10%" in " ".join(printed.split())
    page = (run / "report.html").read_text()
    assert "Majority class of each node" in page
    assert f"Majority class of each node: right of 3 nodes {share} (by chance 10%)." in page


def test_runs_attack_by_module_and_name(lab: Lab, run: Path) -> None:
    lab("attack", "skewed", "--attacks", "majority", "--majority.responses", "64", "--quiet")
    by_name = leakage(run)
    options = ["--attacks", ATTACK, f"--{ATTACK}.responses", "64"]
    lab("attack", "skewed", *options, "--quiet")
    by_path = leakage(run)
    assert by_path["config"] == by_name["config"]  # both names are stored as one
    assert by_path["attacks"][0]["result"] == by_name["attacks"][0]["result"]
    assert "--majority.responses INT" in lab("attack", "--attacks", ATTACK, "--help-all")


def test_comparison_shows_column_of_custom_attack(lab: Lab) -> None:
    (lab.here / "with_leakage.toml").write_text(COMPARED)
    printed = " ".join(lab("compare", "with_leakage.toml", "--out", "with_leakage", "--quiet").split())
    assert "Percentage of the nodes whose majority class is guessed." in printed
    with (lab.here / "with_leakage" / "compare.csv").open() as file:
        fedkd, fedavg = csv.DictReader(file)
    record = leakage(lab.here / "with_leakage" / fedkd["folder"])["attacks"][0]["rows"][0]
    assert float(fedkd["majority_right"]) == record["value"]
    assert fedavg["majority_right"] == ""
    page = (lab.here / "with_leakage" / "compare.html").read_text()
    assert "Majority class</th>" in page
    assert "majority: the nodes release no class scores" in page


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (
            "from dataclasses import dataclass\nfrom fedstill.attacks.attack import Attack\n"
            "@dataclass(frozen=True, kw_only=True)\nclass Own(Attack):\n    title = 'x'\n",
            "a class with a method rows, a method run",
        ),
        ("import nowhere\n", "nowhere"),
        ("class Own:\n    pass\n", "a subclass of Attack"),
    ],
)
def test_rejects_broken_attack_in_one_line(lab: Lab, run: Path, source: str, line: str) -> None:
    (lab.here / "broken.py").write_text(source)
    printed = lab("attack", "skewed", "--attacks", "broken:Own", code=2)
    assert printed.startswith("fedstill: ")
    assert printed.count("\n") == 1
    assert line in printed
