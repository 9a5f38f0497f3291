"""A comparison's tables, for people and for papers: terminal, HTML, CSV, LaTeX and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.core.records import write_text
from fedstill.report import tables
from fedstill.report.compare_csv import runs_csv, summary_csv
from fedstill.report.compare_page import html
from fedstill.report.compare_table import (
    Value,
    budget_table,
    gap_of,
    leak_notes,
    leaves,
    needs,
    paper_text,
    setting_table,
    values_of,
    whole_table,
)
from fedstill.report.summarise import summarise
from fedstill.report.summary import Setting, Summary
from fedstill.report.tables import NONE, Cell, Column, Row, Table

if TYPE_CHECKING:
    from rich.console import Console

    from fedstill.compare.plan import Comparison

__all__ = ["html", "latex", "markdown", "print_comparison", "summarise", "write_comparison"]

WIDE = 130  # columns of a terminal that takes everything in one table
EACH = 14  # more for each figure beyond the first
LEAKING = 11  # more for each figure of attacks


def write_comparison(out: Path, comparison: Comparison) -> Path:
    """Write page, CSV, LaTeX and Markdown of a comparison into its folder; returns the path of the page.

    Raises:
        RunFolderError: a file of a run is broken.
    """
    summary = summarise(out, comparison)
    write_text(out / "compare.csv", runs_csv(summary))
    write_text(out / "compare-summary.csv", summary_csv(summary))
    write_text(out / "compare.tex", latex(summary))
    write_text(out / "compare.md", markdown(summary))
    write_text(out / "compare.html", html(summary))
    return out / "compare.html"


# --- Markdown, LaTeX --------------------------------------------------------------------------------------


def markdown(summary: Summary) -> str:
    """A table for each setting, for a page of documentation; before them accuracy against epsilon."""
    by_budget = budget_table(summary)
    lines = [] if by_budget is None else [*tables.markdown(by_budget), ""]
    for setting in summary.settings:
        table = whole_table(summary, setting)
        lines += [f"**{setting.name}**", ""] if setting.name else []
        judged = zip(setting.entries, table.rows, strict=True)
        rows = [replace(row, cells=[Cell(entry.central), *row.cells]) for entry, row in judged]
        lines += tables.markdown(replace(table, columns=[Column("judged by"), *table.columns], rows=rows))
        lines.append("")
        left_out = [f"{row.name}: {row.says}." for row in table.rows if row.says]
        lines += [*left_out, ""] if left_out else []
    return "\n".join(lines)


def latex(summary: Summary) -> str:
    """The table for a paper."""
    papers = [f"Paper: {paper.method}, {paper.figure}: {paper.source}" for paper in summary.published]
    text = tables.latex(
        [whole_table(summary, setting) for setting in summary.settings], [*summary.notes, *papers]
    )
    return text.replace(" & Down & ", " & Bytes down & ", 1)


# --- the terminal -----------------------------------------------------------------------------------------


def print_comparison(summary: Summary, console: Console) -> None:
    """Print one table a setting, one row a method; on a narrow terminal parted into several."""
    from rich.text import Text

    first, local, *others = summary.shown()
    compared = summary.compared()
    more = EACH * (len(others) + max(0, len(compared) - 2)) + LEAKING * len(summary.leaks)
    wide = console.width >= WIDE + more
    terms = [Value("leaves a node", leaves, style=""), Value("needs", needs, style="")]
    if wide:
        parts = [[*values_of(summary, [first, local, *others], compared, summary.leaks), *terms]]
    else:
        rest = values_of(summary, others, [], summary.leaks)
        parts = [values_of(summary, [first, local], [], []), rest[: len(others)]]
        parts.append([value for value in rest if value.head in [leak.head for leak in summary.leaks]])
    parts[0][1] = replace(parts[0][1], head="local")

    def show(setting: Setting, values: Sequence[Value]) -> None:
        free = ("epsilon", *(value.head for value in terms))
        tables.print_rows(setting_table(summary, setting, values), console, wrapped=free, wrap_names=not wide)

    for setting in summary.settings:
        console.print(Text(setting.name or summary.name, style="bold"))
        console.print(Text(setting.context, style="dim"))
        for values in filter(None, parts):
            show(setting, values)
        for entry in setting.entries:
            if entry.reason():
                console.print(Text(f"{entry.name}: {entry.reason()}"))
            for name in entry.published if not wide else ():
                theirs, gap = paper_text(summary, name, entry), gap_of(summary, name, entry) or NONE
                what = f"{entry.name}, {summary.called(name)}"
                console.print(Text(f"{what}: the paper has {theirs}, the gap is {gap}"))
        console.print()
    if not wide:
        known = {entry.name: entry for entry in summary.entries}.values()
        rows = [Row(entry.name, [value.cell(entry) for value in terms]) for entry in known]
        heads = [Column(value.head, "") for value in terms]
        tables.print_rows(Table("", "method", heads, rows), console, wrapped=[c.head for c in heads])
    for paper in summary.published:
        where = f", {paper.setting}" if paper.setting else ""
        told = f"Paper: {paper.method}, {summary.called(paper.figure)}{where}: {paper.source}"
        console.print(Text(told, style="dim"))
    for note in (*summary.notes, *(leak_notes(summary.leaks) if summary.leakage else ())):
        console.print(Text(note, style="dim"))
