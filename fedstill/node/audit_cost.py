"""What releases have cost, and what is left to pay for more: one account, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedstill.core.errors import ArgumentError
from fedstill.node.audit_entries import ALL
from fedstill.node.audit_log import AuditLog
from fedstill.privacy.accounting import epsilon
from fedstill.privacy.budget import left
from fedstill.privacy.config import Accountant, PrivacyConfig
from fedstill.privacy.events import from_text


@dataclass(frozen=True)
class Cost:
    """What a run, or all runs of a payer, have cost.

    Args:
        bare: releases without a guarantee.
        events: and how often each was paid for; None: nothing is known, as of an edited entry, or where
            prices were paid for units of two kinds, records and patients: they add up to nothing.
        epsilon: that they come to; None: no guarantee, or not known.
        left: of the owner's budget, at that budget's delta; None: there is none, or it is not known.
    """

    bare: int
    events: Mapping[str, int] | None = None
    epsilon: float | None = None
    left: float | None = None


def cost(
    audit: AuditLog,
    payer: str,
    run: str,
    delta: float,
    accountant: Accountant,
    budget: PrivacyConfig | None = None,
    mine: str = "",
) -> Cost:
    """What is paid in a run, or in all (:data:`~fedstill.node.audit_entries.ALL`).

    Args:
        delta: at which epsilon is told.
        budget: the owner's, where they are held against one.
        mine: the unit that would be charged now: what was paid for another leaves nothing.
    """
    spent = audit.sums.spent_by(payer, run)
    events, bare = (spent.total, spent.bare_total) if run == ALL else (spent.run, spent.bare_run)
    units = audit.sums.units(payer, run)
    if len(units) > 1:
        return Cost(bare)
    spoilt = bare or len(units - {mine})
    try:
        price = from_text(events)
        kept = None if budget is None else left(budget, events, spoilt, over_all=run == ALL)
        return Cost(bare, dict(events), None if bare else epsilon(price, delta, accountant), kept)
    except ArgumentError:
        return Cost(bare)
