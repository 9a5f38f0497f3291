"""FedMD-CG's Figure 3: local and global accuracy by round, and over omega."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plots

from fedstill.compare.comparison import ComparisonRun, read_comparison_folder


def reproduce(*, root: str, out: Path, seed: int, runs: Path) -> list[dict[str, Any]]:
    """Draw one seed; return each method's accuracy after a fifth of its rounds and at the end."""
    comparison, rows = read_comparison_folder(runs), []
    curves: dict[str, dict[str, Any]] = {}
    ends: dict[str, dict[str, Any]] = {"local accuracy over omega": {}, "accuracy over omega": {}}
    for setting, table in comparison.settings.items():
        omega = table.get("split", {}).get("alpha", comparison.base["split"]["alpha"])
        for label in comparison.methods:
            run = plots.run_of(runs, ComparisonRun(setting, label, seed))
            if run is None:
                continue
            for what, course in (
                ("accuracy", run.metrics.main_model),
                ("local accuracy", run.metrics.local_models),
            ):
                points = sorted(course.items())
                if not points:
                    continue
                curves.setdefault(f"{what}, {setting}", {})[label] = points
                ends[f"{what} over omega"].setdefault(label, []).append((omega, points[-1][1]))
                early = points[max(0, len(points) // 5 - 1)][1]
                rows.append({"setting": setting, "method": label, "metric": f"{what}, early", "value": early})
                rows.append({"setting": setting, "method": label, "metric": what, "value": points[-1][1]})
    plots.lines(out / "curves.svg", curves, "round", "%")
    plots.lines(out / "omega.svg", ends, "omega", "%", scale="log")
    return rows
