"""A comparison's tables, for people and for papers: terminal, HTML, CSV, LaTeX and Markdown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.core.run_writer import write_text
from fedstill.report import table_formats
from fedstill.report.compare_csv import pairs_csv, runs_csv, summary_csv
from fedstill.report.compare_page import html
from fedstill.report.compare_reader import summarize
from fedstill.report.compare_summary import Summary
from fedstill.report.compare_table import (
    budget_table,
    cost_columns,
    full_table,
    leakage_columns,
    leakage_notes,
    leaves,
    metric_columns,
    needs,
    paper_gap_text,
    paper_text,
    setting_table,
)
from fedstill.report.table_formats import NONE, Cell, Column, Row, Table

if TYPE_CHECKING:
    from rich.console import Console

    from fedstill.compare.comparison_file import Comparison

__all__ = ["html", "latex", "markdown", "print_comparison", "summarize", "write_comparison"]


def write_comparison(out: Path, comparison: Comparison) -> Path:
    """Write page, CSV, LaTeX and Markdown of a comparison into its folder; returns the path of the page.

    Raises:
        RunFolderError: a file of a run is broken.
    """
    summary = summarize(out, comparison)
    write_text(out / "compare.csv", runs_csv(summary))
    write_text(out / "compare-summary.csv", summary_csv(summary))
    write_text(out / "compare-pairs.csv", pairs_csv(summary))
    write_text(out / "compare.tex", latex(summary))
    write_text(out / "compare.md", markdown(summary))
    write_text(out / "compare.html", html(summary))
    return out / "compare.html"


# --- Markdown, LaTeX --------------------------------------------------------------------------------------


def markdown(summary: Summary) -> str:
    """A table for each setting, for a page of documentation; before them accuracy against epsilon."""
    by_budget = budget_table(summary)
    lines = [] if by_budget is None else [*table_formats.markdown(by_budget), ""]
    for setting in summary.settings:
        table = full_table(summary, setting)
        lines += [f"**{setting.name}**", ""] if setting.name else []
        judged = zip(setting.entries, table.rows, strict=True)
        rows = [replace(row, cells=[Cell(entry.central), *row.cells]) for entry, row in judged]
        lines += table_formats.markdown(
            replace(table, columns=[Column("judged by"), *table.columns], rows=rows)
        )
        lines.append("")
        told = [f"{row.name}: {row.says}." for row in table.rows if row.says] + setting.verdicts()
        lines += [*told, ""] if told else []
    return "\n".join(lines)


def latex(summary: Summary) -> str:
    """The table for a paper."""
    papers = [f"Paper: {paper.method}, {paper.metric}: {paper.source}" for paper in summary.published]
    told = [
        f"{setting.name}: {each}" if setting.name else each
        for setting in summary.settings
        for each in setting.verdicts()
    ]
    tables = [full_table(summary, setting) for setting in summary.settings]
    text = table_formats.latex(tables, [*summary.notes, *told, *papers])
    return text.replace(" & Down & ", " & Bytes down & ", 1)


# --- the terminal -----------------------------------------------------------------------------------------


def print_comparison(summary: Summary, console: Console) -> None:
    """Print a setting's tables, one row a method: what is reached at which cost, other figures, leakage."""
    from rich.text import Text

    first, local, *others = summary.shown()
    reached = metric_columns(summary, [first, local])
    reached[1] = replace(reached[1], head="local")
    parts = [[*reached, *cost_columns(summary)], metric_columns(summary, others), leakage_columns(summary)]
    for setting in summary.settings:
        console.print(Text(setting.name or summary.name, style="bold"))
        console.print(Text(setting.context, style="dim"))
        for values in filter(None, parts):
            table_formats.print_rows(setting_table(setting, values), console, wrapped=["epsilon"])
        for verdict in setting.verdicts():
            console.print(Text(verdict))
        for entry in setting.entries:
            if entry.reason():
                console.print(Text(f"{entry.name}: {entry.reason()}"))
            for name in entry.published:
                theirs, gap = paper_text(summary, name, entry), paper_gap_text(summary, name, entry) or NONE
                what = f"{entry.name}, {summary.called(name)}"
                console.print(Text(f"{what}: the paper has {theirs}, the gap is {gap}"))
        console.print()
    known = {entry.name: entry for entry in summary.entries}.values()
    heads = [Column("leaves a node", ""), Column("needs", "")]
    rows = [Row(entry.name, [Cell(leaves(entry)), Cell(needs(entry))]) for entry in known]
    table_formats.print_rows(
        Table("", "method", heads, rows), console, wrapped=[column.head for column in heads]
    )
    for paper in summary.published:
        where = f", {paper.setting}" if paper.setting else ""
        told = f"Paper: {paper.method}, {summary.called(paper.metric)}{where}: {paper.source}"
        console.print(Text(told, style="dim"))
    for note in (*summary.notes, *(leakage_notes(summary.leaks) if summary.leakage else ())):
        console.print(Text(note, style="dim"))
