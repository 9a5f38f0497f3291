"""What a run has cost, as terminal and page tell it: nothing is left where units differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstill.node.audit_cost import AuditCost, compute_audit_cost
from fedstill.node.audit_entries import ALL_RUNS, NODE_DATA, Entry
from fedstill.node.audit_log import AuditLog
from fedstill.privacy.config import PrivacyConfig

PRICE, OWNER = {"gaussian(4.0)": 1}, PrivacyConfig(epsilon=3.0, total_epsilon=5.0)


def charged(log: AuditLog, run: str, unit: str = "a record", no_guarantee: int = 0) -> None:
    about = (run, NODE_DATA, "clinic", 0, "predict_logits", "response")
    assert log.charge(
        Entry(
            *about,
            content_hash=run,
            cost={} if no_guarantee else PRICE,
            no_guarantee=no_guarantee,
            unit=unit,
            queries=1,
        )
    )


def test_remaining_budget_matches_hand_computation(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.sqlite")
    charged(log, "records")
    charged(log, "bare", unit="", no_guarantee=1)

    def audit_cost(run: str, mine: str = "a record") -> AuditCost:
        return compute_audit_cost(log, NODE_DATA, run, OWNER.delta, OWNER.accountant, OWNER, mine)

    one = audit_cost("records")
    assert one.events == PRICE
    assert one.epsilon is not None
    assert one.remaining == pytest.approx(3 - one.epsilon, abs=1e-3)
    assert audit_cost("records", "4 records of one patient") == AuditCost(0, PRICE, one.epsilon, 0.0)
    assert audit_cost("bare") == AuditCost(1, {}, None, 0.0)
    assert audit_cost(ALL_RUNS) == AuditCost(1, PRICE, None, 0.0)
    charged(log, "patients", unit="4 records of one patient")
    assert audit_cost(ALL_RUNS) == AuditCost(1), "of two units, which add up to nothing"
    assert compute_audit_cost(log, NODE_DATA, "records", OWNER.delta, OWNER.accountant) == AuditCost(
        0, PRICE, one.epsilon, None
    )
