"""Output of a comparison: page, CSV, LaTeX and Markdown files, and tables in the terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.core.run_writer import write_text
from fedstill.report import table_formats
from fedstill.report.compare_csv import pairwise_differences_csv, runs_csv, summary_csv
from fedstill.report.compare_page import render_comparison_page
from fedstill.report.compare_reader import summarize
from fedstill.report.compare_summary import ComparisonSummary
from fedstill.report.compare_table import (
    budget_table,
    cost_columns,
    full_table,
    leakage_columns,
    leakage_notes,
    metric_columns,
    needs_text,
    paper_gap_text,
    paper_text,
    releases_text,
    setting_table,
)
from fedstill.report.table_formats import NO_VALUE, Cell, Column, Row, Table

if TYPE_CHECKING:
    from rich.console import Console

    from fedstill.compare.comparison_file import Comparison

__all__ = [
    "latex", "markdown", "print_comparison", "render_comparison_page", "summarize", "write_comparison",
]  # fmt: skip


def write_comparison(out: Path, comparison: Comparison) -> Path:
    """Write page, CSV, LaTeX and Markdown of a comparison into its folder and return the path of the page.

    Raises:
        RunFolderError: a file of a run is broken.
    """
    summary = summarize(out, comparison)
    write_text(out / "compare.csv", runs_csv(summary))
    write_text(out / "compare-summary.csv", summary_csv(summary))
    write_text(out / "compare-pairs.csv", pairwise_differences_csv(summary))
    write_text(out / "compare.tex", latex(summary))
    write_text(out / "compare.md", markdown(summary))
    write_text(out / "compare.html", render_comparison_page(summary))
    return out / "compare.html"


# --- Markdown, LaTeX --------------------------------------------------------------------------------------


def markdown(summary: ComparisonSummary) -> str:
    """Return the Markdown text: a table by privacy budget if budgets differ, then a table per setting."""
    by_budget = budget_table(summary)
    lines = [] if by_budget is None else [*table_formats.markdown(by_budget), ""]
    for setting in summary.settings:
        table = full_table(summary, setting)
        lines += [f"**{setting.name}**", ""] if setting.name else []
        rows = [
            replace(row, cells=[Cell(entry.evaluated_model), *row.cells])
            for entry, row in zip(setting.entries, table.rows, strict=True)
        ]
        lines += table_formats.markdown(
            replace(table, columns=[Column("evaluated model"), *table.columns], rows=rows)
        )
        lines.append("")
        notes = [f"{row.name}: {row.note}." for row in table.rows if row.note] + setting.verdicts()
        lines += [*notes, ""] if notes else []
    return "\n".join(lines)


def latex(summary: ComparisonSummary) -> str:
    """Return the LaTeX table of all settings, with notes as comments."""
    papers = [f"Paper: {paper.method}, {paper.metric}: {paper.source}" for paper in summary.published]
    verdicts = [
        f"{setting.name}: {verdict}" if setting.name else verdict
        for setting in summary.settings
        for verdict in setting.verdicts()
    ]
    tables = [full_table(summary, setting) for setting in summary.settings]
    text = table_formats.latex(tables, [*summary.notes, *verdicts, *papers])
    return text.replace(" & Down & ", " & Bytes down & ", 1)


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
            table_formats.print_rows(setting_table(setting, columns), console, wrapped=["epsilon"])
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
    table_formats.print_rows(
        Table("", "method", headers, rows), console, wrapped=[column.header for column in headers]
    )
    for paper in summary.published:
        setting_text = f", {paper.setting}" if paper.setting else ""
        line = f"Paper: {paper.method}, {summary.title_of(paper.metric)}{setting_text}: {paper.source}"
        console.print(Text(line, style="dim"))
    for note in (*summary.notes, *(leakage_notes(summary.leakage_columns) if summary.leakage else ())):
        console.print(Text(note, style="dim"))
