"""What a run has cost, as terminal and page tell it: nothing is left where units differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstill.node.audit_entries import ALL_RUNS, NODE_DATA, Entry
from fedstill.node.audit_log import AuditLog
from fedstill.node.spent_budget import SpentBudget, compute_spent_budget
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

    def spent_budget(run: str, mine: str = "a record") -> SpentBudget:
        return compute_spent_budget(log, NODE_DATA, run, OWNER.delta, OWNER.accountant, OWNER, mine)

    one = spent_budget("records")
    assert one.events == PRICE
    assert one.epsilon is not None
    assert one.remaining == pytest.approx(3 - one.epsilon, abs=1e-3)
    assert spent_budget("records", "4 records of one patient") == SpentBudget(0, PRICE, one.epsilon, 0.0)
    assert spent_budget("bare") == SpentBudget(1, {}, None, 0.0)
    assert spent_budget(ALL_RUNS) == SpentBudget(1, PRICE, None, 0.0)
    charged(log, "patients", unit="4 records of one patient")
    assert spent_budget(ALL_RUNS) == SpentBudget(1), "of two units, which add up to nothing"
    assert compute_spent_budget(log, NODE_DATA, "records", OWNER.delta, OWNER.accountant) == SpentBudget(
        0, PRICE, one.epsilon, None
    )
