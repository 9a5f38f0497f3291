"""What methods reach against what attacks got, as a drawing: areas are bytes, budgets of a method a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from markupsafe import Markup

from fedstill.attacks.rows import Column
from fedstill.core.words import human_bytes, percent
from fedstill.report.axes import Frame, levels, nice_ticks, percentages, text
from fedstill.report.marks import at, chip_at, colour

HEIGHT = 420
LARGEST, DOT = 22.0, 3.0  # radii in pixels: of the most bytes, and of the point in each area's middle
LEAST_WIDE = 10.0  # points that the axis spans at least
WIDE, NARROW = 960, 250  # pixels that a drawing is laid out for, on a screen and on a phone
LETTER = 6.6  # pixels of a label's letter


@dataclass(frozen=True)
class Spot:
    """One method in one setting: its number and name, what attacks got and what it reaches, in percent.

    Args:
        bytes: up and down, all nodes, a whole run.
        tag: what stands beside it: its epsilon, its setting; may be empty.
        where: the same for a reader who sees no drawing.
        joined: whether it is on a line with the method's spot before it.
    """

    place: int
    name: str
    leak: float
    value: float
    bytes: float
    tag: str = ""
    where: str = ""
    joined: bool = False
    leak_spread: float | None = None
    spread: float | None = None

    def told(self, figure: str) -> str:
        """It in words, with what attacks' figure is called."""
        where = f", {self.where}" if self.where else ""
        reached = f"{percent(self.value)}, {figure} {percent(self.leak)}"
        return f"{self.name}{where}: {reached}, {human_bytes(round(self.bytes))}"


def radius(count: float, most: float) -> float:
    """Of a mark whose area stands for bytes, in pixels.

    >>> radius(100, 100), radius(25, 100), radius(0, 100)
    (22.0, 11.0, 0.0)
    """
    return LARGEST * math.sqrt(count / most) if most > 0 else 0.0


def leak_plot(spots: Sequence[Spot], column: Column, title: str = "Accuracy", width: int = WIDE) -> Markup:
    """What methods reach over what attacks got, with a line at guessing.

    Args:
        spots: at least one; those of one method in the order in which they are joined.
        column: the figure of attacks, in percent.
        title: of what methods reach.
        width: pixels for which numbers and tags are laid out; the drawing stretches.

    Returns:
        An ``<svg>`` 420 pixels high.
    """
    leaks = [(spot.leak, spot.leak_spread or 0.0) for spot in spots]
    guess = 0.0 if column.guess is None else column.guess
    low = min(guess, *(value - room for value, room in leaks))
    high = max(guess, low + LEAST_WIDE, *(value + room for value, room in leaks))
    ticks = nice_ticks(low, high)
    room = 0.03 * (ticks[-1] - ticks[0])
    reached = percentages([(spot.value, spot.spread or 0.0) for spot in spots])
    frame = Frame((ticks[0] - room, ticks[-1] + room), reached, HEIGHT)
    most = max(spot.bytes for spot in spots)
    parts = levels(frame)
    for tick in ticks:
        x = frame.percent(tick)
        parts.append(_upright("grid", x))
        parts.append(text(x, HEIGHT + 22, f"{tick:g}%", "tick middle"))
    parts.append(_upright("guess", frame.percent(guess)))
    parts.append(text(frame.percent(guess), -14, "guessing", "tick middle"))
    placed = _placed(frame, spots, most, width)
    # The largest first, so that none hides another.
    for index in sorted(range(len(spots)), key=lambda index: -spots[index].bytes):
        spot = spots[index]
        drawn = [_line(frame, spots, index)] if spot.joined else []
        drawn += [_area(frame, spot, radius(spot.bytes, most), column.head)]
        parts.append(Markup('<g class="{}">{}</g>').format(colour(spot.place), Markup("").join(drawn)))
    for index, spot in enumerate(spots):
        x, y = frame.percent(spot.leak), frame.down(spot.value)
        drawn = [_tagged(part, spot, *place) for part, place in placed[index].items()]
        parts.append(at(x, y, drawn, colour(spot.place)))
    told = "; ".join(spot.told(column.head) for spot in spots)
    return frame.draw(f"{title} against the {column.axis}. {told}.", parts)


def area(count: float, most: float) -> Markup:
    """A mark of some bytes alone, for a legend."""
    size = max(radius(count, most), DOT + 1)
    middle = round(size + 1, 2)
    shape = _shape(count, radius(count, most))
    return Markup('<svg class="area" width="{w}" height="{w}" aria-hidden="true">{s}</svg>').format(
        w=2 * middle, s=at(str(middle), middle, [shape])
    )


def _upright(style: str, x: str) -> Markup:
    return Markup('<line class="{s}" x1="{x}" x2="{x}" y1="0" y2="{h}"/>').format(s=style, x=x, h=HEIGHT)


def _before(spots: Sequence[Spot], index: int) -> int:
    """Which spot of the same method comes before one."""
    return max(place for place in range(index) if spots[place].place == spots[index].place)


def _line(frame: Frame, spots: Sequence[Spot], index: int) -> Markup:
    """From the method's spot before this one."""
    spot, before = spots[index], spots[_before(spots, index)]
    return Markup('<line class="way" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(
        frame.percent(before.leak), frame.down(before.value), frame.percent(spot.leak), frame.down(spot.value)
    )


def _area(frame: Frame, spot: Spot, size: float, figure: str) -> Markup:
    """A mark with its deviations."""
    y = frame.down(spot.value)
    parts = [Markup("<title>{}</title>").format(spot.told(figure))]
    if spot.spread:
        above, below = (frame.down(spot.value + sign * spot.spread) - y for sign in (1, -1))
        whisker = Markup('<line class="whisker" x1="0" x2="0" y1="{}" y2="{}"/>')
        parts.append(whisker.format(round(above, 2), round(below, 2)))
    parts.append(_shape(spot.bytes, size))
    drawn = at(frame.percent(spot.leak), y, parts)
    if not spot.leak_spread:
        return drawn
    left, right = (frame.percent(spot.leak + sign * spot.leak_spread) for sign in (-1, 1))
    whisker = Markup('<line class="whisker" x1="{}" x2="{}" y1="{y}" y2="{y}"/>')
    return whisker.format(left, right, y=y) + drawn


def _shape(count: float, size: float) -> Markup:
    """An area with a point in its middle; a ring where nothing was sent."""
    if count <= 0:
        return Markup('<circle class="ring" r="{}"/>').format(DOT + 1)
    return Markup('<circle class="bubble" r="{}"/><circle class="point" r="{}"/>').format(
        round(max(size, DOT), 2), DOT
    )


def _tagged(part: str, spot: Spot, x: float, y: float) -> Markup:
    """A number or a tag at its place, relative to the spot."""
    if part == "tag":
        return Markup('<text class="tag" x="{}" y="{}">{}</text>').format(x, round(y + 4, 2), spot.tag)
    leader = Markup('<line class="leader" x1="0" x2="{}" y1="0" y2="{}"/>').format(x, y)
    return leader + chip_at(spot.place, x, y)


# --- where numbers and tags stand -----------------------------------------------------------------------

WAYS = ((1, 0), (-1, 0), (0, -1), (0, 1), (0.7, -0.7), (-0.7, -0.7), (0.7, 0.7), (-0.7, 0.7))
FAR = (0, 10, 22, 36, 52, 70, 90)  # pixels from the nearest place that is tried to further ones

Box = tuple[float, float, float, float]  # middle, half a width, half a height, in pixels


def _placed(
    frame: Frame, spots: Sequence[Spot], most: float, width: int
) -> Sequence[Mapping[str, tuple[float, float]]]:
    """Places of each spot's number and tag, relative to it, apart from each other, all points and all lines.

    Of spots on one line only the last has a number. What finds no free place gets the least crowded one.
    """
    middles = [(frame.across(spot.leak) * width, frame.down(spot.value)) for spot in spots]
    taken: list[Box] = [(x, y, DOT + 2, DOT + 2) for x, y in middles]
    for index, spot in enumerate(spots):
        if spot.joined:
            (x, y), (from_x, from_y) = middles[index], middles[_before(spots, index)]
            steps = max(1, round(math.hypot(x - from_x, y - from_y) / 8))
            shares = [step / steps for step in range(steps)]
            taken += [(from_x + t * (x - from_x), from_y + t * (y - from_y), 3.0, 3.0) for t in shares]
    inner = {_before(spots, index) for index, spot in enumerate(spots) if spot.joined}
    found: list[dict[str, tuple[float, float]]] = [{} for _ in spots]
    wanted = [("number", index, 10.0) for index in range(len(spots)) if index not in inner]
    wanted += [("tag", index, 2 + LETTER * len(spot.tag) / 2) for index, spot in enumerate(spots) if spot.tag]
    for part, index, half in wanted:
        x, y = middles[index]
        tall = 10.0 if part == "number" else 7.0
        off = max(radius(spots[index].bytes, most), DOT + 2) + 2
        tried = []
        for far, (right, down) in product(FAR, WAYS):
            reach = off + far
            box = (x + right * (reach + half), y + down * (reach + tall), half, tall)
            tried.append((_crowding(box, taken, width) + far, box))
        best = min(tried, key=lambda at: at[0])[1]
        taken.append(best)
        found[index][part] = (round(best[0] - x, 1), round(best[1] - y, 1))
    return found


def _crowding(box: Box, taken: Sequence[Box], width: int) -> float:
    """How much of a box others have, or lies outside: 0 is a free place."""
    x, y, half, tall = box
    outside = (
        max(0.0, half - x) + max(0.0, x + half - width) + max(0.0, tall - y) + max(0.0, y + tall - HEIGHT)
    )
    shared = 100 * outside
    for other_x, other_y, other_half, other_tall in taken:
        across = half + other_half - abs(x - other_x)
        along = tall + other_tall - abs(y - other_y)
        shared += max(0.0, across) * max(0.0, along)
    return shared
