"""One label an input: what is learned, and what counts as good."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedstill.core.dataset import Cases, TensorData
from fedstill.tasks.config import TaskConfig
from fedstill.tasks.softmax import SoftmaxTask
from fedstill.tasks.task import Figure


class Classification(SoftmaxTask):
    """Single-label classification of images: outputs are logits ``(B, classes)``."""

    name = "classification"
    figures = (Figure("accuracy", "Accuracy"),)
    kind = "class"

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Cross-entropy of G models on G batches: ``(G, B, C)`` and ``(G, B)`` to ``(G,)``.

        ``smoothing`` is the share of the target that is spread evenly over all classes.
        """
        each = F.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(0, 1), reduction="none", label_smoothing=smoothing
        )
        return each.view(len(outputs), -1).mean(1)

    def counts(self, data: TensorData) -> torch.Tensor:
        """How many examples of each class: ``(C,)`` float32."""
        return torch.bincount(data.targets.flatten(), minlength=self.classes).float()

    def metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: Cases | None = None
    ) -> Mapping[str, float]:
        """Accuracy in percent."""
        return {"accuracy": 100.0 * outputs.argmax(1).eq(targets).double().mean().item()}


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(TaskConfig):
    """One label an image."""

    makes = Classification
