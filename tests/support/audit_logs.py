"""Read, write and damage audit logs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from fedstill.node.audit_entries import ALL_RUNS, RELEASES, Entry, is_about_data
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.folder_log import read_security_events


def entries(folder: Path, *parts: str) -> list[dict[str, Any]]:
    """Return the entries of a folder's log without hash and number, optionally of some parts only.

    Of the security events, only refused queries are included.
    """
    if not (folder / FILE).exists():
        return []
    with closing(AuditLog(folder / FILE, read_only=True)) as audit:
        all_entries = [
            {name: value for name, value in entry.items() if name not in ("entry", "hash")}
            for entry in audit.entries()
            if is_about_data(entry)
        ]
    return [entry for entry in all_entries if not parts or entry["part"] in parts]


def security_events(folder: Path) -> list[dict[str, Any]]:
    """Return the security events of a folder's log."""
    with closing(AuditLog(folder / FILE, read_only=True)) as audit:
        return list(read_security_events(audit))


def releases(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of releases."""
    return entries(folder, *RELEASES)


def total_charged(audit: AuditLog, node: str) -> tuple[Mapping[str, int], int]:
    """Return the total cost of a node's releases.

    That is: events as text with their counts, and the number of releases without a guarantee.
    """
    spent = audit.spending(node, ALL_RUNS)
    return spent.total_events, spent.total_no_guarantee


def write(folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a log with the given entries; missing fields have defaults."""
    (folder / FILE).unlink(missing_ok=True)
    (folder / f"{FILE}.head").unlink(missing_ok=True)
    plain = {"run": "run", "number": 0, "query": "predict_logits", "part": "response"}
    with closing(AuditLog(folder / FILE, durable=False)) as audit:
        for line in lines:
            entry = {"payer": line["node"], **plain, **line}
            entry.pop("at", None)
            audit.append(Entry(**entry))


def edit(path: Path, *statements: str) -> None:
    """Change a log's file through SQLite."""
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


def entry(number: int = 0, **other: Any) -> Entry:
    line: dict[str, Any] = {
        "run": "first",
        "payer": other.get("node", "clinic"),
        "node": "clinic",
        "query": "predict_logits",
        "part": "response",
        "content_hash": "c0",
        "history_hash": "a0",
        "queries": 1,
        "up": {"logits": 40, "critic": 4},
        "rule": "Laplace noise of scale 10",
        "cost": {"laplace(10.0)": 2, "gaussian(1.1)": 1},
        **other,
    }
    return Entry(number=number, **line)


def fill(path: Path, rows: int, start: int = 0) -> None:
    with closing(AuditLog(path, durable=False)) as audit:
        for number in range(start, start + rows):
            assert audit.charge(entry(number))


def head(path: Path) -> Path:
    return path.with_name(path.name + ".head")
