"""A comparison's figures: what methods reach against bytes, epsilon and leakage, and over their runs.

Each method has a number and a colour. A page's tables say which is which; a paper's figure has a legend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedstill.attacks.rows import Column
from fedstill.core.words import human_bytes, percent
from fedstill.report import drawing
from fedstill.report.budgets import Line, budgets, named
from fedstill.report.compare_points import Curve, Mark, Spot
from fedstill.report.drawing import CARD, FAINT, MUTED, PAPER, again, colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GAP = 22  # pixels from one number to the next
LARGEST, DOT = 22.0, 3.0  # radii in pixels: of the most bytes, and of the point in each area's middle
LETTER = 6.6  # pixels of a label's letter


def _reached(axes: Axes, values: Sequence[tuple[float, float | None]]) -> None:
    """The axis of what methods reach, with room for deviations."""
    drawing.percent_axis(axes, [value + sign * (room or 0.0) for value, room in values for sign in (-1, 1)])


def _dot(axes: Axes, place: int, x: float, y: float, words: str, size: float = 9, **errors: Any) -> None:
    """A method's point, with its deviations."""
    own, hollow = colour(place), again(place)
    kept = {way: room for way, room in errors.items() if room}
    if kept:
        axes.errorbar(x, y, **kept, ecolor=own, elinewidth=1.5, alpha=0.6, fmt="none", zorder=3)
    face, edge = (CARD, own) if hollow else (own, CARD)
    (dot,) = axes.plot(
        x, y, "o", ms=size, mfc=face, mec=edge, mew=2 if hollow else 1, clip_on=False, zorder=4
    )
    drawing.tip(dot, words)


def legend(figure: Figure, methods: Sequence[tuple[int, str]]) -> Figure:
    """The same figure with methods' numbers and names below it, for papers."""
    from matplotlib.lines import Line2D

    lines = [
        Line2D(
            [],
            [],
            marker="o",
            ls="",
            ms=7,
            mec=colour(place),
            mew=1.5,
            label=f"{place} {name}",
            mfc=CARD if again(place) else colour(place),
        )
        for place, name in dict(methods).items()
    ]
    figure.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=min(5, len(lines)))
    return figure


# --- against bytes ----------------------------------------------------------------------------------------


def traffic(marks: Sequence[Mark], width: float = PAPER) -> Figure:
    """What methods reach against bytes on a logarithmic axis; what sends nothing stands at 0, to its left."""
    from matplotlib.ticker import EngFormatter

    figure, axes = drawing.sheet(width, 408, right=30, bottom=34)
    _reached(axes, [(mark.value, mark.spread) for mark in marks])
    sent = [mark.bytes for mark in marks if mark.bytes > 0]
    low, high = (math.floor(math.log10(min(sent))), math.ceil(math.log10(max(sent)))) if sent else (0, 1)
    high = max(high, low + 1)
    silent = len(sent) < len(marks)
    axes.set_xscale("symlog", linthresh=10.0**low, linscale=max(0.35, 0.15 * (high - low)))
    axes.set_xlim(-0.35 * 10.0**low if silent else 0.75 * 10.0**low, 10.0**high * 1.3)
    stride = math.ceil((high - low) / 4)
    ticks = [10.0**power for power in range(low, high + 1, stride)] if sent else []
    name = EngFormatter(unit="B")
    axes.set_xticks(([0.0] if silent else []) + ticks, (["0"] if silent else []) + [name(at) for at in ticks])
    axes.set_xticks([10.0**power for power in range(low, high + 1)], minor=True)
    axes.grid(axis="x", which="both")
    if silent:
        axes.axvline(0.6 * 10.0**low, color=FAINT, lw=1, ls=(0, (3, 4)))
    at = [(mark.bytes, mark.value) for mark in marks]
    taken: list[drawing.Box] = [(*drawing.pixels(axes, place), 6.0, 6.0) for place in at]
    offsets = drawing.free_places(axes, [(place, 8.0, 10.0, 10.0) for place in at], taken)
    for mark, offset in zip(marks, offsets, strict=True):
        deviation = "" if mark.spread is None else f" \u00b1 {mark.spread:.1f}"
        words = f"{mark.name}: {percent(mark.value)}{deviation}, {human_bytes(round(mark.bytes))}"
        drawing.chip(axes, mark.place, (mark.bytes, mark.value), offset)
        _dot(axes, mark.place, mark.bytes, mark.value, words, yerr=mark.spread)
    return figure


# --- over the run -----------------------------------------------------------------------------------------


def curves(lines: Sequence[Curve], width: float = PAPER) -> Figure:
    """What methods reach over the share of the run, one line a method, each with its number at the end."""
    figure, axes = drawing.sheet(width, max(388, GAP * len(lines) + 48), right=46, bottom=34)
    _reached(axes, [(y, None) for curve in lines for _, y in curve.line])
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    rises = drawing.ends(axes, [curve.line[-1][1] for curve in lines], GAP)
    for curve, rise in zip(lines, rises, strict=True):
        shown = drawing.thin(curve.line)
        stroke = (0, (3.5, 2)) if again(curve.place) else "solid"
        axes.plot(*zip(*shown, strict=True), color=colour(curve.place), lw=2, ls=stroke, label=curve.name)
        for x, y in shown if len(shown) <= 60 else shown[-1:]:
            _dot(axes, curve.place, x, y, f"{curve.name}, {x:.0%} of the run: {percent(y)}", 6)
        drawing.chip(axes, curve.place, shown[-1], (26, rise))
    return figure


# --- against epsilon --------------------------------------------------------------------------------------


def against_epsilon(lines: Sequence[Line], width: float = PAPER) -> Figure:
    """What methods reach over epsilon on a logarithmic axis; what has no budget stands at the right edge."""
    drawn = [line for line in lines if line.points]
    figure, axes = drawing.sheet(width, max(408, GAP * len(drawn) + 48), right=46, bottom=34)
    _reached(axes, [(point.value, point.spread) for line in drawn for point in line.points])
    columns = budgets(drawn)
    finite = [epsilon for epsilon in columns if math.isfinite(epsilon)] or [1.0]
    step = max(2.0, (finite[-1] / finite[0]) ** 0.3)
    at = {epsilon: epsilon if math.isfinite(epsilon) else finite[-1] * step for epsilon in columns}
    axes.set_xscale("log")
    axes.set_xlim(finite[0] / step**0.3, max(at.values()) * step**0.3)
    axes.set_xticks([at[epsilon] for epsilon in columns], [named(epsilon) for epsilon in columns])
    axes.set_xticks([], minor=True)
    axes.grid(axis="x")
    edge = finite[-1] * step**0.6
    if len(columns) > len(finite) or columns == [math.inf]:
        axes.axvline(edge, color=FAINT, lw=1, ls=(0, (3, 4)))
    ordered = [sorted(line.points, key=lambda point: point.epsilon) for line in drawn]
    rises = drawing.ends(axes, [points[-1].value for points in ordered], GAP)
    for line, points, rise in zip(drawn, ordered, rises, strict=True):
        route = [(at[point.epsilon], point.value) for point in points]
        inside = [place for place in route if place[0] < edge]
        stroke: dict[str, Any] = {"color": colour(line.place), "lw": 2}
        stroke["ls"] = (0, (3.5, 2)) if again(line.place) else "solid"
        if inside:
            axes.plot(*zip(*inside, strict=True), **stroke, label=line.name)
        if 0 < len(inside) < len(route):
            axes.plot(*zip(*route[-2:], strict=True), **stroke, alpha=0.32)
        for point in points:
            words = f"{line.name}, epsilon {named(point.epsilon)}: {point.text()}"
            _dot(axes, line.place, at[point.epsilon], point.value, words, 8, yerr=point.spread)
        drawing.chip(axes, line.place, route[-1], (26, rise))
    return figure


# --- against leakage --------------------------------------------------------------------------------------


def radius(count: float, most: float) -> float:
    """Of a mark whose area stands for bytes, in pixels.

    >>> radius(100, 100), radius(25, 100), radius(0, 100)
    (22.0, 11.0, 0.0)
    """
    return LARGEST * math.sqrt(count / most) if most > 0 else 0.0


def against_leakage(spots: Sequence[Spot], column: Column, width: float = PAPER) -> Figure:
    """What methods reach over what attacks got, with a line at guessing; areas are bytes.

    Args:
        spots: at least one; those of one method in the order in which they are joined.
        column: the figure of attacks, in percent.
        width: of the figure, for which numbers and tags are laid out.
    """
    figure, axes = drawing.sheet(width, 480, right=20, top=28, bottom=34)
    guess = 0.0 if column.guess is None else column.guess
    leaks = [spot.leak + sign * (spot.leak_spread or 0.0) for spot in spots for sign in (-1, 1)]
    low = min(guess, *leaks)
    drawing.percent_axis(axes, [guess, low, max(guess, low + 10, *leaks)], "x")
    axes.margins(x=0.03)
    left, right = axes.get_xlim()
    axes.set_xlim(left - 0.03 * (right - left), right + 0.03 * (right - left))
    _reached(axes, [(spot.value, spot.spread) for spot in spots])
    axes.grid(axis="x")
    axes.axvline(guess, color=MUTED, lw=1.5, ls=(0, (2, 2.7)))
    axes.annotate(
        "guessing", (guess, 1), (0, 13), xycoords=("data", "axes fraction"), textcoords="offset points",
        ha="center", annotation_clip=False,
    )  # fmt: skip
    most = max(spot.bytes for spot in spots)
    before = {
        index: max(place for place in range(index) if spots[place].place == spot.place)
        for index, spot in enumerate(spots)
        if spot.joined
    }
    for index, other in before.items():
        pair = [(spots[each].leak, spots[each].value) for each in (other, index)]
        axes.plot(*zip(*pair, strict=True), color=colour(spots[index].place), lw=1.5, alpha=0.55)
    # The largest first, so that none hides another.
    for spot in sorted(spots, key=lambda spot: -spot.bytes):
        size = 2 * max(radius(spot.bytes, most), DOT)
        if spot.bytes > 0:
            style: dict[str, Any] = {"mec": colour(spot.place), "mew": 1.25, "clip_on": False}
            axes.plot(spot.leak, spot.value, "o", ms=size, mfc=(colour(spot.place), 0.18), **style)
        errors = {"xerr": spot.leak_spread, "yerr": spot.spread}
        _dot(axes, spot.place, spot.leak, spot.value, spot.told(column.head), 2 * DOT + 2, **errors)
    _label(axes, spots, before, most)
    return figure


def _label(axes: Axes, spots: Sequence[Spot], before: dict[int, int], most: float) -> None:
    """Numbers and tags, apart from each other, all points and lines; a line's last spot has its number."""
    at = [(spot.leak, spot.value) for spot in spots]
    middles = [drawing.pixels(axes, place) for place in at]
    taken: list[drawing.Box] = [(x, y, DOT + 2, DOT + 2) for x, y in middles]
    for index, other in before.items():
        (x, y), (from_x, from_y) = middles[index], middles[other]
        steps = max(1, round(math.hypot(x - from_x, y - from_y) / 8))
        shares = [step / steps for step in range(steps)]
        taken += [(from_x + t * (x - from_x), from_y + t * (y - from_y), 3.0, 3.0) for t in shares]
    for (x, y), spot in zip(middles, spots, strict=True):  # whiskers
        corner = (spot.leak + (spot.leak_spread or 0.0), spot.value + (spot.spread or 0.0))
        far, high = drawing.pixels(axes, corner)
        taken += [(x, y, far - x, 1.0), (x, y, 1.0, high - y)]
    off = [max(radius(spot.bytes, most), DOT + 2) + 2 for spot in spots]
    numbered = [index for index in range(len(spots)) if index not in before.values()]
    tagged = [index for index, spot in enumerate(spots) if spot.tag]
    wanted = [(at[index], off[index], 10.0, 10.0) for index in numbered]
    wanted += [(at[index], off[index], 2 + LETTER * len(spots[index].tag) / 2, 7.0) for index in tagged]
    places = drawing.free_places(axes, wanted, taken)
    for index, offset in zip(numbered, places, strict=False):
        drawing.chip(axes, spots[index].place, at[index], offset)
    for index, offset in zip(tagged, places[len(numbered) :], strict=True):
        axes.annotate(
            spots[index].tag, at[index], offset, textcoords="offset points", ha="center",
            va="center_baseline", fontsize=11.5, color=colour(spots[index].place), annotation_clip=False,
        )  # fmt: skip
