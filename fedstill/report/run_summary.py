"""Short texts of runs, for Python's prompt and for notebooks: what a run or a comparison came to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill.core.text_format import clip_text, format_bytes, format_count, format_seconds
from fedstill.report.metric_text import format_spread, format_with_unit, lowercase_title
from fedstill.report.model_scores import comparison
from fedstill.report.privacy_section import describe_privacy
from fedstill.report.result import Result

MOST = 12  # lines of methods
LONGEST = 110  # characters of a line


def run_summary(metrics: Mapping[str, Any], folder: Path | None) -> str:
    """Summary of a run in five lines: metrics of each model, bytes, privacy, and the folder of its files."""
    result = Result.from_record(metrics)
    metric = lowercase_title(result.metric.title)
    reached = ", ".join(
        f"{level.name} {format_spread(result.metric, level.measured[0])}"
        for level in comparison(result)
        if level.value is not None
    )
    up, down, seconds = result.bytes.up, result.bytes_down, result.seconds.total
    lines = [
        f"{result.method_title} with {format_count(len(result.nodes), 'node')}"
        + ("" if seconds is None else f", {format_seconds(seconds)}"),
        f"{metric}: {reached or 'not measured'}",
        f"left the nodes: {format_bytes(up or 0)}; came to the nodes: {format_bytes(down or 0)}",
        f"privacy: {describe_privacy(result) or 'not measured'}",
        "files: none (out= keeps a report)" if folder is None else f"files: {folder}",
    ]
    return "\n  ".join(clip_text(line, 2 * LONGEST) for line in lines)


def comparison_summary(
    results: Mapping[str, Mapping[str, Any]], not_run: Mapping[str, str], folder: Path
) -> str:
    """Summary of a comparison: a line for each method and setting, with its mean over seeds."""
    runs: dict[str, list[Result]] = {}
    for name, record in results.items():
        runs.setdefault(name.rpartition("-seed")[0], []).append(Result.from_record(record))
    lines = [f"{format_count(len(results), 'run')} in {folder}"]
    for label, several in list(runs.items())[:MOST]:
        metric = several[0].metric
        values = [result.value for result in several if result.value is not None]
        mean = format_with_unit(metric, sum(values) / len(values)) if values else "not measured"
        lines.append(
            f"{label}: {lowercase_title(metric.title)} {mean} over {format_count(len(values), 'seed')}"
        )
    if len(runs) > MOST:
        lines.append(f"and {len(runs) - MOST} more")
    if not_run:
        lines.append(f"not run: {', '.join(not_run)}")
    return "\n  ".join(clip_text(line, LONGEST) for line in lines)
