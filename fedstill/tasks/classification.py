"""One label an image, a text or a row of a table, and what all tasks share whose outputs are logits of
classes that exclude each other, one or one a pixel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from fedstill.core.dataset import Cases, TensorData
from fedstill.tasks import classification_metrics, formulas
from fedstill.tasks.classification_metrics import Floats, Ints
from fedstill.tasks.config import TaskConfig
from fedstill.tasks.figure import Figure
from fedstill.tasks.task import Task

Leading = Literal["accuracy", "balanced_accuracy", "macro_f1", "auc", "auprc"]
UNEVEN = 1.5  # times its even share that a class has, or has less than an even share over
MOST_CLASSES = 30  # a larger confusion matrix is no table for people


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
    """Single-label classification of images: outputs are logits ``(B, classes)``.

    Args:
        classes: C.
        metric: the key of the figure that models are judged by; it comes first, the others as they stand.
    """

    name = "classification"
    figures: tuple[Figure, ...] = (
        Figure("accuracy", "Accuracy"),
        Figure("balanced_accuracy", "Balanced acc."),
        Figure("macro_f1", "Macro F1", brief=False),
        Figure("auc", "AUC"),
        Figure("auprc", "AUPRC", brief=False),
        Figure("ece", "ECE", better="lower", brief=False),
    )
    kind = "class"

    def __init__(self, classes: int, metric: Leading = "accuracy") -> None:
        super().__init__(classes)
        self.figures = tuple(sorted(self.figures, key=lambda figure: figure.key != metric))

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

    # --- evaluation ---

    def metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: Cases | None = None
    ) -> Mapping[str, float]:
        """In percent, as :mod:`fedstill.tasks.classification_metrics`; each example counts by itself."""
        (p, true), odds = _told(outputs, targets), _log_odds(outputs)
        of, ranked = classification_metrics.OF, classification_metrics.RANKED
        return {each.key: of[each.key](odds if each.key in ranked else p, true) for each in self.figures}

    def leading(self, outputs: torch.Tensor, targets: torch.Tensor, cases: Cases | None = None) -> float:
        """See :meth:`Task.leading`."""
        return classification_metrics.OF[self.metric](*self._leading(outputs, targets))

    def resampled(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: Cases | None, weights: Floats
    ) -> Floats:
        """See :meth:`Task.resampled`."""
        return classification_metrics.weighted(self.metric, *self._leading(outputs, targets), weights)

    def _leading(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Floats, Ints]:
        """What the leading figure is of."""
        p, true = _told(outputs, targets)
        return (_log_odds(outputs) if self.metric in classification_metrics.RANKED else p), true

    def guess(self, targets: torch.Tensor) -> torch.Tensor:
        """Log-shares of the classes in ``targets``, for every input: the majority guess, ``(N, C)``."""
        counts = torch.bincount(targets.flatten(), minlength=self.classes).double()
        return (counts / counts.sum()).log().expand(len(targets), -1)

    def details(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, Any]:
        """The confusion matrix, of no more than :data:`MOST_CLASSES` classes, and the reliability curve."""
        p, true = _told(outputs, targets)
        few = self.classes <= MOST_CLASSES
        return {
            "confusion": classification_metrics.confusion(p, true) if few else None,
            "calibration": classification_metrics.calibration(p, true),
        }

    def advice(self, targets: torch.Tensor, names: tuple[str, ...]) -> str | None:
        """Another figure to be judged by, where classes are uneven and accuracy leads."""
        counts = torch.bincount(targets.flatten().cpu(), minlength=self.classes)
        shares = counts.double() / len(targets)
        most, least, even = int(shares.argmax()), int(shares.argmin()), 1 / self.classes
        if self.metric != "accuracy" or (shares[most] < UNEVEN * even and shares[least] > even / UNEVEN):
            return None
        return (
            f"test classes are uneven: {names[most]} is {shares[most]:.1%} of the examples and "
            f"{names[least]} {shares[least]:.1%}, where an even share is {even:.1%}; accuracy tells little "
            "of rare classes, so consider task.metric = auc or balanced_accuracy"
        )


def _told(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Floats, Ints]:
    """Probabilities of logits, and true classes."""
    logits = outputs.detach().cpu().double().clamp(-1e300, 1e300)  # of infinity there is no softmax
    return logits.softmax(1).numpy(), targets.cpu().numpy()


def _log_odds(outputs: torch.Tensor) -> Floats:
    """Log-odds of each class against all others, ``(N, C)``: in the order of probabilities, and of those that
    are 1 to the last digit, too."""
    logits = outputs.detach().cpu().double().clamp(-1e300, 1e300)
    best, top = logits.max(1, keepdim=True)
    logits = logits - best
    log_p = logits.log_softmax(1)
    rest = logits.scatter(1, top, -math.inf).logsumexp(1, keepdim=True)
    odds: Floats = (log_p - torch.log1p(-log_p.exp())).scatter(1, top, -rest).numpy()
    return odds.clip(-1e12, 1e12).round(10)  # the same odds may be computed in two orders, and are to tie


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(TaskConfig):
    """One label an image."""

    makes = Classification

    metric: Leading = "accuracy"
    """The figure that models are judged by, which leads in tables, drawings and comparisons; the others stand
    beside it. Where classes are uneven, auc or balanced_accuracy says more than accuracy."""


class TextClassification(Classification):
    """Single-label classification of texts ``(B, L)`` int64, 0 for padding; outputs are logits ``(B, C)``.

    What is learned of a text is what is learned of an image; only what an input is differs.
    """

    name = "text"
    form = "texts"


@dataclass(frozen=True, kw_only=True)
class TextConfig(ClassificationConfig):
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
