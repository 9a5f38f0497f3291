"""A custom task, ordered grades, in a package outside of fedstill."""

from __future__ import annotations

import numpy as np
import pytest
import tomli_w
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import fedstill
from fedstill.data.loading import CLASSIFICATION
from fedstill.models import MLP
from fedstill.tasks import TASKS
from tests.support.my_lab import MY_LAB, SMALL, Lab

TASK_PATH = "my_lab.ordinal:OrdinalConfig"
TABLES = {
    "task": {"name": "ordinal"},
    "public": {"name": "held-out"},
    "nodes": {"models": ["mlp:8"], "local": {"epochs": 20.0, "min_steps": 0}},
    "evaluation": {"every": 0},
    "method": {"name": "fedkd", "student": {"epochs": 2}, "z_max": 20.0},
}


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Lab:
    """Return the lab with a run of the task."""
    lab.write("small.toml", **TABLES)
    lab.run("whole")
    return lab


def test_custom_metrics_are_in_results_and_reports(lab: Lab) -> None:
    result = lab.result("whole")
    assert (result["task"], result["kind"], result["metric"]) == ("ordinal", "class", "accuracy")
    assert 0 < result["centralized"]["mae"] < result["standalone"]["mae"]["mean"] < 5
    assert all(0 < result[part]["mae"] < 5 for part in ("student", "ensemble"))
    assert "MAE" in lab.text("whole/report.html")


@pytest.mark.slow
def test_custom_task_without_its_term_equals_classification(lab: Lab) -> None:
    lab.run("bare", "--task.emd", "0")
    lab.run("plain", "--task.name", "classification")
    bare, plain, whole = map(lab.result, ("bare", "plain", "whole"))
    assert bare["accuracy"] == plain["accuracy"]
    assert bare["local"]["accuracy"] == plain["local"]["accuracy"]
    assert "mae" not in plain
    assert bare["mae"] != whole["mae"], "nodes and student minimize the loss of the task"


def test_fedavg_and_fediod_run_custom_task(lab: Lab) -> None:
    plan = {
        "methods": ["fedavg", "fediod"],
        "options": {"fedavg": {"rounds": 2}, "fediod": {"steps": 3}},
        "base": {key: value for key, value in {**SMALL, **TABLES}.items() if key not in ("method", "task")},
        "paper": [{"method": "fedavg", "metric": "mae", "value": 0.5, "source": "a paper"}],
    }
    (lab.here / "both.toml").write_text(tomli_w.dumps(plan))
    lab("compare", "both.toml", "--task.name", "ordinal", "--task.emd", "0.5", "--out", "both")
    head, *rows = lab.text("both/compare.csv").splitlines()
    assert "mae" in head
    assert len([row for row in rows if "fedavg" in row or "fediod" in row]) >= 2
    for name in ("fedavg-seed0", "fediod-seed0"):
        assert 0 < lab.result(f"both/{name}")["mae"] < 9
        assert "emd = 0.5" in lab.text(f"both/{name}/config.toml")
    assert "MAE" in lab.text("both/compare.html")


def test_node_runs_custom_task_only_if_allowed(lab: Lab) -> None:
    """Queries and responses are exchanged offline with a node that has its own data."""
    digits = load_digits()
    pixels = np.minimum(digits.images * 16, 255).astype(np.uint8)
    toml = '[data]\npath = "data.npz"\n[model]\nname = "mlp:8"\n[policy]\nplugins = []\n'
    node = lab.node("clinic", toml, pixels[:300], digits.target[:300])
    assert "policy.plugins does not name ordinal" in lab("node", "check", "clinic", "small.toml")
    lab("offline", "make", "small.toml")
    refused = lab("offline", "answer", "clinic", "queries.safetensors", code=2)
    assert "invalid task.name = 'ordinal' (expected a name that policy.plugins of the node allows" in refused
    assert not (node / "runs").exists()

    (node / "node.toml").write_text(
        (node / "node.toml").read_text().replace("plugins = []", 'plugins = ["ordinal"]')
    )
    assert "It can take part." in lab("node", "check", "clinic", "small.toml")
    lab("offline", "answer", "clinic", "queries.safetensors")
    responses = ("responses-clinic.safetensors", "--queries", "queries.safetensors")
    lab("offline", "combine", *responses, "--out", "carried", "--quiet")
    assert 0 < lab.result("carried")["mae"] < 9


def test_custom_task_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MY_LAB))
    data = fedstill.TensorData(torch.rand(60, 1, 4, 4), torch.arange(60) % 3)
    student = MLP((1, 4, 4), 3)
    outcome = fedstill.distil(
        [data] * 2,
        [MLP((1, 4, 4), 3) for _ in range(2)],
        student,
        data,
        ["none", "mild", "severe"],
        task=TASK_PATH,
        method=fedstill.FedIOD(
            steps=2, generator=fedstill.InputGenerator(width=8), critic=fedstill.Discriminators(width=8)
        ),
        local=fedstill.LocalConfig(epochs=1),
    )
    student.eval()
    with torch.no_grad():
        off = (student(data.inputs).argmax(1) - data.targets).abs().double().mean()
    assert outcome.result["mae"] == pytest.approx(off.item())


def test_loss_grows_with_distance_of_grades(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MY_LAB))
    task, plain = TASKS[TASK_PATH]().make(4), CLASSIFICATION.make(4)
    sure = 50.0 * F.one_hot(torch.tensor([[0], [1], [3]]), 4).float()  # three models, one example each
    wanted = torch.ones(3, 1, dtype=torch.int64)
    far = task.loss(sure, wanted) - plain.loss(sure, wanted)
    torch.testing.assert_close(far, torch.tensor([1.0, 0.0, 2.0]), atol=1e-4, rtol=0)
    one, other = sure[0], sure[2]
    difference = task.distillation_loss(one, other, 1.0) - plain.distillation_loss(one, other, 1.0)
    torch.testing.assert_close(difference, torch.tensor([3.0]), atol=1e-4, rtol=0)
    assert task.compute_metrics(sure[:, 0], wanted[:, 0]) == {"accuracy": pytest.approx(100 / 3), "mae": 1.0}
