"""One number a row of a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedstill.core.dataset import CaseIndex, TensorData, check_inputs, check_numbers
from fedstill.core.errors import ArgumentError, DataError
from fedstill.tasks.config import TaskConfig
from fedstill.tasks.numeric_task import NumericTask
from fedstill.tasks.task import Metric


class Regression(NumericTask):
    """Outputs are numbers ``(B, 1)``, and so are targets: -1 and 1 are the ends of the declared range.

    Args:
        classes: numbers of an output, 1.

    Raises:
        ArgumentError: other classes than 1.
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
            raise ArgumentError("classes", classes, "1 for task regression: a model gives one number")
        super().__init__(classes)

    def check(self, data: TensorData, what: str) -> None:
        """Refuse anything but rows ``(N, F)`` with a finite number each, ``(N, 1)`` float32.

        Raises:
            DataError: naming the first fault; begins with ``what``.
        """
        check_inputs(data, what, self.form)
        targets = data.targets
        check_numbers(targets, 1, what)
        if not bool(targets.isfinite().all()):
            raise DataError(f"{what}: targets hold NaN or infinity")

    # --- local training ---

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Mean squared difference of G models: ``(G, B, 1)`` twice to ``(G,)``. No labels are smoothed."""
        each: torch.Tensor = (outputs - targets).square().flatten(1).mean(1)
        return each

    # --- FedIOD: answers of K nodes ---

    def distillation_loss(self, student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
        """Squared difference ``(B,)``, the loss of local training; half of it for infinite ``tau``, as the
        limit of a distance of logits has it."""
        square = (student - target).square().flatten(1).mean(1)
        return 0.5 * square if math.isinf(tau) else square

    # --- evaluation ---

    def compute_metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> Mapping[str, float]:
        """R\u00b2 in percent, NaN of equal targets; RMSE and MAE in percent of the target's range."""
        error, spread = (outputs - targets).double(), (targets - targets.double().mean()).double()
        total = spread.square().sum().item()
        return {
            "r2": 100 * (1 - error.square().sum().item() / total) if total else math.nan,
            "rmse": 50 * error.square().mean().sqrt().item(),
            "mae": 50 * error.abs().mean().item(),
        }


@dataclass(frozen=True, kw_only=True)
class RegressionConfig(TaskConfig):
    """One number a row of a table."""

    task_class = Regression
