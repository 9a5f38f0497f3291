"""How drawings look: one palette, type and grid for pages and papers; a page has them as inline SVG.

Figures are matplotlib's, made without pyplot: nothing is shared between two of them, and none needs a screen.
They are drawn in light colors. In a page each color becomes the variable of the style sheet that has this
value, so that one drawing serves both color schemes.
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
    **{color: f"c{place}" for place, color in enumerate(METHOD_COLORS) if place},
}  # fmt: skip
WIDTHS = (330, 540, 1000)  # pixels that a page's drawing is laid out for; the style sheet picks one
PAPER_WIDTH = 540  # the same of a figure for a paper
MAX_POINTS = 600  # a line drawn over some 300 to 900 pixels shows no more than this
LABEL_DISTANCE = 16  # pixels from a point to the label beside it
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
    """The look of all drawings, for what is drawn or saved inside."""
    import matplotlib

    with matplotlib.rc_context({**STYLE, **more}), warnings.catch_warnings():
        # A name in a script that matplotlib's own font lacks is set by the reader's.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def create_axes(
    width: float, height: float, left: float = 46, right: float = 12, top: float = 14, bottom: float = 30
) -> tuple[Figure, Axes]:
    """A figure with one pair of axes; sizes and margins in pixels, which are points of a paper."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    figure.patch.set_visible(False)
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    axes = figure.add_axes(box)
    axes.patch.set_visible(False)
    return figure, axes


def create_grid(panels: int) -> tuple[Figure, list[Axes]]:
    """A figure of several small axes, up to three in a row, for papers."""
    from matplotlib.figure import Figure

    columns = min(3, panels)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(200 * columns / 72, 130 * rows / 72), dpi=72, layout="constrained")
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(panels)]


def to_svg(figure: Figure, name: str) -> Markup:
    """A figure as inline SVG of a page; its label is the drawing in words, for whoever does not see it.

    Its inner references follow from ``name``, which must differ from those of the page's other drawings.
    """
    out = io.StringIO()
    nothing: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with plot_style(**{"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata=nothing)
    drawn = out.getvalue()
    drawn = drawn[drawn.index(">", drawn.index("<svg")) + 1 :]
    for pattern, instead in SVG_REWRITES:
        drawn = re.sub(pattern, instead, drawn, flags=re.DOTALL)
    drawn = re.sub(r"<[^>]+>", lambda tag: re.sub(r"-?\d+\.\d{3,}", _round_number, tag[0]), drawn)
    for color, variable in CSS_VARIABLES.items():
        drawn = drawn.replace(color, f"var(--{variable})")
    width, height = (round(72 * float(side), 2) for side in figure.get_size_inches())
    head = Markup('<svg class="plot" role="img" aria-label="{}" viewBox="0 0 {:g} {:g}">')
    return head.format(figure.get_label(), width, height) + Markup(drawn.strip())


# What a page does not need of matplotlib's SVG: what is around it, its names, its type.
SVG_REWRITES = (
    (r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>|<clipPath.*?</clipPath>|<defs>\s*</defs>", ""),
    (r'<g id="title: ([^"]*)">', r"<g><title>\1</title>"),
    (r'<g id="[^"]*"/>|(?<=<g) id="[^"]*"| clip-path="[^"]*"| transform="rotate\(-0 [^"]*"', ""),
    (r"font-family: [^;\"]*;? ?", ""),
    (r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px"),
    (r"font: (\d+) ([\d.]+)px [^;\"]*", r"font-size: \2px;font-weight: \1"),
    (r"\s*\n\s*", " "),
)


def _round_number(found: re.Match[str]) -> str:
    """A number to a hundredth of a pixel."""
    return f"{round(float(found[0]), 2):g}"


def responsive(draw: Callable[..., Figure], name: str) -> Markup:
    """A drawing laid out for several widths, of which the style sheet shows the one that fits."""
    with plot_style():
        parts = [
            Markup('<div class="w{}">{}</div>').format(width, to_svg(draw(width=width), f"{name} {width}"))
            for width in WIDTHS
        ]
    return Markup('<div class="widths">{}</div>').format(Markup("").join(parts))


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure, as the end of its path's name says; the same figure gives the same bytes."""
    dates: Mapping[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(path.suffix, {})
    with plot_style(**{"svg.hashsalt": path.stem}):
        figure.savefig(path, dpi=220, bbox_inches="tight", metadata=dates)
    return path


# --- axes -------------------------------------------------------------------------------------------------


def percent_axis(axes: Axes, values: Sequence[float], axis: str = "y") -> None:
    """An axis in percent from a round value to a round value, a point high at least, none below 0."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    low = max(0.0, min(min(values), max(values) - 1))
    most = 5 if axis == "y" else max(5, round(axes.get_window_extent().width / 110))
    locator = MaxNLocator(most, steps=[1, 2, 5, 10])
    ticks = locator.tick_values(low, max(max(values), low + 1))
    getattr(axes, f"set_{axis}lim")(max(0.0, ticks[0]), ticks[-1])
    kept = getattr(axes, f"{axis}axis")
    kept.set_major_locator(locator)
    kept.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))


def plain_axis(axes: Axes, axis: str, most: int = 5) -> None:
    """Round ticks in figures: 1,000 and not 1e3."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    kept = getattr(axes, f"{axis}axis")
    kept.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    kept.set_major_formatter(FuncFormatter(lambda value, _: step_text(float(f"{value:.10g}"))))


def step_text(step: float) -> str:
    """A step in figures."""
    return f"{step:,.10g}"  # plain :g would round a step above a million


def set_tooltip(artist: Any, words: str) -> None:
    """What a page says to whoever points at something drawn."""
    artist.set_gid(f"title: {words}")


def downsample(points: Curve, most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most ``most`` points: each is the mean of as many neighbors as that takes.

    >>> downsample([(1, 10.0), (2, 20.0), (3, 30.0), (4, 50.0)], most=2)
    [(1.5, 15.0), (3.5, 40.0)]
    """
    size = math.ceil(len(points) / most)
    groups = [points[start : start + size] for start in range(0, len(points), max(size, 1))]
    return [(fmean(x for x, _ in near), fmean(y for _, y in near)) for near in groups]


def running_mean(points: Curve, share: float = 0.05) -> list[tuple[float, float]]:
    """The running mean over a centered window that is ``share`` of the line long.

    >>> running_mean([(0, 0.0), (1, 3.0), (2, 6.0)], share=0.5)
    [(0, 1.5), (1, 3.0), (2, 4.5)]
    """
    half = round(len(points) * share / 2)
    windows = [points[max(0, place - half) : place + half + 1] for place in range(len(points))]
    return [(x, fmean(y for _, y in near)) for (x, _), near in zip(points, windows, strict=True)]


# --- numbers and labels beside what they name -------------------------------------------------------------


def method_color(place: int) -> str:
    """A method's color, by its number from 1 up."""
    return METHOD_COLORS[(place - 1) % len(METHOD_COLORS)]


def is_color_repeated(place: int) -> bool:
    """Whether another method before it has its color: then it is drawn hollow, and its line dashed."""
    return (place - 1) // len(METHOD_COLORS) % 2 == 1


def draw_number(axes: Axes, place: int, at: XY, offset: XY, text: str = "") -> None:
    """A method's number, or another text, in its color, in pixels from what it names, and joined to it."""
    own, hollow, text = method_color(place), is_color_repeated(place), text or str(place)
    shape = "circle,pad=0.25" if len(text) < 3 else "round,pad=0.35,rounding_size=0.8"
    axes.annotate(
        text, at, offset, textcoords="offset points", ha="center", va="center_baseline",
        fontsize=10.5, fontweight="semibold", color=own if hollow else CARD, annotation_clip=False,
        zorder=3.5,
        bbox={"boxstyle": shape, "fc": CARD if hollow else own, "ec": own, "lw": 1.5},
        arrowprops={"arrowstyle": "-", "color": own, "lw": 1, "alpha": 0.6, "shrinkA": 0, "shrinkB": 0},
    )  # fmt: skip


def to_pixels(axes: Axes, at: tuple[float, float]) -> tuple[float, float]:
    """Where a point of the data is in the figure, once its axes have their limits."""
    x, y = axes.transData.transform(at)
    return float(x), float(y)


def spread_apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move label positions apart to at least ``gap``, from ``low`` to ``high`` if they fit.

    >>> spread_apart([50, 52, 10], gap=16, low=0, high=60)
    [44, 60, 10]
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = [max(place, low) for place in places]
    for before, index in pairwise(order):
        moved[index] = max(moved[index], moved[before] + gap)
    limit = high
    for index in reversed(order):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - gap
    return moved


def place_at_ends(axes: Axes, values: Sequence[float], gap: float) -> list[float]:
    """How far above each line's end its label stands, in pixels, for labels that keep apart."""
    heights = [to_pixels(axes, (axes.get_xlim()[0], value))[1] for value in values]
    box = axes.get_window_extent()
    moved = spread_apart(heights, gap, box.y0, box.y1)
    return [round(place - height, 2) for place, height in zip(moved, heights, strict=True)]


def place_beside(axes: Axes, at: Sequence[XY], halves: Sequence[float], gap: float) -> list[XY]:
    """Where labels stand beside points, in pixels from them: towards the middle, at heights that keep apart.

    ``halves`` are half of the labels' widths, ``gap`` is what their heights keep apart, all in pixels.
    """
    box = axes.get_window_extent()
    sides = [1 if to_pixels(axes, point)[0] < (box.x0 + box.x1) / 2 else -1 for point in at]
    rises = place_at_ends(axes, [y for _, y in at], gap)
    return [
        (side * (LABEL_DISTANCE + half), rise) for side, half, rise in zip(sides, halves, rises, strict=True)
    ]
