"""Drawing functions shared by several of the papers' figures: lines by panel, and rows of pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.core.errors import RunFolderError
from fedstill.report import figures
from fedstill.report.records import RunFiles

Lines = Mapping[str, Sequence[tuple[float, float]]]  # points by name


def run_of(runs: Path, planned_run: Any) -> RunFiles | None:
    """Return a run of a comparison's folder; None if it was refused or is missing."""
    folder = runs / planned_run.folder
    return RunFiles.read(folder) if (folder / "result.json").exists() else None


def lines(path: Path, panels: Mapping[str, Lines], across: str, up: str, *, scale: str = "linear") -> Path:
    """Draw one panel per title and one line per name, with a marker at each point."""
    from matplotlib.figure import Figure

    if not any(points for panel in panels.values() for points in panel.values()):
        raise RunFolderError(f"there is nothing to draw in {path.name}: no run is finished")
    with figures.plot_style():
        figure = Figure(figsize=(4.2 * len(panels), 3.6), layout="constrained")
        for index, (title, panel) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(1, len(panels), index)
            axes.set(title=title, xlabel=across, ylabel=up if index == 1 else "", xscale=scale)
            for number, (name, points) in enumerate(panel.items(), start=1):
                dash = "--" if figures.is_color_repeated(number) else "-"
                axes.plot(
                    *zip(*points, strict=True),
                    dash,
                    marker="o",
                    ms=3,
                    color=figures.method_color(number),
                    label=name,
                )
            if index == len(panels):
                axes.legend(fontsize=8)
        return figures.save_figure(figure, path)


def pictures(path: Path, rows: Sequence[Sequence[tuple[str, Any, Any]]]) -> Path:
    """Draw rows of pictures: each a title, pixels ``(H, W)`` or ``(H, W, 3)``, and an overlay or None."""
    from matplotlib.figure import Figure

    columns = max(map(len, rows))
    with figures.plot_style():
        figure = Figure(figsize=(1.9 * columns, 2.1 * len(rows)), layout="constrained")
        for down, row in enumerate(rows):
            for at, (title, pixels, over) in enumerate(row):
                axes = figure.add_subplot(len(rows), columns, down * columns + at + 1)
                axes.set_axis_off()
                axes.set_title(title, fontsize=8)
                area = (0, pixels.shape[1], pixels.shape[0], 0)
                axes.imshow(pixels, cmap="gray", extent=area, vmin=0, vmax=None if pixels.ndim == 3 else 1)
                if over is not None:
                    axes.imshow(over, extent=area)
        return figures.save_figure(figure, path)
