"""A comparison's drawings: what methods reach against bytes, epsilon and leakage, and over their runs.

Each method has a number and a color. A page's tables say which is which; a paper's figure has a legend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedstill.attacks.leakage import LeakageColumn
from fedstill.core.text_format import format_bytes, format_percent
from fedstill.report import plotting
from fedstill.report.compare_points import Point, budgets, format_budget
from fedstill.report.compare_summary import MethodCurve
from fedstill.report.compared_method import Spread
from fedstill.report.plotting import CARD, FAINT, MUTED, PAPER_WIDTH, is_color_repeated, method_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GAP = 22  # pixels from one number to the next
LARGEST, DOT = 22.0, 3.0  # radii in pixels: of the most bytes, and of the point in each area's middle
LETTER = 6.4  # pixels of a label's letter
MOST_DOTS = 60  # more points than this have no dots on their lines: they would hide them, and fill the page


def _ends(values: Sequence[Spread]) -> list[float]:
    return [value.mean + sign * (value.std or 0.0) for value in values for sign in (-1, 1)]


def _dot(axes: Axes, place: int, x: float, y: float, words: str, size: float = 9, **errors: Any) -> None:
    own, hollow = method_color(place), is_color_repeated(place)
    kept = {way: room for way, room in errors.items() if room}
    if kept:
        axes.errorbar(x, y, **kept, ecolor=own, elinewidth=1.5, alpha=0.6, fmt="none", zorder=3)
    face, edge = (CARD, own) if hollow else (own, CARD)
    (dot,) = axes.plot(
        x, y, "o", ms=size, mfc=face, mec=edge, mew=2 if hollow else 1, clip_on=False, zorder=4
    )
    plotting.set_tooltip(dot, words)


def _words(figure: Figure, title: str, told: Sequence[str]) -> Figure:
    """The same figure with itself in words, for whoever does not see it."""
    figure.set_label(f"{title}. {'; '.join(told)}.")
    return figure


def legend(figure: Figure, methods: Sequence[tuple[int, str]]) -> Figure:
    """The same figure with methods' numbers and names below it, for papers."""
    from matplotlib.lines import Line2D

    lines = []
    for place, name in dict(methods).items():
        face = CARD if is_color_repeated(place) else method_color(place)
        name = f"{place} {name}"
        lines.append(
            Line2D([], [], marker="o", ls="", ms=7, mew=1.5, mec=method_color(place), mfc=face, label=name)
        )
    figure.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=min(5, len(lines)))
    return figure


# --- against bytes ----------------------------------------------------------------------------------------


def traffic(points: Sequence[Point], title: str = "Accuracy", width: float = PAPER_WIDTH) -> Figure:
    """What methods reach against bytes on a logarithmic axis; what sends nothing stands at 0, to its left."""
    from matplotlib.ticker import EngFormatter

    figure, axes = plotting.create_axes(width, 408, right=30, bottom=34)
    plotting.percent_axis(axes, _ends([point.value for point in points]))
    sent = [point.bytes for point in points if point.bytes > 0]
    low, high = (math.floor(math.log10(min(sent))), math.ceil(math.log10(max(sent)))) if sent else (0, 1)
    high = max(high, low + 1)
    silent = len(sent) < len(points)
    axes.set_xscale("symlog", linthresh=10.0**low, linscale=max(0.35, 0.15 * (high - low)))
    axes.set_xlim(-0.35 * 10.0**low if silent else 0.75 * 10.0**low, 10.0**high * 1.3)
    ticks = [10.0**power for power in range(low, high + 1, math.ceil((high - low) / 4))] if sent else []
    name = EngFormatter(unit="B")
    axes.set_xticks(([0.0] if silent else []) + ticks, (["0"] if silent else []) + [name(at) for at in ticks])
    axes.set_xticks([10.0**power for power in range(low, high + 1)], minor=True)
    axes.grid(axis="x", which="both")
    if silent:
        axes.axvline(0.6 * 10.0**low, color=FAINT, lw=1, ls=(0, (3, 4)))
    at = [(point.bytes, point.value.mean) for point in points]
    offsets = plotting.place_beside(axes, at, [10.0] * len(at), GAP)
    told = []
    for point, offset in zip(points, offsets, strict=True):
        size = format_bytes(round(point.bytes))
        told.append(f"{point.name} {format_percent(point.value.mean)}, {size}")
        deviation = "" if point.value.std is None else f" \u00b1 {point.value.std:.1f}"
        words = f"{point.name}: {format_percent(point.value.mean)}{deviation}, {size}"
        plotting.draw_number(axes, point.place, (point.bytes, point.value.mean), offset)
        _dot(axes, point.place, point.bytes, point.value.mean, words, yerr=point.value.std)
    return _words(figure, f"{title} against bytes", told)


# --- over the run -----------------------------------------------------------------------------------------


def curves(lines: Sequence[MethodCurve], title: str = "Accuracy", width: float = PAPER_WIDTH) -> Figure:
    """What methods reach over the share of the run, one line a method, each with its number at the end."""
    figure, axes = plotting.create_axes(width, max(388, GAP * len(lines) + 48), right=46, bottom=34)
    routes = [[(at, value.mean) for at, value in line.reached.items()] for line in lines]
    plotting.percent_axis(axes, [y for route in routes for _, y in route])
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    rises = plotting.place_at_ends(axes, [route[-1][1] for route in routes], GAP)
    dotted = sum(map(len, routes)) <= MOST_DOTS
    for curve, route, rise in zip(lines, routes, rises, strict=True):
        shown = plotting.downsample(route)
        stroke = (0, (3.5, 2)) if is_color_repeated(curve.place) else "solid"
        axes.plot(
            *zip(*shown, strict=True), color=method_color(curve.place), lw=2, ls=stroke, label=curve.name
        )
        for x, y in shown if dotted else shown[-1:]:
            _dot(axes, curve.place, x, y, f"{curve.name}, {x:.0%} of the run: {format_percent(y)}", 6)
        plotting.draw_number(axes, curve.place, shown[-1], (26, rise))
    told = [f"{line.name} {format_percent(route[-1][1])}" for line, route in zip(lines, routes, strict=True)]
    told[0] = f"At the end: {told[0]}"
    return _words(figure, f"{title} over the share of the run", told)


# --- against epsilon --------------------------------------------------------------------------------------


def against_epsilon(
    lines: Sequence[MethodCurve], title: str = "Accuracy", width: float = PAPER_WIDTH
) -> Figure:
    """What methods reach over epsilon on a logarithmic axis; what has no budget stands at the right edge."""
    drawn = [line for line in lines if line.reached]
    figure, axes = plotting.create_axes(width, max(408, GAP * len(drawn) + 48), right=46, bottom=34)
    plotting.percent_axis(axes, _ends([value for line in drawn for value in line.reached.values()]))
    columns = budgets(drawn)
    finite = [epsilon for epsilon in columns if math.isfinite(epsilon)] or [1.0]
    step = max(2.0, (finite[-1] / finite[0]) ** 0.3)
    at = {epsilon: epsilon if math.isfinite(epsilon) else finite[-1] * step for epsilon in columns}
    axes.set_xscale("log")
    axes.set_xlim(finite[0] / step**0.3, max(at.values()) * step**0.3)
    axes.set_xticks([at[epsilon] for epsilon in columns], [format_budget(epsilon) for epsilon in columns])
    axes.set_xticks([], minor=True)
    axes.grid(axis="x")
    edge = finite[-1] * step**0.6
    if len(columns) > len(finite) or columns == [math.inf]:
        axes.axvline(edge, color=FAINT, lw=1, ls=(0, (3, 4)))
    rises = plotting.place_at_ends(axes, [list(line.reached.values())[-1].mean for line in drawn], GAP)
    told = []
    for line, rise in zip(drawn, rises, strict=True):
        route = [(at[epsilon], value.mean) for epsilon, value in line.reached.items()]
        inside = [place for place in route if place[0] < edge]
        stroke: dict[str, Any] = {"color": method_color(line.place), "lw": 2}
        stroke["ls"] = (0, (3.5, 2)) if is_color_repeated(line.place) else "solid"
        if inside:
            axes.plot(*zip(*inside, strict=True), **stroke, label=line.name)
        if 0 < len(inside) < len(route):
            axes.plot(*zip(*route[-2:], strict=True), **stroke, alpha=0.32)
        for epsilon, value in line.reached.items():
            words = f"{line.name}, epsilon {format_budget(epsilon)}: {value.text()}"
            _dot(axes, line.place, at[epsilon], value.mean, words, 8, yerr=value.std)
        plotting.draw_number(axes, line.place, route[-1], (26, rise))
        each = [
            f"{format_budget(epsilon)} {format_percent(value.mean)}"
            for epsilon, value in line.reached.items()
        ]
        told.append(f"{line.name}: {', '.join(each)}")
    return _words(figure, f"{title} against epsilon", told)


# --- against leakage --------------------------------------------------------------------------------------


def radius(count: float, most: float) -> float:
    """Of a mark whose area stands for bytes, in pixels."""
    return LARGEST * math.sqrt(count / most) if most > 0 else 0.0


def against_leakage(
    points: Sequence[Point], column: LeakageColumn, title: str = "Accuracy", width: float = PAPER_WIDTH
) -> Figure:
    """What methods reach over what attacks got, in percent, with a line at guessing; areas are bytes."""
    figure, axes = plotting.create_axes(width, 480, right=20, top=28, bottom=34)
    guess = 0.0 if column.guess is None else column.guess
    leaks = _ends([point.leak for point in points])
    low = min(guess, *leaks)
    plotting.percent_axis(axes, [guess, low, max(guess, low + 10, *leaks)], "x")
    axes.margins(x=0.03)
    left, right = axes.get_xlim()
    axes.set_xlim(left - 0.03 * (right - left), right + 0.03 * (right - left))
    plotting.percent_axis(axes, _ends([point.value for point in points]))
    axes.grid(axis="x")
    axes.axvline(guess, color=MUTED, lw=1.5, ls=(0, (2, 2.7)))
    axes.annotate(
        "guessing", (guess, 1), (0, 13), xycoords=("data", "axes fraction"), textcoords="offset points",
        ha="center", annotation_clip=False,
    )  # fmt: skip
    most = max(point.bytes for point in points)
    before = {
        index: max(place for place in range(index) if points[place].place == point.place)
        for index, point in enumerate(points)
        if point.joined
    }
    for index, other in before.items():
        pair = [(points[each].leak.mean, points[each].value.mean) for each in (other, index)]
        axes.plot(*zip(*pair, strict=True), color=method_color(points[index].place), lw=1.5, alpha=0.55)
    # The largest first, so that none hides another.
    for point in sorted(points, key=lambda point: -point.bytes):
        size = 2 * max(radius(point.bytes, most), DOT)
        if point.bytes > 0:
            style: dict[str, Any] = {"mec": method_color(point.place), "mew": 1.25, "clip_on": False}
            axes.plot(
                point.leak.mean,
                point.value.mean,
                "o",
                ms=size,
                mfc=(method_color(point.place), 0.18),
                **style,
            )
        errors = {"xerr": point.leak.std, "yerr": point.value.std}
        words = point.describe(column.head)
        _dot(axes, point.place, point.leak.mean, point.value.mean, words, 2 * DOT + 2, **errors)
    # Beside each point its number and its tag; of a line only the last point has the number.
    numbers = ["" if index in before.values() else str(point.place) for index, point in enumerate(points)]
    labels = [" ".join(filter(None, pair)) for pair in zip(numbers, (s.tag for s in points), strict=True)]
    at = [(point.leak.mean, point.value.mean) for point in points]
    offsets = plotting.place_beside(axes, at, [7 + LETTER * len(label) / 2 for label in labels], GAP)
    for point, place, label, offset in zip(points, at, labels, offsets, strict=True):
        plotting.draw_number(axes, point.place, place, offset, label)
    return _words(
        figure, f"{title} against the {column.axis}", [point.describe(column.head) for point in points]
    )
