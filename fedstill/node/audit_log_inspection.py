"""The audit log of a node's folder: its path, its faults and its totals."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from fedstill.node.audit_entries import ALL_RUNS, NODE_DATA
from fedstill.node.audit_log import AuditError, AuditLog
from fedstill.node.node_file import NodeFile
from fedstill.protocol.run_plan import PLAN_FILE


def audit_path(file: NodeFile, folder: Path) -> Path:
    """Return the path of a node's audit log."""
    return folder / Path(file.privacy.audit_log).expanduser()


def open_audit(file: NodeFile, folder: Path, *, read_only: bool = False) -> AuditLog:
    """Open a node's audit log, which may have a fault.

    Raises:
        AuditError: it cannot be read, or it is missing.
    """
    path = audit_path(file, folder)
    if (fault := missing_log_fault(path, folder)) is not None:
        raise AuditError(path, f"{fault}: put it back, or `fedstill audit accept {folder}` starts a new one")
    return AuditLog(path, read_only=read_only)


def missing_log_fault(path: Path, folder: Path | None) -> str | None:
    """Return the evidence that an audit log existed and is missing; None: it exists, or never existed.

    Args:
        path: path of the log.
        folder: the node's folder, or None.
    """
    if path.exists():
        return None
    if path.with_name(f"{path.name}.head").exists():
        return "is missing, but its head exists"
    for pattern, evidence in ((f"runs/*/{PLAN_FILE}", "runs"), ("requests/*.json", "requests for approval")):
        if folder is not None and any(folder.glob(pattern)):
            return f"is missing, but its node's {evidence} exist"
    return None


def log_size_bytes(path: Path) -> int:
    """Return the bytes of an audit log on disk, with those of SQLite's write-ahead log."""
    size = 0
    for file in (path, path.with_name(f"{path.name}-wal")):
        with suppress(FileNotFoundError):  # SQLite deletes the second file when the log is closed
            size += file.stat().st_size
    return size


def unwritable_reason(path: Path) -> str:
    """Return the reason why an audit log cannot be written; empty: it can. Without the log nothing is
    released.
    """
    if not path.parent.is_dir():
        return f"folder not found: {path.parent}"
    paths = [path.parent, *([path] if path.exists() else [])]  # SQLite creates further files there
    unwritable = [path_ for path_ in paths if not os.access(path_, os.W_OK)]
    return f"{unwritable[0]} is not writable" if unwritable else ""


@dataclass(frozen=True)
class TotalSpent:
    """Charges of a node's data over all runs.

    Attributes:
        events: number of charges of each event, by its text.
        no_guarantee: number of releases without a guarantee.
        units: charged privacy units.
        fault: fault of the audit log, or None.
    """

    events: Mapping[str, int]
    no_guarantee: int = 0
    units: frozenset[str] = frozenset()
    fault: str | None = None


def read_total_spent(file: NodeFile, folder: Path) -> TotalSpent:
    """Return the totals of a folder's audit log; zero if nothing has been charged yet.

    Raises:
        AuditError: the log cannot be read.
    """
    path = audit_path(file, folder)
    if not path.exists():
        return TotalSpent({}, fault=missing_log_fault(path, folder))
    with closing(AuditLog(path, read_only=True)) as audit:
        spending = audit.spending(NODE_DATA, ALL_RUNS)
        return TotalSpent(
            spending.total_events,
            spending.total_no_guarantee,
            frozenset(audit.totals.units(NODE_DATA)),
            audit.fault,
        )
