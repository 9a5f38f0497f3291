"""Privacy budgets: check whether a cost fits, and show what is spent and left.

A node checks its budgets before every release, so a check is mostly a look-up. Numbers are rounded so that
spending never looks smaller than it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from fedstill.core.errors import FedstillError
from fedstill.core.options import CheckedOptions, Fraction
from fedstill.core.text_format import format_count
from fedstill.privacy.accounting import compute_epsilon, is_within_epsilon, max_repetitions
from fedstill.privacy.config import Accountant, Epsilon, PrivacyConfig
from fedstill.privacy.events import Event, cost_from_dict


class BudgetExceeded(FedstillError):
    """A release would cost more than the budget has left.

    Attributes:
        spent: epsilon spent so far.
        cost: epsilon spent including the release; inf without a guarantee.
        remaining: the budget's epsilon minus ``spent``, 0 or more.

    >>> raise BudgetExceeded(3.0, 1e-5, 2.9612, 3.0721)
    Traceback (most recent call last):
    ...
    fedstill.privacy.budget.BudgetExceeded: the budget is epsilon 3 at delta 1e-05, of which 0.0388 is
    left: this would raise the epsilon spent from 2.9612 to 3.0721
    """

    def __init__(self, limit: float, delta: float, spent: float, cost: float) -> None:
        self.spent, self.cost = spent, cost
        self.remaining = max(0.0, limit - spent)
        consequence = (
            f"would raise the epsilon spent from {spent:.5g} to {cost:.5g}"
            if cost < math.inf
            else "would leave without any guarantee"
        )
        super().__init__(
            f"the budget is epsilon {limit:.6g} at delta {delta:.3g}, of which {self.remaining:.3g} is left: "
            f"this {consequence}"
        )


class UnprotectedReleasesError(BudgetExceeded):
    """Releases without a guarantee were made earlier, so that no budget can hold.

    The message does not name their runs. For runs of other servers it does not give a count either, as a
    server that reads the message may have no part in those runs.

    Args:
        count: number of these releases; None: not disclosed.
        remedy: advice for the node's owner.

    >>> raise UnprotectedReleasesError(3.0, 1e-5, 61, "inf does without a budget")
    Traceback (most recent call last):
    ...
    fedstill.privacy.budget.UnprotectedReleasesError: the budget of epsilon 3 at delta 1e-05 cannot hold, as
    61 releases left without any guarantee before it was set: inf does without a budget
    """

    def __init__(self, limit: float, delta: float, count: int | None, remedy: str) -> None:
        super().__init__(limit, delta, math.inf, math.inf)
        releases = "releases" if count is None else format_count(count, "release")
        self.args = (
            f"the budget of epsilon {limit:.6g} at delta {delta:.3g} cannot hold, as {releases} "
            f"left without any guarantee before it was set: {remedy}",
        )


class ProtectedUnitChanged(BudgetExceeded):
    """Earlier costs protect another unit (such as a record instead of a patient), so that they cannot be
    added up.
    """

    def __init__(
        self,
        limit: float,
        delta: float,
        remedy: str = "privacy.total_epsilon = inf, so that each run has its own budget",
    ) -> None:
        super().__init__(limit, delta, math.inf, math.inf)
        self.args = (
            f"the budget of epsilon {limit:.6g} at delta {delta:.3g} cannot hold, as earlier costs "
            "protect other units than privacy.group_size and data.group say now. Restore these options, or "
            f"use {remedy}",
        )


@dataclass
class Budget(CheckedOptions):
    """Largest epsilon that may be spent; inf: no budget. The epsilon spent is passed to each check and
    stored elsewhere.

    The object caches amounts that are known to fit, which speeds up :meth:`check`. The cache never changes
    a result.

    Args:
        epsilon: above 0; inf: no budget.
        delta: above 0, below 1.
        accountant: "pld" or "rdp".

    >>> budget = Budget(1.0, 1e-5)
    >>> budget.check(spent={}, cost={Event("laplace", 2.0): 1})
    >>> round(budget.remaining({Event("laplace", 2.0): 1}), 2)
    0.5
    """

    section: ClassVar[str] = "budget"

    epsilon: Epsilon
    delta: Fraction
    accountant: Accountant = "pld"
    _affordable: dict[Event, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _first_spent: dict[Event, int] | None = field(default=None, init=False, repr=False, compare=False)

    _costs: dict[frozenset[tuple[Event, int]], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def check(self, spent: Mapping[Event, int], cost: Mapping[Event, int] | None) -> None:
        """Check that a cost fits on top of the events spent.

        Args:
            spent: all events charged so far, by any process.
            cost: None has no guarantee, which no finite budget allows. An empty cost is always allowed.

        Raises:
            BudgetExceeded: the cost does not fit.
        """
        if self.epsilon == math.inf:
            return
        if cost is None:
            raise BudgetExceeded(self.epsilon, self.delta, self._cached_epsilon(spent), math.inf)
        if not cost:
            return
        total = dict(spent)
        for event, times in cost.items():
            total[event] = total.get(event, 0) + times
        if self._is_known_to_fit(total):
            return
        known_epsilon = self._costs.get(frozenset(total.items()))  # refused queries are repeated
        if not (
            is_within_epsilon(total, self.epsilon, self.delta, self.accountant)
            if known_epsilon is None
            else known_epsilon <= self.epsilon
        ):
            raise BudgetExceeded(
                self.epsilon, self.delta, self._cached_epsilon(spent), self._cached_epsilon(total)
            )
        self._extend_affordable(spent, cost, total)

    def remaining(self, spent: Mapping[Event, int]) -> float:
        """Return the budget's epsilon minus that of the events spent, 0 or more; inf without a budget.

        A release whose own epsilon is larger may still fit, as epsilons do not add up.
        """
        return math.inf if self.epsilon == math.inf else max(0.0, self.epsilon - self._cached_epsilon(spent))

    def _cached_epsilon(self, spent: Mapping[Event, int]) -> float:
        key = frozenset(spent.items())
        if key not in self._costs:
            cost = compute_epsilon(spent, self.delta, self.accountant)
            self._costs = {**dict(list(self._costs.items())[-7:]), key: cost}  # the last few
        return self._costs[key]

    def _is_known_to_fit(self, total: Mapping[Event, int]) -> bool:
        """Return whether the total is part of an amount that is known to fit."""
        affordable = self._affordable
        return all(times <= affordable.get(event, 0) for event, times in total.items())

    def _extend_affordable(
        self, spent: Mapping[Event, int], cost: Mapping[Event, int], total: dict[Event, int]
    ) -> None:
        """Find how much further the same mixture of costs fits, up to twice the amount since the first check.

        The mixture is all that was spent since then, also by other processes, in portions of its rarest
        event. If no further portion fits, the present cost alone is tried. This takes a few searches for
        each doubling of the amount, and a few when the budget is nearly spent.
        """
        if self._first_spent is None:
            self._first_spent = dict(spent)
        first_spent = self._first_spent
        since_first = {
            event: n - first_spent.get(event, 0)
            for event, n in total.items()
            if n > first_spent.get(event, 0)
        }
        portions = min(since_first.values())
        portion = {event: -(-n // portions) for event, n in since_first.items()}
        directions: list[tuple[Mapping[Event, int], int]] = [(portion, portions), (cost, max(portions, 64))]
        self._affordable = total
        for direction, max_times in directions:
            repetitions = max_repetitions(
                total, direction, self.epsilon, self.delta, self.accountant, max_times
            )
            if repetitions:
                self._affordable = total | {
                    event: total[event] + repetitions * n for event, n in direction.items()
                }
                return


# --- budgets as text -------------------------------------------------------------------------------


def remaining_epsilon(
    privacy: PrivacyConfig, spent: Mapping[str, int], unprotected: int, *, all_runs: bool
) -> float:
    """Return the epsilon that a budget has left, at its own delta; inf if there is no budget.

    Args:
        privacy: mechanism and budgets of the node's owner.
        spent: events as text, and their counts.
        unprotected: number of releases without a guarantee; if there are any, nothing is left.
        all_runs: the budget of all runs instead of one run.

    Raises:
        ArgumentError: ``spent`` holds an invalid event.
    """
    limit, delta = privacy.total_budget if all_runs else (privacy.epsilon, privacy.delta)
    if math.isinf(limit):
        return math.inf
    return 0.0 if unprotected else Budget(limit, delta, privacy.accountant).remaining(cost_from_dict(spent))


def describe_budgets(privacy: PrivacyConfig) -> list[str]:
    """Return one line for the budget of a run and one for that of all runs."""
    budgets = (
        ("a run", "has", privacy.epsilon, privacy.delta),
        ("all runs on these data", "have", *privacy.total_budget),
    )
    return [
        f"{scope} {verb} "
        + (f"epsilon {limit:g} at delta {delta:g}" if math.isfinite(limit) else "no budget")
        for scope, verb, limit, delta in budgets
    ]


def describe_total_cost(privacy: PrivacyConfig, spent: Mapping[str, int], unprotected: int) -> str:
    """Describe the cost of all runs on some data, at the delta of their budget.

    Args:
        privacy: mechanism and budgets of the node's owner.
        spent: events as text, and their counts.
        unprotected: number of releases without a guarantee.

    >>> describe_total_cost(PrivacyConfig(), {}, 0), describe_total_cost(PrivacyConfig(), {}, 2)
    ('nothing', 'no guarantee: in all 2 releases left without noise')
    >>> describe_total_cost(PrivacyConfig(delta=1e-6), {"gaussian(2.0)": 1}, 0)
    'epsilon 2.255 at delta 1e-06, in all runs on these data'
    """
    if unprotected:
        return f"no guarantee: in all {format_count(unprotected, 'release')} left without noise"
    if not spent:
        return "nothing"
    _, delta = privacy.total_budget
    spent_epsilon = compute_epsilon(cost_from_dict(spent), delta, privacy.accountant)
    return f"epsilon {epsilon_text_rounded_up(spent_epsilon)} at delta {delta:g}, in all runs on these data"


def epsilon_text_rounded_up(value: float | None) -> str:
    """Format an epsilon, rounded up; None is no guarantee."""
    if value is None:
        return "no guarantee"
    return _format_thousandths(math.ceil(1000 * value)) if math.isfinite(value) else "inf"


def epsilon_text_rounded_down(value: float) -> str:
    """Format the epsilon left of a budget, rounded down; infinity is no budget."""
    return "no budget" if math.isinf(value) else _format_thousandths(math.floor(1000 * value + 1e-9))


def _format_thousandths(count: int) -> str:
    """Format a number of thousandths without loss of digits.

    >>> _format_thousandths(1234567), _format_thousandths(3000), _format_thousandths(0)
    ('1234.567', '3', '0')
    """
    return f"{count / 1000:.3f}".rstrip("0").rstrip(".")
