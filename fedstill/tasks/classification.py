"""One label an input: what is learned, how answers are ensembled, what counts as good."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from fedstill.data.dataset import TensorData, check_classification
from fedstill.tasks import functional
from fedstill.tasks.functional import Ensemble


class Classification:
    """Single-label classification into ``classes`` classes: outputs are logits ``(B, classes)``."""

    name = "classification"
    metric = "accuracy"

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def check(self, data: TensorData, what: str) -> None:
        """Refuse data that cannot be learned from (shapes, NaN, labels outside the classes)."""
        check_classification(data, self.classes, what)

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

    def confidence(self, answers: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """L_conf, FedIOD Eq. 3."""
        return functional.mean_entropy(answers, pi)

    def uniqueness(self, answers: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """L_unique, FedIOD Eq. 5."""
        return -functional.divergence(answers, pi)

    def balance(self, ensembled: torch.Tensor) -> torch.Tensor:
        """Negative entropy of the batch's mean class distribution: lowest when no class is rare."""
        return -functional.entropy_of(ensembled.softmax(1).mean(0), 0)

    def importance(self, counts: torch.Tensor, ratio: torch.Tensor | None = None) -> torch.Tensor:
        """pi_k(x), FedIOD Eq. 8: ``(K, C)`` counts and ``(K, B)`` critic ratios to ``(K, B or 1, C)``."""
        return functional.importance(counts, ratio)

    def ensemble(self, answers: torch.Tensor, weights: torch.Tensor, how: Ensemble) -> torch.Tensor:
        """A(z_1..z_K, x), FedIOD Eq. 9: ``(K, B, C)`` to ``(B, C)``."""
        return functional.ensemble(answers, weights, how)

    def expertise(self, ensembled: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """How much each node knows about the classes that an input shows, ``(K, B)``, summing to 1.

        The importance weights, averaged over the classes as the ensemble predicts them.
        """
        share = (weights * ensembled.softmax(1)).sum(2)  # (K, B)
        return share / share.sum(0, keepdim=True).clamp_min(1e-30)

    def mix(self, first: torch.Tensor, second: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Logits of the mixture of two predictions, ``share`` (B,) of it the second's."""
        q = torch.lerp(first.softmax(1), second.softmax(1), share.unsqueeze(1))
        return q.clamp_min(torch.finfo(q.dtype).tiny).log()

    def distance(self, student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
        """How far the student is from the ensemble, FedIOD Eq. 6 and 10: one value an example."""
        return functional.distance(student, target, tau)

    def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, float]:
        """Accuracy in percent."""
        return {"accuracy": 100.0 * outputs.argmax(1).eq(targets).double().mean().item()}
