"""A run's figures: what models reach over its steps or rounds, and losses, as pages and papers show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedstill.core.text_format import format_percent
from fedstill.federation.node_order import natural_sort_key
from fedstill.report import plotting
from fedstill.report.model_scores import comparison
from fedstill.report.plotting import ACCENT, CARD, MUTED, PAPER_WIDTH, Curve
from fedstill.report.result_parts import ConfidenceBin
from fedstill.report.run_files import RunFiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIN_LABELED_WIDTH = 500  # pixels from which on lines have their names at their ends
MAX_DOTS = 60  # a line of more points has no dots on it
LINE_STYLE_OF_MODEL = {
    "standalone mean": "dotted",
    "nodes' own models": "dotted",
    "teachers' ensemble": "dashed",
    "centralized": "solid",
}
LINE_STYLES: Mapping[str, Any] = {"dotted": (0, (0.7, 2.6)), "dashed": (0, (5, 3)), "solid": "solid"}


@dataclass(frozen=True)
class LearningCurve:
    """What models of a run reach on its way, in percent: at least one (step, value) of what it is judged by,
    the levels beside it as (name, stroke, value), the nodes' own models' line, if wanted.
    """

    line: Curve
    name: str
    references: Sequence[tuple[str, str, float]] = ()
    own: Curve = ()
    turn: str = "step"
    title: str = "Accuracy"


def read_learning_curve(run: RunFiles) -> LearningCurve | None:
    """What models of a run reach on its way; None where nothing was measured on it."""
    line, metrics = sorted(run.metrics.central.items()), run.result.metrics
    if not line:
        return None
    turn, central = run.result.turn, run.result.central
    # Where the nodes' models are trained before the first turn, theirs would be a flat line.
    own = sorted(run.metrics.own.items()) if turn == "round" and central != "nodes" else []
    levels = [
        (row.name, LINE_STYLE_OF_MODEL[row.name], row.value)
        for row in comparison(run.result)
        if row.value is not None
        and row.name in LINE_STYLE_OF_MODEL
        and not (own and row.name == "nodes' own models")
    ]
    return LearningCurve(line, run.result.main_model, levels, own, turn, metrics[0].title)


def plot_learning_curve(course: LearningCurve, width: float = PAPER_WIDTH) -> Figure:
    """What models reach over steps or rounds; levels are lines, named at their ends where there is room."""
    labeled = width >= MIN_LABELED_WIDTH
    figure, axes = plotting.create_axes(width, 364, right=178 if labeled else 14, bottom=48)
    values = [y for _, y in (*course.line, *course.own)] + [y for *_, y in course.references]
    plotting.percent_axis(axes, values)
    plotting.plain_axis(axes, "x")
    axes.set_xlim(0, max(1.0, *(x for x, _ in course.line)))
    axes.set_xlabel(course.turn)
    for name, stroke, y in course.references:
        level = axes.axhline(
            y, color=MUTED, lw=2 if stroke == "dotted" else 1.5, ls=LINE_STYLES[stroke], label=name
        )
        level.set_dash_capstyle("round")
    if course.own:
        axes.plot(
            *zip(*plotting.downsample(course.own), strict=True), color=MUTED, lw=1.5, label="nodes' own"
        )
    shown = plotting.downsample(course.line)
    axes.plot(*zip(*shown, strict=True), color=ACCENT, lw=2.25, label=course.name, clip_on=False, zorder=4)
    for x, y in shown if len(shown) <= MAX_DOTS else ():
        (dot,) = axes.plot(x, y, "o", ms=7, mfc=ACCENT, mec=CARD, mew=1.5, clip_on=False, zorder=5)
        plotting.set_tooltip(dot, f"{course.turn} {plotting.step_text(x)}: {format_percent(y)}")
    named = [(course.name, ACCENT, course.line[-1][1])]
    named += [(name, MUTED, y) for name, _, y in course.references]
    named += [("nodes' own", MUTED, course.own[-1][1])] if course.own else []
    steps = plotting.step_text(max(x for x, _ in course.line))
    levels = "; ".join(f"{name} {format_percent(y)}" for name, _, y in named)
    figure.set_label(f"{course.title} on the test data over {steps} {course.turn}s. At the end: {levels}.")
    if labeled:
        for (name, ink, y), rise in zip(
            named, plotting.place_at_ends(axes, [y for *_, y in named], gap=18), strict=True
        ):
            axes.annotate(
                f"{name} {format_percent(y)}", (1, y), (12, rise), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="center", color=ink, annotation_clip=False,
                fontweight="semibold" if ink == ACCENT else "normal",
            )  # fmt: skip
    return figure


def plot_reliability(bins: Sequence[ConfidenceBin], width: float = PAPER_WIDTH) -> Figure:
    """The reliability curve: how often answers are right over how sure they are; on the dashed line the two
    agree. A point is a bin, the larger the more answers are in it."""
    figure, axes = plotting.create_axes(width, 330, bottom=48)
    for axis in ("x", "y"):
        plotting.percent_axis(axes, (0.0, 100.0), axis)
    axes.set_xlabel("how sure the model is of its answer")
    axes.plot((0, 100), (0, 100), color=MUTED, lw=1.5, ls=LINE_STYLES["dashed"])
    line = [(each.confidence, each.accuracy) for each in bins]
    axes.plot(*zip(*line, strict=True), color=ACCENT, lw=2.25, clip_on=False, zorder=4)
    most = max(each.examples for each in bins)
    for (x, y), each in zip(line, bins, strict=True):
        size = 5 + 9 * (each.examples / most) ** 0.5
        (dot,) = axes.plot(x, y, "o", ms=size, mfc=ACCENT, mec=CARD, mew=1.5, clip_on=False, zorder=5)
        plotting.set_tooltip(
            dot, f"{each.examples:,} answers, {format_percent(x)} sure: {format_percent(y)} right"
        )
    told = "; ".join(
        f"{format_percent(each.confidence)} sure, {format_percent(each.accuracy)} right" for each in bins
    )
    figure.set_label(f"Share of right answers over confidence: {told}.")
    return figure


Losses = Mapping[str, Mapping[float, float | None]]  # by name, by step; None is not finite


def local_losses(run: RunFiles) -> Losses:
    """Losses of local training by node, as reports write their names, and of the centralized model."""
    kept = run.metrics
    found = {
        run.result.display_name(name): kept.local[name] for name in sorted(kept.local, key=natural_sort_key)
    }
    return {**found, "centralized": kept.centralized} if kept.centralized else found


def finite_points(values: Mapping[float, float | None]) -> list[tuple[float, float]]:
    """The line of a loss: what is not finite is left out."""
    return [(step, value) for step, value in sorted(values.items()) if value is not None]


def draw_loss(axes: Axes, line: Curve, span: tuple[float, float] | None = None) -> None:
    """One loss over steps: every step pale, the running mean strong; ``span``: an axis that several share."""
    shown = plotting.downsample(line, 300)
    low, high = span or (min(y for _, y in shown), max(y for _, y in shown))
    if 0 < low < 0.3 * high:  # close enough to zero that the axis had better start there
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-200):  # one value alone gets room to both sides
        room = max(0.5, abs(low) * 1e-3)
        low, high = low - room, high + room
    first, last = line[0][0], line[-1][0]
    axes.set_ylim(low, high)
    plotting.plain_axis(axes, "y", 4)
    axes.set_xlim(*((first, last) if last > first else (first - 1, first + 1)))
    ticks = [first, last] if last > first else [first]
    axes.set_xticks(ticks, [plotting.step_text(step) for step in ticks])
    if last > first:
        start, end = axes.get_xticklabels()
        start.set_horizontalalignment("left")
        end.set_horizontalalignment("right")
    if len(shown) == 1:
        axes.plot(*shown[0], "o", ms=6, mfc=ACCENT, mec=CARD, mew=1.5)
    axes.plot(*zip(*shown, strict=True), color=ACCENT, lw=1, alpha=0.32)
    axes.plot(*zip(*plotting.running_mean(shown), strict=True), color=ACCENT, lw=2.25)


def plot_loss(name: str, line: Curve, span: tuple[float, float] | None = None) -> Figure:
    """One loss alone: a page's panel."""
    figure, axes = plotting.create_axes(300, 132, left=44, right=6, top=10, bottom=26)
    draw_loss(axes, line, span)
    first, last = (plotting.step_text(line[place][0]) for place in (0, -1))
    figure.set_label(f"{name}, from step {first} to {last}: {line[0][1]:.4g} to {line[-1][1]:.4g}.")
    return figure


def plot_losses(losses: Losses, *, shared: bool = False) -> Figure:
    """Several losses side by side, with their names."""
    lines = {name: line for name, values in losses.items() if (line := finite_points(values))}
    everything = [y for line in lines.values() for _, y in line]
    figure, each = plotting.create_grid(len(lines))
    for axes, (name, line) in zip(each, lines.items(), strict=True):
        draw_loss(axes, line, (min(everything), max(everything)) if shared else None)
        axes.set_title(name, loc="left")
    return figure
