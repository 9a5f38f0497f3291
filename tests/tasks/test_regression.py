"""Regression: losses and metrics by hand, and rejected data."""

from __future__ import annotations

import math

import pytest
import torch

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, DataError
from fedstill.tasks.regression import RegressionConfig

TASK = RegressionConfig().make(1)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(1)


def test_regression_metrics_by_hand() -> None:
    true, predicted = numbers(-1.0, 0.0, 1.0), numbers(-0.5, 0.0, 0.0)  # errors 0.5, 0, 1 of a range of 2
    metrics = TASK.compute_metrics(predicted, true)
    assert metrics["r2"] == pytest.approx(100 * (1 - 1.25 / 2))
    assert metrics["rmse"] == pytest.approx(100 * math.sqrt(1.25 / 3) / 2)
    assert metrics["mae"] == pytest.approx(100 * 0.5 / 2)
    assert math.isnan(TASK.compute_metrics(predicted, numbers(0.5, 0.5, 0.5))["r2"])


def test_regression_losses_by_hand() -> None:
    outputs, targets = torch.stack([numbers(1.0, 3.0), numbers(0.0, 0.0)]), torch.zeros(2, 2, 1)
    assert TASK.loss(outputs, targets).tolist() == [5.0, 0.0]
    assert TASK.distillation_loss(outputs[0], targets[0], 1.0).tolist() == [1.0, 9.0]
    assert TASK.distillation_loss(outputs[0], targets[0], math.inf).tolist() == [0.5, 4.5]
    pi = torch.tensor([0.25, 0.75])  # means 0.25, 0.75; variances 0.1875 times 1 and 9
    assert TASK.uniqueness_loss(outputs, pi).item() == pytest.approx(-0.1875 * (1 + 9) / 2)


@pytest.mark.parametrize("how", ["logits", "log_probs", "probs", "consensus"])
def test_all_ensembles_are_the_weighted_mean(how: str) -> None:
    responses = torch.stack([numbers(1.0, 3.0), numbers(5.0, -1.0)])
    weights = torch.tensor([0.25, 0.75]).view(2, 1, 1)
    assert torch.allclose(TASK.ensemble(responses, weights, how), numbers(4.0, 0.0))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.zeros(3), r"targets are float32 of shape \(3,\) \(expected float32 of shape \(3, 1\)"),
        (torch.zeros(3, 1).long(), "targets are int64"),
        (numbers(0.0, math.nan, 0.0), "targets hold NaN"),
    ],
)
def test_rejects_targets_other_than_one_number_per_row(targets: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TASK.check(TensorData(torch.zeros(3, 2), targets), "rows")
    with pytest.raises(ArgumentError, match="invalid classes = 2"):
        RegressionConfig().make(2)
