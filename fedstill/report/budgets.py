"""What methods reach against epsilon, where settings differ in the nodes' budget: a table.

The table is as FedIOD's Table 5 has it: one line a method, one column an epsilon, without a budget last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

INFINITE = "\u221e"


@dataclass(frozen=True)
class Point:
    """One method under one budget: what it reaches in percent, its deviation over seeds if that is known."""

    epsilon: float
    value: float
    spread: float | None = None

    def text(self) -> str:
        """As tables show it.

        >>> print(Point(1.0, 93.04, 3.6).text())
        93.0 \u00b1 3.6
        """
        return f"{self.value:.1f}" + ("" if self.spread is None else f" \u00b1 {self.spread:.1f}")


@dataclass(frozen=True)
class Line:
    """One method under several budgets: its number, its name, and what was measured; perhaps nothing."""

    place: int
    name: str
    points: Sequence[Point]

    def at(self, epsilon: float) -> str:
        """What is reached under a budget, or a dash."""
        return next((point.text() for point in self.points if point.epsilon == epsilon), "-")


def budgets(lines: Sequence[Line]) -> list[float]:
    """All epsilons, rising.

    >>> budgets([Line(1, "a", [Point(math.inf, 90.0), Point(3.0, 80.0)]), Line(2, "b", [Point(1.0, 70.0)])])
    [1.0, 3.0, inf]
    """
    return sorted({point.epsilon for line in lines for point in line.points})


def named(epsilon: float) -> str:
    """An epsilon as people write it.

    >>> print(named(7.7), named(math.inf))
    7.7 \u221e
    """
    return INFINITE if math.isinf(epsilon) else f"{epsilon:g}"


def table(lines: Sequence[Line]) -> list[str]:
    """The table in Markdown, line by line.

    >>> print(*table([Line(1, "FedKD", [Point(1.0, 70.0), Point(math.inf, 90.0)])]), sep="\\n")
    | method | epsilon 1 | epsilon \u221e |
    |---|---|---|
    | FedKD | 70.0 | 90.0 |
    """
    columns = budgets(lines)
    heads = ["method", *(f"epsilon {named(epsilon)}" for epsilon in columns)]
    rows = [[line.name, *map(line.at, columns)] for line in lines]
    return [
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
