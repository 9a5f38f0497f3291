"""Privacy costs as counted events, which budgets and audit logs store and accountants compose.

An event records the exact noise and sampling rate of a release, and not an epsilon: the epsilons of single
releases do not add up to the epsilon of all of them, whereas events compose to it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedstill.core.errors import ArgumentError

MAX_NOISE = 1e12  # above it, rounding errors dominate the accountants' results
MAX_COUNT = 2**31  # of one event in one cost
MAX_GROUP = 1000  # larger groups take minutes to account, and remote nodes choose the events

_EVENT_PATTERN = re.compile(r"(gaussian|laplace|pure)\(([^,()]+)(?:, rate=([^,()]+))?(?:, group=(\d+))?\)")


@dataclass(frozen=True)
class Event:
    """One use of a noise mechanism, or any mechanism with a known epsilon at delta 0.

    Args:
        kind: mechanism. ``pure`` is any mechanism under which no record makes an output more than ``e^(1 /
            noise)`` times likelier, such as randomized response.
        noise: standard deviation (Gaussian) or scale (Laplace) divided by the sensitivity of the statistic
            (L2 or L1): above 0, up to 1e12. For ``pure``, the inverse of epsilon.
        rate: Poisson sampling rate of the records in the statistic; 1 means all records.
        group: number of records of one protected unit (such as a patient), up to 1000, each of which may
            move a sampled statistic by the sensitivity. At rate 1, divide ``noise`` by the group size
            instead.

    Raises:
        ArgumentError: a value outside its range; a rate below 1 for noise that is not Gaussian.

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
        """Parse an event from its ``str`` form.

        Raises:
            ArgumentError: the text is not an event.
        """
        match = _EVENT_PATTERN.fullmatch(text)
        if match is None:
            raise ArgumentError(
                "event", text, "a form such as gaussian(1.1, rate=0.01), laplace(50.0), pure(2.0)"
            )
        kind, noise, rate, group = match.groups()
        try:
            numbers = float(noise), float(rate or 1), int(group or 1)
        except ValueError as error:
            raise ArgumentError("event", text, "numbers in it") from error
        kinds: dict[str, Literal["gaussian", "laplace", "pure"]]
        kinds = {"gaussian": "gaussian", "laplace": "laplace", "pure": "pure"}
        return cls(kinds[kind], *numbers)


PrivacyCost = Counter[Event]
"""Privacy cost of one or more releases: the number of times that each event occurred. An empty cost means
that a release only post-processes earlier ones. A cost of None, where it is allowed, means that there is
no guarantee.
"""


CostBreakdown = dict[str, PrivacyCost | None]
"""Privacy costs by purpose; None for a purpose without a guarantee."""


def add_cost(costs: CostBreakdown, purpose: str, cost: PrivacyCost | None) -> None:
    """Add a cost to one purpose of a breakdown, in place. A purpose without a guarantee stays without one.

    >>> costs = CostBreakdown(counts=PrivacyCost({Event("laplace", 10.0): 1}))
    >>> add_cost(costs, "counts", PrivacyCost({Event("laplace", 10.0): 2}))
    >>> costs["counts"].total()
    3
    """
    previous = costs.get(purpose, PrivacyCost())
    costs[purpose] = None if cost is None or previous is None else previous + cost


def total_cost(costs: CostBreakdown) -> PrivacyCost | None:
    """Return the sum of all costs; None if a purpose has no guarantee."""
    total = PrivacyCost()
    for cost in costs.values():
        if cost is None:
            return None
        total += cost
    return total


def cost_to_dict(cost: Mapping[Event, int]) -> dict[str, int]:
    """Return a cost in a form that JSON can hold.

    >>> cost_to_dict(PrivacyCost({Event("laplace", 10.0): 2}))
    {'laplace(10.0)': 2}
    """
    return {str(event): times for event, times in sorted(cost.items(), key=lambda item: str(item[0]))}


def cost_from_dict(table: Mapping[str, int], max_count: int = MAX_COUNT) -> PrivacyCost:
    """Return the cost that :func:`cost_to_dict` wrote.

    Args:
        max_count: largest count of one event; a sum of costs may have a larger one.

    Raises:
        ArgumentError: an entry is not an event and a count.
    """
    cost = PrivacyCost()
    for text, times in table.items():
        if type(times) is not int or not 1 <= times <= max_count:
            raise ArgumentError(f"times of {text}", times, f"1 to {max_count}")
        cost[Event.parse(text)] += times
    return cost
