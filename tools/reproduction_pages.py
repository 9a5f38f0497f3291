"""Write the generated pages on the papers' tables and figures into docs/benchmarks.

    python tools/reproduction_pages.py

docs/benchmarks/reproduction.md has the summary between two markers; the folder docs/benchmarks/reproduction
has a page for each, with its record. A test compares them with the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from fedstill.compare.comparison import SMALL_SCALE
from fedstill.compare.reproduction import (
    NOT_AT_THIS_SCALE,
    HeadlineRow,
    Reproduction,
    ReproductionRecord,
    ScaleNotes,
    reproductions,
)
from fedstill.core.errors import ArgumentError
from fedstill.report.comparison_tables import format_mean_and_std, reproduction_markdown
from fedstill.report.tables import NO_VALUE, Cell, Column, Row, Table, markdown

DOCS = Path(__file__).parents[1] / "docs" / "benchmarks"
MAX_CELL = 200  # characters of a cell of the summary
BEGIN, END = "<!-- summary -->\n", "<!-- /summary -->"  # around the summary on its page
SYMBOLS = {"printed": "", "published": "\u2021", "fedstill": "\u2020"}  # after a row's name, by form
COLUMNS = ("paper", "ours", "scale", "seeds", "verdict")


def main() -> None:
    """Write all pages, and delete those of files that are gone."""
    entries, folder = reproductions(), DOCS / "reproduction"
    folder.mkdir(exist_ok=True)
    for old in set(folder.glob("*.md")) - {folder / f"{entry.name}.md" for entry in entries}:
        old.unlink()
    for entry in entries:
        (folder / f"{entry.name}.md").write_text(page(entry), encoding="utf-8")
    summary = DOCS / "reproduction.md"
    summary.write_text(with_summary(summary.read_text(encoding="utf-8"), entries), encoding="utf-8")


def summary_table(entries: Sequence[Reproduction]) -> list[str]:
    """Return the lines of the summary: paper, ours, scale, seeds and verdict of each record.

    Raises:
        ArgumentError: a record lacks a row of the headline or remarks on its scale, or a cell is too long.
    """
    rows = []
    for entry in entries:
        link = f"[{entry.about.paper}, {entry.about.what}](reproduction/{entry.name}.md)"
        for record in entry.records().values() or [None]:
            values = _summary_cells(entry, record)
            if long := [value for value in values if len(value) > MAX_CELL]:
                raise ArgumentError(f"headline of {entry.name}", long[0], f"at most {MAX_CELL} characters")
            rows.append(Row(link, [Cell(value) for value in values]))
    return markdown(Table("", "table or figure", [Column(name, "") for name in COLUMNS], rows))


def _summary_cells(entry: Reproduction, record: ReproductionRecord | None) -> list[str]:
    if record is None:
        return [_paper_cell(entry, entry.about, SMALL_SCALE), NO_VALUE, NO_VALUE, NO_VALUE, NO_VALUE]
    notes = _notes(entry, record)
    paper, ours = _paper_cell(entry, notes, record.scale), _our_cell(entry, notes, record)
    return [paper, ours, record.scale, str(len(record.seeds)), notes.verdict]


def _notes(entry: Reproduction, record: ReproductionRecord) -> ScaleNotes:
    """Return the remarks on a record's scale, which a page needs."""
    notes = entry.notes(record.scale)
    if notes is None:
        raise ArgumentError(f"scale.{record.scale}.reproduces", "", f"remarks on the record of {entry.name}")
    return notes


def with_summary(text: str, entries: Sequence[Reproduction]) -> str:
    """Return the text of the summary's page with the current summary between its markers."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n".join(summary_table(entries)) + "\n" + END + rest.partition(END)[2]


def page(entry: Reproduction) -> str:
    """Return the page of one table or figure: of each scale verdict, why, and the record's table."""
    about, records = entry.about, entry.records()
    lines = [f"# {about.paper}, {about.what}: {about.title}", ""]
    lines += [
        f"*Generated from [`{entry.file.name}`](../../../experiments/{entry.file.name}) and its record.*",
        "",
    ]
    if not records:
        return "\n".join([*lines, "Nothing is recorded yet.", ""])
    for scale, record in records.items():
        notes = _notes(entry, record)
        lines += [] if scale == SMALL_SCALE else [f"## Scale {scale}", ""]
        lines += [f"**Verdict: {notes.verdict}.** {notes.why.strip()}", ""]
        if about.claim:
            lines += [f"The paper: {about.claim}.", ""]
        table = reproduction_markdown(entry, record, hides_flagged=True)
        lines += [*table.splitlines()[2:], ""]  # without its title
    return "\n".join(lines)


def _paper_cell(entry: Reproduction, notes: ScaleNotes, scale: str) -> str:
    """Return the paper's result: its claim, or its metrics in the rows of the headline."""
    if entry.about.claim:
        return entry.about.claim
    published = {
        (metric.setting, metric.method, metric.metric): format_mean_and_std(metric.value, None)
        for metric in entry.published(scale)
    }

    def text(row: HeadlineRow) -> str | None:
        return published.get((row.setting, row.row, row.metric)) or published.get(("", row.row, row.metric))

    return _headline([(row, text(row)) for row in notes.headline])


def _our_cell(entry: Reproduction, notes: ScaleNotes, record: ReproductionRecord) -> str:
    """Return the record's metrics in the rows of the headline."""
    if notes.verdict == NOT_AT_THIS_SCALE:
        return NOT_AT_THIS_SCALE
    values = {(row.setting, row.method, row.metric): row for row in record.rows}
    forms, found = entry.forms(record.scale), []
    for row in notes.headline:
        metric = values.get((row.setting, row.row, row.metric))
        if metric is None or record.flag(row.setting):
            raise ArgumentError(f"headline of {entry.name}", row.row, "an unflagged row of the record")
        symbol = SYMBOLS[forms[row.row].form] if row.row in forms else ""
        found.append((replace(row, row=f"{row.row}{symbol}"), format_mean_and_std(*metric.mean_and_std())))
    return _headline(found)


def _headline(values: Sequence[tuple[HeadlineRow, str | None]]) -> str:
    """Return metrics as text, by setting: ``alpha 1: fediod 35.0, fedavg 34.7``."""
    known = [(row, value) for row, value in values if value is not None]
    parts = []
    for (setting, metric), group in groupby(known, lambda pair: (pair[0].setting, pair[0].metric)):
        shown = ", ".join(f"{row.row} {value}" for row, value in group)
        unit = "" if metric == "accuracy" else f" ({metric})"
        parts.append(f"{setting}: {shown}{unit}" if setting else f"{shown}{unit}")
    return "; ".join(parts) or NO_VALUE


if __name__ == "__main__":
    main()
