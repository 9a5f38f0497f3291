"""Methods side by side as drawings: a dot or a line each, with its number in its colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fedstill.core.words import human_bytes, percent
from fedstill.report.axes import Frame, Points, levels, percentages, spread, text, thin


@dataclass(frozen=True)
class Mark:
    """One method in a scatter: its number, its name, bytes, what it reaches in percent, its deviation."""

    place: int
    name: str
    bytes: float
    value: float
    spread: float | None = None


@dataclass(frozen=True)
class Curve:
    """One method's line: (share of the run, percent), at least one point."""

    place: int
    name: str
    line: Points


CHIP = 20  # pixels from one numbered chip to the next
EDGE = 0.11  # the part of a scatter's width that is kept for methods without any bytes
COLOURS = 8  # after as many methods the colours come again, with dashed lines


def scatter_plot(marks: Sequence[Mark], title: str = "Accuracy") -> Markup:
    """What methods reach against bytes on a logarithmic axis; what sends nothing stands at the left edge.

    Each dot has its method's number beside it: the page's table says which is which. Returns an
    ``<svg>`` 360 pixels high.
    """
    sent = [mark.bytes for mark in marks if mark.bytes > 0]
    low, high = (math.floor(math.log10(min(sent))), math.ceil(math.log10(max(sent)))) if sent else (0, 1)
    high = max(high, low + 1)
    silent = len(sent) < len(marks)
    first = EDGE + 0.05 if silent else 0.04  # where the axis begins, as a share of the width

    def across(count: float) -> float:
        if count <= 0:
            return EDGE / 2
        return first + (0.96 - first) * (math.log10(count) - low) / (high - low)

    frame = Frame((0.0, 1.0), percentages([(mark.value, mark.spread or 0.0) for mark in marks]), 360)
    parts = levels(frame)
    stride = math.ceil((high - low) / 4)
    for power in range(low, high + 1):
        x = frame.percent(across(10.0**power))
        parts.append(
            Markup('<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{h}"/>').format(x=x, h=frame.height)
        )
        if (power - low) % stride == 0 and sent:
            parts.append(text(x, frame.height + 22, _power(power), "tick middle"))
    if silent:
        x = f"{100 * EDGE:.2f}%"
        parts.append(
            Markup('<line class="edge" x1="{x}" x2="{x}" y1="0" y2="{h}"/>').format(x=x, h=frame.height)
        )
        parts.append(text(frame.percent(EDGE / 2), frame.height + 22, "0", "tick middle"))
    for cluster in _clusters([(across(mark.bytes), mark) for mark in marks]):
        # Chips keep off the dots of their neighbours: those with a neighbour to the right stand to the left.
        furthest = cluster[-1][0] - 0.02
        for way, side in ((-1, [at for at in cluster if at[0] < furthest]),
                          (1, [at for at in cluster if at[0] >= furthest])):  # fmt: skip
            wanted = [frame.down(mark.value) for _, mark in side]
            chips = spread(wanted, gap=CHIP + 2, bottom=frame.height)
            parts += [_marked(frame, x, mark, chip, way) for (x, mark), chip in zip(side, chips, strict=True)]
    told = "; ".join(f"{mark.name} {percent(mark.value)}, {human_bytes(round(mark.bytes))}" for mark in marks)
    return frame.draw(f"{title} against bytes. {told}.", parts)


def _marked(frame: Frame, x: float, mark: Mark, chip: float, way: int) -> Markup:
    """A dot with its deviation, and its numbered chip, to its right (1) or left (-1), at its own height."""
    y = frame.down(mark.value)
    parts = []
    if mark.spread:
        above, below = (frame.down(mark.value + sign * mark.spread) - y for sign in (1, -1))
        parts.append(Markup('<line class="whisker" x1="0" x2="0" y1="{}" y2="{}"/>').format(
            round(above, 2), round(below, 2)))  # fmt: skip
    rise = round(chip - y, 2)
    parts.append(Markup('<line class="leader" x1="0" x2="{}" y1="0" y2="{}"/>').format(16 * way, rise))
    parts.append(Markup('<circle class="point" r="4.5"/>'))
    parts.append(chip_at(mark.place, 24 * way, rise))
    deviation = "" if mark.spread is None else f" \u00b1 {mark.spread:.1f}"
    title = f"{mark.name}: {percent(mark.value)}{deviation}, {human_bytes(round(mark.bytes))}"
    named = Markup("<title>{}</title>").format(title)
    return at(frame.percent(x), y, [named, *parts], colour(mark.place))


def at(x: str, y: float, parts: Sequence[Markup], style: str = "") -> Markup:
    """Parts drawn in pixels around a point that is placed by a share of the width."""
    return Markup('<svg class="{}" x="{}" y="{}" overflow="visible">{}</svg>').format(
        style, x, y, Markup("").join(parts)
    )


def _clusters(placed: Sequence[tuple[float, Mark]]) -> list[list[tuple[float, Mark]]]:
    """Marks whose chips could cover each other, from left to right."""
    clusters: list[list[tuple[float, Mark]]] = []
    for x, mark in sorted(placed, key=lambda item: item[0]):
        if clusters and x - clusters[-1][-1][0] < 0.1:
            clusters[-1].append((x, mark))
        else:
            clusters.append([(x, mark)])
    return clusters


def curves_plot(curves: Sequence[Curve], title: str = "Accuracy") -> Markup:
    """What methods reach over the share of the run, one line a method, each with its number at the end.

    Returns an ``<svg>`` at least 340 pixels high.
    """
    height = max(340, (CHIP + 2) * len(curves))
    values = [(y, 0.0) for curve in curves for _, y in curve.line]
    frame = Frame((0.0, 1.0), percentages(values), height)
    parts = levels(frame)
    parts += [
        text(frame.percent(share), height + 22, f"{share:g}", "tick middle")
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    ends = spread([frame.down(curve.line[-1][1]) for curve in curves], gap=CHIP + 2, bottom=height)
    for curve, end in zip(curves, ends, strict=True):
        shown = thin(curve.line)
        drawn = [frame.line(shown, "curve")] if len(shown) > 1 else []
        for x, y in shown if len(shown) <= 60 else shown[-1:]:
            named = Markup("<title>{}</title>").format(f"{curve.name}, {x:.0%} of the run: {percent(y)}")
            dot = Markup('<circle class="point" r="3">{}</circle>').format(named)
            drawn.append(at(frame.percent(x), frame.down(y), [dot]))
        rise = round(end - frame.down(shown[-1][1]), 2)
        leader = Markup('<line class="leader" x1="0" x2="16" y1="0" y2="{}"/>').format(rise)
        last, height_there = frame.percent(shown[-1][0]), frame.down(shown[-1][1])
        drawn.append(at(last, height_there, [leader, chip_at(curve.place, 24, rise)]))
        parts.append(Markup('<g class="{}">{}</g>').format(colour(curve.place), Markup("").join(drawn)))
    told = "; ".join(f"{curve.name} {percent(curve.line[-1][1])}" for curve in curves)
    return frame.draw(f"{title} over the share of the run. At the end: {told}.", parts)


def chip(place: int) -> Markup:
    """A method's number in its colour, as the drawings show it."""
    return Markup('<svg class="chip {}" width="20" height="20" aria-hidden="true">{}</svg>').format(
        colour(place), chip_at(place, 10, 10)
    )


def chip_at(place: int, x: float, y: float) -> Markup:
    return Markup(
        '<circle class="disc" cx="{x}" cy="{y}" r="9"/><text class="inside" x="{x}" y="{text}">{place}</text>'
    ).format(x=x, y=y, text=round(y + 4, 2), place=place)


def colour(place: int) -> str:
    """The style of a method's marks: a colour and, once all are taken, dashes."""
    again = " again" if (place - 1) // COLOURS % 2 else ""
    return f"c{(place - 1) % COLOURS}{again}"


def _power(power: int) -> str:
    """A power of ten of bytes.

    >>> _power(4), _power(6), _power(0)
    ('10 kB', '1 MB', '1 B')
    """
    group = min(power // 3, 5)
    return f"{10 ** (power - 3 * group)} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[group]}"
