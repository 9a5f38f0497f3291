"""A comparison in the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedstill.report.compare_leakage import notes
from fedstill.report.compare_tables import (
    NONE,
    best_of,
    called,
    cells_of,
    gap_of,
    head_of,
    heads_of,
    paper_text,
    shown,
)
from fedstill.report.metrics import in_a_sentence
from fedstill.report.summary import Setting, Summary

WIDE = 130  # columns of a terminal that takes everything in one table
EACH = 14  # more for each figure beyond the first
LEAKING = 11  # more for each figure of attacks


def print_comparison(summary: Summary, console: Console) -> None:
    """Print one table a setting, one row a method. Names are printed as they are, never read as markup."""
    first, local, *others = shown(summary)
    published = summary.compared()
    more = EACH * (len(others) + max(0, len(published) - 2)) + LEAKING * len(summary.leaks)
    wide = console.width >= WIDE + more
    leaks = summary.leaks if wide else ()
    names = [first, local, *others] if wide else [first, local]
    compared = published if wide else []
    for setting in summary.settings:
        console.print(Text(setting.name or summary.name, style="bold"))
        console.print(Text(setting.context, style="dim"))
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("method", no_wrap=wide)
        heads = [
            re.sub(r"^(paper|gap), (.*)$", r"\1 (\2)", head)
            for head in heads_of(summary, names, compared, leaks)
        ]
        heads[1] = "local"
        for title in heads:
            table.add_column(title, justify="right", no_wrap=True)
        if wide:
            table.add_column("leaves a node", ratio=3)
            table.add_column("needs", ratio=2)
        best = best_of(summary, setting)
        for row in setting.rows:
            cells = [Text(row.name), *map(Text, cells_of(summary, row, names, compared, leaks))]
            for name, cell in zip(names, cells[1:], strict=False):
                if row.label in best[name] and row.runs:
                    cell.stylize("bold")
            told = [Text(", ".join(row.leaves) or "nothing"), Text(", ".join(row.needs) or "nothing")]
            table.add_row(*cells, *(told if wide else []))
        console.print(table)
        if others and not wide:
            _print_others(summary, setting, others, console)
        if summary.leaks and not wide:
            _print_leaks(summary, setting, console)
        for row in setting.rows:
            if row.reason():
                console.print(Text(f"{row.name}: {row.reason()}"))
            for name in row.published if not wide else ():
                theirs, gap = paper_text(summary, row, name), gap_of(summary, row, name)
                console.print(
                    Text(f"{row.name}, {called(summary, name)}: the paper has {theirs}, the gap is {gap}")
                )
        console.print()
    if not wide:
        _print_terms(summary, console)
    for paper in summary.published:
        where = f", {paper.setting}" if paper.setting else ""
        console.print(
            Text(
                f"Paper: {paper.method}, {called(summary, paper.figure)}{where}: {paper.source}", style="dim"
            )
        )
    for note in (*summary.notes, *(notes(summary.leaks) if summary.leakage else ())):
        console.print(Text(note, style="dim"))


def _print_others(summary: Summary, setting: Setting, others: Sequence[str], console: Console) -> None:
    """The figures beyond the first, for terminals too narrow to have them beside it."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("method")
    for name in others:
        table.add_column(Text(in_a_sentence(head_of(summary, name))), justify="right")
    for row in setting.rows:
        cells = [row.shown(name, summary.figure(name).digits) or NONE for name in others]
        table.add_row(*(Text(text) for text in (row.name, *cells)))
    console.print(table)


def _print_leaks(summary: Summary, setting: Setting, console: Console) -> None:
    """What attacks got, for terminals too narrow to have it beside the figures."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("attacked")
    for leak in summary.leaks:
        table.add_column(leak.head, justify="right")
    for row in setting.rows:
        cells = [row.leaked(leak) or NONE for leak in summary.leaks]
        table.add_row(*(Text(text) for text in (row.name, *cells)))
    console.print(table)


def _print_terms(summary: Summary, console: Console) -> None:
    """What leaves a node and what a method needs, for terminals too narrow to have it beside the figures."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in ("method", "leaves a node", "needs"):
        table.add_column(head)
    told = {row.label: row for row in summary.rows}
    for row in told.values():
        leaves, needs = ", ".join(row.leaves) or "nothing", ", ".join(row.needs) or "nothing"
        table.add_row(*(escape(text) for text in (row.name, leaves, needs)))
    console.print(table)
