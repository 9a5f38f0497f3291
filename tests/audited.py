"""What tests read of an audit log, and how they damage one."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from fedstill.node.audit_entries import ALL_RUNS, RELEASES, Entry
from fedstill.node.audit_log import FILE, AuditLog


def entries(folder: Path, *parts: str) -> list[dict[str, Any]]:
    """The entries of a folder's log, without hash and number; of some parts alone, if they are named."""
    if not (folder / FILE).exists():
        return []
    with closing(AuditLog(folder / FILE, read_only=True)) as audit:
        told = [
            {name: value for name, value in entry.items() if name not in ("entry", "hash")}
            for entry in audit.entries()
        ]
    return [entry for entry in told if not parts or entry["part"] in parts]


def releases(folder: Path) -> list[dict[str, Any]]:
    """The entries of what has left."""
    return entries(folder, *RELEASES)


def paid(audit: AuditLog, node: str) -> tuple[Mapping[str, int], int]:
    """What a payer's releases cost: events as text and how often; and how many had no price."""
    spent = audit.spending(node, ALL_RUNS)
    return spent.total_events, spent.total_no_guarantee


def write(folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """A log with such entries; what they do not say is empty."""
    (folder / FILE).unlink(missing_ok=True)
    (folder / f"{FILE}.head").unlink(missing_ok=True)
    plain = {"run": "run", "number": 0, "query": "predict_logits", "part": "response"}
    with closing(AuditLog(folder / FILE, durable=False)) as audit:
        for line in lines:
            told = {"payer": line["node"], **plain, **line}
            told.pop("at", None)
            audit.append(Entry(**told))


def edit(path: Path, *statements: str) -> None:
    """Change a log's file as somebody with an SQLite shell would."""
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()
