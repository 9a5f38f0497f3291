"""Figures of a comparison: the main metric against bytes, epsilon and leakage, and during the runs.

Each method has a number and a color. Pages name them in a table, figures for papers in a legend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedstill.attacks.attack_results import ComparisonColumn
from fedstill.core.text_format import format_bytes, format_percent
from fedstill.report import plotting
from fedstill.report.compare_summary import MethodCurve
from fedstill.report.compared_method import Spread
from fedstill.report.comparison_figure_data import Point, format_budget, sorted_budgets
from fedstill.report.plotting import CARD, FAINT, MUTED, PAPER_WIDTH, is_color_repeated, method_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL_GAP = 22  # pixels between labels
MAX_RADIUS, DOT_RADIUS = 22.0, 3.0  # pixels; of the disk for the most bytes, and of the dot in its center
LETTER_WIDTH = 6.4  # pixels
MAX_MARKERS = 60  # with more points, lines have no markers


def _spread_ends(values: Sequence[Spread]) -> list[float]:
    return [value.mean + sign * (value.std or 0.0) for value in values for sign in (-1, 1)]


def _draw_marker(
    axes: Axes, number: int, x: float, y: float, tooltip: str, size: float = 9, **errors: Any
) -> None:
    own_color, hollow = method_color(number), is_color_repeated(number)
    known = {axis: error for axis, error in errors.items() if error}
    if known:
        axes.errorbar(x, y, **known, ecolor=own_color, elinewidth=1.5, alpha=0.6, fmt="none", zorder=3)
    face, edge = (CARD, own_color) if hollow else (own_color, CARD)
    (marker,) = axes.plot(
        x, y, "o", ms=size, mfc=face, mec=edge, mew=2 if hollow else 1, clip_on=False, zorder=4
    )
    plotting.set_tooltip(marker, tooltip)


def _describe(figure: Figure, title: str, parts: Sequence[str]) -> Figure:
    """Set a figure's accessible text and return the figure."""
    figure.set_label(f"{title}. {'; '.join(parts)}.")
    return figure


def add_legend(figure: Figure, methods: Sequence[tuple[int, str]]) -> Figure:
    """Add a legend of methods' numbers and names below a figure and return the figure."""
    from matplotlib.lines import Line2D

    handles = []
    for number, name in dict(methods).items():
        color = method_color(number)
        face = CARD if is_color_repeated(number) else color
        label = f"{number} {name}"
        handles.append(Line2D([], [], marker="o", ls="", ms=7, mew=1.5, mec=color, mfc=face, label=label))
    figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=min(5, len(handles)))
    return figure


# --- against bytes ----------------------------------------------------------------------------------------


def plot_traffic(points: Sequence[Point], title: str = "Accuracy", width: float = PAPER_WIDTH) -> Figure:
    """Plot the main metric against bytes on a logarithmic axis; methods without traffic are at 0."""
    from matplotlib.ticker import EngFormatter

    figure, axes = plotting.create_axes(width, 408, right=30, bottom=34)
    plotting.percent_axis(axes, _spread_ends([point.value for point in points]))
    sent = [point.bytes for point in points if point.bytes > 0]
    low, high = (math.floor(math.log10(min(sent))), math.ceil(math.log10(max(sent)))) if sent else (0, 1)
    high = max(high, low + 1)
    has_zero = len(sent) < len(points)
    axes.set_xscale("symlog", linthresh=10.0**low, linscale=max(0.35, 0.15 * (high - low)))
    axes.set_xlim(-0.35 * 10.0**low if has_zero else 0.75 * 10.0**low, 10.0**high * 1.3)
    ticks = [10.0**power for power in range(low, high + 1, math.ceil((high - low) / 4))] if sent else []
    tick_text = EngFormatter(unit="B")
    axes.set_xticks(
        ([0.0] if has_zero else []) + ticks, (["0"] if has_zero else []) + [tick_text(tick) for tick in ticks]
    )
    axes.set_xticks([10.0**power for power in range(low, high + 1)], minor=True)
    axes.grid(axis="x", which="both")
    if has_zero:
        axes.axvline(0.6 * 10.0**low, color=FAINT, lw=1, ls=(0, (3, 4)))
    positions = [(point.bytes, point.value.mean) for point in points]
    offsets = plotting.side_label_offsets(axes, positions, [10.0] * len(positions), LABEL_GAP)
    descriptions = []
    for point, offset in zip(points, offsets, strict=True):
        size = format_bytes(round(point.bytes))
        descriptions.append(f"{point.name} {format_percent(point.value.mean)}, {size}")
        deviation = "" if point.value.std is None else f" \u00b1 {point.value.std:.1f}"
        tooltip = f"{point.name}: {format_percent(point.value.mean)}{deviation}, {size}"
        plotting.draw_number(axes, point.number, (point.bytes, point.value.mean), offset)
        _draw_marker(axes, point.number, point.bytes, point.value.mean, tooltip, yerr=point.value.std)
    return _describe(figure, f"{title} against bytes", descriptions)


# --- during the run ---------------------------------------------------------------------------------------


def plot_learning_curves(
    curves: Sequence[MethodCurve], title: str = "Accuracy", width: float = PAPER_WIDTH
) -> Figure:
    """Plot the main metric over the fraction of the run, one line per method with its number at the end."""
    figure, axes = plotting.create_axes(width, max(388, LABEL_GAP * len(curves) + 48), right=46, bottom=34)
    lines = [[(fraction, value.mean) for fraction, value in curve.values.items()] for curve in curves]
    plotting.percent_axis(axes, [y for line in lines for _, y in line])
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    offsets = plotting.end_label_offsets(axes, [line[-1][1] for line in lines], LABEL_GAP)
    has_markers = sum(map(len, lines)) <= MAX_MARKERS
    for curve, line, offset in zip(curves, lines, offsets, strict=True):
        shown = plotting.downsample(line)
        line_style = (0, (3.5, 2)) if is_color_repeated(curve.number) else "solid"
        axes.plot(
            *zip(*shown, strict=True), color=method_color(curve.number), lw=2, ls=line_style, label=curve.name
        )
        for x, y in shown if has_markers else shown[-1:]:
            _draw_marker(
                axes, curve.number, x, y, f"{curve.name}, {x:.0%} of the run: {format_percent(y)}", 6
            )
        plotting.draw_number(axes, curve.number, shown[-1], (26, offset))
    descriptions = [
        f"{curve.name} {format_percent(line[-1][1])}" for curve, line in zip(curves, lines, strict=True)
    ]
    descriptions[0] = f"Final values: {descriptions[0]}"
    return _describe(figure, f"{title} over the fraction of the run", descriptions)


# --- against epsilon --------------------------------------------------------------------------------------


def plot_against_epsilon(
    curves: Sequence[MethodCurve], title: str = "Accuracy", width: float = PAPER_WIDTH
) -> Figure:
    """Plot the main metric over epsilon on a logarithmic axis; runs without budget are at the right."""
    drawn = [curve for curve in curves if curve.values]
    figure, axes = plotting.create_axes(width, max(408, LABEL_GAP * len(drawn) + 48), right=46, bottom=34)
    plotting.percent_axis(axes, _spread_ends([value for curve in drawn for value in curve.values.values()]))
    budgets = sorted_budgets(drawn)
    finite = [epsilon for epsilon in budgets if math.isfinite(epsilon)] or [1.0]
    step = max(2.0, (finite[-1] / finite[0]) ** 0.3)
    x_of = {epsilon: epsilon if math.isfinite(epsilon) else finite[-1] * step for epsilon in budgets}
    axes.set_xscale("log")
    axes.set_xlim(finite[0] / step**0.3, max(x_of.values()) * step**0.3)
    axes.set_xticks([x_of[epsilon] for epsilon in budgets], [format_budget(epsilon) for epsilon in budgets])
    axes.set_xticks([], minor=True)
    axes.grid(axis="x")
    edge = finite[-1] * step**0.6
    if len(budgets) > len(finite) or budgets == [math.inf]:
        axes.axvline(edge, color=FAINT, lw=1, ls=(0, (3, 4)))
    final_values = [list(curve.values.values())[-1].mean for curve in drawn]
    offsets = plotting.end_label_offsets(axes, final_values, LABEL_GAP)
    descriptions = []
    for curve, offset in zip(drawn, offsets, strict=True):
        line = [(x_of[epsilon], value.mean) for epsilon, value in curve.values.items()]
        with_budget = [point for point in line if point[0] < edge]
        style: dict[str, Any] = {"color": method_color(curve.number), "lw": 2}
        style["ls"] = (0, (3.5, 2)) if is_color_repeated(curve.number) else "solid"
        if with_budget:
            axes.plot(*zip(*with_budget, strict=True), **style, label=curve.name)
        if 0 < len(with_budget) < len(line):
            axes.plot(*zip(*line[-2:], strict=True), **style, alpha=0.32)
        for epsilon, value in curve.values.items():
            tooltip = f"{curve.name}, epsilon {format_budget(epsilon)}: {value.text()}"
            _draw_marker(axes, curve.number, x_of[epsilon], value.mean, tooltip, 8, yerr=value.std)
        plotting.draw_number(axes, curve.number, line[-1], (26, offset))
        values = [
            f"{format_budget(epsilon)} {format_percent(value.mean)}"
            for epsilon, value in curve.values.items()
        ]
        descriptions.append(f"{curve.name}: {', '.join(values)}")
    return _describe(figure, f"{title} against epsilon", descriptions)


# --- against leakage --------------------------------------------------------------------------------------


def traffic_disk_radius(byte_count: float, largest: float) -> float:
    """Return the radius, in pixels, of a disk whose area stands for a number of bytes."""
    return MAX_RADIUS * math.sqrt(byte_count / largest) if largest > 0 else 0.0


def plot_against_leakage(
    points: Sequence[Point], column: ComparisonColumn, title: str = "Accuracy", width: float = PAPER_WIDTH
) -> Figure:
    """Plot the main metric over leakage in percent, with a line at random guessing; areas are bytes."""
    figure, axes = plotting.create_axes(width, 480, right=20, top=28, bottom=34)
    guess = 0.0 if column.guess is None else column.guess
    leakage = _spread_ends([point.leakage for point in points])
    low = min(guess, *leakage)
    plotting.percent_axis(axes, [guess, low, max(guess, low + 10, *leakage)], "x")
    axes.margins(x=0.03)
    left, right = axes.get_xlim()
    axes.set_xlim(left - 0.03 * (right - left), right + 0.03 * (right - left))
    plotting.percent_axis(axes, _spread_ends([point.value for point in points]))
    axes.grid(axis="x")
    axes.axvline(guess, color=MUTED, lw=1.5, ls=(0, (2, 2.7)))
    axes.annotate(
        "random guessing", (guess, 1), (0, 13), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha="center", annotation_clip=False,
    )  # fmt: skip
    largest = max(point.bytes for point in points)
    previous = {
        index: max(before for before in range(index) if points[before].number == point.number)
        for index, point in enumerate(points)
        if point.connected
    }
    for index, before in previous.items():
        line = [(points[end].leakage.mean, points[end].value.mean) for end in (before, index)]
        axes.plot(*zip(*line, strict=True), color=method_color(points[index].number), lw=1.5, alpha=0.55)
    # Large disks first, so that they do not hide small ones.
    for point in sorted(points, key=lambda point: -point.bytes):
        size = 2 * max(traffic_disk_radius(point.bytes, largest), DOT_RADIUS)
        color = method_color(point.number)
        if point.bytes > 0:
            style: dict[str, Any] = {"mec": color, "mew": 1.25, "clip_on": False}
            axes.plot(point.leakage.mean, point.value.mean, "o", ms=size, mfc=(color, 0.18), **style)
        errors = {"xerr": point.leakage.std, "yerr": point.value.std}
        tooltip, dot = point.describe(column.head), 2 * DOT_RADIUS + 2
        _draw_marker(axes, point.number, point.leakage.mean, point.value.mean, tooltip, dot, **errors)
    # Each point has its number and label; of connected points only the last one has the number.
    numbers = ["" if index in previous.values() else str(point.number) for index, point in enumerate(points)]
    labels = [" ".join(filter(None, pair)) for pair in zip(numbers, (p.label for p in points), strict=True)]
    positions = [(point.leakage.mean, point.value.mean) for point in points]
    half_widths = [7 + LETTER_WIDTH * len(label) / 2 for label in labels]
    offsets = plotting.side_label_offsets(axes, positions, half_widths, LABEL_GAP)
    for point, position, label, offset in zip(points, positions, labels, offsets, strict=True):
        plotting.draw_number(axes, point.number, position, offset, label)
    return _describe(
        figure, f"{title} against the {column.axis}", [point.describe(column.head) for point in points]
    )
