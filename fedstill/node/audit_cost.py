"""What releases have cost, and what is left to pay for more: one account, for the terminal and the page."""

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
class AuditCost:
    """What a run, or all runs of a payer, have cost.

    Args:
        no_guarantee: releases without a guarantee.
        events: and how often each was paid for; None: nothing is known, as of an edited entry, or where
            prices were paid for units of two kinds, records and patients: they add up to nothing.
        epsilon: that they come to; None: no guarantee, or not known.
        remaining: of the owner's budget, at that budget's delta; None: there is none, or it is not known.
    """

    no_guarantee: int
    events: Mapping[str, int] | None = None
    epsilon: float | None = None
    remaining: float | None = None


def compute_audit_cost(
    audit: AuditLog,
    payer: str,
    run: str,
    delta: float,
    accountant: Accountant,
    budget: PrivacyConfig | None = None,
    unit: str = "",
) -> AuditCost:
    """What is paid in a run, or in all (:data:`~fedstill.node.audit_entries.ALL`).

    Args:
        delta: at which epsilon is told.
        budget: the owner's, where they are held against one.
        unit: the unit that would be charged now: what was paid for another leaves nothing.
    """
    spending = audit.totals.spending(payer, run)
    events, no_guarantee = (
        (spending.total_events, spending.total_no_guarantee)
        if run == ALL_RUNS
        else (spending.run_events, spending.run_no_guarantee)
    )
    units = audit.totals.units(payer, run)
    if len(units) > 1:
        return AuditCost(no_guarantee)
    is_unknown = no_guarantee or len(units - {unit})
    try:
        cost = cost_from_dict(events)
        remaining = (
            None
            if budget is None
            else remaining_epsilon(budget, events, is_unknown, all_runs=run == ALL_RUNS)
        )
        return AuditCost(
            no_guarantee,
            dict(events),
            None if no_guarantee else compute_epsilon(cost, delta, accountant),
            remaining,
        )
    except ArgumentError:
        return AuditCost(no_guarantee)
