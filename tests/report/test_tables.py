"""Text formats, and the terminal table of a run."""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from fedstill.core.text_format import finite_number_at_keys, format_bytes, format_seconds
from fedstill.report.tables import Cell, Column, Row, Table, markdown, print_rows
from tests.support.result_files import printed

RESULT: dict[str, Any] = {
    "name": "digits-fediod",
    "title": "FedIOD",
    "student": {"accuracy": 93.37},
    "standalone": {"accuracy": {"mean": 81.1, "std": 4.24, "per_node": [78.0, 84.2]}},
    "ensemble": {"accuracy": 92.5},
    "centralized": {"accuracy": 96.9},
    "bytes": {"up": 8_123_456, "down": 16_384},
    "seconds": {"total": 192.4},
    "privacy": {"guarantee": None, "text": "no guarantee"},
}


IN_ROUNDS: dict[str, Any] = {
    **RESULT,
    "title": "FedPer",
    "evaluated_model": "virtual",
    "accuracy": 88.2,
    "student": {"parameters": 3},
    "standalone": None,
    "ensemble": None,
    "local": {"accuracy": {"mean": 70.0, "std": 2.0, "per_node": [68.0, 72.0]}},
}


def test_run_in_rounds_shows_local_models() -> None:
    text = printed(IN_ROUNDS)
    assert re.search(
        r"local models \(mean\) +70.0% ± 2.0\s+average \(FedPer\) +88.2%\s+centralized +96.9%", text
    )
    assert "not measured" not in text


def test_standalone_nodes_are_one_row() -> None:
    alone = {
        **IN_ROUNDS,
        "evaluated_model": "nodes",
        "accuracy": 70.0,
        "standalone": {"accuracy": {"mean": 70.0}},
    }
    text = printed(alone)
    assert re.search(r"local models \(FedPer\) +70.0% ± 2.0", text)
    assert text.count("70.0%") == 1


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),  # three digits
        (999_500, "1.0 MB"),  # never "1000 kB"
        (12_345_678, "12.3 MB"),
        (7 * 10**18, "7000 PB"),  # the largest unit
    ],
)
def test_format_bytes_rounds_to_three_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "under 0.1 s"),
        (59.96, "1 min 0 s"),  # never "60.0 s"
        (192.4, "3 min 12 s"),
        (3599.6, "1 h 0 min"),  # never "60 min"
        (7500, "2 h 5 min"),
    ],
)
def test_format_seconds_rounds_up_units(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("value", [None, "0.9", True, float("nan"), float("-inf"), 10**400, [1]])
def test_number_at_returns_none_for_other_values(value: object) -> None:
    assert finite_number_at_keys({"accuracy": value}, "accuracy") is None


def test_table_has_all_metrics_and_totals() -> None:
    lines = printed(RESULT).splitlines()

    def line(start: str) -> str:
        return next(text.strip() for text in lines if text.strip().startswith(start))

    assert line("standalone").split(maxsplit=2)[2] == "81.1% ± 4.2"
    assert line("student (FedIOD)").endswith(" 93.4%")
    assert line("teachers' ensemble").endswith(" 92.5%")
    assert line("centralized").endswith(" 96.9%")
    assert line("bytes from nodes").endswith(" 8.1 MB")
    assert line("bytes to nodes").endswith(" 16.4 kB")
    assert line("time").endswith(" 3 min 12 s")


def test_table_prints_not_measured() -> None:
    assert printed({**RESULT, "centralized": {"accuracy": None}}).count("not measured") == 1
    assert printed({"title": "FedIOD"}).count("not measured") == 8


def test_markdown_escapes_vertical_bars() -> None:
    table = Table("", "a|b", [Column("c|d")], [Row("e|f", [Cell("g|h", bold=True)])])
    assert markdown(table) == [r"| a\|b | c\|d |", "|---|---|", r"| e\|f | **g\|h** |"]


@pytest.mark.parametrize(("width", "tables"), [(16, 3), (18, 3), (19, 2), (28, 2), (29, 1), (80, 1)])
def test_narrow_terminal_splits_tables(width: int, tables: int) -> None:
    """Columns that do not fit are printed as further tables with the same row names."""
    cells = {"all": ["240", "86.7", None], "rome": ["80", "1", "2"]}
    rows = [Row(name, [Cell(value) for value in values]) for name, values in cells.items()]
    text = StringIO()
    heads = [Column("examples"), Column("acc."), Column("AUC %")]
    print_rows(Table("", "site", heads, rows), Console(file=text, width=width))
    lines = [line.split() for line in text.getvalue().splitlines() if line.strip(" \u2500")]
    assert max(map(len, text.getvalue().splitlines())) <= width
    assert [cell for line in lines if line[0] == "rome" for cell in line[1:]] == ["80", "1", "2"]
    assert [cell for line in lines if line[0] == "all" for cell in line[1:]] == ["240", "86.7", "-"]
    assert len([line for line in lines if line[0] == "site"]) == tables


def test_table_prints_markup_as_text() -> None:
    text = printed({**RESULT, "title": "[red]x[/red]", "name": "[/nonsense]"})
    assert "student ([red]x[/red])" in text
    assert "[/nonsense]" in text
