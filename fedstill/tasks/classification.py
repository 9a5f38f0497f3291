"""Classification with one class per input: metrics, and the tasks for images, texts and rows of a table.

:class:`SoftmaxTask` is the base of all tasks whose outputs are logits of mutually exclusive classes, one
class per input or one per pixel. The metric functions take probabilities and true classes and return
percentages. :func:`weighted_metric` evaluates a metric under many weightings of the inputs at once, for
confidence intervals. Classes without inputs have no recall and no AUC and are left out of means over classes.
An undefined metric is NaN, for example if a probability is NaN or if only one class is present.
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
from fedstill.tasks import logit_formulas
from fedstill.tasks.task import Metric, Task, TaskConfig

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
PrimaryMetric = Literal["accuracy", "balanced_accuracy", "macro_f1", "auc", "auprc"]
RANKING_METRICS = ("auc", "auprc")  # depend on the order of scores only
CALIBRATION_BINS = 15  # as in Guo et al., "On Calibration of Modern Neural Networks", ICML 2017
IMBALANCE_FACTOR = 1.5  # classes are uneven if a share is this many times larger or smaller than 1 / C
MAX_CONFUSION_CLASSES = 30  # a larger confusion matrix is not readable


# --- metrics ---------------------------------------------------------------------------------------------


def accuracy(p: Floats, true: Ints) -> float:
    """Return the percentage of inputs whose most probable class is the true class.

    Args:
        p: probabilities, ``(N, C)``.
        true: true classes, ``(N,)``.

    >>> accuracy(np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 0]))
    50.0
    """
    if np.isnan(p).any():
        return math.nan
    return 100.0 * float((p.argmax(1) == true).mean())


def balanced_accuracy(p: Floats, true: Ints) -> float:
    """Return the mean over classes of the recall of each class."""
    if np.isnan(p).any():
        return math.nan
    hit = p.argmax(1) == true
    return 100.0 * float(np.mean([hit[true == c].mean() for c in np.unique(true)]))


def macro_f1(p: Floats, true: Ints) -> float:
    """Return the mean F1 score over the classes that are present or predicted."""
    return float(weighted_metric("macro_f1", p, true, np.ones((1, len(true))))[0])


def auc(p: Floats, true: Ints) -> float:
    """Return the area under the ROC curve of each class against the rest, averaged over classes."""
    return _unweighted_metric("auc", p, true)


def auprc(p: Floats, true: Ints) -> float:
    """Return the average precision of each class against the rest, averaged over classes.

    With two classes it is the average precision of the second class.
    """
    return _unweighted_metric("auprc", p, true)


def ece(p: Floats, true: Ints) -> float:
    """Return the expected calibration error (Guo et al. 2017, Eq. 3).

    It is the mean absolute difference between confidence and accuracy over bins of confidence, weighted by
    the number of inputs in each bin.

    >>> round(ece(np.array([[0.8, 0.2], [0.8, 0.2]]), np.array([0, 1])), 4)
    30.0
    """
    if np.isnan(p).any():
        return math.nan
    bins = calibration_curve(p, true)
    return sum(bin["examples"] * abs(bin["accuracy"] - bin["confidence"]) for bin in bins) / len(true)


METRIC_FUNCTIONS: Mapping[str, Callable[[Floats, Ints], float]] = {
    "accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "macro_f1": macro_f1,
    "auc": auc,
    "auprc": auprc,
    "ece": ece,
}


def _unweighted_metric(metric: str, p: Floats, true: Ints) -> float:
    return float(weighted_metric(metric, p, true, np.ones((1, len(true))))[0])


def confusion_counts(p: Floats, true: Ints) -> list[list[int]]:
    """Return the confusion matrix as C lists of C counts: true classes in rows, predicted classes in
    columns.
    """
    from sklearn.metrics import confusion_matrix

    counts: list[list[int]] = confusion_matrix(true, p.argmax(1), labels=range(p.shape[1])).tolist()
    return counts


def calibration_curve(p: Floats, true: Ints) -> list[dict[str, float]]:
    """Return the reliability curve: one entry per non-empty bin of confidence.

    Each entry has the mean confidence and the accuracy in percent, and the number of examples.
    """
    if np.isnan(p).any():
        return []
    confidence, correct = p.max(1), p.argmax(1) == true
    bins = np.clip(np.ceil(confidence * CALIBRATION_BINS).astype(int) - 1, 0, CALIBRATION_BINS - 1)
    return [
        {
            "confidence": 100.0 * float(confidence[bins == index].mean()),
            "accuracy": 100.0 * float(correct[bins == index].mean()),
            "examples": int((bins == index).sum()),
        }
        for index in np.unique(bins)
    ]


# --- metrics under many weightings -------------------------------------------------------------------------


def weighted_metric(metric: str, p: Floats, true: Ints, weights: Floats) -> Floats:
    """Return a metric under each of R weightings of the inputs, ``(R,)``.

    Args:
        metric: a key of :data:`METRIC_FUNCTIONS` other than ``"ece"``.
        p: probabilities ``(N, C)``. For :data:`RANKING_METRICS` any scores in the same order.
        true: true classes, ``(N,)``.
        weights: number of times that each input counts, ``(R, N)``.
    """
    classes = p.shape[1]
    if np.isnan(p).any():
        return np.full(len(weights), math.nan)
    if metric in RANKING_METRICS:
        ranked = np.arange(1, 2) if metric == "auprc" and classes == 2 else np.arange(classes)
        scores, positive = p.T[ranked], true == ranked[:, None]  # (C, N)
        if len(weights) == 1:
            return 100.0 * mean_over_classes(areas_under_curve(metric, scores, positive, weights)[None])
        # One class at a time: all weightings of all classes at once would be R C N numbers.
        areas = [areas_under_curve(metric, scores[[c]], positive[[c]], weights) for c in range(len(ranked))]
        return 100.0 * mean_over_classes(np.stack(areas, 1))
    guess = p.argmax(1)
    hit = (guess == true).astype(float)
    if metric == "accuracy":
        values: Floats = 100.0 * (weights @ hit) / weights.sum(1)
        return values
    is_true = np.eye(classes)[true]  # (N, C)
    correct, total = weights @ (is_true * hit[:, None]), weights @ is_true  # (R, C)
    if metric == "balanced_accuracy":
        return 100.0 * mean_over_classes(_ratio(correct, total))
    return 100.0 * mean_over_classes(_ratio(2 * correct, total + weights @ np.eye(classes)[guess]))


def areas_under_curve(
    metric: str, scores: Floats, positive: npt.NDArray[np.bool_], weights: Floats
) -> Floats:
    """Return the area under the ROC curve, or the average precision, of each of M rows.

    A row is one class, or one weighting of a class.

    Args:
        metric: ``"auc"`` or ``"auprc"``.
        scores: scores, ``(M, N)``, or ``(1, N)`` for all rows. Inputs with equal scores are tied.
        positive: whether each input belongs to the class, ``(M, N)`` or ``(1, N)``.
        weights: number of times that each input counts, ``(M, N)`` or ``(1, N)``.

    >>> positive = np.array([[True, True, False]])
    >>> areas_under_curve("auc", np.array([[0.9, 0.5, 0.5]]), positive, np.ones((1, 3)))
    array([0.75])
    """
    order = np.argsort(-scores, axis=1)  # highest first
    ranked = np.take_along_axis(scores, order, 1)
    last = np.broadcast_to(np.arange(scores.shape[1]), scores.shape).copy()
    last[:, :-1][ranked[:, :-1] == ranked[:, 1:]] = scores.shape[1]  # keep the last of equal scores only
    end = np.minimum.accumulate(last[:, ::-1], axis=1)[:, ::-1]  # last position with the same score
    total = np.take_along_axis(weights, order, 1)  # (M, N), as all below
    yes = total * np.take_along_axis(positive, order, 1)
    no = total - yes
    # Weights of positive and negative inputs with this score or a higher one.
    true_above, false_above = (np.take_along_axis(rows.cumsum(1), end, 1) for rows in (yes, no))
    if metric == "auc":
        pairs = yes.sum(1) * no.sum(1)
        # The first sum counts ordered pairs, the second the others; tied pairs are in both.
        return _ratio(((no * true_above).sum(1) - (yes * false_above).sum(1) + pairs) / 2, pairs)
    precision = np.nan_to_num(_ratio(true_above, true_above + false_above))
    both = no.sum(1) > 0
    return np.where(both, _ratio((yes * precision).sum(1), yes.sum(1)), math.nan)


def mean_over_classes(by_class: Floats) -> Floats:
    """Return the mean over classes with a known value: ``(R, C)`` to ``(R,)``."""
    known = ~np.isnan(by_class)
    return _ratio(np.where(known, by_class, 0.0).sum(1), known.sum(1).astype(float))


def _ratio(part: Floats, total: Floats) -> Floats:
    return np.divide(part, total, out=np.full_like(part, math.nan), where=total > 0)


# --- tasks -----------------------------------------------------------------------------------------------


class SoftmaxTask(Task):
    """Base of tasks whose outputs are logits ``(B, C, ...)`` of mutually exclusive classes.

    Axes after C, such as the pixels of a map, are averaged like further examples.
    """

    def confidence_loss(self, responses: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Return L_conf, FedIOD Eq. 3."""
        return logit_formulas.mean_entropy(responses, share)

    def uniqueness_loss(self, responses: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Return L_unique, FedIOD Eq. 5."""
        return -logit_formulas.js_divergence(responses, share)

    def balance_loss(self, ensembled: torch.Tensor) -> torch.Tensor:
        """Return the negative entropy of the batch's mean class distribution, lowest if no class is rare.

        It is 0 if inputs are generated from label maps, because the maps determine the class frequencies.
        """
        if self.condition_channels:
            return ensembled.new_zeros(())
        return -logit_formulas.entropy_from_probs(ensembled.softmax(1).mean(0), 0)

    def normalize_outputs(self, responses: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities."""
        return responses.log_softmax(2)

    def predictions(self, responses: torch.Tensor) -> torch.Tensor:
        """Return probabilities."""
        return responses.softmax(2)

    def mix_outputs(self, responses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the weighted mean of probabilities."""
        return logit_formulas.log_mixture(responses.log_softmax(2), weights)

    def consensus(self, responses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of :func:`fedstill.tasks.logit_formulas.consensus`, pixel by pixel for
        maps.
        """
        return logit_formulas.consensus(responses.log_softmax(2), weights)

    def expertise(self, ensembled: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the importance weights averaged over the classes that the ensemble predicts, ``(K, B)``."""
        q = ensembled.softmax(1).flatten(2).mean(2) if ensembled.ndim > 2 else ensembled.softmax(1)  # (B, C)
        share = (weights * q).sum(2)  # (K, B)
        return share / share.sum(0, keepdim=True).clamp_min(1e-30)

    def distillation_loss(self, student: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
        """Return the distance between student and ensemble, FedIOD Eq. 6 and 10, averaged over the pixels of
        maps.
        """
        return logit_formulas.distillation_loss(student, target, tau)


class Classification(SoftmaxTask):
    """Classification of images with one class each. Outputs are logits ``(B, C)``.

    Args:
        classes: C.
        metric: key of the primary metric, which becomes the first of :attr:`metrics`.

    Example:
        >>> Classification(2, metric="auc").metrics[0].title
        'AUC'
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
        self.metrics = tuple(sorted(self.metrics, key=lambda candidate: candidate.key != metric))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return the mean cross-entropy of G models: ``(G, B, C)`` and ``(G, B)`` to ``(G,)``.

        Args:
            outputs: logits, ``(G, B, C)``.
            targets: true classes, ``(G, B)``.
            smoothing: share of the target that is spread evenly over all classes, from 0 to 1.
        """
        losses = F.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(0, 1), reduction="none", label_smoothing=smoothing
        )
        return losses.view(len(outputs), -1).mean(1)

    def counts(self, data: TensorData) -> torch.Tensor:
        """Return the number of examples of each class, ``(C,)`` float32."""
        return torch.bincount(data.targets.flatten(), minlength=self.classes).float()

    # --- evaluation ---

    def compute_metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> Mapping[str, float]:
        """Return all metrics in percent. Cases are ignored: each example counts once."""
        (p, true), odds = _probabilities_and_classes(outputs, targets), _log_odds(outputs)
        return {
            metric.key: METRIC_FUNCTIONS[metric.key](odds if metric.key in RANKING_METRICS else p, true)
            for metric in self.metrics
        }

    def compute_primary_metric(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> float:
        """See :meth:`Task.compute_primary_metric`."""
        return METRIC_FUNCTIONS[self.metric](*self._primary_scores(outputs, targets))

    def bootstrap_metric(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None, weights: Floats
    ) -> Floats:
        """See :meth:`Task.bootstrap_metric`."""
        return weighted_metric(self.metric, *self._primary_scores(outputs, targets), weights)

    def _primary_scores(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Floats, Ints]:
        """Return the scores from which the primary metric is computed, and the true classes."""
        p, true = _probabilities_and_classes(outputs, targets)
        return (_log_odds(outputs) if self.metric in RANKING_METRICS else p), true

    def prior_outputs(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the log-frequencies of the classes in ``targets`` for every input, ``(N, C)``."""
        counts = torch.bincount(targets.flatten(), minlength=self.classes).double()
        return (counts / counts.sum()).log().expand(len(targets), -1)

    def extra_results(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, Any]:
        """Return the confusion matrix, for up to :data:`MAX_CONFUSION_CLASSES` classes, and the reliability
        curve.
        """
        p, true = _probabilities_and_classes(outputs, targets)
        readable = self.classes <= MAX_CONFUSION_CLASSES
        return {
            "confusion": confusion_counts(p, true) if readable else None,
            "calibration": calibration_curve(p, true),
        }

    def metric_warning(self, targets: torch.Tensor, names: tuple[str, ...]) -> str | None:
        """Return a warning if the primary metric is accuracy and the classes are uneven, or None."""
        counts = torch.bincount(targets.flatten().cpu(), minlength=self.classes)
        shares = counts.double() / len(targets)
        largest, smallest, even = int(shares.argmax()), int(shares.argmin()), 1 / self.classes
        if self.metric != "accuracy" or (
            shares[largest] < IMBALANCE_FACTOR * even and shares[smallest] > even / IMBALANCE_FACTOR
        ):
            return None
        absent = [name for name, count in zip(names, counts.tolist(), strict=True) if not count]
        return (
            f"no test examples of {', '.join(absent)}: nothing is measured on them; "
            * bool(absent)
            + f"test classes are uneven: {names[largest]} is {shares[largest]:.1%} of the examples and "
            f"{names[smallest]} {shares[smallest]:.1%}, where an even share is {even:.1%}; accuracy says "
            "little about rare classes, so consider the metric auc or balanced_accuracy"
        )


def _probabilities_and_classes(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Floats, Ints]:
    logits = outputs.detach().cpu().double().clamp(-1e300, 1e300)  # the softmax of infinity is NaN
    return logits.softmax(1).numpy(), targets.cpu().numpy()


def _log_odds(outputs: torch.Tensor) -> Floats:
    """Return the log-odds of each class against all others, ``(N, C)``.

    Their order is that of the probabilities, and they also differ where probabilities round to 1.
    """
    logits = outputs.detach().cpu().double().clamp(-1e300, 1e300)
    best, top = logits.max(1, keepdim=True)
    logits = logits - best
    log_p = logits.log_softmax(1)
    rest = logits.scatter(1, top, -math.inf).logsumexp(1, keepdim=True)
    odds: Floats = (log_p - torch.log1p(-log_p.exp())).scatter(1, top, -rest).numpy()
    return odds.clip(-1e12, 1e12).round(10)  # rounding makes odds tie that were computed in two orders


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(TaskConfig):
    """Classification of images, one class per image."""

    task_class = Classification

    metric: PrimaryMetric = "accuracy"
    """Primary metric: ranks models and comes first in tables and figures. For uneven classes, auc and
    balanced_accuracy say more than accuracy."""


class TextClassification(Classification):
    """Classification of texts ``(B, L)`` int64, padded with 0. Outputs are logits ``(B, C)``.

    Example:
        >>> TextClassification(2).form
        'texts'
    """

    name = "text"
    form = "texts"


@dataclass(frozen=True, kw_only=True)
class TextConfig(ClassificationConfig):
    """Classification of texts, one class per text."""

    task_class = TextClassification


class TabularClassification(Classification):
    """Classification of rows of a table ``(B, F)``. Outputs are logits ``(B, C)``."""

    name = "tabular"
    form = "rows"


@dataclass(frozen=True, kw_only=True)
class TabularConfig(TaskConfig):
    """Classification of rows of a table, one class per row."""

    task_class = TabularClassification
