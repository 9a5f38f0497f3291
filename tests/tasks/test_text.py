"""Classification of texts: what is refused, and that nothing else differs from images."""

from __future__ import annotations

import pytest
import torch

from fedstill.core.dataset import TensorData
from fedstill.core.errors import DataError
from fedstill.tasks.text import TextClassification, TextConfig

TASK = TextClassification(3)
IDS, LABELS = torch.tensor([[4, 1, 0], [0, 0, 0], [2, 2, 2]]), torch.tensor([0, 2, 1])


def test_texts_pass() -> None:
    TASK.check(TensorData(IDS, LABELS), "train")  # an empty text among them


@pytest.mark.parametrize(
    ("inputs", "targets", "said"),
    [
        (IDS.float(), LABELS, r"train: inputs are float32 of shape \(3, 3\): allowed are int64 ids"),
        (IDS.unsqueeze(1), LABELS, "allowed are int64 ids"),
        (IDS, LABELS[:2], "3 texts but 2 targets"),
        (IDS[:0], LABELS[:0], "there are no examples"),
        (IDS[:, :0], LABELS, "texts have no tokens"),
        (
            torch.tensor([[1, 2], [3, -1]]),
            LABELS[:2],
            "1 texts hold ids below 0, the first is example 1",
        ),
        (IDS, torch.tensor([0, 3, 1]), r"label 3 of example 1 is outside 0\.\.2"),
        (IDS, LABELS.float(), "allowed is one int64 class index"),
    ],
)
def test_what_is_no_text_is_refused(inputs: torch.Tensor, targets: torch.Tensor, said: str) -> None:
    with pytest.raises(DataError, match=said):
        TASK.check(TensorData(inputs, targets), "train")


def test_the_task_is_found_by_name_and_says_that_inputs_are_tokens() -> None:
    task = TextConfig().make(("negative", "positive"))
    assert isinstance(task, TextClassification)
    assert (task.name, task.metric, task.tokens, task.conditions, task.classes) == (
        "text",
        "accuracy",
        True,
        0,
        2,
    )
    assert task.outputs((64,)) == (2,)


def test_accuracy_and_counts_by_hand() -> None:
    outputs = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    assert TASK.metrics(outputs, LABELS) == {"accuracy": pytest.approx(200 / 3)}
    assert TASK.counts(TensorData(IDS, torch.tensor([2, 2, 0]))).tolist() == [1.0, 0.0, 2.0]
