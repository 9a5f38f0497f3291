"""Numbers on the owner's page of a node, computed by hand.

Costs of a run as shown in the terminal and on the page: no remaining budget if units differ.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from fedstill.node import folder_log, owner_folder
from fedstill.node.audit_entries import ALL_RUNS, NODE_DATA, REFUSED, Entry
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.folder_log import SecurityEvents
from fedstill.node.overview import SpentBudget, compute_spent_budget, read_overview
from fedstill.privacy.config import PrivacyConfig

PRIVACY = "[privacy]\nepsilon = 3.0\ntotal_epsilon = 5.0\ntotal_delta = 0.1\n"


def test_costs_are_shown_at_the_delta_of_their_own_budget(tmp_path: Path) -> None:
    """Laplace noise of scale 2 costs epsilon = 1/2 + 2 log(1 - delta)."""
    owner_folder.init_folder(tmp_path / "clinic")
    (tmp_path / "clinic/node.toml").write_text(f'name = "clinic"\n{PRIVACY}')
    about = {"run": "one", "payer": NODE_DATA, "node": "clinic", "number": 0, "query": "predict_logits"}
    with closing(AuditLog(tmp_path / "clinic" / FILE)) as audit:
        audit.charge(
            Entry(**about, part="response", cost={"laplace(2.0)": 1}, unit="a record", up={"counts": 40})
        )
        audit.append(Entry(**about, part=REFUSED))
    shown = read_overview(tmp_path / "clinic")
    assert shown.costs["one"].epsilon == pytest.approx(0.499980, abs=1e-4)
    assert shown.costs["one"].remaining == pytest.approx(3 - 0.499980, abs=1e-4)
    assert shown.costs[ALL_RUNS].epsilon == pytest.approx(0.289279, abs=1e-4)
    assert shown.costs[ALL_RUNS].remaining == pytest.approx(5 - 0.289279, abs=1e-4)
    (day,) = shown.releases.values()
    assert (day.refused, day.no_guarantee, dict(day.bytes_by_kind), day.queries) == (
        1,
        0,
        {"counts": 40},
        {0},
    )


@pytest.mark.parametrize("counted_rules", [50, 0])
def test_counted_refusals_are_shown_with_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted_rules: int
) -> None:
    monkeypatch.setattr(folder_log, "MAX_COUNTED_RULES", counted_rules)
    owner_folder.init_folder(tmp_path / "clinic")
    with closing(SecurityEvents(tmp_path / "clinic")) as events:
        for run in ("one", "two"):
            for number in range(530):
                events.record_refused_query("aa", f"max_rows: {number}", run, "predict", number)
        events.record_repeats()
    shown = read_overview(tmp_path / "clinic").releases
    assert {run: day.refused for (_, run), day in shown.items()} == {"one": 530, "two": 530}


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
    assert spent_budget(ALL_RUNS) == SpentBudget(1), "charges in two units cannot be summed"
    assert compute_spent_budget(log, NODE_DATA, "records", OWNER.delta, OWNER.accountant) == SpentBudget(
        0, PRICE, one.epsilon, None
    )
