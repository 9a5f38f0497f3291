"""How well scores tell members from others: ROC figures, each with what is known of its error.

Intervals are over the records that were drawn, for the one model that was attacked; another training of the
same data is another model, and no interval here speaks of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fedstill.privacy.epsilon_lower_bounds import CONFIDENCE, most

LOW = (0.01, 0.001)  # false positive rates at which members are counted


Figures = dict[str, Any]  # as JSON has them; an interval is a value with its low and high end


def rates(scores: torch.Tensor, inside: torch.Tensor, confidence: float = CONFIDENCE) -> Figures:
    """All figures of an attack: scores ``(N,)``, higher for likelier members, and who is one ``(N,)``.

    ``auc`` is :func:`auc`, ``at`` are :func:`at_rate` at low rates of false positives.
    """
    members, others = scores[inside], scores[~inside]
    low = [at_rate(members, others, rate, confidence) for rate in LOW]
    return {"auc": auc(members, others, confidence), "at": low}


def auc(members: torch.Tensor, others: torch.Tensor, confidence: float = CONFIDENCE) -> Figures:
    """Area under the ROC curve, how often a member's score is above another's, with DeLong's interval.

    DeLong, DeLong, Clarke-Pearson, Biometrics 1988: V10 of a member is the share of others below it, V01 of
    another the share of members above it, ties half; AUC is the mean of either, its variance
    var(V10) / n + var(V01) / n'. Computed from ranks as Sun and Xu, IEEE Signal Processing Letters 2014.

    The interval is taken on the scale of log(A / (1 - A)), so that it stays within 0 .. 1; where the variance
    is 0, it is that of Clopper and Pearson for min(n, n') pairs without a record in common, which is wide.

    >>> auc(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]))["value"]  # pairs: 1, 1/2, 1, 1
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
        return _interval(area, _clopper_pearson(area * pairs, pairs, confidence))
    from scipy.special import expit, logit, ndtri

    reach = float(ndtri((1 + confidence) / 2)) * math.sqrt(variance) / (area * (1 - area))
    return _interval(area, (float(expit(logit(area) - reach)), float(expit(logit(area) + reach))))


def at_rate(
    members: torch.Tensor, others: torch.Tensor, rate: float, confidence: float = CONFIDENCE
) -> Figures:
    """True positives at a false positive rate, without interpolation: the strictest there is.

    A record is accused if its score is above that of the first non-member that must not be: of n' others, at
    most floor(rate n') are ``allowed`` to be, and so many are ``accused``, fewer where scores are equal. A
    rate of 0.1 % with fewer than 1000 others thus means none at all. ``true_positives`` is the rate of
    members ``found``, ``false_positives`` that of the accused, each with its Clopper-Pearson interval for the
    threshold as it is: the latter may well reach beyond ``rate``.

    >>> at = at_rate(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 1.5, 1.0]), 0.25)
    >>> at["allowed"], at["accused"], at["found"]  # above 1.5 are one other and two members
    (1, 1, 2)
    """
    members, others = members.double(), others.double()
    n, m = len(members), len(others)
    allowed = math.floor(rate * m + 1e-9)  # 0.29 * 100 is 28.999999999999996
    threshold = float(others.sort(descending=True).values[allowed]) if allowed < m else -math.inf
    accused, found = int((others > threshold).sum()), int((members > threshold).sum())
    if allowed == m:  # everybody, also those of score -inf
        accused, found = m, n
    return {
        "rate": rate,
        "allowed": allowed,
        "accused": accused,
        "found": found,
        "members": n,
        "others": m,
        "true_positives": _interval(found / n, _clopper_pearson(found, n, confidence)),
        "false_positives": _interval(accused / m, _clopper_pearson(accused, m, confidence)),
    }


def _interval(value: float, ends: tuple[float, float]) -> Figures:
    return {"value": value, "low": ends[0], "high": ends[1]}


def _clopper_pearson(k: float, n: int, confidence: float) -> tuple[float, float]:
    """The exact interval of a probability whose event came k times in n; two-sided."""
    error = (1 - confidence) / 2
    return 1 - most(n - math.floor(k), n, error), most(math.ceil(k), n, error)
