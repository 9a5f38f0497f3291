"""Epsilons and what is left of budgets, in words: rounded so that nothing looks cheaper than it is."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedstill.core.text_format import counted
from fedstill.privacy.accounting import epsilon
from fedstill.privacy.budget import Budget
from fedstill.privacy.config import PrivacyConfig
from fedstill.privacy.events import from_text


def up(value: float | None) -> str:
    """An epsilon, rounded up; None is no guarantee."""
    if value is None:
        return "no guarantee"
    return _thousandths(math.ceil(1000 * value)) if math.isfinite(value) else "inf"


def budgets(privacy: PrivacyConfig) -> list[str]:
    """What a node's owner allows: a run, and all of them."""
    both = (
        ("a run", "has", privacy.epsilon, privacy.delta),
        ("all runs on these data", "have", *privacy.over_all),
    )
    return [
        f"{what} {has} " + (f"epsilon {most:g} at delta {delta:g}" if math.isfinite(most) else "no budget")
        for what, has, most, delta in both
    ]


def down(value: float) -> str:
    """What is left of a budget, rounded down; infinity is no budget."""
    return "no budget" if math.isinf(value) else _thousandths(math.floor(1000 * value + 1e-9))


def _thousandths(count: int) -> str:
    """So many thousandths, and no digit of them lost.

    >>> _thousandths(1234567), _thousandths(3000), _thousandths(0)
    ('1234.567', '3', '0')
    """
    return f"{count / 1000:.3f}".rstrip("0").rstrip(".")


def left(privacy: PrivacyConfig, spent: Mapping[str, int], bare: int, *, over_all: bool) -> float:
    """Epsilon that a budget has left, at its own delta; inf: there is none.

    Args:
        privacy: the owner's.
        spent: events as text and how often each.
        bare: releases without a guarantee; they leave nothing.
        over_all: of all runs, and not of one.

    Raises:
        ArgumentError: what was spent are no events.
    """
    most, delta = privacy.over_all if over_all else (privacy.epsilon, privacy.delta)
    if math.isinf(most):
        return math.inf
    return 0.0 if bare else Budget(most, delta, privacy.accountant).left(from_text(spent))


def cost(privacy: PrivacyConfig, spent: Mapping[str, int], bare: int) -> str:
    """What all runs on some data have cost so far, at the delta of their budget.

    Args:
        privacy: the owner's.
        spent: events as text and how often each.
        bare: releases without a guarantee.

    >>> cost(PrivacyConfig(), {}, 0), cost(PrivacyConfig(), {}, 2)
    ('nothing', 'no guarantee: in all 2 releases left without noise')
    >>> cost(PrivacyConfig(delta=1e-6), {"gaussian(2.0)": 1}, 0)
    'epsilon 2.255 at delta 1e-06, in all runs on these data'
    """
    if bare:
        return f"no guarantee: in all {counted(bare, 'release')} left without noise"
    if not spent:
        return "nothing"
    _, delta = privacy.over_all
    paid = epsilon(from_text(spent), delta, privacy.accountant)
    return f"epsilon {up(paid)} at delta {delta:g}, in all runs on these data"
