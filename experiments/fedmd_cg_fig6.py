"""FedMD-CG's Figure 6: a box per loss weight, over its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plots

from fedstill.compare.comparison import ONLY_SETTING, ComparisonRun, read_comparison_folder
from fedstill.report import figures


def reproduce(*, root: str, out: Path, seed: int, runs: Path) -> list[dict[str, Any]]:
    """Draw one seed; return no rows, as the comparison has the metrics."""
    from matplotlib.figure import Figure

    boxes: dict[str, dict[str, list[float]]] = {"local accuracy": {}, "accuracy": {}}
    for label in read_comparison_folder(runs).methods:
        run = plots.run_of(runs, ComparisonRun(ONLY_SETTING, label, seed))
        if run is not None:
            weight = label.partition("-")[0]
            own = run.result.local["share"].mean
            boxes["accuracy"].setdefault(weight, []).append(run.result.metric_values["accuracy"] or 0.0)
            boxes["local accuracy"].setdefault(weight, []).append(own or 0.0)
    with figures.plot_style():
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        for index, (title, by_weight) in enumerate(boxes.items(), start=1):
            axes = figure.add_subplot(1, 2, index)
            axes.boxplot(list(by_weight.values()))
            axes.set_xticks(range(1, len(by_weight) + 1), list(by_weight))
            axes.set(title=title, ylabel="%")
        figures.save_figure(figure, out / "figure6.svg")
    return []
