"""Overview of a node for its owner: requests, releases, remaining budgets, state of the audit log.

Everything is read without locks, so that no node waits for a reader.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstill.core.errors import ArgumentError
from fedstill.node import folder_log, owner_folder
from fedstill.node.approvals import ApprovalRequest, ApprovalRequests
from fedstill.node.audit_database import AuditError
from fedstill.node.audit_entries import (
    ALL_RUNS,
    NODE_DATA,
    REFUSED,
    RELEASES,
    SECURITY_EVENTS,
    is_about_data,
    refusal_count,
)
from fedstill.node.audit_log import AuditLog
from fedstill.node.folder_log import as_security_event
from fedstill.node.node_file import NodeFile
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.budget import remaining_epsilon
from fedstill.privacy.config import Accountant, PrivacyConfig
from fedstill.privacy.events import cost_from_dict

MAX_RUNS = 20  # latest runs with computed budgets
MAX_EVENTS = 50  # last security events


@dataclass
class DailyReleases:
    """Releases of one run on one day: bytes by payload kind, queries, releases without a guarantee,
    refusals.
    """

    bytes_by_kind: Counter[str] = field(default_factory=Counter)
    queries: set[int] = field(default_factory=set)
    no_guarantee: int = 0
    refused: int = 0


@dataclass(frozen=True)
class Overview:
    """State of a node.

    Args:
        file: its ``node.toml``.
        requests: requests of all servers, the latest first.
        releases: by day (UTC) and run, the latest first.
        costs: by run: of all (:data:`~fedstill.node.audit_entries.ALL_RUNS`), then of each, the latest
            first.
        audit_fault: fault of the audit log, or None.
        entry_count: number of entries of the audit log, without security events.
        events: last security events, the latest first.
    """

    file: NodeFile
    requests: Sequence[ApprovalRequest]
    releases: Mapping[tuple[str, str], DailyReleases]
    costs: Mapping[str, SpentBudget]
    audit_fault: str | None
    entry_count: int
    events: Sequence[Mapping[str, Any]]


def read_overview(folder: Path) -> Overview:
    """Return the overview of the node in a folder.

    Raises:
        FedstillError: its ``node.toml`` or a request cannot be read.
    """
    file = owner_folder.read_node_file(folder)
    releases: dict[tuple[str, str], DailyReleases] = {}
    costs: dict[str, SpentBudget] = {}
    events: deque[Mapping[str, Any]] = deque(maxlen=MAX_EVENTS)
    fault, entries = (
        folder_log.missing_log_fault(folder_log.audit_path(file, folder), folder),
        0,
    )
    if fault is None and folder_log.audit_path(file, folder).exists():
        try:
            with closing(folder_log.open_audit(file, folder, read_only=True)) as audit:
                entries, fault = _add_entries(audit, releases, events), audit.fault
                costs = _run_costs(audit, file.privacy, file.privacy.unit(file.data.group))
        except AuditError as error:
            fault = str(error)
    return Overview(
        file=file,
        requests=ApprovalRequests(folder, file).list_all(),
        releases=dict(reversed(releases.items())),
        costs=costs,
        audit_fault=fault,
        entry_count=entries,
        events=list(reversed(events)),
    )


def _add_entries(
    audit: AuditLog,
    releases: dict[tuple[str, str], DailyReleases],
    events: deque[Mapping[str, Any]],
) -> int:
    """Add all entries to the releases by day and run, or to the security events; return the number of those
    that are about data.
    """
    count = 0
    for entry in audit.entries():
        if entry["part"] in SECURITY_EVENTS:
            events.append(as_security_event(entry))
        if not is_about_data(entry):
            continue
        count += 1
        if entry["part"] in (*RELEASES, REFUSED):
            day = releases.setdefault((str(entry["at"])[:10], entry["run"]), DailyReleases())
            day.bytes_by_kind.update(entry["up"])
            day.refused += refusal_count(entry)
            day.no_guarantee += entry["no_guarantee"]
            if entry["part"] in RELEASES:
                day.queries.add(entry["number"])
    return count


def _run_costs(audit: AuditLog, privacy: PrivacyConfig, unit: str) -> dict[str, SpentBudget]:
    runs = [run for payer, run in audit.totals.events if payer == NODE_DATA and run != ALL_RUNS]
    return {
        run: compute_spent_budget(audit, NODE_DATA, run, delta, privacy.accountant, privacy, unit)
        for run in ([ALL_RUNS, *reversed(runs[-MAX_RUNS:])] if runs else [])
        for delta in [privacy.total_budget[1] if run == ALL_RUNS else privacy.delta]
    }


# --- costs and budgets ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpentBudget:
    """Privacy cost of a run, or of all runs of a payer.

    Args:
        no_guarantee: number of releases without a guarantee.
        events: number of charges of each event; None: not known, for example after an edited entry, or
            charges in two units (records and patients), which cannot be added.
        epsilon: epsilon of these events; None: no guarantee, or not known.
        remaining: remaining epsilon of the owner's budget, at that budget's delta; None: no budget, or not
            known.
    """

    no_guarantee: int
    events: Mapping[str, int] | None = None
    epsilon: float | None = None
    remaining: float | None = None


def compute_spent_budget(
    audit: AuditLog,
    payer: str,
    run: str,
    delta: float,
    accountant: Accountant,
    budget: PrivacyConfig | None = None,
    unit: str = "",
) -> SpentBudget:
    """Return the cost of a run, or of all runs (:data:`~fedstill.node.audit_entries.ALL_RUNS`).

    Args:
        audit: the audit log.
        payer: whose charges count.
        run: name of the run.
        delta: delta of the returned epsilon.
        accountant: accountant of the returned epsilon.
        budget: the owner's budget; None: no remainder is computed.
        unit: the privacy unit of current charges; after charges in another unit nothing remains.
    """
    spending = audit.totals.spending(payer, run)
    events, no_guarantee = (
        (spending.total_events, spending.total_no_guarantee)
        if run == ALL_RUNS
        else (spending.run_events, spending.run_no_guarantee)
    )
    units = audit.totals.units(payer, run)
    if len(units) > 1:
        return SpentBudget(no_guarantee)
    is_unknown = no_guarantee or len(units - {unit})
    try:
        cost = cost_from_dict(events)
        remaining = (
            None
            if budget is None
            else remaining_epsilon(budget, events, is_unknown, all_runs=run == ALL_RUNS)
        )
        return SpentBudget(
            no_guarantee,
            dict(events),
            None if no_guarantee else compute_epsilon(cost, delta, accountant),
            remaining,
        )
    except ArgumentError:
        return SpentBudget(no_guarantee)
