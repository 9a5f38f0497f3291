"""Figures of finished runs and comparisons for papers, as matplotlib Figures.

Each function takes a folder and returns a ``matplotlib.figure.Figure``, which belongs to the caller: change
it, put it into a notebook, save it. They are the drawings of the reports, with names where a report has a
table.

>>> import fedstill.figures
>>> sorted(fedstill.figures.RUN_FIGURES)
['accuracy', 'local_losses', 'losses']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.report import compare_figures, plotting, run_figures
from fedstill.report.compare_points import Point, leakage_scatter, learning_curves, scatter_points
from fedstill.report.compare_summary import ComparedSetting, MethodCurve, Summary
from fedstill.report.plotting import FORMATS
from fedstill.report.run_files import RunFiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "accuracy", "against_epsilon", "against_leakage", "curves", "local_losses", "losses", "traffic", "write",
]  # fmt: skip


T = TypeVar("T")


class NothingToDraw(FedstillError):
    """A run or a comparison lacks what a figure shows."""


def accuracy(run: str | Path | RunFiles) -> Figure:
    """What a run is judged by over its steps or rounds, in percent, with the levels beside it.

    Args:
        run: its folder, or the run as :meth:`fedstill.report.run_files.RunFiles.read` loads it.

    Raises:
        NothingToDraw: nothing was measured on the way.
        RunFolderError: the folder holds no finished run, or a file of it is spoilt.
    """
    kept = _run(run)
    lacking = f"{kept.folder} measured nothing on its way: there is no curve to draw"
    course = _needed(run_figures.read_learning_curve(kept), lacking)
    with plotting.plot_style():
        figure = run_figures.plot_learning_curve(course)
        figure.axes[0].set_ylabel(f"{course.title} on the test data")
    return figure


def losses(run: str | Path | RunFiles) -> Figure:
    """The server's losses, a small plot each: every step pale, the running mean strong. Raises as
    :func:`accuracy`.
    """
    kept = _run(run)
    return _losses(kept, kept.metrics.losses, shared=False)


def local_losses(run: str | Path | RunFiles) -> Figure:
    """The losses of local training, a small plot a node on one scale, and of the centralized model. Raises
    as :func:`accuracy`.
    """
    kept = _run(run)
    return _losses(kept, run_figures.local_losses(kept), shared=True)


def traffic(comparison: str | Path | Summary, setting: int = 0) -> Figure:
    """What methods reach against the bytes that they send, on a logarithmic axis.

    Args:
        comparison: its folder, or its summary.
        setting: which of its settings, from 0 up.

    Raises:
        NothingToDraw: no run has both figures.
        RunFolderError: the folder holds no comparison, or a file of it is spoilt.
    """
    kept = _setting(comparison, setting)
    spots = _needed(scatter_points(kept), "no run of the comparison has both its figure and its bytes")
    axis = "bytes up and down, all nodes, a whole run"
    return _compared(compare_figures.traffic, (spots,), axis, kept.metric.title, spots)


def curves(comparison: str | Path | Summary, setting: int = 0) -> Figure:
    """What methods reach over the share of the run that is done, a line each. Raises as :func:`traffic`."""
    kept = _setting(comparison, setting)
    lines = _needed(learning_curves(kept), "no run of the comparison measured anything on its way")
    axis = "share of the run that is done"
    return _compared(compare_figures.curves, (lines,), axis, kept.metric.title, lines)


def against_epsilon(comparison: str | Path | Summary) -> Figure:
    """What methods reach under each budget of privacy; without one at the right edge. Raises as
    :func:`traffic`.
    """
    summary = _summary(comparison)
    lines = [line for line in summary.budgets() if line.reached]
    _needed(lines, "the settings of the comparison do not differ in nodes.privacy.epsilon")
    return _compared(compare_figures.against_epsilon, (lines,), "epsilon", summary.metric.title, lines)


def against_leakage(comparison: str | Path | Summary) -> Figure:
    """What methods reach against what attacks got of them; areas are bytes. Raises as :func:`traffic`."""
    summary = _summary(comparison)
    found = leakage_scatter(summary)
    if found.column is None or not found.spots:
        raise NothingToDraw("no run of the comparison has both its figure and one of attacks")
    shown, axis = (found.spots, found.column), found.column.axis
    return _compared(compare_figures.against_leakage, shown, axis, summary.metric.title, found.spots)


def _compared(
    draw: Callable[..., Figure],
    shown: tuple[object, ...],
    axis: str,
    title: str,
    methods: Sequence[Point | MethodCurve],
) -> Figure:
    """A comparison's drawing with its axes and its methods named."""
    with plotting.plot_style():
        figure = draw(*shown, title)
        figure.axes[0].set(xlabel=axis, ylabel=title)
        return compare_figures.legend(figure, [(method.place, method.name) for method in methods])


RUN_FIGURES: Mapping[str, Callable[[RunFiles], Figure]] = {
    draw.__name__: draw for draw in (accuracy, losses, local_losses)
}


def write(folder: Path, out: Path | None = None, kind: str = "pdf") -> list[Path]:
    """Write all figures of a run or a comparison that have something to show; returns their paths.

    Args:
        folder: of the run or the comparison.
        out: where they go; None is ``figures`` in that folder.
        kind: pdf, svg or png.

    Raises:
        ArgumentError: another kind.
        NothingToDraw: there is none.
        RunFolderError: the folder holds neither, or a file in it is spoilt.
    """
    if kind not in FORMATS:
        raise ArgumentError("format", kind, ", ".join(FORMATS))
    jobs: list[tuple[str, Callable[[], Figure]]] = []
    if (folder / "compare.toml").exists():
        summary = _summary(folder)
        for place in range(len(summary.settings)):
            end = "" if len(summary.settings) == 1 else f"_{place + 1}"
            jobs += [(f"{draw.__name__}{end}", partial(draw, summary, place)) for draw in (traffic, curves)]
        jobs += [(draw.__name__, partial(draw, summary)) for draw in (against_epsilon, against_leakage)]
    else:
        run = RunFiles.read(folder)
        jobs += [(name, partial(draw, run)) for name, draw in RUN_FIGURES.items()]
    made = {}
    for name, draw in jobs:
        try:
            made[name] = draw()
        except NothingToDraw:  # a run need not have all of them
            continue
    _needed(made, f"{folder} holds nothing that a figure could show")
    target = folder / "figures" if out is None else out
    target.mkdir(parents=True, exist_ok=True)
    return [plotting.save_figure(figure, target / f"{name}.{kind}") for name, figure in made.items()]


def _needed(found: T | None, lacking: str) -> T:
    if not found:
        raise NothingToDraw(lacking)
    return found


def _run(run: str | Path | RunFiles) -> RunFiles:
    return run if isinstance(run, RunFiles) else RunFiles.read(Path(run))


def _losses(run: RunFiles, found: run_figures.Losses, *, shared: bool) -> Figure:
    _needed(any(map(run_figures.finite_points, found.values())), f"{run.folder} holds no such losses")
    with plotting.plot_style():
        return run_figures.plot_losses(found, shared=shared)


def _summary(comparison: str | Path | Summary) -> Summary:
    if isinstance(comparison, Summary):
        return comparison
    from fedstill.compare.comparison_file import read_folder
    from fedstill.report.compare_reader import summarize

    return summarize(Path(comparison), read_folder(Path(comparison)))


def _setting(comparison: str | Path | Summary, setting: int) -> ComparedSetting:
    settings = _summary(comparison).settings
    if not 0 <= setting < len(settings):
        raise ArgumentError("setting", setting, f"from 0 to {len(settings) - 1}")
    return settings[setting]
