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

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fedstill.errors import DataError
from fedstill.report.table import Row, percent

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


def accuracy_plot(line: Points, references: Sequence[tuple[str, str, float]], student: str) -> Markup:
    """Accuracy over steps, with the reference levels as horizontal lines labelled at their ends.

    ``line`` holds (step, accuracy), at least one; ``references`` holds (name, style class,
    accuracy). Accuracies are percent, from 0 to 100. Returns an ``<svg>`` 320 pixels high.
    """
    values = [y for _, y in line] + [y for *_, y in references]
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

    shown = thin(line)
    parts.append(frame.line(shown, "curve"))
    if len(shown) <= 60:
        for x, y in shown:
            parts.append(
                Markup('<circle class="dot" cx="{}" cy="{}" r="3.5"><title>step {}: {}</title></circle>')
                .format(frame.percent(x), frame.down(y), _step(x), percent(y))
            )  # fmt: skip

    labels = [(student, "student", shown[-1][1])] + [(name, "", y) for name, _, y in references]
    places = spread([frame.down(y) for *_, y in labels], gap=18, bottom=frame.height)
    for (name, style, y), place in zip(labels, places, strict=True):
        parts.append(_text("100%", place + 4, f"{name} {percent(y)}", f"label {style}", 12))
    told = "; ".join(f"{name} {percent(y)}" for name, _, y in labels)
    return frame.draw(f"Accuracy on the test data over {_step(max(steps))} steps. At the end: {told}.", parts)


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
