"""Short summaries of a run and of a comparison, printed by their Python objects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill.core.text_format import format_bytes, format_count, format_seconds, to_printable_line
from fedstill.report.metric_text import format_spread, format_with_unit, lowercase_title
from fedstill.report.model_scores import list_model_scores
from fedstill.report.privacy_section import describe_privacy
from fedstill.report.result import Result

MAX_METHODS = 12  # lines
MAX_LINE = 110  # characters


def run_summary(metrics: Mapping[str, Any], folder: Path | None) -> str:
    """Return a summary of a run in five lines: models' metrics, bytes, privacy and folder."""
    result = Result.from_record(metrics)
    metric = lowercase_title(result.metric.title)
    scores = ", ".join(
        f"{model.name} {format_spread(result.metric, model.stats[0])}"
        for model in list_model_scores(result)
        if model.value is not None
    )
    up, down, seconds = result.bytes.up, result.bytes_down, result.seconds.total
    lines = [
        f"{result.method_title} with {format_count(len(result.nodes), 'node')}"
        + ("" if seconds is None else f", {format_seconds(seconds)}"),
        f"{metric}: {scores or 'not measured'}",
        f"bytes from nodes: {format_bytes(up or 0)}; bytes to nodes: {format_bytes(down or 0)}",
        f"privacy: {describe_privacy(result) or 'not measured'}",
        "files: none (pass out= to keep results and a report)" if folder is None else f"files: {folder}",
    ]
    return "\n  ".join(to_printable_line(line, 2 * MAX_LINE) for line in lines)


def comparison_summary(
    results: Mapping[str, Mapping[str, Any]], not_run: Mapping[str, str], folder: Path
) -> str:
    """Return a summary of a comparison: the main metric's mean over seeds by method and setting."""
    by_label: dict[str, list[Result]] = {}
    for name, record in results.items():
        by_label.setdefault(name.rpartition("-seed")[0], []).append(Result.from_record(record))
    lines = [f"{format_count(len(results), 'run')} in {folder}"]
    for label, runs in list(by_label.items())[:MAX_METHODS]:
        metric = runs[0].metric
        values = [result.value for result in runs if result.value is not None]
        mean = format_with_unit(metric, sum(values) / len(values)) if values else "not measured"
        lines.append(
            f"{label}: {lowercase_title(metric.title)} {mean} over {format_count(len(values), 'seed')}"
        )
    if len(by_label) > MAX_METHODS:
        lines.append(f"and {len(by_label) - MAX_METHODS} more")
    if not_run:
        lines.append(f"not run: {', '.join(not_run)}")
    return "\n  ".join(to_printable_line(line, MAX_LINE) for line in lines)
