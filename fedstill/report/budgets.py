"""What methods reach against epsilon, where settings differ in the nodes' budget: a table and a plot.

The table is as FedIOD's Table 5 has it: one line a method, one column an epsilon, without a budget last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fedstill.core.words import percent
from fedstill.report.axes import Frame, levels, percentages, spread, text
from fedstill.report.marks import CHIP, at, chip_at, colour

UNLIMITED = 0.12  # the part of a plot's width that is kept for runs without a budget
HEIGHT = 360
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


def plot(lines: Sequence[Line], title: str = "Accuracy") -> Markup:
    """What methods reach over epsilon on a logarithmic axis; what has no budget stands at the right edge.

    Whiskers are one deviation to each side. Each line has its method's number at its end: the page's table
    says which is which. At least one point is needed. Returns an ``<svg>`` at least 360 pixels high.
    """
    drawn = [line for line in lines if line.points]
    columns = budgets(drawn)
    finite = [epsilon for epsilon in columns if math.isfinite(epsilon)]
    right = 1 - UNLIMITED if len(finite) < len(columns) else 0.96
    low, high = (math.log10(finite[0]), math.log10(finite[-1])) if finite else (0.0, 0.0)

    def across(epsilon: float) -> float:
        if math.isinf(epsilon):
            return 1 - UNLIMITED / 2
        first, last = 0.05, right - 0.05
        return (
            first + (last - first) * (math.log10(epsilon) - low) / (high - low) if high > low else right / 2
        )

    height = max(HEIGHT, (CHIP + 2) * len(drawn))
    values = [(point.value, point.spread or 0.0) for line in drawn for point in line.points]
    frame = Frame((0.0, 1.0), percentages(values), height)
    parts = levels(frame)
    for epsilon in columns:
        style = "grid" if math.isfinite(epsilon) else "edge"
        x = frame.percent(across(epsilon) if math.isfinite(epsilon) else right)
        parts.append(
            Markup('<line class="{s}" x1="{x}" x2="{x}" y1="0" y2="{h}"/>').format(s=style, x=x, h=height)
        )
        parts.append(text(frame.percent(across(epsilon)), height + 22, named(epsilon), "tick middle"))
    ordered = [sorted(line.points, key=lambda point: point.epsilon) for line in drawn]
    ends = spread([frame.down(points[-1].value) for points in ordered], gap=CHIP + 2, bottom=height)
    for line, points, end in zip(drawn, ordered, ends, strict=True):
        route = [(across(point.epsilon), point.value) for point in points]
        inside = [place for place in route if place[0] < right]
        marks = [frame.line(inside, "curve")] if len(inside) > 1 else []
        marks += [frame.line(route[-2:], "curve pale")] if len(inside) < len(route) > 1 else []
        marks += [_dot(frame, across(point.epsilon), line.name, point) for point in points]
        rise = round(end - frame.down(points[-1].value), 2)
        leader = Markup('<line class="leader" x1="0" x2="16" y1="0" y2="{}"/>').format(rise)
        last = frame.percent(route[-1][0]), frame.down(route[-1][1])
        marks.append(at(*last, [leader, chip_at(line.place, 24, rise)]))
        parts.append(Markup('<g class="{}">{}</g>').format(colour(line.place), Markup("").join(marks)))
    told = "; ".join(
        f"{line.name}: " + ", ".join(f"{named(point.epsilon)} {percent(point.value)}" for point in points)
        for line, points in zip(drawn, ordered, strict=True)
    )
    return frame.draw(f"{title} against epsilon. {told}.", parts)


def _dot(frame: Frame, x: float, name: str, point: Point) -> Markup:
    """A point with its deviation."""
    y = frame.down(point.value)
    parts = [
        Markup("<title>{}</title>").format(f"{name}, epsilon {named(point.epsilon)}: {point.text()}"),
        Markup('<circle class="point" r="4"/>'),
    ]
    if point.spread:
        above, below = (frame.down(point.value + sign * point.spread) - y for sign in (1, -1))
        whisker = Markup('<line class="whisker" x1="0" x2="0" y1="{}" y2="{}"/>')
        parts.insert(1, whisker.format(round(above, 2), round(below, 2)))
    return at(frame.percent(x), y, parts)
