"""Ordered classes, such as grades of a disease: an error of two grades is worse than one.

Hou, Yu, Samaras: "Squared Earth Mover's Distance-based Loss for Training Deep Neural Networks", 2016.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedstill.core.dataset import CaseIndex
from fedstill.tasks import Metric, TaskConfig
from fedstill.tasks.classification import Classification


class Ordinal(Classification):
    """Ordinal classification: outputs are logits ``(B, C)``, targets ``(B,)``."""

    name = "ordinal"
    metrics = (Metric("accuracy", "Accuracy"), Metric("mae", "MAE", unit="", digits=2, better="lower"))

    def __init__(self, classes: int, emd: float) -> None:
        super().__init__(classes)
        self.emd = emd

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        one_hot = F.one_hot(targets, self.classes).to(outputs.dtype)  # (G, B, C)
        distance = emd(outputs.softmax(-1), one_hot).mean(1)  # (G,)
        return super().loss(outputs, targets, smoothing) + self.emd * distance

    def distillation_loss(self, student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
        distance = emd(student.softmax(1), target.softmax(1))  # (B,)
        return super().distillation_loss(student, target, tau) + self.emd * distance

    def compute_metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> Mapping[str, float]:
        errors = (outputs.argmax(1) - targets).abs().double()  # (N,) grades
        return {"accuracy": 100 * errors.eq(0).double().mean().item(), "mae": errors.mean().item()}


def emd(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the squared earth mover's distance ``(...,)`` of distributions ``(..., C)``."""
    return (p.cumsum(-1) - q.cumsum(-1)).square().sum(-1)


@dataclass(frozen=True, kw_only=True)
class OrdinalConfig(TaskConfig):
    """Ordered grades, one per image."""

    task_class = Ordinal

    emd: float = 1.0
    """Weight of the earth mover's distance, added to the cross-entropy."""
