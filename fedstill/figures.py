"""Figures of finished runs and comparisons for papers, as matplotlib figures.

Each function takes a folder and returns a :class:`matplotlib.figure.Figure`, which the caller may change,
show in a notebook or save. The figures are those of the reports, with axis labels and legends.

>>> import fedstill.figures
>>> sorted(fedstill.figures.RUN_FIGURES)
['accuracy', 'local_losses', 'losses']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fedstill.compare.comparison import read_comparison_folder
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.report import figures as drawings
from fedstill.report.comparison_records import ComparedSetting, ComparisonSummary, MethodCurve, summarize
from fedstill.report.figures import FORMATS, Point, leakage_scatter, learning_curves, scatter_points
from fedstill.report.records import RunFiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "accuracy", "against_epsilon", "against_leakage", "curves", "local_losses", "losses", "traffic", "write",
]  # fmt: skip


T = TypeVar("T")


class NothingToDraw(FedstillError):
    """Raised when a run or a comparison lacks the metrics of a figure."""


def accuracy(run: str | Path | RunFiles) -> Figure:
    """Plot the main metric of a run over its steps or rounds, in percent, with baselines and upper bounds.

    Args:
        run: folder of a finished run, or the run as returned by
            :meth:`fedstill.report.records.RunFiles.read`.

    Returns:
        Figure with one pair of axes.

    Raises:
        NothingToDraw: the metric was not measured during the run.
        RunFolderError: the folder holds no finished run, or a file is broken.

    ``accuracy("runs/fediod").savefig("curve.pdf")`` writes the figure for a paper.
    """
    files = _run_files(run)
    message = f"{files.folder} has no metrics over steps or rounds: there is no curve to draw"
    curve = _require(drawings.read_learning_curve(files), message)
    with drawings.plot_style():
        figure = drawings.plot_learning_curve(curve)
        figure.axes[0].set_ylabel(f"{curve.title} on the test data")
    return figure


def losses(run: str | Path | RunFiles) -> Figure:
    """Plot each of the server's losses: values pale, their running mean strong.

    Args:
        run: as for :func:`accuracy`.

    Returns:
        Figure with one pair of axes per loss.

    Raises:
        NothingToDraw: the run has no losses at the server.
        RunFolderError: the folder holds no finished run, or a file is broken.
    """
    files = _run_files(run)
    return _plot_losses(files, files.metrics.server_losses, shared=False)


def local_losses(run: str | Path | RunFiles) -> Figure:
    """Plot the losses of local training of each node and of the centralized model, on one scale.

    Args:
        run: as for :func:`accuracy`.

    Returns:
        Figure with one pair of axes per node.

    Raises:
        NothingToDraw: the run has no losses of local training.
        RunFolderError: the folder holds no finished run, or a file is broken.
    """
    files = _run_files(run)
    return _plot_losses(files, drawings.local_losses(files), shared=True)


def traffic(comparison: str | Path | ComparisonSummary, setting: int = 0) -> Figure:
    """Plot the main metric of methods against their bytes, on a logarithmic axis.

    Args:
        comparison: folder of a comparison, or its summary.
        setting: index of the setting, from 0.

    Returns:
        Figure with one pair of axes and a legend of methods.

    Raises:
        ArgumentError: there is no such setting.
        NothingToDraw: no method has both the metric and bytes.
        RunFolderError: the folder holds no comparison, or a file is broken.
    """
    compared = _setting(comparison, setting)
    points = _require(
        scatter_points(compared), "no run of the comparison has both its main metric and its bytes"
    )
    axis = "bytes up and down, all nodes, whole run"
    return _comparison_figure(drawings.plot_traffic, (points,), axis, compared.metric.title, points)


def curves(comparison: str | Path | ComparisonSummary, setting: int = 0) -> Figure:
    """Plot the main metric of methods over the fraction of the run, one line per method.

    Args:
        comparison, setting: as for :func:`traffic`.

    Raises:
        ArgumentError: there is no such setting.
        NothingToDraw: no run measured the metric during the run.
        RunFolderError: the folder holds no comparison, or a file is broken.
    """
    compared = _setting(comparison, setting)
    lines = _require(learning_curves(compared), "no run of the comparison has metrics over steps or rounds")
    axis = "fraction of the run"
    return _comparison_figure(drawings.plot_learning_curves, (lines,), axis, compared.metric.title, lines)


def against_epsilon(comparison: str | Path | ComparisonSummary) -> Figure:
    """Plot the main metric of methods over the privacy budget; runs without a budget are at the right edge.

    Args:
        comparison: as for :func:`traffic`.

    Raises:
        NothingToDraw: the settings do not differ in ``nodes.privacy.epsilon``.
        RunFolderError: the folder holds no comparison, or a file is broken.
    """
    summary = _summary(comparison)
    lines = [line for line in summary.budget_curves() if line.values]
    _require(lines, "the settings of the comparison do not differ in nodes.privacy.epsilon")
    return _comparison_figure(drawings.plot_against_epsilon, (lines,), "epsilon", summary.metric.title, lines)


def against_malicious_nodes(comparison: str | Path | ComparisonSummary, adversary: int = 0) -> Figure:
    """Plot the main metric of methods over the number of malicious nodes of one adversary.

    Args:
        comparison: as for :func:`traffic`.
        adversary: index of the adversary, from 0, in the order of the comparison's settings.

    Raises:
        ArgumentError: there is no such adversary.
        NothingToDraw: no settings differ only in ``adversary.nodes``.
        RunFolderError: the folder holds no comparison, or a file is broken.
    """
    summary = _summary(comparison)
    groups = _require(
        summary.adversary_curves(), "no settings of the comparison differ only in adversary.nodes"
    )
    if not 0 <= adversary < len(groups):
        raise ArgumentError("adversary", adversary, f"0 to {len(groups) - 1}")
    lines, axis = groups[adversary].curves, "malicious nodes"
    draw = drawings.plot_against_malicious_nodes
    return _comparison_figure(draw, (lines,), axis, summary.metric.title, lines)


def against_leakage(comparison: str | Path | ComparisonSummary) -> Figure:
    """Plot the main metric of methods against leakage, the metric of attacks; areas of disks are bytes.

    Args:
        comparison: as for :func:`traffic`.

    Raises:
        NothingToDraw: no method has both the main metric and a leakage metric.
        RunFolderError: the folder holds no comparison, or a file is broken.
    """
    summary = _summary(comparison)
    scatter = leakage_scatter(summary)
    if scatter.column is None or not scatter.points:
        raise NothingToDraw("no run of the comparison has both its main metric and a leakage metric")
    content, axis = (scatter.points, scatter.column), scatter.column.axis
    return _comparison_figure(
        drawings.plot_against_leakage, content, axis, summary.metric.title, scatter.points
    )


def _comparison_figure(
    draw: Callable[..., Figure],
    content: tuple[object, ...],
    axis: str,
    title: str,
    methods: Sequence[Point | MethodCurve],
) -> Figure:
    """Return a comparison's figure with axis labels and a legend."""
    with drawings.plot_style():
        figure = draw(*content, title)
        figure.axes[0].set(xlabel=axis, ylabel=title)
        return drawings.add_legend(figure, [(method.number, method.name) for method in methods])


RUN_FIGURES: Mapping[str, Callable[[RunFiles], Figure]] = {
    draw.__name__: draw for draw in (accuracy, losses, local_losses)
}


def write(folder: Path, out: Path | None = None, kind: str = "pdf") -> list[Path]:
    """Write all figures of a run or a comparison and return their paths; figures without data are skipped.

    Args:
        folder: folder of the run or the comparison.
        out: folder of the figures; None for ``figures`` in that folder.
        kind: format: "pdf", "svg" or "png".

    Raises:
        ArgumentError: the format is none of these.
        NothingToDraw: there is no data for any figure.
        RunFolderError: the folder holds neither a run nor a comparison, or a file is broken.

    ``write(Path("runs/fediod"), kind="svg")`` writes ``runs/fediod/figures/accuracy.svg`` and others.
    """
    if kind not in FORMATS:
        raise ArgumentError("format", kind, ", ".join(FORMATS))
    jobs: list[tuple[str, Callable[[], Figure]]] = []
    if (folder / "compare.toml").exists():
        summary = _summary(folder)
        for index in range(len(summary.settings)):
            suffix = "" if len(summary.settings) == 1 else f"_{index + 1}"
            jobs += [
                (f"{draw.__name__}{suffix}", partial(draw, summary, index)) for draw in (traffic, curves)
            ]
        jobs += [(draw.__name__, partial(draw, summary)) for draw in (against_epsilon, against_leakage)]
        groups = summary.adversary_curves()
        for index in range(len(groups)):
            suffix = "" if len(groups) == 1 else f"_{index + 1}"
            draw_group = partial(against_malicious_nodes, summary, index)
            jobs.append((f"{against_malicious_nodes.__name__}{suffix}", draw_group))
    else:
        run = RunFiles.read(folder)
        jobs += [(name, partial(draw, run)) for name, draw in RUN_FIGURES.items()]
    figures = {}
    for name, draw in jobs:
        try:
            figures[name] = draw()
        except NothingToDraw:  # a run need not have the data of all figures
            continue
    _require(figures, f"{folder} has no data for any figure")
    target = folder / "figures" if out is None else out
    target.mkdir(parents=True, exist_ok=True)
    return [drawings.save_figure(figure, target / f"{name}.{kind}") for name, figure in figures.items()]


def _require(data: T | None, message: str) -> T:
    if not data:
        raise NothingToDraw(message)
    return data


def _run_files(run: str | Path | RunFiles) -> RunFiles:
    return run if isinstance(run, RunFiles) else RunFiles.read(Path(run))


def _plot_losses(run: RunFiles, losses: drawings.Losses, *, shared: bool) -> Figure:
    _require(any(map(drawings.finite_points, losses.values())), f"{run.folder} has no such losses")
    with drawings.plot_style():
        return drawings.plot_losses(losses, shared=shared)


def _summary(comparison: str | Path | ComparisonSummary) -> ComparisonSummary:
    if isinstance(comparison, ComparisonSummary):
        return comparison
    return summarize(Path(comparison), read_comparison_folder(Path(comparison)))


def _setting(comparison: str | Path | ComparisonSummary, setting: int) -> ComparedSetting:
    settings = _summary(comparison).settings
    if not 0 <= setting < len(settings):
        raise ArgumentError("setting", setting, f"from 0 to {len(settings) - 1}")
    return settings[setting]
