"""Figures of survival: who has the event first, and how near the predicted survival curves are.

Times are in any unit, the same for all; events are 1, or 0 where a row is censored.

The time until an event, of which some rows only say that it had not happened yet: discrete hazards.

Gensheimer and Narasimhan, "A scalable discrete-time survival model for neural networks" (nnet-survival),
PeerJ 7:e6257, 2019. The time of follow-up is cut into J intervals, and a model gives the log-odds of each
one's hazard ``h_j``: how likely the event is in it for who has come so far. Then ``S_j = prod_{i <= j} (1 -
h_i)`` survive interval j.

Each interval is a query of its own with two answers, event or none, that is unknown of who was not
followed through it: labels as :mod:`fedstill.tasks.multi_label` has them. So FedKD's and FedIOD's formulas
are those of labels, interval by interval; what nodes hold of an interval is who they followed through it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fedstill.core.dataset import CaseIndex, TensorData, check_inputs, check_numbers
from fedstill.core.errors import DataError
from fedstill.tasks import formulas
from fedstill.tasks.config import TaskConfig
from fedstill.tasks.multi_label import UNKNOWN, MultiLabel
from fedstill.tasks.task import Metric

Floats = npt.NDArray[np.float64]
ROWS_PER_BLOCK = 512  # rows that are compared with all others at once


# --- metrics ---


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
    for start in range(0, len(time), ROWS_PER_BLOCK):
        of = slice(start, start + ROWS_PER_BLOCK)
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
    uncensored = _CensoringCurve(time, event)
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


class _CensoringCurve:
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


# --- the task ---


class Survival(MultiLabel):
    """Outputs are log-odds of hazards ``(B, J)``; targets ``(B, 2)`` float32: the time of follow-up, counted
    in intervals from 0 to J, and 1 where the event ended it, 0 where the row is censored.

    The ensemble ``logits`` is the weighted mean of log-odds, as FedIOD Eq. 9; ``probs`` and ``consensus`` are
    log-odds of the weighted mean hazard.
    """

    name = "survival"
    metrics = (
        Metric("concordance", "Concordance"),
        Metric("brier", "Integrated Brier", unit="", digits=3, better="lower"),
    )
    kind = "time"
    form = "rows"

    def empty_targets(self, count: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Rows that were not followed at all."""
        return torch.zeros(count, 2)

    def check(self, data: TensorData, what: str) -> None:
        """Refuse anything but rows ``(N, F)`` with a time and an event each.

        Raises:
            DataError: naming the first fault; begins with ``what``.
        """
        check_inputs(data, what, self.form)
        targets = data.targets
        check_numbers(targets, 2, what)
        time, event = targets.unbind(1)
        if not bool(((time >= 0) & (time <= self.classes)).all()):
            raise DataError(f"{what}: holds a time that is no number of intervals from 0 to {self.classes}")
        if not bool(((event == 0) | (event == 1)).all()):
            raise DataError(f"{what}: holds an event that is neither 1 nor 0 (censored)")

    # --- local training ---

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Negative log-likelihood of G models on G batches: ``(G, B, J)`` and ``(G, B, 2)`` to ``(G,)``.

        Of a row with its event in interval j, ``-log h_j - sum_{i < j} log(1 - h_i)``; of a censored one the
        same sum over the intervals that it was followed through, which are those whose middle it reached.
        Nothing is smoothed.
        """
        responses = interval_labels(targets, self.classes)
        wanted = responses.clamp_min(0).to(outputs.dtype)
        each = F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")
        return torch.where(responses != UNKNOWN, each, 0.0).sum(2).mean(1)

    def counts(self, data: TensorData) -> torch.Tensor:
        """How many rows say something of each interval: ``(J,)`` float32; a row adds from 0 to J."""
        return (interval_labels(data.targets, self.classes) != UNKNOWN).sum(0).float()

    # --- FedIOD: answers of K nodes ---

    def balance_loss(self, ensembled: torch.Tensor) -> torch.Tensor:
        """Lowest where events are evenly spread over the intervals and the time after them."""
        before = F.pad(F.logsigmoid(-ensembled).cumsum(1), (1, 0))  # log S_0 .. log S_J
        last = F.pad(F.logsigmoid(ensembled), (0, 1))  # log h_1 .. log h_J, and 0: later it is for sure
        return -formulas.entropy_from_probs((before + last).exp().mean(0), 0)

    # --- evaluation ---

    def compute_metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> Mapping[str, float]:
        """Harrell's concordance in percent, of the mean survival time, and the integrated Brier score."""
        survival, time, event = _survival_curves(outputs, targets)
        return {
            "concordance": self.compute_primary_metric(outputs, targets),
            "brier": integrated_brier(survival, time, event),
        }

    def compute_primary_metric(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> float:
        """See :meth:`Task.compute_primary_metric`."""
        survival, time, event = _survival_curves(outputs, targets)
        return 100 * float(concordance(survival.sum(1), time, event)[0])

    def bootstrap_metric(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None, weights: Floats
    ) -> Floats:
        """See :meth:`Task.bootstrap_metric`."""
        survival, time, event = _survival_curves(outputs, targets)
        return 100 * concordance(survival.sum(1), time, event, weights)

    def measurable_targets(self, targets: torch.Tensor, data: TensorData) -> torch.Tensor:
        """All: of one row's time no part can be left out."""
        return targets

    def per_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """None: an interval is no finding."""


def interval_labels(targets: torch.Tensor, intervals: int) -> torch.Tensor:
    """What rows ``(..., 2)`` say of each interval, ``(..., J)`` int64: 1 the event, 0 none, -1 nothing.

    The event at time t is in interval ``floor(t)``, from 0, and at the very end in the last one. Who is
    censored is known to have had none in the intervals whose middle was reached.

    >>> interval_labels(torch.tensor([[1.2, 1.0], [1.4, 0.0], [1.6, 0.0]]), 3).tolist()
    [[0, 1, -1], [0, -1, -1], [0, 0, -1]]
    """
    time, event = targets[..., :1], targets[..., 1:] > 0.5
    place = torch.arange(intervals, device=targets.device)
    last = time.floor().clamp(max=intervals - 1)
    none = torch.where(event, place < last, time >= place + 0.5)
    responses = torch.where(none, 0, UNKNOWN)
    return torch.where(event & (place == last), 1, responses)


def _survival_curves(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Floats, Floats, Floats]:
    """Survival at the end of each interval ``(N, J)``, times and events ``(N,)``."""
    survival = (-outputs.detach().cpu().double()).sigmoid().cumprod(1)
    time, event = targets.cpu().double().unbind(1)
    return survival.numpy(), time.numpy(), event.numpy()


@dataclass(frozen=True, kw_only=True)
class SurvivalConfig(TaskConfig):
    """The time until an event, a row of a table."""

    task_class = Survival
