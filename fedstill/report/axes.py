"""What all drawings share: ticks, lines, labels that keep apart, and how data become places.

Horizontal positions are percentages and vertical ones pixels, so a drawing stretches to any width while its
type keeps its size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from markupsafe import Markup

Points = Sequence[tuple[float, float]]

MOST_POINTS = 600  # a line drawn over some 300 to 900 pixels shows no more than this


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round tick values from at or below ``low`` to at or above ``high``, about ``most`` steps.

    >>> nice_ticks(0.31, 0.94)
    [0.2, 0.4, 0.6, 0.8, 1.0]
    >>> nice_ticks(7, 7)
    [6.4, 6.6, 6.8, 7.0, 7.2, 7.4, 7.6]
    """
    low, high = widen(low, high)
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * power for unit in (1, 2, 5, 10) if unit * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{step * k:.10g}") for k in range(first, last + 1)]


def widen(low: float, high: float) -> tuple[float, float]:
    """A range that an axis can show: one value alone gets some room to both sides."""
    if high - low > 1e-9 * max(abs(low), abs(high), 1e-200):
        return low, high
    room = max(0.5, abs(low) * 1e-3)
    return low - room, high + room


def thin(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most ``most`` points: each is the mean of as many neighbours as that takes.

    >>> thin([(1, 10.0), (2, 20.0), (3, 30.0), (4, 50.0)], most=2)
    [(1.5, 15.0), (3.5, 40.0)]
    """
    size = math.ceil(len(points) / most)
    groups = [points[start : start + size] for start in range(0, len(points), max(size, 1))]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def smooth(points: Points, share: float = 0.05) -> list[tuple[float, float]]:
    """The running mean over a centred window that is ``share`` of the line long.

    >>> smooth([(0, 0.0), (1, 3.0), (2, 6.0)], share=0.5)
    [(0, 1.5), (1, 3.0), (2, 4.5)]
    """
    half = round(len(points) * share / 2)
    line = []
    for place, (x, _) in enumerate(points):
        window = points[max(0, place - half) : place + half + 1]
        line.append((x, sum(y for _, y in window) / len(window)))
    return line


def spread(places: Sequence[float], gap: float, bottom: float) -> list[float]:
    """Move label positions apart to at least ``gap`` pixels, none below ``bottom`` if they fit.

    >>> spread([50, 52, 10], gap=16, bottom=60)
    [44, 60, 10]
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = list(places)
    for before, index in itertools.pairwise(order):
        moved[index] = max(moved[index], moved[before] + gap)
    limit = bottom
    for index in reversed(order):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - gap
    return moved


class Frame:
    """Maps data to the drawing: x to a share of the width, y to pixels from the top."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], height: int) -> None:
        self.x, self.y, self.height = x, y, height

    def across(self, value: float) -> float:
        low, high = self.x
        return (value - low) / (high - low) if high > low else 0.5

    def percent(self, value: float) -> str:
        return f"{100 * self.across(value):.2f}%"

    def down(self, value: float) -> float:
        low, high = self.y
        return round(self.height * (1 - (value - low) / (high - low)), 2)

    def line(self, points: Points, style: str) -> Markup:
        """A polyline: SVG allows no percentages in it, so an inner drawing is stretched instead."""
        places = " ".join(f"{1000 * self.across(x):.1f},{self.down(y):.1f}" for x, y in points)
        return Markup(
            '<svg width="100%" height="{h}" viewBox="0 0 1000 {h}" preserveAspectRatio="none"'
            ' overflow="visible">'
            '<polyline class="{style}" points="{places}" vector-effect="non-scaling-stroke"/></svg>'
        ).format(h=self.height, style=style, places=places)

    def level(self, value: float, style: str) -> Markup:
        return Markup('<line class="{style}" x1="0" x2="100%" y1="{y}" y2="{y}"/>').format(
            style=style, y=self.down(value)
        )

    def draw(self, label: str, parts: Sequence[Markup]) -> Markup:
        return Markup(
            '<svg class="plot" role="img" aria-label="{label}" width="100%" height="{h}">{parts}</svg>'
        ).format(label=label, h=self.height, parts=Markup("").join(parts))


def text(x: str, y: float, words: str, style: str, dx: int = 0) -> Markup:
    return Markup('<text class="{style}" x="{x}" y="{y}" dx="{dx}">{text}</text>').format(
        style=style, x=x, y=round(y, 2), dx=dx, text=words
    )


def step_text(step: float) -> str:
    """A step in figures."""
    return f"{step:,.10g}"  # plain :g would round a step above a million


def percentages(values: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """An axis for percentages with their deviations: at least one point high, and none below 0."""
    lowest, highest = min(y - room for y, room in values), max(y + room for y, room in values)
    lowest = max(0.0, min(lowest, highest - 1))
    ticks = nice_ticks(lowest, max(highest, lowest + 1))
    return ticks[0], ticks[-1]


def levels(frame: Frame) -> list[Markup]:
    """Horizontal lines with their percentages."""
    low, high = frame.y
    # Round ends can have rounder steps than what they were made of, which would end outside.
    ticks = [tick for tick in nice_ticks(low, high) if low <= tick <= high]
    parts = [frame.level(tick, "grid") for tick in ticks]
    return parts + [text("0", frame.down(tick) + 4, f"{tick:g}%", "tick left", -10) for tick in ticks]
