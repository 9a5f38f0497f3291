"""The page of the papers' tables agrees with the records: metrics, seeds, dates and pairs in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedstill.compare.reproduction import Reproduction, ReproductionRecord, reproductions
from fedstill.report.comparison_tables import compare_ranking

PAGE = Path(__file__).parents[2] / "docs" / "reproduction.md"
LINE = re.compile(r"\| \[[^]]*\]\(\.\./experiments/(\w+)\.toml\): (.*) \|$", re.MULTILINE)
NAMES = {"alone": "standalone", "public only": "public-only"}  # of methods, where the page has other words
ENTRIES = {entry.file.stem: entry for entry in reproductions()}


def lines() -> dict[str, list[str]]:
    """Return the cells of each table's line: our metrics, seeds and date, pairs."""
    entries = LINE.findall(PAGE.read_text(encoding="utf-8"))
    assert len(entries) == len(dict(entries))
    return {stem: [cell.strip() for cell in cells.split(" | ")][2:5] for stem, cells in entries}


def test_each_table_has_line() -> None:
    assert lines().keys() == ENTRIES.keys()


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=list(ENTRIES))
def test_line_matches_record(entry: Reproduction) -> None:
    ours, seeds, pairs = lines()[entry.file.stem]
    record = entry.record()
    if record is None:
        assert (ours, seeds, pairs) == ("-", "-", "-")
        return
    assert seeds == f"{len(record.seeds)}, {record.date}"
    order = compare_ranking(record.rows, entry.published())
    assert pairs == (str(order) if order.pairs else "nothing printed")
    metrics = re.findall(rf"(?:({'|'.join(NAMES)}|[\w-]+) )?(\d+\.\d+)", ours)
    assert metrics
    for name, metric in metrics:
        assert metric in recorded(record, NAMES.get(name, name.lower()), len(metric.partition(".")[2]))


def recorded(record: ReproductionRecord, method: str, digits: int) -> set[str]:
    """Return the means of a record as the page writes them; of one method, if the name is one."""
    own = [row for row in record.rows if row.method.partition(",")[0] == method]
    means = [row.mean_and_std()[0] for row in own or record.rows]
    return {f"{mean:.{digits}f}" for mean in means if mean is not None}
