"""Survival analysis: the time until an event, with censoring, by discrete hazards.

Gensheimer and Narasimhan, "A scalable discrete-time survival model for neural networks" (nnet-survival),
PeerJ 7:e6257, 2019. The time of follow-up is divided into J intervals. A model returns the log-odds of each
interval's hazard ``h_j``, the probability of the event in interval j given survival up to it. Then
``S_j = prod_{i <= j} (1 - h_i)`` is the probability to survive interval j.

Each interval is a binary label, event or no event, that is unknown for rows that were not followed through it
(see :mod:`fedstill.tasks.multi_label`). FedKD's and FedIOD's formulas apply to these labels, and a node's
weight for an interval is the number of rows that it followed through it. Metrics are Harrell's concordance
and the integrated Brier score. Times may have any unit, the same for all rows; events are 1, or 0 for
censored rows.
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
from fedstill.tasks import logit_formulas
from fedstill.tasks.multi_label import UNKNOWN, MultiLabel
from fedstill.tasks.task import Metric, TaskConfig

Floats = npt.NDArray[np.float64]
ROWS_PER_BLOCK = 512  # rows compared with all others at once


# --- metrics ---------------------------------------------------------------------------------------------


def concordance(score: Floats, time: Floats, event: Floats, weights: Floats | None = None) -> Floats:
    """Return Harrell's C under each of R weightings, ``(R,)``, from 0 to 1 (Harrell et al. 1996).

    It is the share of comparable pairs in which the row with the earlier event has the lower score. Equal
    scores count half. A row censored at the time of another row's event outlived it. NaN without comparable
    pairs, or if a score is NaN.

    Args:
        score: predicted scores, ``(N,)``, higher for a later event.
        time: times of follow-up, ``(N,)``.
        event: 1 for an event, 0 for a censored row, ``(N,)``.
        weights: number of times that each row counts, ``(R, N)``. None: once.

    >>> concordance(np.array([1.0, 3.0, 2.0]), np.array([5.0, 6.0, 7.0]), np.array([1.0, 1.0, 0.0]))
    array([0.66666667])
    """
    weights = np.ones((1, len(time))) if weights is None else weights
    concordant, pairs = np.zeros(len(weights)), np.zeros(len(weights))
    if np.isnan(score).any():
        return np.full(len(weights), math.nan)
    for start in range(0, len(time), ROWS_PER_BLOCK):
        block = slice(start, start + ROWS_PER_BLOCK)
        t, s = time[block, None], score[block, None]
        comparable = (event[block, None] == 1) & ((t < time) | ((t == time) & (event == 0)))  # (block, N)
        agree = comparable * ((s < score) + 0.5 * (s == score))
        concordant += ((weights[:, block] @ agree) * weights).sum(1)
        pairs += ((weights[:, block] @ comparable.astype(float)) * weights).sum(1)
    with np.errstate(invalid="ignore"):
        share: Floats = concordant / pairs
    return share


def integrated_brier(survival: Floats, time: Floats, event: Floats) -> float:
    """Return the integrated Brier score, lower is better. Survival of 1/2 at all times scores 0.25.

    The squared error of predicted survival at the end of each interval is averaged over rows, which are
    weighted by the inverse probability of not being censored (Graf et al. 1999), from the Kaplan-Meier
    estimate of the same rows. The result is the mean over time by the trapezoidal rule, from time 0, with
    error 0, to the last interval that some row was followed beyond. NaN if no row was followed beyond the
    first interval.

    Args:
        survival: predicted survival at the ends of intervals, ``(N, J)``.
        time: times of follow-up in intervals, ``(N,)``.
        event: 1 for an event, 0 for a censored row, ``(N,)``.
    """
    censoring = _CensoringCurve(time, event)
    scores = [0.0]
    for end, predicted in enumerate(survival.T, start=1):
        if not (time > end).any():
            break
        # An event at the end of an interval belongs to the next one, as in training.
        had_event, at_risk = (time < end) & (event == 1), time >= end
        errors = np.zeros(len(time))
        errors[had_event] = predicted[had_event] ** 2 / censoring.before(time[had_event])
        errors[at_risk] = (1 - predicted[at_risk]) ** 2 / censoring.before(end)
        scores.append(float(errors.mean()))
    area = float(sum(scores)) - scores[-1] / 2
    return area / (len(scores) - 1) if len(scores) > 1 else math.nan


class _CensoringCurve:
    """Kaplan-Meier estimate of the probability of not being censored yet. At equal times events come
    first.
    """

    def __init__(self, time: Floats, event: Floats) -> None:
        self._times, index = np.unique(time, return_inverse=True)
        events = np.bincount(index, weights=event)
        leaving = np.bincount(index)
        at_risk = leaving[::-1].cumsum()[::-1] - events  # rows that can still be censored
        censored = leaving - events
        uncensored = 1 - np.divide(censored, at_risk, out=np.zeros(len(at_risk)), where=at_risk > 0)
        self._share = np.concatenate([[1.0], uncensored.cumprod()])

    def before(self, time: Floats | float) -> Floats:
        share: Floats = self._share[np.searchsorted(self._times, time, side="left")]
        return share


# --- task ------------------------------------------------------------------------------------------------


class Survival(MultiLabel):
    """Time until an event. Outputs are log-odds of hazards ``(B, J)``, targets ``(B, 2)`` float32.

    A target holds the time of follow-up in intervals, from 0 to J, and 1 if the event ended it or 0 if the
    row is censored. The ensemble ``logits`` is the weighted mean of log-odds, as FedIOD Eq. 9. ``probs`` and
    ``consensus`` are log-odds of the weighted mean hazard.

    Args:
        classes: J, the number of intervals.
    """

    name = "survival"
    metrics = (
        Metric("concordance", "Concordance"),
        Metric("brier", "Integrated Brier", unit="", digits=3, better="lower"),
    )
    kind = "time"
    form = "rows"

    def empty_targets(self, count: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return targets of rows without follow-up, ``(count, 2)``."""
        return torch.zeros(count, 2)

    def check(self, data: TensorData, description: str) -> None:
        """Refuse anything but rows ``(N, F)`` with a time and an event each.

        Raises:
            DataError: the data are invalid; the message names the first fault.
        """
        check_inputs(data, description, self.form)
        targets = data.targets
        check_numbers(targets, 2, description)
        time, event = targets.unbind(1)
        if not bool(((time >= 0) & (time <= self.classes)).all()):
            raise DataError(
                f"{description}: holds a time that is no number of intervals from 0 to {self.classes}"
            )
        if not bool(((event == 0) | (event == 1)).all()):
            raise DataError(f"{description}: holds an event that is neither 1 nor 0 (censored)")

    # --- local training ---

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return the mean negative log-likelihood of G models: ``(G, B, J)`` and ``(G, B, 2)`` to ``(G,)``.

        For a row with its event in interval j it is ``-log h_j - sum_{i < j} log(1 - h_i)``. For a censored
        row it is the sum over the intervals whose middle the follow-up reached. ``smoothing`` is ignored.
        """
        labels = interval_labels(targets, self.classes)
        present = labels.clamp_min(0).to(outputs.dtype)
        losses = F.binary_cross_entropy_with_logits(outputs, present, reduction="none")
        return torch.where(labels != UNKNOWN, losses, 0.0).sum(2).mean(1)

    def counts(self, data: TensorData) -> torch.Tensor:
        """Return the number of rows with a known label in each interval, ``(J,)`` float32. A row adds 0 to J
        in all.
        """
        return (interval_labels(data.targets, self.classes) != UNKNOWN).sum(0).float()

    # --- FedIOD: responses of K nodes ---

    def balance_loss(self, ensembled: torch.Tensor) -> torch.Tensor:
        """Return a scalar that is lowest if events are spread evenly over the intervals and the time after
        them.
        """
        before = F.pad(F.logsigmoid(-ensembled).cumsum(1), (1, 0))  # log S_0 .. log S_J
        last = F.pad(
            F.logsigmoid(ensembled), (0, 1)
        )  # log h_1 .. log h_J, and 0: certain after the last interval
        return -logit_formulas.entropy_from_probs((before + last).exp().mean(0), 0)

    # --- evaluation ---

    def compute_metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> Mapping[str, float]:
        """Return Harrell's concordance of the mean survival time in percent, and the integrated Brier
        score.
        """
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
        """Return all targets: a row's time has no unknown part."""
        return targets

    def metric_per_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Return None: intervals are not labels of interest."""


def interval_labels(targets: torch.Tensor, intervals: int) -> torch.Tensor:
    """Return the label of each interval, ``(..., J)`` int64: 1 (event), 0 (no event) or -1 (unknown).

    The event at time t is in interval ``floor(t)``, counted from 0, and at the very end in the last one. A
    censored row has no event in the intervals whose middle it reached.

    Args:
        targets: times and events, ``(..., 2)``.
        intervals: J.

    >>> interval_labels(torch.tensor([[1.2, 1.0], [1.4, 0.0], [1.6, 0.0]]), 3).tolist()
    [[0, 1, -1], [0, -1, -1], [0, 0, -1]]
    """
    time, event = targets[..., :1], targets[..., 1:] > 0.5
    index = torch.arange(intervals, device=targets.device)
    last = time.floor().clamp(max=intervals - 1)
    no_event = torch.where(event, index < last, time >= index + 0.5)
    labels = torch.where(no_event, 0, UNKNOWN)
    return torch.where(event & (index == last), 1, labels)


def _survival_curves(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Floats, Floats, Floats]:
    """Return survival at the end of each interval ``(N, J)``, and times and events ``(N,)``."""
    survival = (-outputs.detach().cpu().double()).sigmoid().cumprod(1)
    time, event = targets.cpu().double().unbind(1)
    return survival.numpy(), time.numpy(), event.numpy()


@dataclass(frozen=True, kw_only=True)
class SurvivalConfig(TaskConfig):
    """Survival analysis: time until an event, per row of a table."""

    task_class = Survival
