"""FedMD-CG's Figure 5: the loss ``consistency`` of the runs of its Table 3, by round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plots

from fedstill.compare.comparison import ComparisonRun, read_comparison_folder

METHODS = {"fedcg-ave": "FedCG", "ave-latent": "FedMD-CG"}  # both use AVE_agg*


def reproduce(*, root: str, out: Path, seed: int, runs: Path) -> list[dict[str, Any]]:
    """Draw one seed; return the loss of the second round and of the last."""
    panels: dict[str, dict[str, Any]] = {}
    rows = []
    for setting in read_comparison_folder(runs).settings:
        for label, name in METHODS.items():
            run = plots.run_of(runs, ComparisonRun(setting, label, seed))
            course = {} if run is None else run.metrics.server_losses.get("consistency", {})
            points = [(step, loss) for step, loss in sorted(course.items()) if loss is not None]
            if not points:
                continue
            panels.setdefault(setting, {})[name] = points
            for metric, at in (("G+D loss, early", min(1, len(points) - 1)), ("G+D loss, last", -1)):
                rows.append({"setting": setting, "method": name, "metric": metric, "value": points[at][1]})
    plots.lines(out / "figure5.svg", panels, "round", "G+D loss")
    return rows
