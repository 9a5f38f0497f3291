"""Regression: one number per row of a table. Also the base of all tasks whose outputs are numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedstill.core.dataset import CaseIndex, TensorData, check_inputs, check_numbers
from fedstill.core.errors import ArgumentError, DataError
from fedstill.tasks.task import Metric, Task, TaskConfig


class NumericTask(Task):
    """Base of tasks whose outputs are numbers ``(B, 1, ...)``.

    FedIOD's losses are written for distributions over classes. Here an output y_k stands for a Gaussian with
    mean y_k and variance 1/2. Its entropy is constant, so the confidence loss is 0. The divergence of the
    nodes from their mean is the variance of their outputs. The ensemble is the weighted mean.
    """

    def counts(self, data: TensorData) -> torch.Tensor:
        """Return the number of examples, ``(1,)`` float32."""
        return torch.tensor([float(len(data))], device=data.inputs.device)

    # --- FedIOD: responses of K nodes ---

    def confidence_loss(self, responses: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Return 0: a number does not express confidence."""
        return responses.new_zeros(())

    def uniqueness_loss(self, responses: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Return ``-sum_k share_k (y_k - y)^2`` with ``y = sum_k share_k y_k``, averaged over inputs and
        pixels.

        This is minus the counterpart of the Jensen-Shannon divergence,
        ``sum_k share_k KL(N(y_k, 1/2) || N(y, 1/2))``.
        """
        mean = torch.tensordot(share, responses, dims=([0], [0]))  # (B, 1, ...)
        variance: torch.Tensor = share @ (responses - mean).square().flatten(1).mean(1)
        return -variance

    def balance_loss(self, ensembled: torch.Tensor) -> torch.Tensor:
        """Return 0: there are no classes."""
        return ensembled.new_zeros(())

    def expertise(self, ensembled: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the importance weights, ``(K, B)``."""
        return weights[..., 0].expand(len(weights), len(ensembled))


class Regression(NumericTask):
    """Regression of one number per row. Outputs and targets are ``(B, 1)`` in the declared range, scaled to
    -1..1.

    Args:
        classes: number of output values, 1.

    Raises:
        ArgumentError: ``classes`` is not 1.
    """

    name = "regression"
    metrics = (
        Metric("r2", "R\u00b2"),
        Metric("rmse", "RMSE", better="lower"),
        Metric("mae", "MAE", better="lower"),
    )
    kind = "number"
    form = "rows"
    min_classes = 1

    def __init__(self, classes: int = 1) -> None:
        if classes != 1:
            raise ArgumentError("classes", classes, "1 for task regression: a model returns one number")
        super().__init__(classes)

    def check(self, data: TensorData, description: str) -> None:
        """Refuse anything but rows ``(N, F)`` with one finite number each, ``(N, 1)`` float32.

        Raises:
            DataError: the data are invalid; the message names the first fault.
        """
        check_inputs(data, description, self.form)
        targets = data.targets
        check_numbers(targets, 1, description)
        if not bool(targets.isfinite().all()):
            raise DataError(f"{description}: targets hold NaN or infinity")

    # --- local training ---

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return the mean squared error of G models: ``(G, B, 1)`` twice to ``(G,)``. ``smoothing`` is
        ignored.
        """
        losses: torch.Tensor = (outputs - targets).square().flatten(1).mean(1)
        return losses

    # --- FedIOD: responses of K nodes ---

    def distillation_loss(self, student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
        """Return the squared error ``(B,)``; half of it for infinite ``tau``, the limit for logits."""
        square = (student - target).square().flatten(1).mean(1)
        return 0.5 * square if math.isinf(tau) else square

    # --- evaluation ---

    def compute_metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> Mapping[str, float]:
        """Return R² in percent (NaN for constant targets), and RMSE and MAE in percent of the target's
        range.
        """
        error, spread = (outputs - targets).double(), (targets - targets.double().mean()).double()
        total = spread.square().sum().item()
        return {
            "r2": 100 * (1 - error.square().sum().item() / total) if total else math.nan,
            "rmse": 50 * error.square().mean().sqrt().item(),
            "mae": 50 * error.abs().mean().item(),
        }


@dataclass(frozen=True, kw_only=True)
class RegressionConfig(TaskConfig):
    """Regression of one number per row of a table."""

    task_class = Regression
