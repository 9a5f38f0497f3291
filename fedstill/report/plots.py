"""Plots as inline SVG, drawn by hand: small, sharp, and at home in light and dark.

No plotting library, on purpose: the page's own style sheet colours the lines and sets the
type, so one drawing serves both colour schemes. Horizontal positions are percentages and
vertical ones pixels, so a drawing stretches to any width while its type keeps its size.
Every function is pure: the same figures give the same bytes.
"""

from __future__ import annotations

import base64
import itertools
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fedstill.errors import DataError
from fedstill.report.table import Row, human_bytes, percent

Points = Sequence[tuple[float, float]]

MOST_POINTS = 600  # a line drawn over some 300 to 900 pixels shows no more than this
MOST_PIXELS = 64  # the longer side of an inlined picture: keeps a page of pictures under 2 MB


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round tick values from at or below ``low`` to at or above ``high``, about ``most`` steps.

    >>> nice_ticks(0.31, 0.94)
    [0.2, 0.4, 0.6, 0.8, 1.0]
    >>> nice_ticks(7, 7)
    [6.4, 6.6, 6.8, 7.0, 7.2, 7.4, 7.6]
    """
    low, high = _widen(low, high)
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * power for unit in (1, 2, 5, 10) if unit * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{step * k:.10g}") for k in range(first, last + 1)]


def _widen(low: float, high: float) -> tuple[float, float]:
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


class _Frame:
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


def _text(x: str, y: float, text: str, style: str, dx: int = 0) -> Markup:
    return Markup('<text class="{style}" x="{x}" y="{y}" dx="{dx}">{text}</text>').format(
        style=style, x=x, y=round(y, 2), dx=dx, text=text
    )


def _step(step: float) -> str:
    return f"{step:,.10g}"  # plain :g would round a step above a million


def accuracy_plot(
    line: Points,
    references: Sequence[tuple[str, str, float]],
    student: str,
    local: Points = (),
    turn: str = "step",
) -> Markup:
    """Accuracy over steps or rounds, with the reference levels as horizontal lines labelled at their ends.

    ``line`` holds (step, accuracy), at least one; ``references`` holds (name, style class,
    accuracy); ``local`` is the nodes' own models' line, if wanted; ``turn`` says what a step is called.
    Accuracies are percent, from 0 to 100. Returns an ``<svg>`` 320 pixels high.
    """
    values = [y for _, y in (*line, *local)] + [y for *_, y in references]
    lowest = max(0.0, min(min(values), max(values) - 1))  # at least one point of accuracy is shown
    ticks = nice_ticks(lowest, max(max(values), lowest + 1))
    steps = [x for x, _ in line]
    frame = _Frame((0.0, max(max(steps), 1.0)), (ticks[0], ticks[-1]), 320)

    parts = [frame.level(tick, "grid") for tick in ticks]
    parts += [_text("0", frame.down(tick) + 4, f"{tick:g}%", "tick left", -10) for tick in ticks]
    for tick in nice_ticks(0, frame.x[1]):
        if tick <= frame.x[1]:
            parts.append(_text(frame.percent(tick), frame.height + 22, _step(tick), "tick middle"))
    parts += [frame.level(y, f"reference {style}") for _, style, y in references]

    if local:
        parts.append(frame.line(thin(local), "curve local"))
    shown = thin(line)
    parts.append(frame.line(shown, "curve"))
    if len(shown) <= 60:
        for x, y in shown:
            parts.append(
                Markup('<circle class="dot" cx="{}" cy="{}" r="3.5"><title>{} {}: {}</title></circle>')
                .format(frame.percent(x), frame.down(y), turn, _step(x), percent(y))
            )  # fmt: skip

    labels = [(student, "student", shown[-1][1])] + [(name, "", y) for name, _, y in references]
    labels += [("nodes' own", "", local[-1][1])] if local else []
    places = spread([frame.down(y) for *_, y in labels], gap=18, bottom=frame.height)
    for (name, style, y), place in zip(labels, places, strict=True):
        parts.append(_text("100%", place + 4, f"{name} {percent(y)}", f"label {style}", 12))
    told = "; ".join(f"{name} {percent(y)}" for name, _, y in labels)
    return frame.draw(
        f"Accuracy on the test data over {_step(max(steps))} {turn}s. At the end: {told}.", parts
    )


@dataclass(frozen=True)
class Mark:
    """One method in a scatter: its number, its name, bytes, accuracy in percent and its deviation."""

    place: int
    name: str
    bytes: float
    accuracy: float
    spread: float | None = None


@dataclass(frozen=True)
class Curve:
    """One method's line: (share of the run, accuracy in percent), at least one point."""

    place: int
    name: str
    line: Points


CHIP = 20  # pixels from one numbered chip to the next
EDGE = 0.11  # the part of a scatter's width that is kept for methods without any bytes
COLOURS = 8  # after as many methods the colours come again, with dashed lines


def scatter_plot(marks: Sequence[Mark]) -> Markup:
    """Accuracy against bytes on a logarithmic axis; what sends nothing stands at the left edge.

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

    frame = _Frame((0.0, 1.0), _accuracies([(mark.accuracy, mark.spread or 0.0) for mark in marks]), 360)
    parts = _levels(frame)
    stride = math.ceil((high - low) / 4)
    for power in range(low, high + 1):
        x = frame.percent(across(10.0**power))
        parts.append(
            Markup('<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{h}"/>').format(x=x, h=frame.height)
        )
        if (power - low) % stride == 0 and sent:
            parts.append(_text(x, frame.height + 22, _power(power), "tick middle"))
    if silent:
        x = f"{100 * EDGE:.2f}%"
        parts.append(
            Markup('<line class="edge" x1="{x}" x2="{x}" y1="0" y2="{h}"/>').format(x=x, h=frame.height)
        )
        parts.append(_text(frame.percent(EDGE / 2), frame.height + 22, "0", "tick middle"))
    for cluster in _clusters([(across(mark.bytes), mark) for mark in marks]):
        # Chips keep off the dots of their neighbours: those with a neighbour to the right stand to the left.
        furthest = cluster[-1][0] - 0.02
        for way, side in ((-1, [at for at in cluster if at[0] < furthest]),
                          (1, [at for at in cluster if at[0] >= furthest])):  # fmt: skip
            wanted = [frame.down(mark.accuracy) for _, mark in side]
            chips = spread(wanted, gap=CHIP + 2, bottom=frame.height)
            parts += [_marked(frame, x, mark, chip, way) for (x, mark), chip in zip(side, chips, strict=True)]
    told = "; ".join(
        f"{mark.name} {percent(mark.accuracy)}, {human_bytes(round(mark.bytes))}" for mark in marks
    )
    return frame.draw(f"Accuracy against bytes. {told}.", parts)


def _marked(frame: _Frame, x: float, mark: Mark, chip: float, way: int) -> Markup:
    """A dot with its deviation, and its numbered chip, to its right (1) or left (-1), at its own height."""
    y = frame.down(mark.accuracy)
    parts = []
    if mark.spread:
        above, below = (frame.down(mark.accuracy + sign * mark.spread) - y for sign in (1, -1))
        parts.append(Markup('<line class="whisker" x1="0" x2="0" y1="{}" y2="{}"/>').format(
            round(above, 2), round(below, 2)))  # fmt: skip
    rise = round(chip - y, 2)
    parts.append(Markup('<line class="leader" x1="0" x2="{}" y1="0" y2="{}"/>').format(16 * way, rise))
    parts.append(Markup('<circle class="point" r="4.5"/>'))
    parts.append(_chip(mark.place, 24 * way, rise))
    deviation = "" if mark.spread is None else f" \u00b1 {mark.spread:.1f}"
    title = f"{mark.name}: {percent(mark.accuracy)}{deviation}, {human_bytes(round(mark.bytes))}"
    named = Markup("<title>{}</title>").format(title)
    return _at(frame.percent(x), y, [named, *parts], _colour(mark.place))


def _at(x: str, y: float, parts: Sequence[Markup], style: str = "") -> Markup:
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


def curves_plot(curves: Sequence[Curve]) -> Markup:
    """Accuracy over the share of the run, one line a method, each with its number at the end.

    Returns an ``<svg>`` at least 340 pixels high.
    """
    height = max(340, (CHIP + 2) * len(curves))
    values = [(y, 0.0) for curve in curves for _, y in curve.line]
    frame = _Frame((0.0, 1.0), _accuracies(values), height)
    parts = _levels(frame)
    parts += [
        _text(frame.percent(share), height + 22, f"{share:g}", "tick middle")
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    ends = spread([frame.down(curve.line[-1][1]) for curve in curves], gap=CHIP + 2, bottom=height)
    for curve, end in zip(curves, ends, strict=True):
        shown = thin(curve.line)
        drawn = [frame.line(shown, "curve")] if len(shown) > 1 else []
        for x, y in shown if len(shown) <= 60 else shown[-1:]:
            named = Markup("<title>{}</title>").format(f"{curve.name}, {x:.0%} of the run: {percent(y)}")
            dot = Markup('<circle class="point" r="3">{}</circle>').format(named)
            drawn.append(_at(frame.percent(x), frame.down(y), [dot]))
        rise = round(end - frame.down(shown[-1][1]), 2)
        leader = Markup('<line class="leader" x1="0" x2="16" y1="0" y2="{}"/>').format(rise)
        last, height_there = frame.percent(shown[-1][0]), frame.down(shown[-1][1])
        drawn.append(_at(last, height_there, [leader, _chip(curve.place, 24, rise)]))
        parts.append(Markup('<g class="{}">{}</g>').format(_colour(curve.place), Markup("").join(drawn)))
    told = "; ".join(f"{curve.name} {percent(curve.line[-1][1])}" for curve in curves)
    return frame.draw(f"Accuracy over the share of the run. At the end: {told}.", parts)


def chip(place: int) -> Markup:
    """A method's number in its colour, as the drawings show it."""
    return Markup('<svg class="chip {}" width="20" height="20" aria-hidden="true">{}</svg>').format(
        _colour(place), _chip(place, 10, 10)
    )


def _chip(place: int, x: float, y: float) -> Markup:
    return Markup(
        '<circle class="disc" cx="{x}" cy="{y}" r="9"/><text class="inside" x="{x}" y="{text}">{place}</text>'
    ).format(x=x, y=y, text=round(y + 4, 2), place=place)


def _colour(place: int) -> str:
    """The style of a method's marks: a colour and, once all are taken, dashes."""
    again = " again" if (place - 1) // COLOURS % 2 else ""
    return f"c{(place - 1) % COLOURS}{again}"


def _accuracies(values: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """An axis for accuracies with their deviations: at least one point high, and no percentage below 0."""
    lowest, highest = min(y - room for y, room in values), max(y + room for y, room in values)
    lowest = max(0.0, min(lowest, highest - 1))
    ticks = nice_ticks(lowest, max(highest, lowest + 1))
    return ticks[0], ticks[-1]


def _levels(frame: _Frame) -> list[Markup]:
    """Horizontal lines with their percentages."""
    ticks = nice_ticks(*frame.y)
    parts = [frame.level(tick, "grid") for tick in ticks]
    return parts + [_text("0", frame.down(tick) + 4, f"{tick:g}%", "tick left", -10) for tick in ticks]


def _power(power: int) -> str:
    """A power of ten of bytes.

    >>> _power(4), _power(6), _power(0)
    ('10 kB', '1 MB', '1 B')
    """
    group = min(power // 3, 5)
    return f"{10 ** (power - 3 * group)} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[group]}"


def small_plot(label: str, line: Points, span: tuple[float, float] | None = None) -> Markup:
    """One quantity over steps, small: every step pale, the running mean strong.

    ``line`` holds (step, value), at least one, all finite; ``span`` fixes the lowest and highest
    value of the axis, so that several plots can share it. Returns an ``<svg>`` 96 pixels high.
    """
    shown = thin(line)
    low, high = span or (min(y for _, y in shown), max(y for _, y in shown))
    low, high = _widen(low, high)
    if 0 < low < 0.3 * high:  # close enough to zero that the axis had better start there
        low = 0.0
    coarse, fine = (
        [tick for tick in nice_ticks(low, high, most=most) if low <= tick <= high] for most in (4, 8)
    )
    ticks = coarse if len(coarse) > 1 else fine  # one tick alone tells no scale
    first, last = line[0][0], line[-1][0]
    frame = _Frame((first, last), (low, high), 96)
    parts = [frame.level(tick, "grid") for tick in [low, *ticks]]
    parts += [_text("0", frame.down(tick) + 4, f"{tick:g}", "tick left", -8) for tick in ticks]
    parts.append(_text("0", frame.height + 20, _step(first), "tick"))
    if last > first:
        parts.append(_text("100%", frame.height + 20, _step(last), "tick left"))
    if len(shown) == 1:
        spot = frame.down(shown[0][1])
        parts.append(Markup('<circle class="dot" cx="50%" cy="{}" r="3"/>').format(spot))
    parts += [frame.line(shown, "curve pale"), frame.line(smooth(shown), "curve")]
    told = f"{label}, from step {_step(first)} to {_step(last)}: {line[0][1]:.4g} to {line[-1][1]:.4g}."
    return frame.draw(told, parts)


def accuracy_bar(row: Row) -> Markup:
    """A bar from 0 to 100%; with the spread and one dot a node where the row has them."""
    if row.accuracy is None:
        return Markup("")

    def x(value: float) -> str:
        return f"{min(max(value, 0.0), 100.0):.2f}%"

    parts = [
        Markup('<rect class="track" width="100%" y="5" height="14" rx="3"/>'),
        Markup('<rect class="{}" width="{}" y="5" height="14" rx="3"/>').format(
            "bar student" if row.is_student else "bar", x(row.accuracy)
        ),
    ]
    parts += [Markup('<circle class="node" cx="{}" cy="12" r="3"/>').format(x(value)) for value in row.each]
    if row.spread is not None:
        parts.append(
            Markup('<line class="whisker" x1="{}" x2="{}" y1="12" y2="12"/>').format(
                x(row.accuracy - row.spread), x(row.accuracy + row.spread)
            )
        )
    return Markup('<svg class="bars" width="100%" height="24" aria-hidden="true">{}</svg>').format(
        Markup("").join(parts)
    )


def picture(image: npt.NDArray[np.uint8]) -> str:
    """One image as a PNG in a ``data:`` address, for ``<img src>``.

    ``image`` is (C, H, W), 8 bits, C 1 (grey) or 3 (colour). A picture with a side above
    64 pixels is made smaller by averaging square blocks. Raises DataError for another shape.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[0] not in (1, 3) or 0 in image.shape:
        raise DataError(f"image is {image.dtype} {image.shape}: allowed is uint8 (C, H, W) with C 1 or 3")
    block = math.ceil(max(image.shape[1:]) / MOST_PIXELS)
    # A side shorter than a block (a very long, thin picture) still keeps one row of pixels.
    across, along = min(block, image.shape[2]), min(block, image.shape[1])
    height, width = image.shape[1] // along, image.shape[2] // across
    cut = image[:, : height * along, : width * across]
    blocks = cut.reshape(len(image), height, along, width, across)
    pixels = blocks.mean(axis=(2, 4)).round().astype(np.uint8).transpose(1, 2, 0)  # (H, W, C)

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    colour = 0 if len(image) == 1 else 2  # PNG's colour types: grey, or red green blue
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: this row uses no filter
    png = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(rows, 9))
        + chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
