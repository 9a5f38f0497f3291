"""Figures of a run: the main metric over steps or rounds, losses, and the reliability diagram."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedstill.core.name_normalization import natural_sort_key
from fedstill.core.text_format import format_percent
from fedstill.report import plotting
from fedstill.report.model_scores import CENTRALIZED, ENSEMBLE, LOCAL_MODELS, STANDALONE, list_model_scores
from fedstill.report.plotting import ACCENT, CARD, MUTED, PAPER_WIDTH, Curve
from fedstill.report.result_records import ConfidenceBin
from fedstill.report.run_files import RunFiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIN_LABELED_WIDTH = 500  # pixels from which lines have their names at their ends
MAX_MARKERS = 60  # a line with more points has no markers
LINE_STYLE_OF_MODEL = {
    STANDALONE: "dotted",
    LOCAL_MODELS: "dotted",
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
        (model.name, LINE_STYLE_OF_MODEL[model.name], model.value)
        for model in list_model_scores(run.result)
        if model.value is not None
        and model.name in LINE_STYLE_OF_MODEL
        and not (local_models and model.name == LOCAL_MODELS)
    ]
    return LearningCurve(points, run.result.main_model_name, references, local_models, unit, metrics[0].title)


def plot_learning_curve(curve: LearningCurve, width: float = PAPER_WIDTH) -> Figure:
    """Plot a learning curve with horizontal lines for baselines and upper bounds.

    Lines are named at their ends if the figure is wide enough.
    """
    labeled = width >= MIN_LABELED_WIDTH
    figure, axes = plotting.create_axes(width, 364, right=178 if labeled else 14, bottom=48)
    values = [y for _, y in (*curve.points, *curve.local_models)] + [y for *_, y in curve.references]
    plotting.percent_axis(axes, values)
    plotting.plain_axis(axes, "x")
    axes.set_xlim(0, max(1.0, *(x for x, _ in curve.points)))
    axes.set_xlabel(curve.unit)
    for name, line_style, y in curve.references:
        line = axes.axhline(
            y, color=MUTED, lw=2 if line_style == "dotted" else 1.5, ls=LINE_STYLES[line_style], label=name
        )
        line.set_dash_capstyle("round")
    if curve.local_models:
        local = plotting.downsample(curve.local_models)
        axes.plot(*zip(*local, strict=True), color=MUTED, lw=1.5, label=LOCAL_LABEL)
    shown = plotting.downsample(curve.points)
    axes.plot(*zip(*shown, strict=True), color=ACCENT, lw=2.25, label=curve.name, clip_on=False, zorder=4)
    for x, y in shown if len(shown) <= MAX_MARKERS else ():
        (marker,) = axes.plot(x, y, "o", ms=7, mfc=ACCENT, mec=CARD, mew=1.5, clip_on=False, zorder=5)
        plotting.set_tooltip(marker, f"{curve.unit} {plotting.step_text(x)}: {format_percent(y)}")
    named = [(curve.name, ACCENT, curve.points[-1][1])]
    named += [(name, MUTED, y) for name, _, y in curve.references]
    named += [(LOCAL_LABEL, MUTED, curve.local_models[-1][1])] if curve.local_models else []
    steps = plotting.step_text(max(x for x, _ in curve.points))
    final = "; ".join(f"{name} {format_percent(y)}" for name, _, y in named)
    figure.set_label(f"{curve.title} on the test data over {steps} {curve.unit}s. Final values: {final}.")
    if labeled:
        for (name, ink, y), offset in zip(
            named, plotting.end_label_offsets(axes, [y for *_, y in named], gap=18), strict=True
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
    figure, axes = plotting.create_axes(width, 330, bottom=48)
    for axis in ("x", "y"):
        plotting.percent_axis(axes, (0.0, 100.0), axis)
    axes.set_xlabel("confidence")
    axes.plot((0, 100), (0, 100), color=MUTED, lw=1.5, ls=LINE_STYLES["dashed"])
    line = [(each_bin.confidence, each_bin.accuracy) for each_bin in bins]
    axes.plot(*zip(*line, strict=True), color=ACCENT, lw=2.25, clip_on=False, zorder=4)
    largest = max(each_bin.examples for each_bin in bins)
    for (x, y), each_bin in zip(line, bins, strict=True):
        size = 5 + 9 * (each_bin.examples / largest) ** 0.5
        (marker,) = axes.plot(x, y, "o", ms=size, mfc=ACCENT, mec=CARD, mew=1.5, clip_on=False, zorder=5)
        plotting.set_tooltip(
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
    shown = plotting.downsample(line, 300)
    low, high = span or (min(y for _, y in shown), max(y for _, y in shown))
    if 0 < low < 0.3 * high:  # start the axis at zero if the values are close to it
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-200):  # a constant gets a margin on both sides
        margin = max(0.5, abs(low) * 1e-3)
        low, high = low - margin, high + margin
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
    """Plot one loss as a small panel of a page."""
    figure, axes = plotting.create_axes(300, 132, left=44, right=6, top=10, bottom=26)
    draw_loss(axes, line, span)
    first, last = (plotting.step_text(line[index][0]) for index in (0, -1))
    figure.set_label(f"{name}, from step {first} to {last}: {line[0][1]:.4g} to {line[-1][1]:.4g}.")
    return figure


def plot_losses(losses: Losses, *, shared: bool = False) -> Figure:
    """Plot several losses in a grid, each below its name; ``shared`` gives them one scale."""
    lines = {name: line for name, values in losses.items() if (line := finite_points(values))}
    all_values = [y for line in lines.values() for _, y in line]
    figure, grid = plotting.create_grid(len(lines))
    for axes, (name, line) in zip(grid, lines.items(), strict=True):
        draw_loss(axes, line, (min(all_values), max(all_values)) if shared else None)
        axes.set_title(name, loc="left")
    return figure
