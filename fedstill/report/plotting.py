"""Style and helpers of all figures: palette, axes, labels, and inline SVG for pages.

Figures use matplotlib without pyplot, so they share no state and need no display. They are drawn in light
colors. In a page's SVG each color is replaced by the CSS variable with this value, so that one drawing works
in light and dark mode.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

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
