"""Tables for a terminal, without lines, in 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def print_facts(console: Console, facts: Mapping[str, str], indent: str = "  ") -> None:
    """What is to be known of one thing, a line each, under their names."""
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for head, text in facts.items():
        table.add_row(f"{indent}{head}", text)
    console.print(table)
    console.print()


def print_table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> None:
    """Rows under their heads; the first ``left`` columns are words, all others numbers."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for place, head in enumerate(heads):
        table.add_column(
            f"  {head}" if place == 0 else head,
            justify="left" if place < left else "right",
            overflow="fold",
            header_style="bold",
        )
    for first, *rest in rows:
        table.add_row(f"  {first}", *rest)
    console.print(table)
    console.print()
