"""Tables for a terminal in 80 columns, tab-separated lines for a pipe, and the last line of an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fedstill.core.errors import FedstillError
from fedstill.core.text_format import json_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def plain() -> Console:
    """Return a console that prints text without markup, highlighting or emoji."""
    from fedstill.core.safe_console import SafeConsole

    return SafeConsole(highlight=False, markup=False, emoji=False)


def columns(*heads: str | None, gap: int = 2, left: int | None = None, **first: Any) -> Table:
    """Return an empty table without lines.

    Args:
        heads: heads of the columns; None for a column without head.
        gap: blanks between columns.
        left: number of columns that hold text; all others hold numbers and are aligned right. None: all text.
        first: options of the first column, as rich's ``Table.add_column`` takes them.
    """
    from rich.table import Table

    table = Table(box=None, show_header=any(heads), padding=(0, gap, 0, 0), pad_edge=False)
    for index, head in enumerate(heads):
        justify = "left" if left is None or index < left else "right"
        options: dict[str, Any] = {"justify": justify, **(first if index == 0 else {})}
        table.add_column(head or "", overflow="fold", header_style="bold", **options)
    return table


def print_json(value: Any) -> None:
    """Print one JSON document; infinite numbers and NaN become null."""
    print(json_text(value))


def print_list(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text under their heads: as a table on a terminal, else tab-separated without padding.

    The environment variable COLUMNS gives a table of that width in a pipe, too.
    """
    console = plain()
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        for row in (heads, *rows):
            print("\t".join(" ".join(cell.split()) for cell in row))
        return
    table = columns(*heads, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()


def print_facts(console: Console, facts: Mapping[str, str | Sequence[str]], indent: str = "  ") -> None:
    """Print names with their texts, a line each; a sequence of texts takes a line each."""
    table = columns(None, None, no_wrap=True)
    for head, texts in facts.items():
        lines = [texts] if isinstance(texts, str) else texts
        for number, line in enumerate(lines):
            table.add_row(f"{indent}{head}" if number == 0 else "", line)
    console.print(table)
    console.print()


def print_table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> None:
    """Print rows under their heads; the first ``left`` columns hold text, all others numbers."""
    table = columns(f"  {heads[0]}", *heads[1:], left=left)
    for first, *rest in rows:
        table.add_row(f"  {first}", *rest)
    console.print(table)
    console.print()


def leave(message: str, code: int) -> NoReturn:
    """Exit with a code and one line on standard error."""
    print(f"fedstill: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def leave_faulty(folder: Path, faults: Sequence[str]) -> NoReturn:
    """Exit with the faults of a node."""
    if len(faults) == 1:
        raise FedstillError(faults[0])
    print(f"fedstill: {len(faults)} faults in {folder}:", file=sys.stderr)
    for fault in faults:
        print(f"  {' '.join(fault.split())}", file=sys.stderr)
    sys.exit(2)
