"""The time until an event, of which some rows only say that it had not happened yet: discrete hazards.

Gensheimer and Narasimhan, "A scalable discrete-time survival model for neural networks" (nnet-survival),
PeerJ 7:e6257, 2019. The time of follow-up is cut into J intervals, and a model gives the log-odds of each
one's hazard ``h_j``: how likely the event is in it for who has come so far. Then ``S_j = prod_{i <= j} (1 -
h_i)`` survive interval j.

Each interval is a question of its own with two answers, event or none, that is unknown of who was not
followed through it: labels as :mod:`fedstill.tasks.multi_label` has them. So FedKD's and FedIOD's formulas
are those of labels, interval by interval; what nodes hold of an interval is who they followed through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedstill.core.dataset import Cases, TensorData, check_inputs, check_numbers
from fedstill.core.errors import DataError
from fedstill.tasks import formulas, survival_metrics
from fedstill.tasks.config import TaskConfig
from fedstill.tasks.figure import Figure
from fedstill.tasks.multi_label import UNKNOWN, MultiLabel
from fedstill.tasks.survival_metrics import Floats


class Survival(MultiLabel):
    """Outputs are log-odds of hazards ``(B, J)``; targets ``(B, 2)`` float32: the time of follow-up, counted
    in intervals from 0 to J, and 1 where the event ended it, 0 where the row is censored.

    The ensemble ``logits`` is the weighted mean of log-odds, as FedIOD Eq. 9; ``probs`` and ``consensus`` are
    log-odds of the weighted mean hazard.
    """

    name = "survival"
    figures = (
        Figure("concordance", "Concordance"),
        Figure("brier", "Integrated Brier", unit="", digits=3, better="lower"),
    )
    kind = "time"
    form = "rows"

    def blank(self, count: int, shape: tuple[int, ...]) -> torch.Tensor:
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
        answers = by_interval(targets, self.classes)
        wanted = answers.clamp_min(0).to(outputs.dtype)
        each = F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")
        return torch.where(answers != UNKNOWN, each, 0.0).sum(2).mean(1)

    def counts(self, data: TensorData) -> torch.Tensor:
        """How many rows say something of each interval: ``(J,)`` float32; a row adds from 0 to J."""
        return (by_interval(data.targets, self.classes) != UNKNOWN).sum(0).float()

    # --- FedIOD: answers of K nodes ---

    def balance(self, ensembled: torch.Tensor) -> torch.Tensor:
        """Lowest where events are evenly spread over the intervals and the time after them."""
        before = F.pad(F.logsigmoid(-ensembled).cumsum(1), (1, 0))  # log S_0 .. log S_J
        last = F.pad(F.logsigmoid(ensembled), (0, 1))  # log h_1 .. log h_J, and 0: later it is for sure
        return -formulas.entropy_of((before + last).exp().mean(0), 0)

    # --- evaluation ---

    def metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: Cases | None = None
    ) -> Mapping[str, float]:
        """Harrell's concordance in percent, of the mean survival time, and the integrated Brier score."""
        survival, time, event = _told(outputs, targets)
        return {
            "concordance": self.leading(outputs, targets),
            "brier": survival_metrics.integrated_brier(survival, time, event),
        }

    def leading(self, outputs: torch.Tensor, targets: torch.Tensor, cases: Cases | None = None) -> float:
        """See :meth:`Task.leading`."""
        survival, time, event = _told(outputs, targets)
        return 100 * float(survival_metrics.concordance(survival.sum(1), time, event)[0])

    def resampled(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: Cases | None, weights: Floats
    ) -> Floats:
        """See :meth:`Task.resampled`."""
        survival, time, event = _told(outputs, targets)
        return 100 * survival_metrics.concordance(survival.sum(1), time, event, weights)

    def measurable(self, targets: torch.Tensor, data: TensorData) -> torch.Tensor:
        """All: of one row's time no part can be left out."""
        return targets

    def per_class(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """None: an interval is no finding."""


@dataclass(frozen=True, kw_only=True)
class SurvivalConfig(TaskConfig):
    """The time until an event, a row of a table."""

    makes = Survival


def by_interval(targets: torch.Tensor, intervals: int) -> torch.Tensor:
    """What rows ``(..., 2)`` say of each interval, ``(..., J)`` int64: 1 the event, 0 none, -1 nothing.

    The event at time t is in interval ``floor(t)``, from 0, and at the very end in the last one. Who is
    censored is known to have had none in the intervals whose middle was reached.

    >>> by_interval(torch.tensor([[1.2, 1.0], [1.4, 0.0], [1.6, 0.0]]), 3).tolist()
    [[0, 1, -1], [0, -1, -1], [0, 0, -1]]
    """
    time, event = targets[..., :1], targets[..., 1:] > 0.5
    place = torch.arange(intervals, device=targets.device)
    last = time.floor().clamp(max=intervals - 1)
    none = torch.where(event, place < last, time >= place + 0.5)
    answers = torch.where(none, 0, UNKNOWN)
    return torch.where(event & (place == last), 1, answers)


def _told(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Floats, Floats, Floats]:
    """Survival at the end of each interval ``(N, J)``, times and events ``(N,)``."""
    survival = (-outputs.detach().cpu().double()).sigmoid().cumprod(1)
    time, event = targets.cpu().double().unbind(1)
    return survival.numpy(), time.numpy(), event.numpy()
