"""Tables, independent of the medium, and writers for terminal, Markdown, LaTeX and CSV.

Pages render a :class:`Table` with the macro ``table`` of ``table.html.j2``.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

NO_VALUE = "-"


@dataclass(frozen=True)
class Cell:
    """One value of a table.

    Args:
        value: text, or markup on a page; None if not measured.
        note: small print below the value, on a page.
        bold: whether the value is the best of its column.
        style: CSS classes in addition to the column's.
        span: number of columns that the cell covers.
        tooltip: tooltip of the cell, on a page.
    """

    value: str | None
    note: str = ""
    bold: bool = False
    style: str = ""
    span: int = 1
    tooltip: str = ""

    def bold_if(self, best: bool) -> Cell:
        """Return this cell, in bold if it is the best of its column and has a value."""
        return replace(self, bold=best and self.value is not None)


class Fact(NamedTuple):
    """Named value with a note; the value is None if it was not measured."""

    name: str
    value: str | None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One row of a table: its header, its cells, a note on the row, and whether it is highlighted."""

    name: str
    cells: Sequence[Cell]
    note: str = ""
    highlight: bool = False


@dataclass(frozen=True)
class Column:
    """One column of a table: its header and its CSS classes; class "r" aligns right."""

    header: str
    style: str = "r"


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        title: caption for screen readers.
        row_header: header of the column of row names.
        columns: one per cell of a row.
        rows: from top to bottom.
        footer: rows below a line.
        groups: headers above several columns, each with its number of columns; an empty header covers columns
            without a group.
        style: CSS class of the table.
        no_value: text of a page for a missing value; empty for "not measured".
    """

    title: str
    row_header: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    footer: Sequence[Row] = ()
    groups: Sequence[tuple[str, int]] = ()
    style: str = ""
    no_value: str = ""


def print_rows(table: Table, console: Console, *, wrapped: Sequence[str] = ()) -> None:
    """Print a table in the terminal; texts are printed as they are, never as rich markup.

    Args:
        table: table to print.
        console: rich console.
        wrapped: headers of columns whose texts may wrap. Without it, columns that do not fit the console are
            printed as further tables below, with the same row names.
    """
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    if not wrapped and len(parts := _split_to_width(table, console.width)) > 1:
        for part in parts:
            print_rows(part, console)
        return
    printed = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    printed.add_column(Text(table.row_header), overflow="fold")
    for column in table.columns:
        wraps = column.header in wrapped
        justify: Any = "right" if "r" in column.style.split() else "left"
        printed.add_column(
            Text(column.header), justify=justify, no_wrap=not wraps, ratio=2 if wraps else None
        )
    for row in table.rows:
        style = "bold" if row.highlight else ""
        values = [Text(_plain(cell), style="bold" if cell.bold else style) for cell in row.cells]
        printed.add_row(Text(row.name, style=style), *values)
    console.print(printed)


def _split_to_width(table: Table, width: int) -> list[Table]:
    """Split a table by columns into tables that fit a console, with at least one column each."""
    name_width = max(map(len, (table.row_header, *(row.name for row in table.rows))))
    used = margin = 2 + min(name_width, width // 2)
    parts: list[list[int]] = [[]]
    for index, column in enumerate(table.columns):
        values = [_plain(row.cells[index]) for row in table.rows]
        column_width = 2 + max(map(len, (column.header, *values)))
        if parts[-1] and used + column_width > width:
            parts.append([])
            used = margin
        parts[-1].append(index)
        used += column_width
    return [
        replace(
            table,
            columns=[table.columns[index] for index in part],
            rows=[replace(row, cells=[row.cells[index] for index in part]) for row in table.rows],
        )
        for part in parts
    ]


def _plain(cell: Cell) -> str:
    return NO_VALUE if cell.value is None else cell.value


def markdown(table: Table) -> list[str]:
    """Return the lines of a table in Markdown.

    >>> markdown(Table("", "method", [Column("AUC")], [Row("a", [Cell("93", bold=True)])]))
    ['| method | AUC |', '|---|---|', '| a | **93** |']
    """
    lines = [[table.row_header, *(column.header for column in table.columns)]]
    for row in table.rows:
        stars = [("**" if cell.bold else "", _plain(cell)) for cell in row.cells]
        lines.append([row.name, *(f"{star}{value}{star}" for star, value in stars)])
    lines = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    header, *rest = [f"| {' | '.join(line)} |" for line in lines]
    return [header, f"|{'---|' * len(lines[0])}", *rest]


TEX_ESCAPES = {
    "\\": "\\textbackslash{}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#", "_": "\\_", "{": "\\{",
    "}": "\\}", "<": "$<$", ">": "$>$", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}",
    "\u00b1": "$\\pm$", "\u2193": "$\\downarrow$",
}  # fmt: skip


def latex(tables: Sequence[Table], comments: Sequence[str] = ()) -> str:
    """Return tables with the same columns as one LaTeX table; it needs the package booktabs.

    A row without values shows its note instead. Columns with the style "gap" are set in math mode.

    Args:
        tables: parts of the table, each below its title.
        comments: LaTeX comments before the table.
    """
    first = [tables[0].row_header, *(column.header for column in tables[0].columns)]
    headers = [escape_tex(f"{header[:1].upper()}{header[1:]}") for header in first]
    lines = [
        "% Needs \\usepackage{booktabs}.",
        *(f"% {' '.join(comment.split())}" for comment in comments),
        f"\\begin{{tabular}}{{l{'r' * (len(headers) - 1)}}}",
        "\\toprule",
        f"{' & '.join(headers)} \\\\",
    ]
    for table in tables:
        lines.append("\\midrule")
        if table.title:
            lines.append(f"\\multicolumn{{{len(headers)}}}{{l}}{{\\emph{{{escape_tex(table.title)}}}}} \\\\")
        for row in table.rows:
            cells = [_tex_cell(cell, column) for cell, column in zip(row.cells, table.columns, strict=False)]
            if row.note:
                cells = [f"\\multicolumn{{{len(headers) - 1}}}{{l}}{{{escape_tex(row.note)}}}"]
            lines.append(f"{' & '.join([escape_tex(row.name), *cells])} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _tex_cell(cell: Cell, column: Column) -> str:
    if cell.value in (None, NO_VALUE):
        return "--"
    if "gap" in column.style:
        return f"${cell.value}$"
    text = escape_tex(cell.value or "")
    return f"\\textbf{{{text}}}" if cell.bold else text


def escape_tex(text: str) -> str:
    """Escape characters that are commands in LaTeX.

    >>> print(escape_tex("a_b & <5%"))
    a\\_b \\& $<$5\\%
    """
    return "".join(TEX_ESCAPES.get(letter, letter) for letter in " ".join(text.split()))


def as_csv(records: Sequence[Mapping[str, Any]], header: Sequence[str] = ()) -> str:
    """Return records with the same keys as CSV; None is empty. Without records, the header is required."""
    text = io.StringIO()
    writer = csv.DictWriter(text, header or list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
