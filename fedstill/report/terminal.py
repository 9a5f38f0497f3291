"""Text for the terminal: a run's table, a comparison's tables, an evaluation, and short summaries."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.core.text_format import (
    NOT_MEASURED,
    format_bytes,
    format_count,
    format_seconds,
    to_printable_line,
)
from fedstill.report.comparison_records import ComparisonSummary
from fedstill.report.comparison_tables import (
    cost_columns,
    decomposition_table,
    leakage_columns,
    leakage_notes,
    metric_columns,
    needs_text,
    paper_gap_text,
    paper_text,
    releases_text,
    setting_table,
)
from fedstill.report.privacy_section import describe_privacy
from fedstill.report.records import Result, model_rows
from fedstill.report.run_tables import (
    interval_label,
    interval_text,
    message_cost_text,
    metrics_table,
    time_parts_text,
)
from fedstill.report.tables import (
    NO_VALUE,
    Cell,
    Column,
    Fact,
    Row,
    Table,
    format_header,
    format_record,
    format_value_without_unit,
    format_with_unit,
    lowercase_title,
    print_rows,
)
from fedstill.tasks.task import Metric

if TYPE_CHECKING:
    from rich.console import Console


MAX_METHODS = 12  # lines
MAX_LINE = 110  # characters


def run_summary(metrics: Mapping[str, Any], folder: Path | None) -> str:
    """Return a summary of a run in five lines: models' metrics, bytes, privacy and folder."""
    result = Result.from_record(metrics)
    metric = lowercase_title(result.metric.title)
    scores = ", ".join(
        f"{model.name} {format_record(result.metric, model.main_record)}"
        for model in model_rows(result)
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


# --- evaluation -----------------------------------------------------------------------------------------


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


# --- terminal ---------------------------------------------------------------------------------------------


def print_comparison(summary: ComparisonSummary, console: Console) -> None:
    """Print each setting's tables with a row per method: main metric and costs, other metrics, leakage."""
    from rich.text import Text

    main, local, *others = summary.shown_metrics()
    main_columns = metric_columns(summary, [main, local])
    main_columns[1] = replace(main_columns[1], header="local")
    parts = [
        [*main_columns, *cost_columns(summary)],
        metric_columns(summary, others),
        leakage_columns(summary),
    ]
    for setting in summary.settings:
        console.print(Text(setting.name or summary.name, style="bold"))
        console.print(Text(setting.context, style="dim"))
        for columns in filter(None, parts):
            print_rows(setting_table(setting, columns), console, wrapped=["epsilon"])
        if (decomposition := decomposition_table(setting)) is not None:
            print_rows(decomposition, console)
        for verdict in setting.verdicts():
            console.print(Text(verdict))
        for entry in setting.entries:
            if entry.missing_reason():
                console.print(Text(f"{entry.name}: {entry.missing_reason()}"))
            for name in entry.published:
                published = paper_text(summary, name, entry)
                gap = paper_gap_text(summary, name, entry) or NO_VALUE
                console.print(Text(f"{entry.name}, {summary.title_of(name)}: paper {published}, gap {gap}"))
        console.print()
    by_name = {entry.name: entry for entry in summary.entries}.values()
    headers = [Column("releases of a node", ""), Column("needs", "")]
    rows = [Row(entry.name, [Cell(releases_text(entry)), Cell(needs_text(entry))]) for entry in by_name]
    print_rows(Table("", "method", headers, rows), console, wrapped=[column.header for column in headers])
    for paper in summary.published:
        setting_text = f", {paper.setting}" if paper.setting else ""
        line = f"Paper: {paper.method}, {summary.title_of(paper.metric)}{setting_text}: {paper.source}"
        console.print(Text(line, style="dim"))
    for note in (*summary.notes, *(leakage_notes(summary.leakage_columns) if summary.leakage else ())):
        console.print(Text(note, style="dim"))


NO_BREAK_SPACE = "\u00a0"


def print_table(record: Mapping[str, Any], console: Console) -> None:
    """Print the table at the end of a run.

    Args:
        record: content of ``result.json``.
        console: rich console to print on.
    """
    from rich.text import Text

    result = Result.from_record(record)
    console.print(Text(result.name or "run", style="italic"))
    print_rows(metrics_table(result), console)
    for label, value, _ in run_totals(result):
        # No line break between a number and its unit.
        unbroken = re.sub(r"(?<=[0-9]) (?=\S)", NO_BREAK_SPACE, value or NOT_MEASURED)
        line = textwrap.fill(
            f"  {label + ':':<19}{unbroken}",
            width=console.width,
            subsequent_indent=" " * 21,
            break_on_hyphens=False,
        )
        console.print(Text(line.replace(NO_BREAK_SPACE, " ")), soft_wrap=True)


def run_totals(result: Result) -> list[Fact]:
    """Return intervals, bytes, privacy and time of a whole run, and its message cost if distributed."""
    up, down, seconds = result.bytes.up, result.bytes_down, result.seconds.total
    intervals = {model.name: interval_text(result.metric, model.interval) for model in model_rows(result)}
    by_model = "; ".join(f"{name} {text}" for name, text in intervals.items() if text)
    facts = [
        Fact("intervals", f"{by_model} ({interval_label(result)})" if by_model else None),
        Fact("bytes from nodes", NOT_MEASURED if up is None else format_bytes(up)),
        Fact("bytes to nodes", NOT_MEASURED if down is None else format_bytes(down)),
        Fact("privacy", describe_privacy(result) or NOT_MEASURED),
        Fact("time", NOT_MEASURED if seconds is None else format_seconds(seconds)),
        Fact("time by activity", time_parts_text(result)),
        Fact("messages", message_cost_text(result)),
        *(Fact(event.node, event.text) for event in result.events),
    ]
    return [fact for fact in facts if fact.value is not None]
