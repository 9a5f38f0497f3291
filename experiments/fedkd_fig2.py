"""FedKD's Figure 2: accuracy over noise and over levels, one line per size of the public data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plots

from fedstill.compare.comparison import ComparisonRun, read_comparison_folder


def reproduce(*, root: str, out: Path, seed: int, runs: Path) -> list[dict[str, Any]]:
    """Draw one seed; return no rows, as the comparison has the metrics."""
    comparison = read_comparison_folder(runs)
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for option, title in (("gamma", "noise 1/gamma (S = 200)"), ("levels", "levels S (gamma = 1)")):
        panels[title] = {}
        for setting in comparison.settings:
            points = []
            for label, method in comparison.methods.items():
                run = plots.run_of(runs, ComparisonRun(setting, label, seed))
                if label.startswith(f"{option}-") and run is not None:
                    value = float(method[option])
                    points.append(
                        (1 / value if option == "gamma" else value, run.result.metric_values["accuracy"])
                    )
            panels[title][setting or comparison.name] = sorted(points)
    plots.lines(out / "figure2.svg", panels, "", "accuracy, %", scale="symlog")
    return []
