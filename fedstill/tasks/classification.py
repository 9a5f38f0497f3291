"""One label an image, a text or a row of a table, and what all tasks share whose outputs are logits of
classes that exclude each other, one or one a pixel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedstill.core.dataset import Cases, TensorData
from fedstill.tasks import formulas
from fedstill.tasks.config import TaskConfig
from fedstill.tasks.task import Figure, Task


class SoftmaxTask(Task):
    """Logits ``(B, C, ...)``, of which a softmax over C is a distribution; further axes are like examples."""

    def confidence(self, answers: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """L_conf, FedIOD Eq. 3."""
        return formulas.mean_entropy(answers, pi)

    def uniqueness(self, answers: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """L_unique, FedIOD Eq. 5."""
        return -formulas.divergence(answers, pi)

    def balance(self, ensembled: torch.Tensor) -> torch.Tensor:
        """Negative entropy of the batch's mean class distribution: lowest when no class is rare.

        0 where inputs are made from label maps, which settle how often each class is met.
        """
        if self.conditions:
            return ensembled.new_zeros(())
        return -formulas.entropy_of(ensembled.softmax(1).mean(0), 0)

    def normalised(self, answers: torch.Tensor) -> torch.Tensor:
        """Log-probabilities."""
        return answers.log_softmax(2)

    def mixture(self, answers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the weighted mean of probabilities."""
        return formulas.log_mixture(answers.log_softmax(2), weights)

    def consensus(self, answers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Log-probabilities, :func:`fedstill.tasks.formulas.consensus`, pixel by pixel for maps."""
        return formulas.consensus(answers.log_softmax(2), weights)

    def expertise(self, ensembled: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The importance weights, averaged over the classes as the ensemble predicts them."""
        q = ensembled.softmax(1).flatten(2).mean(2) if ensembled.ndim > 2 else ensembled.softmax(1)  # (B, C)
        share = (weights * q).sum(2)  # (K, B)
        return share / share.sum(0, keepdim=True).clamp_min(1e-30)

    def distance(self, student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
        """How far the student is from the ensemble, FedIOD Eq. 6 and 10; of maps the mean over pixels."""
        return formulas.distance(student, target, tau)


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


class TextClassification(Classification):
    """Single-label classification of texts ``(B, L)`` int64, 0 for padding; outputs are logits ``(B, C)``.

    What is learned of a text is what is learned of an image; only what an input is differs.
    """

    name = "text"
    form = "texts"


@dataclass(frozen=True, kw_only=True)
class TextConfig(TaskConfig):
    """One label a text."""

    makes = TextClassification


class TabularClassification(Classification):
    """Single-label classification of rows of a table ``(B, F)``; outputs are logits ``(B, C)``."""

    name = "tabular"
    form = "rows"


@dataclass(frozen=True, kw_only=True)
class TabularConfig(TaskConfig):
    """One label a row of a table."""

    makes = TabularClassification
