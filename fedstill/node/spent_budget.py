"""Cost of releases so far and the remaining budget, for the terminal and the report page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedstill.core.errors import ArgumentError
from fedstill.node.audit_entries import ALL_RUNS
from fedstill.node.audit_log import AuditLog
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.budget import remaining_epsilon
from fedstill.privacy.config import Accountant, PrivacyConfig
from fedstill.privacy.events import cost_from_dict


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
