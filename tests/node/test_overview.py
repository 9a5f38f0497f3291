"""Numbers on the owner's page of a node, worked out by hand."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from fedstill.node import owner_folder
from fedstill.node.audit_entries import ALL_RUNS, NODE_DATA, REFUSED, Entry
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.overview import read_overview

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
