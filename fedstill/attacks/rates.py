"""How well scores tell members from others: ROC figures, each with what is known of its error.

Intervals are over the records that were drawn, for the one model that was attacked; another training of the
same data is another model, and no interval here speaks of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedstill.privacy.audit import CONFIDENCE, most

LOW = (0.01, 0.001)  # false positive rates at which members are counted


@dataclass(frozen=True)
class Interval:
    """A figure, and between what it lies at the confidence that was asked for."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class At:
    """What is found at a false positive rate: the strictest test of that kind that the records allow.

    Args:
        allowed: false positives among the non-members, the whole part of rate times their number.
        accused: how many of them there are; fewer where scores are equal.
        found: true positives.
        true_positives: rate of what was found, with its Clopper-Pearson interval, for the threshold as it is.
        false_positives: rate of the accused, with its own: it may well reach beyond ``rate``.
    """

    rate: float
    allowed: int
    accused: int
    found: int
    members: int
    others: int
    true_positives: Interval
    false_positives: Interval


@dataclass(frozen=True)
class Rates:
    """How often an attack is right.

    Args:
        auc: how often a member's score is above another's, of all pairs; equal scores count half.
        at: at low rates of false positives.
    """

    auc: Interval
    at: tuple[At, ...]


def rates(scores: torch.Tensor, inside: torch.Tensor, confidence: float = CONFIDENCE) -> Rates:
    """All figures of an attack: scores ``(N,)``, higher for likelier members, and who is one ``(N,)``."""
    members, others = scores[inside], scores[~inside]
    low = tuple(at_rate(members, others, rate, confidence) for rate in LOW)
    return Rates(auc(members, others, confidence), low)


def auc(members: torch.Tensor, others: torch.Tensor, confidence: float = CONFIDENCE) -> Interval:
    """Area under the ROC curve, with DeLong's interval.

    DeLong, DeLong, Clarke-Pearson, Biometrics 1988: V10 of a member is the share of others below it, V01 of
    another the share of members above it, ties half; AUC is the mean of either, its variance
    var(V10) / n + var(V01) / n'. Computed from ranks as Sun and Xu, IEEE Signal Processing Letters 2014.

    The interval is taken on the scale of log(A / (1 - A)), so that it stays within 0 .. 1; where the variance
    is 0, it is that of Clopper and Pearson for min(n, n') pairs without a record in common, which is wide.

    >>> auc(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])).value  # pairs: 1, 1/2, 1, 1
    0.875
    """
    from scipy.stats import rankdata

    members, others = members.double(), others.double()
    n, m = len(members), len(others)
    ranks, own, theirs = (
        torch.from_numpy(rankdata(scores)) for scores in (torch.cat([members, others]), members, others)
    )
    of_members = (ranks[:n] - own) / m  # V10, (n,)
    of_others = 1 - (ranks[n:] - theirs) / n  # V01, (m,)
    area = float(of_members.mean())
    variance = float(of_members.var() / n + of_others.var() / m) if min(n, m) > 1 else 0.0
    if not 0 < area < 1 or variance < 1e-15:
        pairs = min(n, m)
        return Interval(area, *_clopper_pearson(area * pairs, pairs, confidence))
    from scipy.special import expit, logit, ndtri

    reach = float(ndtri((1 + confidence) / 2)) * math.sqrt(variance) / (area * (1 - area))
    return Interval(area, float(expit(logit(area) - reach)), float(expit(logit(area) + reach)))


def at_rate(members: torch.Tensor, others: torch.Tensor, rate: float, confidence: float = CONFIDENCE) -> At:
    """True positives at a false positive rate, without interpolation.

    A record is accused if its score is above that of the first non-member that must not be: of n' others, at
    most floor(rate n') are accused. A rate of 0.1 % with fewer than 1000 others thus means none at all.

    >>> at = at_rate(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 1.5, 1.0]), 0.25)
    >>> at.allowed, at.accused, at.found  # above 1.5 are one other and two members
    (1, 1, 2)
    """
    members, others = members.double(), others.double()
    n, m = len(members), len(others)
    allowed = math.floor(rate * m + 1e-9)  # 0.29 * 100 is 28.999999999999996
    threshold = float(others.sort(descending=True).values[allowed]) if allowed < m else -math.inf
    accused, found = int((others > threshold).sum()), int((members > threshold).sum())
    if allowed == m:  # everybody, also those of score -inf
        accused, found = m, n
    return At(
        rate,
        allowed,
        accused,
        found,
        n,
        m,
        Interval(found / n, *_clopper_pearson(found, n, confidence)),
        Interval(accused / m, *_clopper_pearson(accused, m, confidence)),
    )


def _clopper_pearson(k: float, n: int, confidence: float) -> tuple[float, float]:
    """The exact interval of a probability whose event came k times in n; two-sided."""
    error = (1 - confidence) / 2
    return 1 - most(n - math.floor(k), n, error), most(math.ceil(k), n, error)
