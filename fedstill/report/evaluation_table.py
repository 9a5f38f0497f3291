"""Terminal table of a student's metrics on other data than its run's: over all examples and by site."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstill.core.text_format import format_count
from fedstill.report.metric_text import format_header, format_value_without_unit
from fedstill.report.table_formats import Cell, Column, Row, Table
from fedstill.tasks.task import Metric


def evaluation_table(evaluation: Mapping[str, Any], metrics: tuple[Metric, ...]) -> Table:
    """Return one row for all examples and one row per site, with every metric of the task.

    Args:
        evaluation: the student's evaluation, with the keys ``examples``, ``metrics``, ``interval`` and
            ``sites``.
        metrics: metrics of the task; the first has a 95% interval.
    """
    columns = [Column("examples"), *(Column(format_header(metric, units=True)) for metric in metrics)]
    columns.insert(2, Column("95% interval"))

    def row(name: str, scores: Mapping[str, Any], highlight: bool = False) -> Row:
        values = [scores["metrics"][metric.key] for metric in metrics]
        texts = [
            None if value is None else format_value_without_unit(metric, value)
            for metric, value in zip(metrics, values, strict=True)
        ]
        ends = scores["interval"]
        interval = (
            None if ends is None else " to ".join(format_value_without_unit(metrics[0], end) for end in ends)
        )
        cells = [f"{scores['examples']:,}", texts[0], interval, *texts[1:]]
        return Row(name, [Cell(text) for text in cells], highlight=highlight)

    by_site = [row(site, scores) for site, scores in evaluation["sites"].items()]
    rows = [row("all", evaluation, highlight=True), *by_site]
    return Table("", "site" if evaluation["sites"] else "", columns, rows)


def data_overlap_text(evaluation: Mapping[str, Any]) -> str:
    """Return a sentence on evaluation examples that are also in the nodes' data or in the public data."""
    seen, count = evaluation["seen"], evaluation["examples"]
    if seen["examples"] is None:
        return f"Overlap with the nodes' data was not checked: {seen['why']}."
    if not seen["examples"] and not seen["public"]:
        return (
            f"None of the {format_count(count, 'example')} is in the nodes' training data or in the public "
            "data "
            "(compared bit by bit; rescaled copies are not found)."
        )
    sources = {"examples": "the nodes' training data", "public": "the public data used for distillation"}
    overlaps = [f"{seen[key]:,} are also in {source}" for key, source in sources.items() if seen[key]]
    return f"Of {format_count(count, 'example')} {', and '.join(overlaps)}: metrics may be too optimistic."
