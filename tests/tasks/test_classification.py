"""Single-label classification behind the task protocol."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedstill.core.dataset import TensorData
from fedstill.core.errors import UnknownName
from fedstill.tasks import TASKS
from fedstill.tasks.classification import Classification, ClassificationConfig, TextClassification, TextConfig

TASK = Classification(3)
SURE = 1e4


def test_the_loss_is_each_models_own_mean_cross_entropy() -> None:
    outputs = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2, 2], [1, 1, 0, 2]])
    expected = torch.stack([F.cross_entropy(outputs[g], targets[g]) for g in range(2)])
    losses = TASK.loss(outputs, targets)
    assert losses.shape == (2,)
    torch.testing.assert_close(losses, expected)


def test_smoothing_spreads_its_share_of_the_label_over_all_classes() -> None:
    outputs = torch.tensor([[[2.0, 0.0, 0.0]]])
    log_q = outputs[0, 0].log_softmax(0)
    expected = -(0.7 * log_q[0] + 0.3 * log_q.mean())
    torch.testing.assert_close(TASK.loss(outputs, torch.tensor([[0]]), 0.3), expected[None])


def test_counts_name_every_class_even_an_absent_one() -> None:
    data = TensorData(torch.zeros(4, 1, 8, 8), torch.tensor([1, 1, 0, 1]))
    counts = TASK.counts(data)
    assert counts.tolist() == [1.0, 3.0, 0.0]
    assert counts.dtype == torch.float32


def test_confidence_is_low_where_nodes_are_sure_and_uniqueness_where_they_differ() -> None:
    pi = torch.tensor([0.5, 0.5])
    unsure, sure = torch.zeros(2, 1, 3), torch.tensor([[[SURE, 0.0, 0.0]], [[SURE, 0.0, 0.0]]])
    split = torch.tensor([[[SURE, 0.0, 0.0]], [[0.0, SURE, 0.0]]])
    assert TASK.confidence(sure, pi).item() == pytest.approx(0)
    assert TASK.confidence(unsure, pi).item() == pytest.approx(math.log(3))
    assert TASK.uniqueness(sure, pi).item() == pytest.approx(0, abs=1e-6)
    assert TASK.uniqueness(split, pi).item() == pytest.approx(-math.log(2))


def test_balance_is_lowest_for_a_batch_that_shows_all_classes_alike() -> None:
    each_once = SURE * torch.eye(3)
    assert TASK.balance(each_once).item() == pytest.approx(-math.log(3))
    lopsided = SURE * torch.eye(3)[[0, 0, 1]]
    expected = -(2 / 3 * math.log(3 / 2) + 1 / 3 * math.log(3))
    assert TASK.balance(lopsided).item() == pytest.approx(expected)
    assert TASK.balance(SURE * torch.eye(3)[[0, 0, 0]]).item() == pytest.approx(0, abs=1e-6)


def test_expertise_by_hand() -> None:
    weights = torch.tensor([[[1.0, 0.25, 0.5]], [[0.0, 0.75, 0.5]]])  # (2 nodes, 1, 3)
    shows = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    expertise = TASK.expertise((shows + 1e-30).log(), weights)  # two inputs
    torch.testing.assert_close(expertise, torch.tensor([[0.625, 0.5], [0.375, 0.5]]))


def test_accuracy_is_in_percent() -> None:
    outputs = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 5.0], [1.0, 0.0, 0.0]])
    assert TASK.metrics(outputs, torch.tensor([0, 1, 2, 2])) == {"accuracy": 75.0}


def test_tasks_are_made_by_name() -> None:
    assert ClassificationConfig().make(7).classes == 7
    with pytest.raises(UnknownName, match="unknown task 'juggling'"):
        TASKS["juggling"]


def test_the_task_is_found_by_name_and_says_that_inputs_are_tokens() -> None:
    task = TextConfig().make(("negative", "positive"))
    assert isinstance(task, TextClassification)
    assert (task.name, task.metric, task.form == "texts", task.conditions, task.classes) == (
        "text",
        "accuracy",
        True,
        0,
        2,
    )
    assert task.outputs((64,)) == (2,)
