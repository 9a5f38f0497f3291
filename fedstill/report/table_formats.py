"""A table is made once, from typed files, and written by one function for each medium.

A page writes the same :class:`Table` by the macro ``table`` of ``table.html.j2``.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

NONE = "-"


@dataclass(frozen=True)
class Cell:
    """One value of a table.

    Args:
        value: as it is written, perhaps as markup of a page; None is not measured.
        says: small print below it, on a page.
        bold: whether it is the best of its column.
        style: more classes of a page's style sheet than its column's.
        span: columns that it takes.
        title: what a page says to whoever points at it.
    """

    value: str | None
    says: str = ""
    bold: bool = False
    style: str = ""
    span: int = 1
    title: str = ""

    def bold_if(self, best: bool) -> Cell:
        """The same as the best of its column, if it is that and there is a value."""
        return replace(self, bold=best and self.value is not None)


class Fact(NamedTuple):
    """One thing that is told: its name, its value, None where that was not measured, and what is said."""

    name: str
    value: str | None
    says: str = ""


@dataclass(frozen=True)
class Row:
    """One line of a table: its name, its values, and what is said of it; some stand out."""

    name: str
    cells: Sequence[Cell]
    says: str = ""
    accent: bool = False


@dataclass(frozen=True)
class Column:
    """One column: its head, and classes of a page's style sheet; what has "r" stands at the right."""

    head: str
    style: str = "r"


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        title: what it shows, for whoever hears it.
        name: over the names of its rows.
        columns: one a cell.
        rows: from top to bottom.
        foot: rows below a line.
        groups: heads over several columns, with how many; what is not named is over none.
        style: its class in a page's style sheet.
        none: what a page writes where there is no value; empty: that it was not measured.
    """

    title: str
    name: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    foot: Sequence[Row] = ()
    groups: Sequence[tuple[str, int]] = ()
    style: str = ""
    none: str = ""


def print_rows(table: Table, console: Console, *, wrapped: Sequence[str] = ()) -> None:
    """Print a table; words are printed as they are, never read as markup.

    Names, and columns whose heads are ``wrapped``, may go on in a second line. Without these, columns that
    the console has no room for stand below, beside the same names.
    """
    from rich import box
    from rich.table import Table as Lines
    from rich.text import Text

    if not wrapped and len(parts := _fitting(table, console.width)) > 1:
        for part in parts:
            print_rows(part, console)
        return
    lines = Lines(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    lines.add_column(Text(table.name), overflow="fold")
    for column in table.columns:
        free = column.head in wrapped
        justify: Any = "right" if "r" in column.style.split() else "left"
        lines.add_column(Text(column.head), justify=justify, no_wrap=not free, ratio=2 if free else None)
    for row in table.rows:
        style = "bold" if row.accent else ""
        values = [Text(_plain(cell), style="bold" if cell.bold else style) for cell in row.cells]
        lines.add_row(Text(row.name, style=style), *values)
    console.print(lines)


def _fitting(table: Table, width: int) -> list[Table]:
    """A table's columns in as many tables as a console of some width needs, at least one column in each."""
    names = max(map(len, (table.name, *(row.name for row in table.rows))))
    used = edge = 2 + min(names, width // 2)
    parts: list[list[int]] = [[]]
    for place, column in enumerate(table.columns):
        values = [_plain(row.cells[place]) for row in table.rows]
        need = 2 + max(map(len, (column.head, *values)))
        if parts[-1] and used + need > width:
            parts.append([])
            used = edge
        parts[-1].append(place)
        used += need
    return [
        replace(
            table,
            columns=[table.columns[place] for place in part],
            rows=[replace(row, cells=[row.cells[place] for place in part]) for row in table.rows],
        )
        for part in parts
    ]


def _plain(cell: Cell) -> str:
    return NONE if cell.value is None else cell.value


def markdown(table: Table) -> list[str]:
    """A table's lines in Markdown.

    >>> markdown(Table("", "method", [Column("AUC")], [Row("a", [Cell("93", bold=True)])]))
    ['| method | AUC |', '|---|---|', '| a | **93** |']
    """
    lines = [[table.name, *(column.head for column in table.columns)]]
    for row in table.rows:
        bold = [("**" if cell.bold else "", _plain(cell)) for cell in row.cells]
        lines.append([row.name, *(f"{mark}{value}{mark}" for mark, value in bold)])
    lines = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    head, *rest = [f"| {' | '.join(line)} |" for line in lines]
    return [head, f"|{'---|' * len(lines[0])}", *rest]


SPECIAL = {
    "\\": "\\textbackslash{}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#", "_": "\\_", "{": "\\{",
    "}": "\\}", "<": "$<$", ">": "$>$", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}",
    "\u00b1": "$\\pm$", "\u2193": "$\\downarrow$",
}  # fmt: skip


def latex(tables: Sequence[Table], remarks: Sequence[str] = ()) -> str:
    """Tables of the same columns as one, each under its title; it needs the package booktabs.

    A row without values has what is said of it in their place. Differences, whose columns have the style
    "gap", are set as mathematics.
    """
    first = [tables[0].name, *(column.head for column in tables[0].columns)]
    heads = [tex(f"{head[:1].upper()}{head[1:]}") for head in first]
    lines = [
        "% Needs \\usepackage{booktabs}.",
        *(f"% {' '.join(remark.split())}" for remark in remarks),
        f"\\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
        "\\toprule",
        f"{' & '.join(heads)} \\\\",
    ]
    for table in tables:
        lines.append("\\midrule")
        if table.title:
            lines.append(f"\\multicolumn{{{len(heads)}}}{{l}}{{\\emph{{{tex(table.title)}}}}} \\\\")
        for row in table.rows:
            cells = [_tex_cell(cell, column) for cell, column in zip(row.cells, table.columns, strict=False)]
            if row.says:
                cells = [f"\\multicolumn{{{len(heads) - 1}}}{{l}}{{{tex(row.says)}}}"]
            lines.append(f"{' & '.join([tex(row.name), *cells])} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _tex_cell(cell: Cell, column: Column) -> str:
    if cell.value in (None, NONE):
        return "--"
    if "gap" in column.style:
        return f"${cell.value}$"
    told = tex(cell.value or "")
    return f"\\textbf{{{told}}}" if cell.bold else told


def tex(text: str) -> str:
    """Text with what LaTeX would read as a command escaped.

    >>> print(tex("a_b & <5%"))
    a\\_b \\& $<$5\\%
    """
    return "".join(SPECIAL.get(letter, letter) for letter in " ".join(text.split()))


def as_csv(records: Sequence[Mapping[str, Any]], head: Sequence[str] = ()) -> str:
    """Records of the same keys as CSV with a head, which of none must be given; None is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, head or list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
