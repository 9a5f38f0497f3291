"""FedIOD's Figure 8: gigabytes transferred until a method first reaches a level.

A run's bytes are assumed to be spread evenly over its steps or rounds, which is exact except for label
counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plots

from fedstill.compare.comparison import COMPARISON_FILE, ComparisonRun
from fedstill.report.records import RunFiles

DICE = [40.0, 50.0, 55.0]  # levels of (b)


def reproduce(*, root: str, out: Path, seed: int, runs: Path, levels: list[float]) -> list[dict[str, Any]]:
    """Draw one seed; return rows of gigabytes by level, and the best value reached."""
    rows: list[dict[str, Any]] = []
    panels: dict[str, dict[str, Any]] = {}
    tumors = runs.parent / runs.name.replace("fig8", "table2")
    for title, folder, wanted in (("CIFAR-10", runs, levels), ("brain MRI", tumors, DICE)):
        if not (folder / COMPARISON_FILE).exists():
            continue
        for method in ("fedavg", "fediod"):
            run = plots.run_of(folder, ComparisonRun("", method, seed))
            if run is None or not run.metrics.main_model:
                continue
            course = crossed(run)
            panels.setdefault(title, {})[method] = course
            about = {"setting": title, "method": method}
            rows.append({**about, "metric": "best, %", "value": max(value for _, value in course)})
            for target in wanted:
                first = next((size for size, value in course if value >= target), None)
                if first is not None:
                    rows.append({**about, "metric": f"GB to {target:g} %", "value": first})
    plots.lines(out / "figure8.svg", panels, "gigabytes, both ways", "%", scale="symlog")
    return rows


def crossed(run: RunFiles) -> list[tuple[float, float]]:
    """Return (gigabytes transferred, metric) of each evaluation."""
    result, course = run.result, sorted(run.metrics.main_model.items())
    whole, last = (
        ((result.bytes.up or 0) + (result.bytes.down or 0)) / 1e9,
        result.iterations or course[-1][0],
    )
    return [(whole * step / last, value) for step, value in course]
