"""Audit logs and heads that were rewritten are refused in one line, and valid after acceptance."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedstill.core.hashing import chain_hash
from fedstill.node.audit_log import AuditError, AuditLog, Spending
from tests.support.audit_logs import edit, entry, fill, head
from tests.support.errors import raises_invalid


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a log with three entries."""
    path = tmp_path / "audit.sqlite"
    fill(path, 3)
    return path


def settles(path: Path, message: str) -> Spending:
    """Accept a damaged log; afterwards it can be opened, verified and charged like any other."""
    with closing(AuditLog(path)) as audit:
        with pytest.raises(AuditError, match=message):
            audit.charge(entry(50))
        assert all(isinstance(row["number"], int) for row in audit.entries())
        audit.accept("looked at it")
        audit.verify()
        spent = audit.spending("clinic", "first")
        assert audit.charge(entry(50))
    with closing(AuditLog(path)) as audit:
        audit.verify()
        assert audit.charge(entry(51))
    return spent


def replace(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1
    path.write_text(text.replace(before, after), encoding="utf-8")


FIELDS: dict[str, Any] = {
    "number": [1],
    "content_hash": [],
    "release_hash": {},
    "history_hash": [1],
    "query": [1],
    "rule": "\ud800",
    "run": "",
    "up": {"logits": -1},
    "down": [],
    "cost": {"rubbish": 1},
    "training_cost": {"x": 2**53},
    "no_guarantee": True,
    "queries": 1.0,
    "entry": "x",
}
LINES = {
    **{name: {name: value} for name, value in FIELDS.items()},
    "free": {"cost": {"gaussian(1.1)": 0}},
    "deep": "[" * 100_000,
    "no UTF-8": b"{\xff}",
}


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("name", LINES)
def test_foreign_line_counts_as_damage(name: str, hashed: bool, path: Path) -> None:
    wrong: Any = LINES[name]
    with closing(sqlite3.connect(path)) as file:
        (before,) = file.execute("SELECT hash FROM entries WHERE entry = 2").fetchone()
        (line,) = file.execute("SELECT line FROM entries WHERE entry = 3").fetchone()
        line = json.dumps({**json.loads(line), **wrong}) if isinstance(wrong, dict) else wrong
        set_line = "UPDATE entries SET line = CAST(? AS TEXT) WHERE entry = 3"
        file.execute(set_line, (line,))
        if hashed:  # with a valid hash
            text = line.decode("utf-8", "surrogateescape") if isinstance(line, bytes) else line
            file.execute("UPDATE entries SET hash = ? WHERE entry = 3", (chain_hash(before, 3, text),))
        file.commit()
    spent = settles(path, "entry 3 is not as it was written")
    assert spent.total_events == {"gaussian(1.1)": 3, "laplace(10.0)": 6}  # from the head


def test_bytes_instead_of_text_count_as_damage(path: Path) -> None:
    edit(path, "UPDATE entries SET line = CAST(line AS BLOB), hash = x'ff' WHERE entry = 2")
    settles(path, "entry 2 is not as it was written")
    with closing(AuditLog(path)) as audit:
        assert json.dumps(list(audit.entries()))


def totals(*rows: list[Any], **other: Any) -> str:
    return json.dumps({"entry": 3, "hash": "x", "totals": rows, **other})


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"entry":' + "9" * 5000 + "}",
        "[]",
        totals(entry=-5),
        totals(entry=10**30),
        totals(entry=True),
        totals(hash=3),
        totals(totals=3),
        totals([1, "first", {"gaussian(1.1)": 9}]),
        totals(["clinic", ["first"], {}]),
        totals(["clinic", "", {"gaussian(1.1)": 9}]),
        totals(["\ud800", "first", {}]),
        totals(["clinic", "first", {}], ["clinic", "first", {}]),
        totals(["clinic", "first", {"rubbish": 9}]),
        totals(["clinic", "first", {"gaussian(1.1)": -9}]),
        totals(["clinic", "first", {"gaussian(1.1)": 2**53}]),
        totals(["clinic", "first", {"bytes": 2.0}]),
    ],
    ids=range(17),
)
def test_inconsistent_head_counts_as_damage(text: str, path: Path) -> None:
    head(path).write_text(text, encoding="utf-8")
    assert settles(path, "its head audit.sqlite.head is damaged").total_events["gaussian(1.1)"] == 3


@pytest.mark.parametrize(("head_count", "charged"), [(2, 3), (5, 5), (2**53 - 1, 2**53 - 1)])
def test_larger_of_head_and_entry_totals_is_charged(head_count: int, charged: int, path: Path) -> None:
    replace(head(path), '"gaussian(1.1)":3', f'"gaussian(1.1)":{head_count}')
    spent = settles(path, "its entries up to 3 do not add up to the totals in its head")
    assert spent.total_events == {"gaussian(1.1)": charged, "laplace(10.0)": 6}


def test_older_head_is_compared_with_entries_up_to_it(path: Path) -> None:
    with closing(AuditLog(path, durable=False)) as audit, closing(AuditLog(path, read_only=True)) as reader:
        audit.charge(entry(3))
        reader.verify()
        replace(head(path), '"gaussian(1.1)":3', '"gaussian(1.1)":2')
        with pytest.raises(AuditError, match="entries up to 3 "):
            reader.verify()
        replace(head(path), '"gaussian(1.1)":2', '"gaussian(1.1)":3')


def test_leftover_wal_is_not_applied_to_new_log(path: Path) -> None:
    log = path.with_name(f"{path.name}-wal")
    with closing(AuditLog(path)) as audit:
        audit.charge(entry(3))
        leftover = log.read_bytes()
    path.unlink()
    log.write_bytes(leftover)
    assert settles(path, "ends at entry 0, and its head at 4").total_events["gaussian(1.1)"] == 4


def test_acceptance_without_free_number_gives_advice(path: Path) -> None:
    message = "no entry can follow number .*: move this log or its head away, and run .fedstill audit accept."
    edit(path, f"INSERT INTO entries VALUES ({2**63 - 1}, 'x', 'y')")
    with closing(AuditLog(path)) as audit, pytest.raises(AuditError, match=message):
        audit.accept("looked at it")
    for file in set(path.parent.glob(f"{path.name}*")) - {head(path)}:
        file.unlink()
    assert settles(path, "ends at entry 0, and its head at 3").total_events["gaussian(1.1)"] == 3
    head(path).write_text(totals(entry=2**62), encoding="utf-8")
    with closing(AuditLog(path)) as audit, pytest.raises(AuditError, match=message):
        audit.accept("looked at it")
    head(path).unlink()
    assert settles(path, "head audit.sqlite.head is missing").total_events["gaussian(1.1)"] == 5


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t BEFORE INSERT ON entries BEGIN SELECT raise(ignore); END",
        "CREATE TRIGGER t AFTER INSERT ON entries BEGIN DELETE FROM entries WHERE entry = new.entry; END",
        "CREATE INDEX i ON entries (hash)",
        "CREATE VIEW v AS SELECT line FROM entries",
        "DROP TABLE entries",
    ],
)
def test_file_with_other_tables_is_refused(statement: str, path: Path) -> None:
    before = head(path).read_bytes()
    with closing(AuditLog(path)) as audit:
        edit(path, statement)
        with pytest.raises(AuditError, match="unknown tables"):
            audit.charge(entry(3))
    with pytest.raises(AuditError, match=r"unknown .*audit accept"):
        AuditLog(path)
    assert head(path).read_bytes() == before


def test_unstored_entry_blocks_release(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(AuditLog(path)) as audit:
        edit(path, "CREATE TRIGGER t BEFORE INSERT ON entries BEGIN SELECT raise(ignore); END")
        monkeypatch.setattr(audit._database, "require_format", lambda: None)
        with pytest.raises(AuditError, match="an entry"):
            audit.charge(entry(3))


@pytest.mark.parametrize("because", [" ", "\udcff"])
def test_acceptance_needs_a_reason(because: str, path: Path) -> None:
    head(path).unlink()
    with closing(AuditLog(path)) as audit, raises_invalid("because", because):
        audit.accept(because)
