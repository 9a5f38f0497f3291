"""Write the leaderboards of the benchmark suite into docs/benchmarks/suite.md, and the schema of its rows.

    python tools/suite_page.py

A test compares both with the recorded rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fedstill.compare.suite import SuitePart, row_schema, suite_parts
from fedstill.core.text_format import format_count
from fedstill.report.suite_results import leaderboard, leaderboard_notes
from fedstill.report.tables import markdown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "suite.md"
SCHEMA = ROOT / "experiments" / "suite" / "schema.json"
BEGIN, END = "<!-- leaderboards -->\n", "<!-- /leaderboards -->"  # around the generated part of the page


def main() -> None:
    """Write the page and the schema."""
    PAGE.write_text(with_leaderboards(PAGE.read_text(encoding="utf-8"), suite_parts()), encoding="utf-8")
    SCHEMA.write_text(schema_text(), encoding="utf-8")


def schema_text() -> str:
    """Return the schema of a row as a file's text."""
    return json.dumps(row_schema(), indent=2, ensure_ascii=False) + "\n"


def with_leaderboards(text: str, parts: Sequence[SuitePart]) -> str:
    """Return a page's text with the leaderboards of parts that have rows."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    lines = [line for part in parts for line in _section(part)]
    return before + BEGIN + "\n".join(["", *lines, ""]) + END + after


def _section(part: SuitePart) -> list[str]:
    rows = part.recorded_rows()
    if not rows:
        return []
    table = markdown(leaderboard(part, rows))
    days = sorted({row.date for row in rows if row.date})
    file = f"../../experiments/suite/{part.file.name}"
    results = f"../../experiments/suite/results/{part.results_file.name}"
    period = " to ".join(dict.fromkeys([days[0], days[-1]]))
    return [
        f"### {part.name}",
        "",
        f"[{part.file.name}]({file}); {format_count(len(rows), 'row')}: "
        f"[{part.results_file.name}]({results}); {period}.",
        "",
        ":::{table}",
        ":class: sortable",
        "",
        *table,
        ":::",
        "",
        *(f"- {note}" for note in leaderboard_notes(part, rows)),
        "",
    ]


if __name__ == "__main__":
    main()
