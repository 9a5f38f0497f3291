"""Tables, independent of the medium, and their renderers for terminal, Markdown, LaTeX, CSV and pages.

A page renders a :class:`Table` with the macro ``table`` of ``table.html.j2``. :func:`template_environment`
loads the templates. :func:`bar` and :func:`sparkline` draw SVG for cells and for pages that refresh often;
they stretch to any width while their strokes keep their width.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedstill.core.text_format import NOT_MEASURED, format_bytes, format_percent, format_seconds
from fedstill.report.records import Record
from fedstill.tasks.task import Metric

if TYPE_CHECKING:
    from rich.console import Console


# --- values of metrics as text --------------------------------------------------------------------------


PROPER_NAMES = ("Dice",)  # first words of titles that keep their capital within a sentence


def format_value_without_unit(metric: Metric, value: float) -> str:
    """Return a value without its unit, for columns whose header has the unit."""
    return f"{value:.{metric.digits}f}"


def format_with_unit(metric: Metric, value: float) -> str:
    """Return a value with its unit.

    >>> format_with_unit(Metric("accuracy", "Accuracy"), 93.37)
    '93.4%'
    >>> format_with_unit(Metric("hd95", "HD95", "px", 2, "lower"), 12.3456)
    '12.35 px'
    """
    return format_value_without_unit(metric, value) + (
        metric.unit if metric.unit in ("%", "") else f" {metric.unit}"
    )


def format_record(metric: Metric, record: Record | None) -> str:
    """Return value and standard deviation with the unit, as "81.1% ± 4.2", or "not measured"."""
    if record is None:
        return NOT_MEASURED
    return format_with_unit(metric, record.value) + _deviation(metric, record)


def format_record_without_unit(metric: Metric, record: Record | None) -> str:
    """Return value and standard deviation without the unit, as "81.1 ± 4.2"; "-" if not measured."""
    if record is None:
        return NO_VALUE
    return format_value_without_unit(metric, record.value) + _deviation(metric, record)


def _deviation(metric: Metric, record: Record) -> str:
    return "" if record.std is None else f" \u00b1 {format_value_without_unit(metric, record.std)}"


def format_difference(metric: Metric, difference: float) -> str:
    """Return a difference with its sign and without a unit, as "+12.3"; "0.0" if it rounds to zero."""
    rounded = round(difference, metric.digits)
    return f"{rounded:+.{metric.digits}f}" if rounded else format_value_without_unit(metric, 0.0)


def format_header(metric: Metric, *, units: bool = False) -> str:
    """Return the column header of a metric; a down arrow means that lower is better."""
    arrow = " \u2193" if metric.better == "lower" else ""
    return f"{metric.title}{arrow}" + (f" {metric.unit}" if units and metric.unit else "")


def lowercase_title(title: str) -> str:
    """Return a title as written within a sentence; abbreviations and proper names keep their capitals.

    >>> lowercase_title("Accuracy"), lowercase_title("Object Dice"), lowercase_title("HD95")
    ('accuracy', 'object Dice', 'HD95')
    """
    first = title.partition(" ")[0]
    keeps_capital = first[1:] != first[1:].lower() or len(first) < 2 or first in PROPER_NAMES
    return title if keeps_capital else title[0].lower() + title[1:]


# --- tables ---------------------------------------------------------------------------------------------


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
    """One row of a table: its header, its cells, a note on the row, and whether it is highlighted.

    ``group`` is a title above the first of several rows that have it.
    """

    name: str
    cells: Sequence[Cell]
    note: str = ""
    highlight: bool = False
    group: str = ""


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


def with_group_titles(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """Return rows, each with the title above it; empty unless it is the first of its group.

    >>> rows = [Row("a", []), Row("b", [], group="x"), Row("c", [], group="x")]
    >>> [title for title, _ in with_group_titles(rows)]
    ['', 'x', '']
    """
    above = ["", *(row.group for row in rows)]
    return [("" if row.group == last else row.group, row) for last, row in zip(above, rows, strict=False)]


def print_rows(table: Table, console: Console, *, wrapped: Sequence[str] = ()) -> None:
    """Print a table in the terminal; texts are printed as they are, never as rich markup.

    Args:
        table: table to print.
        console: rich console.
        wrapped: headers of columns whose texts may wrap. Without one, columns that do not fit the console are
            printed as further tables below, with the same row names.
    """
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    wraps = any(column.header in wrapped for column in table.columns)
    if not wraps and len(parts := _split_to_width(table, console.width)) > 1:
        for part in parts:
            print_rows(part, console)
        return
    printed = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    printed.add_column(Text(table.row_header), overflow="fold")
    for column in table.columns:
        may_wrap = column.header in wrapped
        justify: Any = "right" if "r" in column.style.split() else "left"
        printed.add_column(
            Text(column.header), justify=justify, no_wrap=not may_wrap, ratio=2 if may_wrap else None
        )
    for title, row in with_group_titles(table.rows):
        style = "bold" if row.highlight else ""
        if title:
            printed.add_row(Text(title, style="italic"))
        values = [Text(_plain(cell), style="bold" if cell.bold else style) for cell in row.cells]
        printed.add_row(Text(row.name, style=style), *values)
    console.print(printed)


def _split_to_width(table: Table, width: int) -> list[Table]:
    """Split a table by columns into tables that fit a console, with at least one column each."""
    names = (name for row in table.rows for name in (row.group, row.name))
    name_width = max(map(len, (table.row_header, *names)))
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
    for title, row in with_group_titles(table.rows):
        if title:
            lines.append([f"*{title}*", *("" for _ in row.cells)])
        stars = [("**" if cell.bold else "", _plain(cell)) for cell in row.cells]
        lines.append([row.name, *(f"{star}{value}{star}" for star, value in stars)])
    lines = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    header, *rest = [f"| {' | '.join(line)} |" for line in lines]
    return [header, f"|{'---|' * len(lines[0])}", *rest]


def table_html(table: Table, facts: Sequence[Fact] = ()) -> str:
    """Return a table in plain HTML, as notebooks show it, and facts below it. All texts are escaped.

    >>> print(table_html(Table("fedkd", "", [Column("AUC")], [Row("a", [Cell("<93", bold=True)])])))
    <table><caption>fedkd</caption>
    <tr><th></th><th>AUC</th></tr>
    <tr><th>a</th><td><b>&lt;93</b></td></tr>
    </table>
    """
    header = Markup("").join(Markup("<th>{}</th>").format(column.header) for column in table.columns)
    caption = Markup("<caption>{}</caption>").format(table.title) if table.title else ""
    lines = [Markup("<table>{}").format(caption)]
    lines.append(Markup("<tr><th>{}</th>{}</tr>").format(table.row_header, header))
    for title, row in with_group_titles(table.rows):
        if title:
            group = Markup('<tr><th colspan="{}"><i>{}</i></th></tr>')
            lines.append(group.format(len(table.columns) + 1, title))
        cells = Markup("").join(
            Markup("<td><b>{}</b></td>" if cell.bold else "<td>{}</td>").format(_plain(cell))
            for cell in row.cells
        )
        lines.append(Markup("<tr><th>{}</th>{}</tr>").format(row.name, cells))
    lines.append(Markup("</table>"))
    if facts:
        items = Markup("").join(Markup("<li>{}: {}</li>").format(name, value) for name, value, _ in facts)
        lines.append(Markup("<ul>{}</ul>").format(items))
    return "\n".join(lines)


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
        for title, row in with_group_titles(table.rows):
            if title:
                lines.append(f"\\multicolumn{{{len(headers)}}}{{l}}{{{escape_tex(title)}}} \\\\")
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


# --- templates of pages ---------------------------------------------------------------------------------


@cache  # the environment caches compiled templates; compiling takes longer than rendering
def template_environment() -> Environment:
    """Return the Jinja environment with the filters ``duration``, ``percent`` and ``or_missing``."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["with_group_titles"] = with_group_titles
    environment.filters["with_contents"] = with_contents
    environment.filters["duration"] = lambda value: MISSING_MARKUP if value is None else format_seconds(value)
    environment.filters["percent"] = lambda value: MISSING_MARKUP if value is None else format_percent(value)
    environment.filters["or_missing"] = lambda value: MISSING_MARKUP if value is None else value
    return environment


def with_contents(body: Markup) -> tuple[list[tuple[str, Markup]], Markup]:
    """Return the ids and titles of all second-level headings, and the text in which they have these ids.

    >>> with_contents(Markup("<h2>Metrics on the test data</h2>"))[0]
    [('metrics-on-the-test-data', Markup('Metrics on the test data'))]
    """
    headings: list[tuple[str, Markup]] = []

    def with_id(match: re.Match[str]) -> str:
        title = Markup(match[1])
        name = "-".join(re.findall(r"[a-z0-9]+", title.striptags().lower()))
        headings.append((name, title))
        return f'<h2 id="{name}">{title}</h2>'

    return headings, Markup(re.sub(r"<h2>(.*?)</h2>", with_id, body))


MISSING_MARKUP = Markup('<span class="missing">{}</span>').format(NOT_MEASURED)


def bytes_markup(count: int | None) -> Markup:
    """Return a number of bytes in a readable unit, with the exact number as tooltip."""
    if count is None:
        return MISSING_MARKUP
    return Markup('<span title="{:,} bytes">{}</span>').format(count, format_bytes(count))


# --- bars and sparklines --------------------------------------------------------------------------------


MAX_POINTS = 200  # points of a sparkline

VerticalLines = Sequence[tuple[str, float]]  # style class and position in percent


def bar(
    fill: tuple[str, float] | None = None,
    *,
    whisker: tuple[float, float] | None = None,
    rings: Sequence[float] = (),
    lines: VerticalLines = (),
) -> Markup:
    """Return a horizontal track from 0 to 100% with optional drawings on it; all positions in percent.

    Args:
        fill: style class and length of the filled bar.
        whisker: ends of a horizontal line.
        rings: positions of rings, one per node.
        lines: style classes and positions of vertical lines.
    """
    parts = ['<rect class="track" width="100%" y="5" height="14" rx="3"/>']
    if fill:
        parts.append(f'<rect class="{fill[0]}" width="{_percent(fill[1])}" y="5" height="14" rx="3"/>')
    parts += [
        f'<line class="{name}" x1="{_percent(x)}" x2="{_percent(x)}" y1="2" y2="22"/>' for name, x in lines
    ]
    parts += [f'<circle class="node" cx="{_percent(value)}" cy="12" r="3"/>' for value in rings]
    if whisker:
        parts.append(
            f'<line class="whisker" x1="{_percent(whisker[0])}" x2="{_percent(whisker[1])}" y1="12" y2="12"/>'
        )
    content = "".join(parts)
    return Markup(f'<svg class="bars" width="100%" height="24" aria-hidden="true">{content}</svg>')


def sparkline(values: Sequence[float]) -> Markup:
    """Return a line through finite values, scaled from their minimum to their maximum.

    Of more than :data:`MAX_POINTS` values, an evenly spaced subset and the last value are drawn.
    """
    step = -(-len(values) // MAX_POINTS) or 1
    shown = [*values[:-1:step], *values[-1:]]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    x_scale, y_scale = 100 / max(len(shown) - 1, 1), 30 / ((high - low) or 1.0)
    points = " ".join(
        f"{index * x_scale:.2f},{35 - (value - low) * y_scale:.2f}" for index, value in enumerate(shown)
    )
    line = Markup('<polyline points="{}" vector-effect="non-scaling-stroke"/>').format(points)
    svg = Markup(
        '<svg class="spark" viewBox="0 0 100 40" preserveAspectRatio="none" aria-hidden="true">{}</svg>'
    )
    return svg.format(line)


def _percent(value: float) -> str:
    return f"{min(max(value, 0.0), 100.0):.2f}%"


def format_budget(epsilon: float) -> str:
    """Return a privacy budget as text, as "7.7"; the infinity sign without a budget."""
    return f"{epsilon:g}".replace("inf", "\u221e")
