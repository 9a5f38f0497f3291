"""Tables for a terminal, without lines, in 80 columns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedstill.core.text_format import json_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def plain() -> Console:
    """A console that prints texts as they are."""
    from fedstill.core.console import SafeConsole

    return SafeConsole(highlight=False, markup=False, emoji=False)


def whole_rows() -> Console:
    """A console for lists: in a pipe one row of a table is one line, unless COLUMNS says how wide it is."""
    from fedstill.core.console import SafeConsole

    console = SafeConsole(highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = 1000
    return console


def columns(*heads: str | None, gap: int = 2, left: int | None = None, **first: Any) -> Table:
    """A table without lines.

    Args:
        heads: of its columns; None, or no heads: they have none.
        left: so many columns are words, all others numbers; None: all are words.
    """
    from rich.table import Table

    table = Table(box=None, show_header=any(heads), padding=(0, gap, 0, 0), pad_edge=False)
    for place, head in enumerate(heads):
        side = "left" if left is None or place < left else "right"
        own: dict[str, Any] = {"justify": side, **(first if place == 0 else {})}
        table.add_column(head or "", overflow="fold", header_style="bold", **own)
    return table


def print_json(told: Any) -> None:
    """One JSON document for scripts; JSON has no infinity, so what is without bound or end is null."""
    print(json_text(told))


def print_facts(console: Console, facts: Mapping[str, str | Sequence[str]], indent: str = "  ") -> None:
    """What is to be known of one thing under its names: a line each, or several."""
    table = columns(None, None, no_wrap=True)
    for head, texts in facts.items():
        lines = [texts] if isinstance(texts, str) else texts
        for number, line in enumerate(lines):
            table.add_row(f"{indent}{head}" if number == 0 else "", line)
    console.print(table)
    console.print()


def print_table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> None:
    """Rows under their heads; the first ``left`` columns are words, all others numbers."""
    table = columns(f"  {heads[0]}", *heads[1:], left=left)
    for first, *rest in rows:
        table.add_row(f"  {first}", *rest)
    console.print(table)
    console.print()
