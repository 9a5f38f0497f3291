"""Figures of one class an input, from probabilities and true classes; and those that may lead, over many
weightings of the inputs at once, for intervals.

Classes that no input is of have no recall and no AUC, and are left out of means over classes. All is in
percent; what cannot be said (no class with inputs of both kinds, a probability that is no number) is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BINS = 15  # of confidence, as in Guo et al., "On Calibration of Modern Neural Networks", ICML 2017


def accuracy(p: Floats, true: Ints) -> float:
    """The share of inputs whose most probable class is the true one: ``p`` (N, C), ``true`` (N,).

    >>> accuracy(np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 0]))
    50.0
    """
    return 100.0 * float((p.argmax(1) == true).mean())


def balanced_accuracy(p: Floats, true: Ints) -> float:
    """The mean over classes of the share of a class's inputs that are taken for it."""
    hit = p.argmax(1) == true
    return 100.0 * float(np.mean([hit[true == c].mean() for c in np.unique(true)]))


def macro_f1(p: Floats, true: Ints) -> float:
    """The mean of F1 over the classes that are there or predicted."""
    return float(weighted("macro_f1", p, true, np.ones((1, len(true))))[0])


def auc(p: Floats, true: Ints) -> float:
    """The area under the ROC curve of each class against the rest, the mean over classes."""
    return _area("auc", p, true)


def auprc(p: Floats, true: Ints) -> float:
    """Average precision of each class against the rest, the mean over classes; of two the second's."""
    return _area("auprc", p, true)


def ece(p: Floats, true: Ints) -> float:
    """Expected calibration error: how far confidence is from accuracy, the mean over bins of confidence, each
    weighed by its inputs (Guo et al. 2017, Eq. 3).

    >>> round(ece(np.array([[0.8, 0.2], [0.8, 0.2]]), np.array([0, 1])), 4)
    30.0
    """
    if np.isnan(p).any():
        return math.nan
    apart = (each["examples"] * abs(each["accuracy"] - each["confidence"]) for each in calibration(p, true))
    return sum(apart) / len(true)


OF: Mapping[str, Callable[[Floats, Ints], float]] = {
    "accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "macro_f1": macro_f1,
    "auc": auc,
    "auprc": auprc,
    "ece": ece,
}


def confusion(p: Floats, true: Ints) -> list[list[int]]:
    """How many inputs of each class (rows) are taken for each class (columns): C lists of C."""
    from sklearn.metrics import confusion_matrix

    counts: list[list[int]] = confusion_matrix(true, p.argmax(1), labels=range(p.shape[1])).tolist()
    return counts


def calibration(p: Floats, true: Ints) -> list[dict[str, float]]:
    """The reliability curve: of each bin of confidence that holds inputs the mean confidence and the accuracy
    in percent, and how many it holds."""
    if np.isnan(p).any():
        return []
    sure, hit = p.max(1), p.argmax(1) == true
    bins = np.clip(np.ceil(sure * BINS).astype(int) - 1, 0, BINS - 1)
    return [
        {
            "confidence": 100.0 * float(sure[bins == place].mean()),
            "accuracy": 100.0 * float(hit[bins == place].mean()),
            "examples": int((bins == place).sum()),
        }
        for place in np.unique(bins)
    ]


def _area(metric: str, p: Floats, true: Ints) -> float:
    """An area under a curve where each input counts once."""
    if np.isnan(p).any():
        return math.nan
    return float(weighted(metric, p, true, np.ones((1, len(true))))[0])


# --- the same over weighted cases -------------------------------------------------------------------------


def weighted(metric: str, p: Floats, true: Ints, weights: Floats) -> Floats:
    """A figure where inputs count several times or not at all, for each of R weightings: ``(R,)``.

    Args:
        metric: a key of :data:`OF`, but not ece.
        p, true: ``(N, C)`` and ``(N,)``.
        weights: how often each input counts, ``(R, N)``.
    """
    classes = p.shape[1]
    if metric in ("auc", "auprc"):
        ranked = range(1, 2) if metric == "auprc" and classes == 2 else range(classes)
        each = [area(metric, p[:, c], true == c, weights) for c in ranked]
        return 100.0 * over_classes(np.stack(each, 1))
    guess = p.argmax(1)
    hit = (guess == true).astype(float)
    if metric == "accuracy":
        told: Floats = 100.0 * (weights @ hit) / weights.sum(1)
        return told
    is_true = np.eye(classes)[true]  # (N, C)
    right, there = weights @ (is_true * hit[:, None]), weights @ is_true  # (R, C)
    if metric == "balanced_accuracy":
        return 100.0 * over_classes(_ratio(right, there))
    return 100.0 * over_classes(_ratio(2 * right, there + weights @ np.eye(classes)[guess]))


def area(metric: str, score: Floats, positive: npt.NDArray[np.bool_], weights: Floats) -> Floats:
    """One class's area under the ROC curve, or its average precision: ``(R,)``, inputs of equal score taken
    together."""
    values, at = np.unique(-score, return_inverse=True)  # highest first
    group = torch.from_numpy(at)

    def grouped(rows: npt.NDArray[np.bool_]) -> Floats:
        sums = torch.zeros(len(weights), len(values), dtype=torch.float64)
        told: Floats = sums.index_add_(1, group[rows], torch.from_numpy(weights[:, rows])).numpy()
        return told

    yes, no = grouped(positive), grouped(~positive)  # (R, G)
    above = yes.cumsum(1)  # positives of this score or a higher one
    if metric == "auc":
        ahead = (no * (above - yes / 2)).sum(1)
        return _ratio(ahead, yes.sum(1) * no.sum(1))
    precision = np.nan_to_num(_ratio(above, above + no.cumsum(1)))
    both = no.sum(1) > 0
    return np.where(both, _ratio((yes * precision).sum(1), yes.sum(1)), math.nan)


def _ratio(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.full_like(part, math.nan), where=whole > 0)


def over_classes(by_class: Floats) -> Floats:
    """The mean over classes that can be said: ``(R, C)`` to ``(R,)``."""
    known = ~np.isnan(by_class)
    return _ratio(np.where(known, by_class, 0.0).sum(1), known.sum(1).astype(float))
