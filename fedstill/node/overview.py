"""What a node's owner looks at: requests, what left, what is left of budgets, the state of the logs.

Everything is read; nothing is locked, so that no node waits for whoever looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstill.node import audit_file, owner_folder
from fedstill.node.audit_cost import AuditCost, compute_audit_cost
from fedstill.node.audit_database import AuditError
from fedstill.node.audit_entries import ALL_RUNS, NODE_DATA, REFUSED, RELEASES
from fedstill.node.audit_log import AuditLog
from fedstill.node.node_file import NodeFile
from fedstill.node.requests import Request, Requests
from fedstill.node.security_log import SecurityLog, SecurityLogError
from fedstill.privacy.config import PrivacyConfig

MOST_RUNS = 20  # whose budgets are worked out, the latest
MOST_LINES = 50  # of the security log


@dataclass
class LeftOnDay:
    """What left in one run on one day: bytes by kind, queries, releases without any guarantee, refusals."""

    kinds: Counter[str] = field(default_factory=Counter)
    queries: set[int] = field(default_factory=set)
    bare: int = 0
    refused: int = 0


@dataclass(frozen=True)
class Overview:
    """A node as it is now.

    Args:
        file: its ``node.toml``.
        requests: of all servers, the latest first.
        left: by day (UTC) and run, the latest first.
        costs: by run: of all (:data:`~fedstill.node.audit_entries.ALL`), then of each, the latest first.
        audit: what is wrong with the audit log, or None.
        log: last lines of the security log, the latest first.
        security: what is wrong with the security log, or None.
    """

    file: NodeFile
    requests: Sequence[Request]
    left: Mapping[tuple[str, str], LeftOnDay]
    costs: Mapping[str, Cost]
    audit: str | None
    entries: int
    log: Sequence[Mapping[str, Any]]
    security: str | None


def overview(folder: Path) -> Overview:
    """The node in a folder.

    Raises:
        FedstillError: its ``node.toml`` or a request cannot be read.
    """
    file = owner_folder.read(folder)
    released: dict[tuple[str, str], LeftOnDay] = {}
    costs: dict[str, Cost] = {}
    trouble, entries = audit_file.missing_log_fault(audit_file.audit_path(file, folder), folder), 0
    if trouble is None and audit_file.audit_path(file, folder).exists():
        try:
            with closing(audit_file.open_audit(file, folder, read_only=True)) as audit:
                entries, trouble = _count(audit, released), audit.fault
                costs = _costs(audit, file.privacy, file.privacy.unit(file.data.group))
        except AuditError as error:
            trouble = str(error)
    log = SecurityLog(folder)
    try:
        security = log.verify()
    except SecurityLogError as error:
        security = str(error)
    return Overview(
        file=file,
        requests=Requests(folder, file).all(),
        left=dict(reversed(released.items())),
        costs=costs,
        audit=trouble,
        entries=entries,
        log=list(log.lines())[: -MOST_LINES - 1 : -1],
        security=security,
    )


def _count(audit: AuditLog, released: dict[tuple[str, str], LeftOnDay]) -> int:
    """Add up all entries by day and run; how many there are."""
    count = 0
    for entry in audit.entries():
        count += 1
        if entry["part"] in (*RELEASES, REFUSED):
            sums = released.setdefault((str(entry["at"])[:10], entry["run"]), LeftOnDay())
            sums.kinds.update(entry["up"])
            sums.refused += entry["part"] == REFUSED
            sums.bare += entry["bare"]
            if entry["part"] in RELEASES:
                sums.queries.add(entry["number"])
    return count


def _costs(audit: AuditLog, privacy: PrivacyConfig, mine: str) -> dict[str, Cost]:
    runs = [run for payer, run in audit.totals.spent if payer == DATA and run != ALL]
    return {
        run: cost(audit, DATA, run, delta, privacy.accountant, privacy, mine)
        for run in ([ALL, *reversed(runs[-MOST_RUNS:])] if runs else [])
        for delta in [privacy.over_all[1] if run == ALL else privacy.delta]
    }
