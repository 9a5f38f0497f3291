"""PATE: noisy votes of teachers on disjoint parts of the records; and what GNMax has cost on the votes cast.

Papernot et al., "Scalable Private Learning with PATE", ICLR 2018. Where teachers agree, a noisy majority
hardly depends on any one of them, and costs less than the worst case that budgets charge. But **that figure
is computed from the private votes and is itself not private**: it is for the owner's eyes, it must not leave
the node, and nothing may be decided by it that shows outside. It holds for released labels only, not for
released vote counts.

Rényi curves here are for one record more or less, which changes one teacher's vote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Interval
from numpy.typing import NDArray
from torch import nn

from fedstill.core.checked import Checked, PositiveFloat, PositiveInt
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.privacy import renyi
from fedstill.privacy.config import (
    COUNTED,
    NOT_CHOSEN,
    AnswersConfig,
    Noise,
    Release,
)
from fedstill.privacy.rules import Rule, Sanitised
from fedstill.privacy.teachers import Teachers, shards
from fedstill.privacy.votes import Votes
from fedstill.protocol.questions import Question
from fedstill.tasks import Task

Floats = NDArray[np.float64]
DROWNED = (
    "the votes are almost all noise: more records and teachers, fewer questions, a larger epsilon, or dp-sgd"
)


@dataclass(frozen=True)
class PateConfig(Checked):
    """PATE at the node: teachers on disjoint parts of its data, and noisy votes."""

    under: ClassVar[str] = "pate"

    teachers: PositiveInt = 10
    """How many; each has its own part of the records."""
    noise: Noise = None
    """Standard deviation of the Gaussian noise on the votes for each class; none: as much as
    privacy.epsilon asks for."""
    release: Literal["votes", "label"] = "votes"
    """What leaves: all noisy votes, or only the class with the most (GNMax). They cost the same."""
    threshold: Annotated[float, Interval(ge=0, lt=inf), "0 (answer everywhere) or more"] = 0.0
    """Answer only where the most votes, with noise of their own, reach this number (Confident-GNMax);
    elsewhere nothing is said of any class. 0: answer everywhere."""
    threshold_noise: PositiveFloat = 10.0
    """Standard deviation of that noise, in votes."""
    sharpness: PositiveFloat = 10.0
    """Votes are told as logits: this number times their share."""
    data_dependent: bool = False
    """Also compute what the labels have cost by the votes themselves (release = "label"). For your eyes only:
    that figure tells of the votes. No budget goes by it."""
    share: PositiveFloat = 1.0
    """Of the epsilon that is divided among all whose noise is none, in parts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_dependent and self.release != "label":
            raise ArgumentError("pate.data_dependent", True, 'false, unless pate.release = "label"')


@dataclass(frozen=True, kw_only=True)
class PATE(AnswersConfig):
    """Noisy votes of teachers on disjoint parts of the data."""

    about: ClassVar[str] = "noisy votes of teachers, each of whom learned from its own part of the records"
    assumes: ClassVar[tuple[str, ...]] = (
        "each record belongs to one teacher, which nobody else's records decide",
        f"{COUNTED}: where a critic learns, the rate at which it draws them tells it",
        NOT_CHOSEN,
    )

    pate: PateConfig = field(default_factory=PateConfig)
    """Teachers and votes."""

    def refusal(self, question: Question, task: Task) -> str | None:
        """Training in rounds, and tasks in which there is nothing to vote for."""
        if question.span is not None:
            return "teachers learn once, before the first question, and this one trains the model"
        if task.kind != "class" and any(kind.of != "counts" for kind in question.releases.values()):
            return f"teachers vote for one class an input, which task {task.name} has not: take dp-sgd"
        return None

    def rule(self, release: Release, levels: Mapping[str, float]) -> Rule:
        """Votes, and the mean of the teachers' gradients."""
        pate = self.pate
        if release.pulled:
            # One that carries records carries all of them, whoever's they are.
            teachers = 1 if release.reads else pate.teachers
            return Sanitised(self.gradients.clip, levels["gradients"], teachers)
        if release.kind.of == "scores" and not release.reads:
            threshold = pate.threshold, pate.threshold_noise
            return Votes(pate.teachers, levels["pate"], pate.release, *threshold, pate.sharpness)
        return super().rule(release, levels)

    def shards(self, data: TensorData) -> Sequence[torch.Tensor]:
        """By a hash of what a record is."""
        return shards(data, self.pate.teachers)

    def ensemble(self, networks: Sequence[nn.Module]) -> nn.Module:
        """Teachers, who vote."""
        return Teachers(networks, self.pate.sharpness, self.gradients.clip)

    def facts(self, levels: Mapping[str, float]) -> Mapping[str, str]:
        """Whether anything is left of the votes."""
        noise, teachers = levels["pate"], self.pate.teachers
        told = f"noise {noise:.4g} on the votes of {teachers} teachers"
        return {"votes": f"{told}: {DROWNED}" if noise >= teachers / 2 else told} if noise else {}

    def votes(self, rule: Rule, exact: torch.Tensor, noised: torch.Tensor) -> Sequence[Sequence[int]]:
        """Of each row, whether it was answered, and its votes; where the owner wants to know."""
        if not self.pate.data_dependent or not isinstance(rule, Votes):
            return ()
        answered = (noised != 0).any(1, keepdim=True)
        rows: list[list[int]] = torch.cat([answered, rule.votes(exact)], 1).int().tolist()
        return rows

    def data_dependent(self, votes: Sequence[Sequence[int]], levels: Mapping[str, float]) -> float | None:
        """Of all labels released (Papernot et al. 2018)."""
        if not votes or not levels["pate"]:
            return None
        rows = torch.tensor(votes)
        thresholds = (self.pate.threshold, self.pate.threshold_noise, rows[:, 0] > 0)
        return epsilon_data_dependent(rows[:, 1:], levels["pate"], self.delta, *thresholds)


def log_other(votes: Floats, sigma: float) -> Floats:
    """Log of a bound on the chance that GNMax says another class than the one with most votes (Prop. 7).

    ``q = min(1/2 sum_{i != i*} erfc((n_i* - n_i) / (2 sigma)), 1 - 1/C)``

    Args:
        votes: without noise, (N, C), C of 2 or more.
        sigma: standard deviation of the noise on each count, in votes, above 0.

    Returns:
        (N,), at most log(1 - 1/C).
    """
    from scipy.special import log_ndtr, logsumexp

    ordered = np.sort(votes, axis=1)  # (N, C)
    gaps = ordered[:, -1:] - ordered[:, :-1]  # (N, C - 1)
    q = logsumexp(log_ndtr(-gaps / (math.sqrt(2) * sigma)), axis=1)
    return np.asarray(np.minimum(q, math.log1p(-1 / votes.shape[1])))


def curves(log_q: Floats, sigma: float, orders: Floats = renyi.ORDERS) -> Floats:
    """Data-dependent Rényi divergence ``(N, A)`` of a mechanism that is (order, order / sigma^2)-RDP (Thm 6).

    With the two higher orders of Prop. 10, ``mu_2 = sigma sqrt(log(1/q))`` and ``mu_1 = mu_2 + 1``; the
    data-independent ``order / sigma^2`` (Prop. 8) wherever the theorem asks for more than is given.
    ``log_q`` (N,) is the log of the chance of all outcomes but a likely one, below 0.
    """
    worst = np.broadcast_to(orders / sigma**2, (len(log_q), len(orders)))
    with np.errstate(all="ignore"):  # rows where the theorem does not apply are left out below
        q = log_q[:, None]
        mu2 = sigma * np.sqrt(-q)
        mu1 = mu2 + 1
        e1, e2 = mu1 / sigma**2, mu2 / sigma**2
        applies = (
            (orders <= mu2)
            & (mu2 > 1)
            & (q + e2 < 0)
            & (q <= (mu2 - 1) * e2 - mu2 * (np.log(mu1 / (mu1 - 1)) + np.log(mu2 / (mu2 - 1))))
        )
        log_a = _log1mexp(q) - _log1mexp((q + e2) * (1 - 1 / mu2))
        log_b = e1 - q / (mu1 - 1)
        total = np.logaddexp(_log1mexp(q) + (orders - 1) * log_a, q + (orders - 1) * log_b)
        better = np.minimum(worst, np.maximum(total, 0) / (orders - 1))
    return np.where(applies, better, worst)


def epsilon_data_dependent(
    votes: torch.Tensor,
    sigma: float,
    delta: float,
    threshold: float = 0.0,
    threshold_noise: float = 0.0,
    answered: torch.Tensor | None = None,
) -> float:
    """Epsilon at delta of the labels that GNMax (or Confident-GNMax) has released for these votes.

    **Not to be published**, see above. Never more than the data-independent figure of the Rényi accountant.

    Args:
        votes: without noise, (N, C), one row a question.
        sigma: standard deviation of the noise on each count, in votes, above 0.
        threshold: of the most votes, which then is asked about every row; 0: all rows were answered.
        threshold_noise: standard deviation of that noise, above 0 with a threshold.
        answered: with a threshold: which rows passed it, bool (N,).

    Raises:
        ArgumentError: a threshold, and not which rows passed it.
    """
    from scipy.special import log_ndtr

    counts: Floats = votes.detach().cpu().double().numpy()
    total = np.zeros_like(renyi.ORDERS)
    if threshold > 0:
        if answered is None:
            raise ArgumentError("answered", answered, "with a threshold, one truth for each row of votes")
        above = (counts.max(axis=1) - threshold) / threshold_noise
        rarer = np.minimum(log_ndtr(above), log_ndtr(-above))  # of the two outcomes
        total += curves(rarer, math.sqrt(2) * threshold_noise).sum(axis=0)  # one vote moves the most by 1
        counts = counts[answered.cpu().numpy()]
    total += curves(log_other(counts, sigma), sigma).sum(axis=0)
    return renyi.to_epsilon(total, delta) if len(votes) else 0.0


def _log1mexp(x: Floats) -> Floats:
    """``log(1 - exp(x))`` for x below 0."""
    return np.asarray(np.where(x > -math.log(2), np.log(-np.expm1(x)), np.log1p(-np.exp(x))))
