"""Warnings of a run, each given if and only if it applies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedstill.core.dataset import TensorData
from fedstill.data.public import PublicData
from fedstill.methods._replay_training import ReplayTraining
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fediod import FedIOD
from fedstill.runs import results
from fedstill.runs.evaluation import Outputs
from fedstill.tasks.classification import Classification
from fedstill.tasks.multi_label import MultiLabel
from fedstill.tasks.reconstruction import ReconstructionConfig
from tests.support.runs import SHORT, fedstill_run


def images(first: int, count: int, *labels: int) -> TensorData:
    """Return images with constant pixels: numbers from ``first`` on."""
    each = torch.arange(first, first + count).float().view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    return TensorData(each, torch.tensor(labels or [0] * count))


def test_warns_about_single_node() -> None:
    assert results.single_node_warning(["a"]) == "there is only one node: nothing is federated"
    assert results.single_node_warning(["a", "b"]) is None


def test_warns_about_zero_learning_rates() -> None:
    assert results.zero_learning_rates_warning(FedAvg(), 0.001) == []
    result = results.zero_learning_rates_warning(FedIOD(student=ReplayTraining(lr=0.0)), 0.0)
    assert result == [
        f"{name} is 0: its parameters are not trained" for name in ("nodes.local.lr", "method.student.lr")
    ]


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"epsilon": 20.0, "budget": 20.0}, None),
        ({"epsilon": None, "budget": None}, None),
        ({"epsilon": 3.0, "budget": 50.0}, "epsilon is up to 50 at a"),
        ({"epsilon": 20.5, "budget": None}, "epsilon is up to 20.5 at a"),
    ],
)
def test_warns_about_large_epsilon(node: dict[str, float | None], expected: str | None) -> None:
    warning = results.weak_privacy_warning({"nodes": [{"name": "a", **node}, {"name": "b", "epsilon": 1.0}]})
    assert (
        (warning is None)
        if expected is None
        else (warning is not None and warning.startswith(f"{expected}: above 20 "))
    )


def test_warns_about_missing_classes() -> None:
    task, classes = Classification(4), ("p", "q", "r", "s")
    assert results.missing_classes_warning(task, [images(0, 3, 0, 1, 3), images(0, 1, 2)], classes) is None
    result = results.missing_classes_warning(task, [images(0, 2, 0, 0), images(0, 1, 2)], classes)
    assert result == "no node has an example of q and s: it cannot be learned"
    findings = TensorData(torch.zeros(2, 1, 4, 4), torch.tensor([[1, 0], [-1, 0]]))
    assert results.missing_classes_warning(MultiLabel(2), [findings], ("Edema", "Mass")) == (
        "no node has an example of Mass: it cannot be learned"
    )
    # in a deployed federation, the server does not know the nodes' classes
    assert results.missing_classes_warning(task, [], classes) is None


def test_warns_about_duplicate_inputs() -> None:
    test, public = images(0, 10), PublicData("other", images(8, 6).inputs)  # 0..9 and 8..13
    assert results.duplicate_inputs_warnings(test, public, [images(100, 3), images(9, 1), images(12, 2)]) == [
        "1 of 10 test examples are also private data: metrics are too good",
        "2 of 10 test examples are also public data: metrics are too good",
        "3 different public inputs are also private data: these are not secret",
    ]
    assert results.duplicate_inputs_warnings(test, None, [images(10, 5)]) == []


def test_warns_about_probabilities() -> None:
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    task = Classification(3)
    assert (
        results.probabilities_as_logits_warning(task, Outputs(logits, {"a": logits.log_softmax(1)})) is None
    )
    result = results.probabilities_as_logits_warning(
        task, Outputs(logits.softmax(1), {"a": logits, "b": logits.softmax(1)})
    )
    assert result == ("outputs of b and the student are probabilities (expected logits): remove the softmax")
    assert "sigmoid" in (
        results.probabilities_as_logits_warning(MultiLabel(3), Outputs(logits.sigmoid())) or ""
    )
    assert (
        results.probabilities_as_logits_warning(ReconstructionConfig().make(1), Outputs(logits.sigmoid()))
        is None
    )


def test_warns_about_non_finite_outputs() -> None:
    """argmax returns the first class for NaN, so accuracy alone would not show this."""
    good, bad = torch.zeros(5, 3), torch.zeros(5, 3)
    assert results.non_finite_outputs_warning(Outputs(good, {"a": good})) is None
    bad[1:3, 2], bad[3, 0] = torch.nan, torch.inf
    message = "outputs of b and the student are NaN or infinite for up to 3 of 5 test inputs"
    assert (results.non_finite_outputs_warning(Outputs(bad, {"a": good, "b": bad})) or "").startswith(message)


def test_warnings_appear_in_result_terminal_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--split.nodes", "1", "--split.name", "iid", "--method.student.lr", "0", "--method.steps", "2"]
    assert fedstill_run("digits-fediod", *SHORT, *words, "--out", str(out)) == 0
    notes = json.loads((out / "result.json").read_text())["notes"]
    result = [
        "there is only one node: nothing is federated",
        "method.student.lr is 0: its parameters are not trained",
    ]
    assert [note for note in notes if note in result] == result
    printed, page = capsys.readouterr().out, (out / "report.html").read_text(encoding="utf-8")
    for note in result:
        assert f"Note: {note}" in printed
        assert note in page


def test_warns_about_reshaped_public_data() -> None:
    done = "images of 3 x 12 x 12, resized or recolored to 1 x 8 x 8"
    public = PublicData("color", torch.zeros(1, 1, 8, 8), conversion=done)
    assert results.warn_reshaped_public(public) == f"public data color are {done}"
    assert results.warn_reshaped_public(PublicData("gray", torch.zeros(1, 1, 8, 8))) is None
    assert results.warn_reshaped_public(None) is None


def test_warns_about_unscaled_images() -> None:
    task, half = Classification(2), [TensorData(torch.rand(3, 1, 8, 8), torch.zeros(3, dtype=torch.int64))]
    result = results.unscaled_images_warning(task, (), (), half) or ""
    assert result.endswith("pixels from 0 to 1 want mean = 0 and std = 1")
    assert results.unscaled_images_warning(task, (0.5,), (0.5,), half) == result
    assert results.unscaled_images_warning(task, (0.0,), (1.0,), half) is None
    assert results.unscaled_images_warning(task, (), (), []) is None
    below = TensorData(half[0].inputs - 1, half[0].targets)
    assert results.unscaled_images_warning(task, (), (), [*half, below]) is None
