"""Figures of one class an input, from probabilities and true classes; and those that may lead, over many
weightings of the inputs at once, for intervals.

Classes that no input is of have no recall and no AUC, and are left out of means over classes. All is in
percent; what cannot be said (no class with inputs of both kinds, a probability that is no number) is NaN.

One label an image, a text or a row of a table, and what all tasks share whose outputs are logits of
classes that exclude each other, one or one a pixel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fedstill.core.dataset import CaseIndex, TensorData
from fedstill.tasks import formulas
from fedstill.tasks.config import TaskConfig
from fedstill.tasks.task import Metric, Task

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
PrimaryMetric = Literal["accuracy", "balanced_accuracy", "macro_f1", "auc", "auprc"]
RANKING_METRICS = ("auc", "auprc")  # figures of how inputs are ranked: any scores will do
CALIBRATION_BINS = (
    15  # of confidence, as in Guo et al., "On Calibration of Modern Neural Networks", ICML 2017
)
IMBALANCE_FACTOR = 1.5  # times its even share that a class has, or has less than an even share over
MAX_CONFUSION_CLASSES = 30  # a larger confusion matrix is no table for people


# --- metrics ---


def accuracy(p: Floats, true: Ints) -> float:
    """The share of inputs whose most probable class is the true one: ``p`` (N, C), ``true`` (N,).

    >>> accuracy(np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 0]))
    50.0
    """
    if np.isnan(p).any():
        return math.nan
    return 100.0 * float((p.argmax(1) == true).mean())


def balanced_accuracy(p: Floats, true: Ints) -> float:
    """The mean over classes of the share of a class's inputs that are taken for it."""
    if np.isnan(p).any():
        return math.nan
    hit = p.argmax(1) == true
    return 100.0 * float(np.mean([hit[true == c].mean() for c in np.unique(true)]))


def macro_f1(p: Floats, true: Ints) -> float:
    """The mean of F1 over the classes that are there or predicted."""
    return float(weighted_metric("macro_f1", p, true, np.ones((1, len(true))))[0])


def auc(p: Floats, true: Ints) -> float:
    """The area under the ROC curve of each class against the rest, the mean over classes."""
    return _area_under_curve("auc", p, true)


def auprc(p: Floats, true: Ints) -> float:
    """Average precision of each class against the rest, the mean over classes; of two the second's."""
    return _area_under_curve("auprc", p, true)


def ece(p: Floats, true: Ints) -> float:
    """Expected calibration error: how far confidence is from accuracy, the mean over bins of confidence, each
    weighed by its inputs (Guo et al. 2017, Eq. 3).

    >>> round(ece(np.array([[0.8, 0.2], [0.8, 0.2]]), np.array([0, 1])), 4)
    30.0
    """
    if np.isnan(p).any():
        return math.nan
    apart = (
        each["examples"] * abs(each["accuracy"] - each["confidence"]) for each in calibration_curve(p, true)
    )
    return sum(apart) / len(true)


METRIC_FUNCTIONS: Mapping[str, Callable[[Floats, Ints], float]] = {
    "accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "macro_f1": macro_f1,
    "auc": auc,
    "auprc": auprc,
    "ece": ece,
}


def _area_under_curve(metric: str, p: Floats, true: Ints) -> float:
    """An area under a curve where each input counts once."""
    return float(weighted_metric(metric, p, true, np.ones((1, len(true))))[0])


def confusion_counts(p: Floats, true: Ints) -> list[list[int]]:
    """How many inputs of each class (rows) are taken for each class (columns): C lists of C."""
    from sklearn.metrics import confusion_matrix

    counts: list[list[int]] = confusion_matrix(true, p.argmax(1), labels=range(p.shape[1])).tolist()
    return counts


def calibration_curve(p: Floats, true: Ints) -> list[dict[str, float]]:
    """The reliability curve: of each bin of confidence that holds inputs the mean confidence and the accuracy
    in percent, and how many it holds."""
    if np.isnan(p).any():
        return []
    sure, hit = p.max(1), p.argmax(1) == true
    bins = np.clip(np.ceil(sure * CALIBRATION_BINS).astype(int) - 1, 0, CALIBRATION_BINS - 1)
    return [
        {
            "confidence": 100.0 * float(sure[bins == place].mean()),
            "accuracy": 100.0 * float(hit[bins == place].mean()),
            "examples": int((bins == place).sum()),
        }
        for place in np.unique(bins)
    ]


# --- metrics under many weightings ---


def weighted_metric(metric: str, p: Floats, true: Ints, weights: Floats) -> Floats:
    """A figure where inputs count several times or not at all, for each of R weightings: ``(R,)``.

    Args:
        metric: a key of :data:`METRIC_FUNCTIONS`, but not ece.
        p, true: ``(N, C)`` and ``(N,)``; for :data:`RANKING_METRICS` any scores in the order of
            probabilities.
        weights: how often each input counts, ``(R, N)``.
    """
    classes = p.shape[1]
    if np.isnan(p).any():
        return np.full(len(weights), math.nan)
    if metric in RANKING_METRICS:
        ranked = np.arange(1, 2) if metric == "auprc" and classes == 2 else np.arange(classes)
        scores, positive = p.T[ranked], true == ranked[:, None]  # (C, N)
        if len(weights) == 1:
            return 100.0 * mean_over_classes(areas_under_curve(metric, scores, positive, weights)[None])
        # A class at a time: all weightings of all classes at once would be R C N numbers.
        each = [areas_under_curve(metric, scores[[c]], positive[[c]], weights) for c in range(len(ranked))]
        return 100.0 * mean_over_classes(np.stack(each, 1))
    guess = p.argmax(1)
    hit = (guess == true).astype(float)
    if metric == "accuracy":
        told: Floats = 100.0 * (weights @ hit) / weights.sum(1)
        return told
    is_true = np.eye(classes)[true]  # (N, C)
    right, there = weights @ (is_true * hit[:, None]), weights @ is_true  # (R, C)
    if metric == "balanced_accuracy":
        return 100.0 * mean_over_classes(_ratio(right, there))
    return 100.0 * mean_over_classes(_ratio(2 * right, there + weights @ np.eye(classes)[guess]))


def areas_under_curve(
    metric: str, scores: Floats, positive: npt.NDArray[np.bool_], weights: Floats
) -> Floats:
    """The area under the ROC curve, or average precision, of each of M rows: classes, or weightings of one.

    Args:
        metric: ``auc`` or ``auprc``.
        scores, positive: ``(M, N)``, or ``(1, N)`` for all rows; inputs of equal score are taken together.
        weights: the same.

    >>> areas_under_curve("auc", np.array([[0.9, 0.5, 0.5]]), np.array([[True, True, False]]), np.ones((1, 3)))
    array([0.75])
    """
    order = np.argsort(-scores, axis=1)  # highest first
    ranked = np.take_along_axis(scores, order, 1)
    place = np.broadcast_to(np.arange(scores.shape[1]), scores.shape).copy()
    place[:, :-1][ranked[:, :-1] == ranked[:, 1:]] = scores.shape[1]  # but the last of equal scores
    end = np.minimum.accumulate(place[:, ::-1], axis=1)[:, ::-1]  # the last one of an input's score
    whole = np.take_along_axis(weights, order, 1)  # (M, N), as all below
    yes = whole * np.take_along_axis(positive, order, 1)
    no = whole - yes
    above, wrong = (np.take_along_axis(rows.cumsum(1), end, 1) for rows in (yes, no))  # this score or higher
    if metric == "auc":
        pairs = yes.sum(1) * no.sum(1)
        # The first sum has all pairs in order, the second all of the others, and both have those that tie.
        return _ratio(((no * above).sum(1) - (yes * wrong).sum(1) + pairs) / 2, pairs)
    precision = np.nan_to_num(_ratio(above, above + wrong))
    both = no.sum(1) > 0
    return np.where(both, _ratio((yes * precision).sum(1), yes.sum(1)), math.nan)


def mean_over_classes(by_class: Floats) -> Floats:
    """The mean over classes that can be said: ``(R, C)`` to ``(R,)``."""
    known = ~np.isnan(by_class)
    return _ratio(np.where(known, by_class, 0.0).sum(1), known.sum(1).astype(float))


def _ratio(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.full_like(part, math.nan), where=whole > 0)


# --- tasks ---


class SoftmaxTask(Task):
    """Logits ``(B, C, ...)``, of which a softmax over C is a distribution; further axes are like examples."""

    def confidence_loss(self, responses: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """L_conf, FedIOD Eq. 3."""
        return formulas.mean_entropy(responses, pi)

    def uniqueness_loss(self, responses: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """L_unique, FedIOD Eq. 5."""
        return -formulas.js_divergence(responses, pi)

    def balance_loss(self, ensembled: torch.Tensor) -> torch.Tensor:
        """Negative entropy of the batch's mean class distribution: lowest when no class is rare.

        0 where inputs are made from label maps, which settle how often each class is met.
        """
        if self.condition_channels:
            return ensembled.new_zeros(())
        return -formulas.entropy_from_probs(ensembled.softmax(1).mean(0), 0)

    def normalize_outputs(self, responses: torch.Tensor) -> torch.Tensor:
        """Log-probabilities."""
        return responses.log_softmax(2)

    def mix_outputs(self, responses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the weighted mean of probabilities."""
        return formulas.log_mixture(responses.log_softmax(2), weights)

    def consensus(self, responses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Log-probabilities, :func:`fedstill.tasks.formulas.consensus`, pixel by pixel for maps."""
        return formulas.consensus(responses.log_softmax(2), weights)

    def expertise(self, ensembled: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The importance weights, averaged over the classes as the ensemble predicts them."""
        q = ensembled.softmax(1).flatten(2).mean(2) if ensembled.ndim > 2 else ensembled.softmax(1)  # (B, C)
        share = (weights * q).sum(2)  # (K, B)
        return share / share.sum(0, keepdim=True).clamp_min(1e-30)

    def distillation_loss(self, student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
        """How far the student is from the ensemble, FedIOD Eq. 6 and 10; of maps the mean over pixels."""
        return formulas.distillation_loss(student, target, tau)


class Classification(SoftmaxTask):
    """Single-label classification of images: outputs are logits ``(B, classes)``.

    Args:
        classes: C.
        metric: the key of the figure that models are judged by; it comes first, the others as they stand.
    """

    name = "classification"
    metrics: tuple[Metric, ...] = (
        Metric("accuracy", "Accuracy"),
        Metric("balanced_accuracy", "Balanced acc."),
        Metric("macro_f1", "Macro F1", in_summary=False),
        Metric("auc", "AUC"),
        Metric("auprc", "AUPRC", in_summary=False),
        Metric("ece", "ECE", better="lower", in_summary=False),
    )
    kind = "class"

    def __init__(self, classes: int, metric: PrimaryMetric = "accuracy") -> None:
        super().__init__(classes)
        self.metrics = tuple(sorted(self.metrics, key=lambda each: each.key != metric))

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

    def compute_metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> Mapping[str, float]:
        """In percent, as :mod:`fedstill.tasks.classification`; each example counts by itself."""
        (p, true), odds = _probabilities_and_classes(outputs, targets), _log_odds(outputs)
        of, ranked = METRIC_FUNCTIONS, RANKING_METRICS
        return {each.key: of[each.key](odds if each.key in ranked else p, true) for each in self.metrics}

    def compute_primary_metric(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> float:
        """See :meth:`Task.compute_primary_metric`."""
        return METRIC_FUNCTIONS[self.metric](*self._leading(outputs, targets))

    def bootstrap_metric(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None, weights: Floats
    ) -> Floats:
        """See :meth:`Task.bootstrap_metric`."""
        return weighted_metric(self.metric, *self._leading(outputs, targets), weights)

    def _leading(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Floats, Ints]:
        """What the leading figure is of."""
        p, true = _probabilities_and_classes(outputs, targets)
        return (_log_odds(outputs) if self.metric in RANKING_METRICS else p), true

    def prior_outputs(self, targets: torch.Tensor) -> torch.Tensor:
        """Log-shares of the classes in ``targets``, for every input: the majority guess, ``(N, C)``."""
        counts = torch.bincount(targets.flatten(), minlength=self.classes).double()
        return (counts / counts.sum()).log().expand(len(targets), -1)

    def extra_results(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, Any]:
        """The confusion matrix, of no more than :data:`MAX_CONFUSION_CLASSES` classes, and the reliability
        curve.
        """
        p, true = _probabilities_and_classes(outputs, targets)
        few = self.classes <= MAX_CONFUSION_CLASSES
        return {
            "confusion": confusion_counts(p, true) if few else None,
            "calibration": calibration_curve(p, true),
        }

    def metric_advice(self, targets: torch.Tensor, names: tuple[str, ...]) -> str | None:
        """Another figure to be judged by, where classes are uneven and accuracy leads."""
        counts = torch.bincount(targets.flatten().cpu(), minlength=self.classes)
        shares = counts.double() / len(targets)
        most, least, even = int(shares.argmax()), int(shares.argmin()), 1 / self.classes
        if self.metric != "accuracy" or (
            shares[most] < IMBALANCE_FACTOR * even and shares[least] > even / IMBALANCE_FACTOR
        ):
            return None
        return (
            f"test classes are uneven: {names[most]} is {shares[most]:.1%} of the examples and "
            f"{names[least]} {shares[least]:.1%}, where an even share is {even:.1%}; accuracy tells little "
            "of rare classes, so consider task.metric = auc or balanced_accuracy"
        )


def _probabilities_and_classes(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Floats, Ints]:
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

    task_class = Classification

    metric: PrimaryMetric = "accuracy"
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

    task_class = TextClassification


class TabularClassification(Classification):
    """Single-label classification of rows of a table ``(B, F)``; outputs are logits ``(B, C)``."""

    name = "tabular"
    form = "rows"


@dataclass(frozen=True, kw_only=True)
class TabularConfig(TaskConfig):
    """One label a row of a table."""

    task_class = TabularClassification
