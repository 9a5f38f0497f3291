"""All figures: style, figures of a run, and figures of a comparison.

Figures use matplotlib without pyplot, so they share no state and need no display. They are drawn in light
colors. In a page's SVG each color is replaced by the CSS variable with this value, so that one drawing works
in light and dark mode. In a comparison each method has a number and a color. Pages name them in a table,
figures for papers in a legend.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fedstill.attacks.attack import ComparisonColumn
from fedstill.core.name_normalization import natural_sort_key
from fedstill.core.text_format import format_bytes, format_percent
from fedstill.privacy.statement import format_epsilon_bound
from fedstill.report.comparison_records import (
    ComparedMethod,
    ComparedSetting,
    ComparisonSummary,
    Decomposition,
    MethodCurve,
)
from fedstill.report.records import (
    CENTRALIZED,
    ENSEMBLE,
    LOCAL,
    STANDALONE,
    ConfidenceBin,
    RunFiles,
    model_rows,
)
from fedstill.report.statistics import Spread
from fedstill.report.tables import format_budget

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


XY = tuple[float, float]
Curve = Sequence[XY]

INK, MUTED, FAINT, GRID, CARD, ACCENT = "#16191f", "#5b6472", "#8b93a1", "#e9ebef", "#ffffff", "#0a5fb4"
METHOD_COLORS = (ACCENT, "#c2410c", "#15803d", "#7e22ce", "#a16207", "#be185d", "#0e7490", "#475569")
CSS_VARIABLES = {
    INK: "ink", MUTED: "muted", FAINT: "faint", GRID: "grid", CARD: "card", ACCENT: "accent",
    **{color: f"c{index}" for index, color in enumerate(METHOD_COLORS) if index},
}  # fmt: skip
WIDTHS = (330, 540, 1000)  # pixels; layouts of a page's figure, of which the style sheet shows one
PAPER_WIDTH = 540  # pixels; width of a figure for a paper
MAX_POINTS = 600  # of a line, which is 300 to 900 pixels long
LABEL_DISTANCE = 16  # pixels from a point to its label
FORMATS = ("pdf", "svg", "png")

STYLE = {
    "font.size": 12.0,
    "text.color": MUTED,
    "text.parse_math": False,  # names are shown as they are
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 12.0,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.spines.bottom": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.titlesize": 12.0,
    "axes.titleweight": 600,
    "axes.titlecolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 1.0,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.pad": 8.0,
    "ytick.major.pad": 8.0,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 10.0,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}


@contextmanager
def plot_style(**more: Any) -> Iterator[None]:
    """Apply the style of all figures within a ``with`` block."""
    import matplotlib

    with matplotlib.rc_context({**STYLE, **more}), warnings.catch_warnings():
        # Names in scripts that matplotlib's font lacks are shown in the reader's font.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def create_axes(
    width: float, height: float, left: float = 46, right: float = 12, top: float = 14, bottom: float = 30
) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes; size and margins in pixels (points on paper)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    figure.patch.set_visible(False)
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    axes = figure.add_axes(box)
    axes.patch.set_visible(False)
    return figure, axes


def create_grid(panels: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with several small axes, up to three in a row, for papers."""
    from matplotlib.figure import Figure

    columns = min(3, panels)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(200 * columns / 72, 130 * rows / 72), dpi=72, layout="constrained")
    return figure, [figure.add_subplot(rows, columns, index + 1) for index in range(panels)]


def to_svg(figure: Figure, name: str) -> Markup:
    """Return a figure as inline SVG of a page; the figure's label becomes its accessible text.

    Args:
        figure: figure to convert.
        name: seed of the SVG's inner ids; it must be unique within the page.
    """
    out = io.StringIO()
    no_metadata: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with plot_style(**{"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata=no_metadata)
    content = out.getvalue()
    content = content[content.index(">", content.index("<svg")) + 1 :]
    for pattern, replacement in SVG_REWRITES:
        content = re.sub(pattern, replacement, content, flags=re.DOTALL)
    content = re.sub(r"<[^>]+>", lambda tag: re.sub(r"-?\d+\.\d{3,}", _round_number, tag[0]), content)
    for color, variable in CSS_VARIABLES.items():
        content = content.replace(color, f"var(--{variable})")
    width, height = (round(72 * float(side), 2) for side in figure.get_size_inches())
    head = Markup('<svg class="plot" role="img" aria-label="{}" viewBox="0 0 {:g} {:g}">')
    return head.format(figure.get_label(), width, height) + Markup(content.strip())


# Rewrites that remove metadata, ids and fonts from matplotlib's SVG, and turn tooltips into titles.
SVG_REWRITES = (
    (r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>|<clipPath.*?</clipPath>|<defs>\s*</defs>", ""),
    (r'<g id="title: ([^"]*)">', r"<g><title>\1</title>"),
    (r'<g id="[^"]*"/>|(?<=<g) id="[^"]*"| clip-path="[^"]*"| transform="rotate\(-0 [^"]*"', ""),
    (r"font-family: [^;\"]*;? ?", ""),
    (r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px"),
    (r"font: (\d+) ([\d.]+)px [^;\"]*", r"font-size: \2px;font-weight: \1"),
    (r"\s*\n\s*", " "),
)


def _round_number(match: re.Match[str]) -> str:
    return f"{round(float(match[0]), 2):g}"


def responsive_svg(draw: Callable[..., Figure], name: str) -> Markup:
    """Return a figure drawn for several widths, of which the style sheet shows the one that fits."""
    with plot_style():
        parts = [
            Markup('<div class="w{}">{}</div>').format(width, to_svg(draw(width=width), f"{name} {width}"))
            for width in WIDTHS
        ]
    return Markup('<div class="widths">{}</div>').format(Markup("").join(parts))


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure in the format of the path's suffix; the same figure gives the same bytes."""
    dates: Mapping[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(path.suffix, {})
    with plot_style(**{"svg.hashsalt": path.stem}):
        figure.savefig(path, dpi=220, bbox_inches="tight", metadata=dates)
    return path


# --- axes -------------------------------------------------------------------------------------------------


def percent_axis(axes: Axes, values: Sequence[float], axis: str = "y") -> None:
    """Set an axis in percent with round limits, at least one point long and never below 0."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    low = max(0.0, min(min(values), max(values) - 1))
    max_ticks = 5 if axis == "y" else max(5, round(axes.get_window_extent().width / 110))
    locator = MaxNLocator(max_ticks, steps=[1, 2, 5, 10])
    ticks = locator.tick_values(low, max(max(values), low + 1))
    getattr(axes, f"set_{axis}lim")(max(0.0, ticks[0]), ticks[-1])
    percent_scale = getattr(axes, f"{axis}axis")
    percent_scale.set_major_locator(locator)
    percent_scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))


def plain_axis(axes: Axes, axis: str, max_ticks: int = 5) -> None:
    """Set round ticks with plain numbers: 1,000 and not 1e3."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    plain_scale = getattr(axes, f"{axis}axis")
    plain_scale.set_major_locator(MaxNLocator(max_ticks, steps=[1, 2, 5, 10]))
    plain_scale.set_major_formatter(FuncFormatter(lambda value, _: step_text(float(f"{value:.10g}"))))


def step_text(step: float) -> str:
    """Return a step as a number with thousands separators."""
    return f"{step:,.10g}"  # :g would round steps above a million


def set_tooltip(artist: Any, text: str) -> None:
    """Set the tooltip that a page shows for an artist."""
    artist.set_gid(f"title: {text}")


def downsample(points: Curve, max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return at most ``max_points`` points, each the mean of consecutive points.

    >>> downsample([(1, 10.0), (2, 20.0), (3, 30.0), (4, 50.0)], max_points=2)
    [(1.5, 15.0), (3.5, 40.0)]
    """
    size = math.ceil(len(points) / max_points)
    groups = [points[start : start + size] for start in range(0, len(points), max(size, 1))]
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]


def running_mean(points: Curve, fraction: float = 0.05) -> list[tuple[float, float]]:
    """Return the running mean over a centered window of a fraction of the line.

    >>> running_mean([(0, 0.0), (1, 3.0), (2, 6.0)], fraction=0.5)
    [(0, 1.5), (1, 3.0), (2, 4.5)]
    """
    half = round(len(points) * fraction / 2)
    windows = [points[max(0, index - half) : index + half + 1] for index in range(len(points))]
    return [(x, fmean(y for _, y in window)) for (x, _), window in zip(points, windows, strict=True)]


# --- numbers and labels of methods ------------------------------------------------------------------------


def method_color(number: int) -> str:
    """Return a method's color by its number, from 1."""
    return METHOD_COLORS[(number - 1) % len(METHOD_COLORS)]


def is_color_repeated(number: int) -> bool:
    """Return whether a method shares its color with an earlier one; it is then drawn hollow and dashed."""
    return (number - 1) // len(METHOD_COLORS) % 2 == 1


def draw_number(axes: Axes, number: int, point: XY, offset: XY, text: str = "") -> None:
    """Draw a method's number, or another text, in its color and connected to a point.

    Args:
        axes: axes to draw on.
        number: number of the method, from 1.
        point: named point, in data coordinates.
        offset: distance of the label from the point, in pixels.
        text: text instead of the number.
    """
    own_color, hollow, text = method_color(number), is_color_repeated(number), text or str(number)
    shape = "circle,pad=0.25" if len(text) < 3 else "round,pad=0.35,rounding_size=0.8"
    axes.annotate(
        text, point, offset, textcoords="offset points", ha="center", va="center_baseline",
        fontsize=10.5, fontweight="semibold", color=own_color if hollow else CARD, annotation_clip=False,
        zorder=3.5,
        bbox={"boxstyle": shape, "fc": CARD if hollow else own_color, "ec": own_color, "lw": 1.5},
        arrowprops={"arrowstyle": "-", "color": own_color, "lw": 1, "alpha": 0.6, "shrinkA": 0, "shrinkB": 0},
    )  # fmt: skip


def to_pixels(axes: Axes, point: tuple[float, float]) -> tuple[float, float]:
    """Return the pixel position of a point; the limits of the axes must be set."""
    x, y = axes.transData.transform(point)
    return float(x), float(y)


def spread_apart(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move label positions to distances of at least ``gap``, between ``low`` and ``high`` if they fit.

    >>> spread_apart([50, 52, 10], gap=16, low=0, high=60)
    [44, 60, 10]
    """
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    moved = [max(position, low) for position in positions]
    for before, index in pairwise(order):
        moved[index] = max(moved[index], moved[before] + gap)
    limit = high
    for index in reversed(order):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - gap
    return moved


def end_label_offsets(axes: Axes, values: Sequence[float], gap: float) -> list[float]:
    """Return vertical offsets, in pixels, of labels at the ends of lines, so that labels do not overlap."""
    heights = [to_pixels(axes, (axes.get_xlim()[0], value))[1] for value in values]
    box = axes.get_window_extent()
    moved = spread_apart(heights, gap, box.y0, box.y1)
    return [round(position - height, 2) for position, height in zip(moved, heights, strict=True)]


def side_label_offsets(
    axes: Axes, points: Sequence[XY], half_widths: Sequence[float], gap: float
) -> list[XY]:
    """Return offsets, in pixels, of labels to the left or right of points, so that labels do not overlap.

    Args:
        axes: axes of the points.
        points: named points, in data coordinates.
        half_widths: half of each label's width, in pixels.
        gap: vertical distance between labels, in pixels.
    """
    box = axes.get_window_extent()
    sides = [1 if to_pixels(axes, point)[0] < (box.x0 + box.x1) / 2 else -1 for point in points]
    heights = end_label_offsets(axes, [y for _, y in points], gap)
    return [
        (side * (LABEL_DISTANCE + half_width), height)
        for side, half_width, height in zip(sides, half_widths, heights, strict=True)
    ]


# --- figures of a run -----------------------------------------------------------------------------------


MIN_LABELED_WIDTH = 500  # pixels from which lines have their names at their ends
LINE_STYLE_OF_MODEL = {
    STANDALONE: "dotted",
    LOCAL: "dotted",
    ENSEMBLE: "dashed",
    CENTRALIZED: "solid",
}
LINE_STYLES: Mapping[str, Any] = {"dotted": (0, (0.7, 2.6)), "dashed": (0, (5, 3)), "solid": "solid"}
LOCAL_LABEL = "local models"


@dataclass(frozen=True)
class LearningCurve:
    """Main metric during a run, in percent.

    Args:
        points: step and value of the main model, at least one.
        name: name of the main model.
        references: baselines and upper bounds: name, line style and value.
        local_models: step and mean value of the nodes' local models; may be empty.
        unit: "step" or "round".
        title: title of the metric.
    """

    points: Curve
    name: str
    references: Sequence[tuple[str, str, float]] = ()
    local_models: Curve = ()
    unit: str = "step"
    title: str = "Accuracy"


def read_learning_curve(run: RunFiles) -> LearningCurve | None:
    """Return a run's learning curve; None if nothing was measured during the run."""
    points, metrics = sorted(run.metrics.main_model.items()), run.result.metrics
    if not points:
        return None
    unit, central = run.result.iteration_unit, run.result.evaluated_model
    # Local models that are trained before the first step would be a flat line.
    local_models = sorted(run.metrics.local_models.items()) if unit == "round" and central != "nodes" else []
    references = [
        (model.name, LINE_STYLE_OF_MODEL[model.model], model.value)
        for model in model_rows(run.result)
        if model.value is not None
        and model.model in LINE_STYLE_OF_MODEL
        and not (local_models and model.model == LOCAL)
    ]
    return LearningCurve(points, run.result.main_model_name, references, local_models, unit, metrics[0].title)


def plot_learning_curve(curve: LearningCurve, width: float = PAPER_WIDTH) -> Figure:
    """Plot a learning curve with horizontal lines for baselines and upper bounds.

    Lines are named at their ends if the figure is wide enough.
    """
    labeled = width >= MIN_LABELED_WIDTH
    figure, axes = create_axes(width, 364, right=178 if labeled else 14, bottom=48)
    values = [y for _, y in (*curve.points, *curve.local_models)] + [y for *_, y in curve.references]
    percent_axis(axes, values)
    plain_axis(axes, "x")
    axes.set_xlim(0, max(1.0, *(x for x, _ in curve.points)))
    axes.set_xlabel(curve.unit)
    for name, line_style, y in curve.references:
        line = axes.axhline(
            y, color=MUTED, lw=2 if line_style == "dotted" else 1.5, ls=LINE_STYLES[line_style], label=name
        )
        line.set_dash_capstyle("round")
    if curve.local_models:
        local = downsample(curve.local_models)
        axes.plot(*zip(*local, strict=True), color=MUTED, lw=1.5, label=LOCAL_LABEL)
    shown = downsample(curve.points)
    axes.plot(*zip(*shown, strict=True), color=ACCENT, lw=2.25, label=curve.name, clip_on=False, zorder=4)
    for x, y in shown if len(shown) <= MAX_MARKERS else ():
        (marker,) = axes.plot(x, y, "o", ms=7, mfc=ACCENT, mec=CARD, mew=1.5, clip_on=False, zorder=5)
        set_tooltip(marker, f"{curve.unit} {step_text(x)}: {format_percent(y)}")
    named = [(curve.name, ACCENT, curve.points[-1][1])]
    named += [(name, MUTED, y) for name, _, y in curve.references]
    named += [(LOCAL_LABEL, MUTED, curve.local_models[-1][1])] if curve.local_models else []
    steps = step_text(max(x for x, _ in curve.points))
    final = "; ".join(f"{name} {format_percent(y)}" for name, _, y in named)
    figure.set_label(f"{curve.title} on the test data over {steps} {curve.unit}s. Final values: {final}.")
    if labeled:
        for (name, ink, y), offset in zip(
            named, end_label_offsets(axes, [y for *_, y in named], gap=18), strict=True
        ):
            axes.annotate(
                f"{name} {format_percent(y)}", (1, y), (12, offset), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="center", color=ink, annotation_clip=False,
                fontweight="semibold" if ink == ACCENT else "normal",
            )  # fmt: skip
    return figure


def plot_reliability(bins: Sequence[ConfidenceBin], width: float = PAPER_WIDTH) -> Figure:
    """Plot the reliability diagram: accuracy over confidence by bin.

    The dashed line is perfect calibration. Larger points are bins with more predictions.
    """
    figure, axes = create_axes(width, 330, bottom=48)
    for axis in ("x", "y"):
        percent_axis(axes, (0.0, 100.0), axis)
    axes.set_xlabel("confidence")
    axes.plot((0, 100), (0, 100), color=MUTED, lw=1.5, ls=LINE_STYLES["dashed"])
    line = [(each_bin.confidence, each_bin.accuracy) for each_bin in bins]
    axes.plot(*zip(*line, strict=True), color=ACCENT, lw=2.25, clip_on=False, zorder=4)
    largest = max(each_bin.examples for each_bin in bins)
    for (x, y), each_bin in zip(line, bins, strict=True):
        size = 5 + 9 * (each_bin.examples / largest) ** 0.5
        (marker,) = axes.plot(x, y, "o", ms=size, mfc=ACCENT, mec=CARD, mew=1.5, clip_on=False, zorder=5)
        set_tooltip(
            marker,
            f"{each_bin.examples:,} predictions, confidence {format_percent(x)}: "
            f"accuracy {format_percent(y)}",
        )
    summary = "; ".join(
        f"confidence {format_percent(each_bin.confidence)}, accuracy {format_percent(each_bin.accuracy)}"
        for each_bin in bins
    )
    figure.set_label(f"Reliability diagram: {summary}.")
    return figure


Losses = Mapping[str, Mapping[float, float | None]]  # by name, by step; None is not finite


def local_losses(run: RunFiles) -> Losses:
    """Return losses of local training by the node's display name, and of the centralized model."""
    log = run.metrics
    by_node = {
        run.result.node_display_name(name): log.local_losses[name]
        for name in sorted(log.local_losses, key=natural_sort_key)
    }
    return {**by_node, "centralized": log.centralized_losses} if log.centralized_losses else by_node


def finite_points(values: Mapping[float, float | None]) -> list[tuple[float, float]]:
    """Return step and value of the finite values, in order of steps."""
    return [(step, value) for step, value in sorted(values.items()) if value is not None]


def draw_loss(axes: Axes, line: Curve, span: tuple[float, float] | None = None) -> None:
    """Draw one loss over steps: pale its values, strong their running mean.

    Args:
        axes: axes to draw on.
        line: step and value.
        span: limits of an axis that several losses share.
    """
    shown = downsample(line, 300)
    low, high = span or (min(y for _, y in shown), max(y for _, y in shown))
    if 0 < low < 0.3 * high:  # start the axis at zero if the values are close to it
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-200):  # a constant gets a margin on both sides
        margin = max(0.5, abs(low) * 1e-3)
        low, high = low - margin, high + margin
    first, last = line[0][0], line[-1][0]
    axes.set_ylim(low, high)
    plain_axis(axes, "y", 4)
    axes.set_xlim(*((first, last) if last > first else (first - 1, first + 1)))
    ticks = [first, last] if last > first else [first]
    axes.set_xticks(ticks, [step_text(step) for step in ticks])
    if last > first:
        start, end = axes.get_xticklabels()
        start.set_horizontalalignment("left")
        end.set_horizontalalignment("right")
    if len(shown) == 1:
        axes.plot(*shown[0], "o", ms=6, mfc=ACCENT, mec=CARD, mew=1.5)
    axes.plot(*zip(*shown, strict=True), color=ACCENT, lw=1, alpha=0.32)
    axes.plot(*zip(*running_mean(shown), strict=True), color=ACCENT, lw=2.25)


def plot_loss(name: str, line: Curve, span: tuple[float, float] | None = None) -> Figure:
    """Plot one loss as a small panel of a page."""
    figure, axes = create_axes(300, 132, left=44, right=6, top=10, bottom=26)
    draw_loss(axes, line, span)
    first, last = (step_text(line[index][0]) for index in (0, -1))
    figure.set_label(f"{name}, from step {first} to {last}: {line[0][1]:.4g} to {line[-1][1]:.4g}.")
    return figure


def plot_losses(losses: Losses, *, shared: bool = False) -> Figure:
    """Plot several losses in a grid, each below its name; ``shared`` gives them one scale."""
    lines = {name: line for name, values in losses.items() if (line := finite_points(values))}
    all_values = [y for line in lines.values() for _, y in line]
    figure, grid = create_grid(len(lines))
    for axes, (name, line) in zip(grid, lines.items(), strict=True):
        draw_loss(axes, line, (min(all_values), max(all_values)) if shared else None)
        axes.set_title(name, loc="left")
    return figure


# --- points and curves of a comparison ------------------------------------------------------------------


NO_LEAKAGE = Spread(0.0)


@dataclass(frozen=True)
class Point:
    """Point of a scatter plot: one method in one setting.

    Args:
        number: number of the method.
        name: name of the method.
        value: main metric in percent.
        bytes: bytes up and down of a whole run over all nodes.
        leakage: metric of attacks in percent, if it is an axis.
        label: epsilon and letter of the setting, next to the number.
        details: epsilon and setting in words.
        connected: whether a line connects the point to the method's previous point.
    """

    number: int
    name: str
    value: Spread
    bytes: float
    leakage: Spread = NO_LEAKAGE
    label: str = ""
    details: str = ""
    connected: bool = False

    def describe(self, leakage_name: str) -> str:
        """Return the point in words; ``leakage_name`` is the name of the attacks' metric."""
        name = f"{self.name}, {self.details}" if self.details else self.name
        values = f"{format_percent(self.value.mean)}, {leakage_name} {format_percent(self.leakage.mean)}"
        return f"{name}: {values}, {format_bytes(round(self.bytes))}"


@dataclass(frozen=True)
class LeakageScatter:
    """Main metric against leakage.

    Args:
        column: metric of attacks on the axis; None if no metric can be an axis.
        points: points, those of one method in the order in which lines connect them.
        letters: letters of settings with their names.
        missing: methods and settings that lack a metric, in words.
    """

    column: ComparisonColumn | None
    points: Sequence[Point]
    letters: Sequence[tuple[str, str]]
    missing: Sequence[str]


def scatter_points(setting: ComparedSetting) -> list[Point]:
    """Return main metric and bytes of each method that has both."""
    return [point for entry in setting.entries if (point := _point(entry)) is not None]


def _point(entry: ComparedMethod) -> Point | None:
    value, total_bytes = entry.spread(entry.metric), entry.total_bytes()
    if value is None or total_bytes is None:
        return None
    return Point(entry.number, entry.name, value, total_bytes)


def learning_curves(setting: ComparedSetting) -> list[MethodCurve]:
    """Return the learning curve of each method that measured its main metric during the run."""
    return [
        MethodCurve(entry.number, entry.name, curve)
        for entry in setting.entries
        if (curve := entry.learning_curve())
    ]


def leakage_scatter(summary: ComparisonSummary) -> LeakageScatter:
    """Return main metric against leakage over all settings.

    If settings differ in the privacy budget alone, lines connect the points of each method. Otherwise
    settings have letters.
    """
    by_budget = bool(summary.budget_curves())
    column = next((column for column in summary.leakage_columns if column.axis), None)
    names = [setting.name for setting in summary.settings]
    letters = dict(zip(names, ascii_lowercase, strict=False)) if len(names) > 1 and not by_budget else {}
    entries = [(setting.name, entry) for setting in summary.settings for entry in setting.entries]
    if by_budget:
        entries.sort(key=lambda pair: (pair[1].number, pair[1].budget))
    points: list[Point] = []
    missing = []
    for name, entry in entries:
        point, leakage = _point(entry), None if column is None else entry.strongest_attack_and_value(column)
        if point is None or leakage is None:
            missing.append(", ".join(part for part in (entry.name, name) if part))
            continue
        bound = entry.privacy_bound()
        epsilon = "" if bound is None else format_epsilon_bound(bound[0])
        label = ", ".join(filter(None, (letters.get(name), epsilon and f"\u03b5 {epsilon}")))
        details = ", ".join(filter(None, (name, epsilon and f"epsilon {epsilon}")))
        connected = by_budget and bool(points) and points[-1].number == point.number
        points.append(replace(point, leakage=leakage[1], label=label, details=details, connected=connected))
    return LeakageScatter(column, points, [(letter, name) for name, letter in letters.items()], missing)


def sorted_budgets(curves: Sequence[MethodCurve]) -> list[float]:
    """Return the budgets of all curves in ascending order."""
    return sorted({epsilon for curve in curves for epsilon in curve.values})


# --- figures of a comparison ----------------------------------------------------------------------------


LABEL_GAP = 22  # pixels between labels
MAX_RADIUS, DOT_RADIUS = 22.0, 3.0  # pixels; of the disk for the most bytes, and of the dot in its center
LETTER_WIDTH = 6.4  # pixels
MAX_LABEL = 18  # letters of a method's name at its point
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
    set_tooltip(marker, tooltip)


def _point_label(number: int, name: str, width: float) -> tuple[str, float]:
    """Return the text at a method's point or line, and half of its width in pixels: the name if it
    fits, otherwise the number, which the legend explains."""
    text = name if width >= PAPER_WIDTH and len(name) <= MAX_LABEL else str(number)
    return text, max(10.0, LETTER_WIDTH * len(text) / 2 + 6)


def _create_curve_axes(
    curves: Sequence[MethodCurve], width: float, height: int
) -> tuple[Figure, Axes, list[tuple[str, float]]]:
    """Return figure and axes with space for labels at the right, and the labels (:func:`_point_label`)."""
    labels = [_point_label(curve.number, curve.name, width) for curve in curves]
    side = 26 + 2 * max(half for _, half in labels)
    figure, axes = create_axes(width, max(height, LABEL_GAP * len(curves) + 48), right=side, bottom=34)
    return figure, axes, labels


def _line_style(number: int) -> dict[str, Any]:
    dashes = (0, (3.5, 2)) if is_color_repeated(number) else "solid"
    return {"color": method_color(number), "lw": 2, "ls": dashes}


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

    figure, axes = create_axes(width, 408, right=30, bottom=34)
    percent_axis(axes, _spread_ends([point.value for point in points]))
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
    labels = [_point_label(point.number, point.name, width) for point in points]
    offsets = side_label_offsets(axes, positions, [half for _, half in labels], LABEL_GAP)
    descriptions = []
    for point, (text, _), offset in zip(points, labels, offsets, strict=True):
        size = format_bytes(round(point.bytes))
        descriptions.append(f"{point.name} {format_percent(point.value.mean)}, {size}")
        deviation = "" if point.value.std is None else f" \u00b1 {point.value.std:.1f}"
        tooltip = f"{point.name}: {format_percent(point.value.mean)}{deviation}, {size}"
        draw_number(axes, point.number, (point.bytes, point.value.mean), offset, text)
        _draw_marker(axes, point.number, point.bytes, point.value.mean, tooltip, yerr=point.value.std)
    return _describe(figure, f"{title} against bytes", descriptions)


# --- from teachers to student -----------------------------------------------------------------------------


def plot_decompositions(
    parts: Sequence[Decomposition], title: str = "Accuracy", width: float = PAPER_WIDTH
) -> Figure:
    """Plot the main metric from teachers over their ensemble to the student, one line per method.

    A gray bar leads from the teachers' mean to their ensemble, and a line in the method's color from there to
    its student.
    """
    labels = [_point_label(part.entry.number, part.entry.name, width) for part in parts]
    side = max(30.0, 2 * max(half for _, half in labels))
    figure, axes = create_axes(width, 2 * LABEL_GAP * len(parts) + 60, left=30, right=side, bottom=34)
    spreads = [spread for part in parts for spread in (part.teachers, part.ensemble, part.student)]
    percent_axis(axes, [spread.mean for spread in spreads], axis="x")
    axes.set_ylim(len(parts) - 0.4, -0.6)
    axes.set_yticks([])
    axes.grid(axis="x")
    descriptions = []
    for y, (part, (text, half)) in enumerate(zip(parts, labels, strict=True)):
        number, name = part.entry.number, part.entry.name
        teachers, ensemble, student = (spread.mean for spread in (part.teachers, part.ensemble, part.student))
        axes.plot([teachers, ensemble], [y, y], color=GRID, lw=12, solid_capstyle="butt")
        axes.plot([ensemble, student], [y, y], color=method_color(number), lw=3)
        for value, of in ((teachers, "teachers"), (ensemble, "ensemble")):
            (tick,) = axes.plot([value], [y], marker="|", ms=15, mew=2, color=MUTED)
            set_tooltip(tick, f"{name}, {of}: {format_percent(value)}")
        offset = (half + LABEL_DISTANCE if student >= ensemble else -half - LABEL_DISTANCE, 0)
        draw_number(axes, number, (student, y), offset if text == name else (0, 0), text)
        descriptions.append(
            f"{name} {format_percent(teachers)}, {format_percent(ensemble)}, {format_percent(student)}"
        )
    return _describe(figure, f"{title} of teachers, ensemble and student", descriptions)


# --- during the run ---------------------------------------------------------------------------------------


def plot_learning_curves(
    curves: Sequence[MethodCurve], title: str = "Accuracy", width: float = PAPER_WIDTH
) -> Figure:
    """Plot the main metric over the fraction of the run, one line per method with its number at the end."""
    figure, axes, labels = _create_curve_axes(curves, width, 388)
    lines = [[(fraction, value.mean) for fraction, value in curve.values.items()] for curve in curves]
    percent_axis(axes, [y for line in lines for _, y in line])
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    offsets = end_label_offsets(axes, [line[-1][1] for line in lines], LABEL_GAP)
    has_markers = sum(map(len, lines)) <= MAX_MARKERS
    for curve, line, (text, half), offset in zip(curves, lines, labels, offsets, strict=True):
        shown = downsample(line)
        axes.plot(*zip(*shown, strict=True), **_line_style(curve.number), label=curve.name)
        for x, y in shown if has_markers else shown[-1:]:
            _draw_marker(
                axes, curve.number, x, y, f"{curve.name}, {x:.0%} of the run: {format_percent(y)}", 6
            )
        draw_number(axes, curve.number, shown[-1], (LABEL_DISTANCE + half, offset), text)
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
    figure, axes, labels = _create_curve_axes(drawn, width, 408)
    percent_axis(axes, _spread_ends([value for curve in drawn for value in curve.values.values()]))
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
    offsets = end_label_offsets(axes, final_values, LABEL_GAP)
    descriptions = []
    for curve, (text, half), offset in zip(drawn, labels, offsets, strict=True):
        line = [(x_of[epsilon], value.mean) for epsilon, value in curve.values.items()]
        with_budget = [point for point in line if point[0] < edge]
        style = _line_style(curve.number)
        if with_budget:
            axes.plot(*zip(*with_budget, strict=True), **style, label=curve.name)
        if 0 < len(with_budget) < len(line):
            axes.plot(*zip(*line[-2:], strict=True), **style, alpha=0.32)
        for epsilon, value in curve.values.items():
            tooltip = f"{curve.name}, epsilon {format_budget(epsilon)}: {value.text()}"
            _draw_marker(axes, curve.number, x_of[epsilon], value.mean, tooltip, 8, yerr=value.std)
        draw_number(axes, curve.number, line[-1], (LABEL_DISTANCE + half, offset), text)
        values = [
            f"{format_budget(epsilon)} {format_percent(value.mean)}"
            for epsilon, value in curve.values.items()
        ]
        descriptions.append(f"{curve.name}: {', '.join(values)}")
    return _describe(figure, f"{title} against epsilon", descriptions)


# --- against malicious nodes ------------------------------------------------------------------------------


def plot_against_malicious_nodes(
    curves: Sequence[MethodCurve], title: str = "Accuracy", width: float = PAPER_WIDTH
) -> Figure:
    """Plot the main metric over the number of malicious nodes, one line per method with its number."""
    figure, axes, labels = _create_curve_axes(curves, width, 388)
    percent_axis(axes, _spread_ends([value for curve in curves for value in curve.values.values()]))
    counts = sorted({count for curve in curves for count in curve.values})
    margin = 0.06 * (counts[-1] - counts[0])
    axes.set_xlim(counts[0] - margin, counts[-1] + margin)
    axes.set_xticks(counts, [f"{count:.0f}" for count in counts])
    offsets = end_label_offsets(axes, [list(curve.values.values())[-1].mean for curve in curves], LABEL_GAP)
    descriptions = []
    for curve, (text, half), offset in zip(curves, labels, offsets, strict=True):
        line = [(count, value.mean) for count, value in curve.values.items()]
        axes.plot(*zip(*line, strict=True), **_line_style(curve.number), label=curve.name)
        for count, value in curve.values.items():
            tooltip = f"{curve.name}, {count:.0f} malicious: {value.text()}"
            _draw_marker(axes, curve.number, count, value.mean, tooltip, 8, yerr=value.std)
        draw_number(axes, curve.number, line[-1], (LABEL_DISTANCE + half, offset), text)
        values = [f"{count:.0f} {format_percent(value.mean)}" for count, value in curve.values.items()]
        descriptions.append(f"{curve.name}: {', '.join(values)}")
    return _describe(figure, f"{title} against malicious nodes", descriptions)


# --- against leakage --------------------------------------------------------------------------------------


def traffic_disk_radius(byte_count: float, largest: float) -> float:
    """Return the radius, in pixels, of a disk whose area stands for a number of bytes."""
    return MAX_RADIUS * math.sqrt(byte_count / largest) if largest > 0 else 0.0


def plot_against_leakage(
    points: Sequence[Point], column: ComparisonColumn, title: str = "Accuracy", width: float = PAPER_WIDTH
) -> Figure:
    """Plot the main metric over leakage in percent, with a line at random guessing; areas are bytes."""
    figure, axes = create_axes(width, 480, right=20, top=28, bottom=34)
    guess = 0.0 if column.guess is None else column.guess
    leakage = _spread_ends([point.leakage for point in points])
    low = min(guess, *leakage)
    percent_axis(axes, [guess, low, max(guess, low + 10, *leakage)], "x")
    axes.margins(x=0.03)
    left, right = axes.get_xlim()
    axes.set_xlim(left - 0.03 * (right - left), right + 0.03 * (right - left))
    percent_axis(axes, _spread_ends([point.value for point in points]))
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
    offsets = side_label_offsets(axes, positions, half_widths, LABEL_GAP)
    for point, position, label, offset in zip(points, positions, labels, offsets, strict=True):
        draw_number(axes, point.number, position, offset, label)
    return _describe(
        figure, f"{title} against the {column.axis}", [point.describe(column.head) for point in points]
    )
