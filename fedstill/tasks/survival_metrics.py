"""Figures of survival: who has the event first, and how near the predicted survival curves are.

Times are in any unit, the same for all; events are 1, or 0 where a row is censored.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BLOCK = 512  # rows that are compared with all others at once


def concordance(score: Floats, time: Floats, event: Floats, weights: Floats | None = None) -> Floats:
    """Harrell's C for each of R weightings, ``(R,)``, from 0 to 1 (Harrell et al. 1996).

    Of the pairs of which it is known who had the event first, the share in which that one has the lower
    score; equal scores count half. A row censored at the very time of another's event outlived it. NaN where
    there is no such pair, or where a score is NaN.

    Args:
        score: ``(N,)``, the higher the later the event is expected.
        time, event: ``(N,)``.
        weights: how often each row counts, ``(R, N)``; None: once.

    >>> concordance(np.array([1.0, 3.0, 2.0]), np.array([5.0, 6.0, 7.0]), np.array([1.0, 1.0, 0.0]))
    array([0.66666667])
    """
    times = np.ones((1, len(time))) if weights is None else weights
    right, pairs = np.zeros(len(times)), np.zeros(len(times))
    if np.isnan(score).any():
        return np.full(len(times), math.nan)
    for start in range(0, len(time), BLOCK):
        of = slice(start, start + BLOCK)
        t, s = time[of, None], score[of, None]
        first = (event[of, None] == 1) & ((t < time) | ((t == time) & (event == 0)))  # (block, N)
        agree = first * ((s < score) + 0.5 * (s == score))
        right += ((times[:, of] @ agree) * times).sum(1)
        pairs += ((times[:, of] @ first.astype(float)) * times).sum(1)
    with np.errstate(invalid="ignore"):
        share: Floats = right / pairs
    return share


def integrated_brier(survival: Floats, time: Floats, event: Floats) -> float:
    """Integrated Brier score, lower is better; 0.25 is what survival of one half at all times reaches.

    The squared distance of predicted survival from what happened, at the end of each interval, where rows
    are weighed by the inverse probability of not being censored (Graf et al. 1999), as the Kaplan-Meier
    estimate of these same rows has it; its mean over time by the trapezium rule, from 0, where it is 0, to
    the last interval that somebody was followed beyond. NaN where nobody was followed beyond the first.

    Args:
        survival: ``(N, J)``, at the ends of intervals.
        time: ``(N,)``, in intervals.
        event: ``(N,)``.
    """
    uncensored = _Uncensored(time, event)
    scores = [0.0]
    for end, predicted in enumerate(survival.T, start=1):
        if not (time > end).any():
            break
        # An event at the end of an interval is the next one's, as models learn it.
        gone, there = (time < end) & (event == 1), time >= end
        lost = np.zeros(len(time))
        lost[gone] = predicted[gone] ** 2 / uncensored.before(time[gone])
        lost[there] = (1 - predicted[there]) ** 2 / uncensored.before(end)
        scores.append(float(lost.mean()))
    area = float(sum(scores)) - scores[-1] / 2
    return area / (len(scores) - 1) if len(scores) > 1 else math.nan


class _Uncensored:
    """The share that is not censored yet, by Kaplan and Meier; at equal times events come first."""

    def __init__(self, time: Floats, event: Floats) -> None:
        self._times, of = np.unique(time, return_inverse=True)
        events = np.bincount(of, weights=event)
        leaving = np.bincount(of)
        there = leaving[::-1].cumsum()[::-1] - events  # who can still be censored
        censored = leaving - events
        left = 1 - np.divide(censored, there, out=np.zeros(len(there)), where=there > 0)
        self._share = np.concatenate([[1.0], left.cumprod()])

    def before(self, time: Floats | float) -> Floats:
        share: Floats = self._share[np.searchsorted(self._times, time, side="left")]
        return share
