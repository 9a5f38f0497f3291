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

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RANKED = ("auc", "auprc")  # figures of how inputs are ranked: any scores will do
BINS = 15  # of confidence, as in Guo et al., "On Calibration of Modern Neural Networks", ICML 2017


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
    return float(weighted(metric, p, true, np.ones((1, len(true))))[0])


# --- the same over weighted cases -------------------------------------------------------------------------


def weighted(metric: str, p: Floats, true: Ints, weights: Floats) -> Floats:
    """A figure where inputs count several times or not at all, for each of R weightings: ``(R,)``.

    Args:
        metric: a key of :data:`OF`, but not ece.
        p, true: ``(N, C)`` and ``(N,)``; for :data:`RANKED` any scores in the order of probabilities.
        weights: how often each input counts, ``(R, N)``.
    """
    classes = p.shape[1]
    if np.isnan(p).any():
        return np.full(len(weights), math.nan)
    if metric in RANKED:
        ranked = np.arange(1, 2) if metric == "auprc" and classes == 2 else np.arange(classes)
        scores, positive = p.T[ranked], true == ranked[:, None]  # (C, N)
        if len(weights) == 1:
            return 100.0 * over_classes(areas(metric, scores, positive, weights)[None])
        # A class at a time: all weightings of all classes at once would be R C N numbers.
        each = [areas(metric, scores[[c]], positive[[c]], weights) for c in range(len(ranked))]
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


def areas(metric: str, scores: Floats, positive: npt.NDArray[np.bool_], weights: Floats) -> Floats:
    """The area under the ROC curve, or average precision, of each of M rows: classes, or weightings of one.

    Args:
        metric: ``auc`` or ``auprc``.
        scores, positive: ``(M, N)``, or ``(1, N)`` for all rows; inputs of equal score are taken together.
        weights: the same.

    >>> areas("auc", np.array([[0.9, 0.5, 0.5]]), np.array([[True, True, False]]), np.ones((1, 3)))
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


def _ratio(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.full_like(part, math.nan), where=whole > 0)


def over_classes(by_class: Floats) -> Floats:
    """The mean over classes that can be said: ``(R, C)`` to ``(R,)``."""
    known = ~np.isnan(by_class)
    return _ratio(np.where(known, by_class, 0.0).sum(1), known.sum(1).astype(float))
