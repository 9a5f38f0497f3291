"""Classification of texts: what is refused, and that nothing else differs from images."""

from __future__ import annotations

import pytest
import torch

from fedstill.core.dataset import TensorData
from fedstill.tasks.classification import TextClassification, TextConfig

TASK = TextClassification(3)
IDS, LABELS = torch.tensor([[4, 1, 0], [0, 0, 0], [2, 2, 2]]), torch.tensor([0, 2, 1])


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
