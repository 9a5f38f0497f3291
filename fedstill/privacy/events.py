"""What a release costs, as events that accountants compose: the currency of budgets and audit logs.

An event is kept exactly (which noise, at which rate) and not as an epsilon: epsilons of single releases
do not add up to the epsilon of all of them, events compose to it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedstill.core.errors import ArgumentError

MAX_NOISE = 1e12  # noise; with more, accountants meet their own rounding
MAX_COUNT = 2**31  # times of an event in one price
MAX_GROUP = 1000  # of more, losses take minutes to work out, and others name what is worked out here

_EVENT_PATTERN = re.compile(r"(gaussian|laplace|pure)\(([^,()]+)(?:, rate=([^,()]+))?(?:, group=(\d+))?\)")


@dataclass(frozen=True)
class Event:
    """One draw of noise on a statistic of bounded sensitivity; or what else has a known epsilon at delta 0.

    Args:
        kind: of the noise. ``pure``: whatever it is, no record makes anything it says more than
            ``e^(1 / noise)`` times likelier, as in randomized response.
        noise: its standard deviation (Gaussian) or scale (Laplace) over how far one record can move the
            statistic (in L2, in L1), above 0, up to 1e12. Of ``pure``, one over its epsilon.
        rate: at which records are drawn into the statistic, each by itself (Poisson sampling); 1 is all.
        group: records of one protected unit (a patient, say), each of which may move a sampled statistic
            by that much, up to 1000. At rate 1 that is a smaller ``noise``, and said so.

    Raises:
        ArgumentError: a value outside its range; a rate for other than Gaussian noise.

    >>> str(Event("gaussian", 1.1, rate=0.01)), str(Event("laplace", 50.0))
    ('gaussian(1.1, rate=0.01)', 'laplace(50.0)')
    >>> Event.parse("gaussian(1.1, rate=0.01)") == Event("gaussian", 1.1, rate=0.01)
    True
    """

    kind: Literal["gaussian", "laplace", "pure"]
    noise: float
    rate: float = 1.0
    group: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.noise <= MAX_NOISE:
            raise ArgumentError("noise of an event", self.noise, f"above 0, up to {MAX_NOISE:g}")
        if not 0 < self.rate <= 1:
            raise ArgumentError("rate of an event", self.rate, "above 0, up to 1")
        if self.kind != "gaussian" and self.rate < 1:
            raise ArgumentError("rate of an event", self.rate, f"1 for {self.kind}")
        if not 1 <= self.group <= (1 if self.rate == 1 else MAX_GROUP):
            expected = f"1, or up to {MAX_GROUP} for a sampled statistic"
            raise ArgumentError("group of an event", self.group, expected)

    def __str__(self) -> str:
        rate = "" if self.rate == 1 else f", rate={self.rate!r}"
        group = "" if self.group == 1 else f", group={self.group}"
        return f"{self.kind}({self.noise!r}{rate}{group})"

    @classmethod
    def parse(cls, text: str) -> Event:
        """The event that ``str`` has written.

        Raises:
            ArgumentError: the text is none.
        """
        match = _EVENT_PATTERN.fullmatch(text)
        if match is None:
            raise ArgumentError("event", text, "as gaussian(1.1, rate=0.01), laplace(50.0) or pure(2.0)")
        kind, noise, rate, group = match.groups()
        try:
            numbers = float(noise), float(rate or 1), int(group or 1)
        except ValueError as error:
            raise ArgumentError("event", text, "numbers in it") from error
        kinds: dict[str, Literal["gaussian", "laplace", "pure"]]
        kinds = {"gaussian": "gaussian", "laplace": "laplace", "pure": "pure"}
        return cls(kinds[kind], *numbers)


PrivacyCost = Counter[Event]
"""Events and how often each. Empty: nothing beyond what is paid for already (post-processing)."""


CostBreakdown = dict[str, PrivacyCost | None]
"""Prices by what they are for; None where something has no guarantee."""


def add_cost(costs: CostBreakdown, purpose: str, cost: PrivacyCost | None) -> None:
    """Put a price on a bill; what has no guarantee stays without.

    >>> bill = CostBreakdown(counts=PrivacyCost({Event("laplace", 10.0): 1}))
    >>> add_cost(bill, "counts", PrivacyCost({Event("laplace", 10.0): 2}))
    >>> bill["counts"].total()
    3
    """
    before = costs.get(purpose, PrivacyCost())
    costs[purpose] = None if cost is None or before is None else before + cost


def total_cost(costs: CostBreakdown) -> PrivacyCost | None:
    """All of a bill; None if a part of it has no guarantee."""
    total = PrivacyCost()
    for cost in costs.values():
        if cost is None:
            return None
        total += cost
    return total


def cost_to_dict(cost: Mapping[Event, int]) -> dict[str, int]:
    """A price as JSON can hold it.

    >>> cost_to_dict(PrivacyCost({Event("laplace", 10.0): 2}))
    {'laplace(10.0)': 2}
    """
    return {str(event): times for event, times in sorted(cost.items(), key=lambda item: str(item[0]))}


def cost_from_dict(table: Mapping[str, int], max_count: int = MAX_COUNT) -> PrivacyCost:
    """The price that :func:`cost_to_dict` wrote.

    Args:
        most: times of one event; a sum of prices may have more.

    Raises:
        ArgumentError: it is none.
    """
    cost = PrivacyCost()
    for text, times in table.items():
        if type(times) is not int or not 1 <= times <= max_count:
            raise ArgumentError(f"times of {text}", times, f"1 to {max_count}")
        cost[Event.parse(text)] += times
    return cost
