"""The audit log of a real node: restored copies regain no budget, and nodes that share a log share totals."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.node.audit_entries import NODE_DATA, ReceivedQuery
from fedstill.node.audit_log import AuditError, AuditLog, Charge
from fedstill.node.gate import Gate
from fedstill.node.policy import PolicyConfig
from fedstill.node.run_budgets import RunBudgets
from fedstill.node.run_mechanism import PrivacyMechanism
from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.queries import Query
from fedstill.protocol.run_plan import PLAN_FILE, RunPlan
from fedstill.tasks.classification import Classification
from tests.support.node_services import FEDIOD, PLAN, Clinic, release_now, same
from tests.support.small_world import SETTING

PRIVACY = """
[privacy]
mechanism = "noisy-outputs"
[privacy.outputs]
distribution = "gaussian"
noise = 200.0
bound = 1.0
"""
PRIVATE = RunPlan("one", {**FEDIOD, "gan": 0.0, "backpropagate": False}, PLAN.spec)


def private(folder: Path, more: str = "", run: str = "one") -> Clinic:
    """Return a node that responds with charged noise."""
    return Clinic(folder, PRIVACY + more, dataclasses.replace(PRIVATE, run=run))


def call(clinic: Clinic, number: int) -> Any:
    return clinic.query(number, differentiable=False)


def spent(clinic: Clinic) -> Any:
    with closing(AuditLog(clinic.folder / "audit.sqlite", read_only=True)) as audit:
        return audit.spending(NODE_DATA, "one")


@pytest.mark.parametrize("change", ["an older copy", "gone", "gone with its head"])
def test_log_with_lost_entries_refuses_joins_until_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    clinic = private(tmp_path / "clinic").ready()
    _, response = call(clinic, 0)
    clinic.say("leave")
    shutil.copy(clinic.folder / "audit.sqlite", tmp_path)
    clinic.ready()
    call(clinic, 1)
    call(clinic, 2)
    clinic.say("leave")
    before = spent(clinic)
    assert before.run_events
    log, head = clinic.folder / "audit.sqlite", clinic.folder / "audit.sqlite.head"
    log.unlink()
    if change == "an older copy":
        shutil.copy(tmp_path / "audit.sqlite", log)
    elif change == "gone with its head":
        head.unlink()
    with caplog.at_level(logging.WARNING):
        refused = clinic.say("join", plan=clinic.plan.to_dict())
    assert refused["text"] == "its data or model failed: see its log"
    assert not {"AuditError", "sqlite"} & set(json.dumps(refused).split('"'))
    assert str(log) in caplog.text
    assert "fedstill audit accept" in caplog.text
    assert clinic.host.session is None
    assert log.exists() == (change == "an older copy"), "no new log is created"
    assert "run" in call(clinic, 3)["text"]  # no run is joined
    with pytest.raises(AuditError, match="audit accept"):  # a new process does not start either
        private(clinic.folder, run="two")
    begun = (clinic.folder / "runs/one" / PLAN_FILE).read_bytes()
    clinic.say("join", plan={**clinic.plan.to_dict(), "method": {**clinic.plan.method, "batch": 5}})
    assert (clinic.folder / "runs/one" / PLAN_FILE).read_bytes() == begun, "the stored plan is not changed"

    with closing(AuditLog(log)) as audit:
        audit.accept("the disk was replaced", is_lost=change == "gone with its head")
    if change != "gone with its head":  # without log and head, the spent budget is unknown
        after = spent(clinic)
        assert (after.run_events, after.run_no_guarantee) == (before.run_events, before.run_no_guarantee)
        assert (after.run_queries, after.total_queries) == (before.run_queries, before.total_queries)
    clinic.ready()  # in the same process: nothing remained locked
    same(call(clinic, 0)[1], response)
    assert not isinstance(call(clinic, 3), dict)


@pytest.mark.parametrize(
    "function", ["fedstill.node.audit_log.AuditLog.require_sound", "fedstill.node.session.protect"]
)
def test_failed_join_leaves_nothing_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    clinic = private(tmp_path / "clinic")

    def fails(*given: Any, **more: Any) -> None:
        raise AuditError("/home/clinic/audit.sqlite", "is broken")

    with monkeypatch.context() as patch:
        patch.setattr(function, fails)
        refused = clinic.say("join", plan=clinic.plan.to_dict())
    assert "/home/clinic" not in json.dumps(refused)
    other = private(clinic.folder).ready()  # another process
    assert not isinstance(call(other, 0), dict)
    other.say("leave")
    clinic.ready()
    assert not isinstance(call(clinic, 0), dict)


def test_nodes_with_same_data_share_total(tmp_path: Path) -> None:
    """Two folders share one log: what the first spends reduces the budget of the second."""
    shared = f'audit_log = "{tmp_path / "shared.sqlite"}"\n'
    limits = PRIVACY.replace("[privacy.outputs]", f"{shared}total_epsilon = 0.5\n[privacy.outputs]")
    first, second = (
        Clinic(tmp_path / name, limits, dataclasses.replace(PRIVATE, run=name))
        for name in ("first", "second")
    )
    first.ready()
    number = 0
    while not isinstance(call(first, number), dict):
        number += 1
    assert number > 0
    first.say("leave")
    second.say("join", plan=second.plan.to_dict())
    second.say("train_locally", seconds=60)
    assert "privacy budget" in call(second, 0)["text"]


def test_nodes_with_one_payer_are_charged_each() -> None:
    """Nodes that only differ in their name have different noise: two releases of the same records."""
    audit = AuditLog()
    query = Query(
        lambda node: {},
        sends={"x": "inputs"},
        releases={"logits": "logits"},
        rows=4,
        depends_on_records=(),
        name="predict",
    )
    config = NoisyOutputs(outputs=OutputsConfig("gaussian", noise=50.0, bound=1.0))
    side, x = NodeSide({"predict": query}, SETTING), {"x": torch.zeros(4, 1, 4, 4)}
    charged, released = [], []
    for name in ("first", "second", "second"):
        mechanism = PrivacyMechanism(
            name, config, side, LocalConfig(epochs=1, batch=10), 50, Classification(4), secret=3
        )
        mechanism.setup_hash = "the same data, model and options"
        gate = Gate(name, PolicyConfig(), audit, "run", NODE_DATA)
        gate.ledger.budgets = RunBudgets(mechanism, audit, "run", NODE_DATA)
        received = ReceivedQuery(0, "predict", "content", "", {})
        gate.admit(query, received, x)
        logits = {"logits": torch.zeros(4, 4)}
        released.append(release_now(gate, received, "response", logits, query, x)["logits"])
        charged.append(sum(audit.spending(NODE_DATA, "run").run_events.values()))
        assert not audit.spending(name, "run").run_events
    assert not torch.equal(released[0], released[1])
    assert torch.equal(released[1], released[2])  # repeated after a restart
    assert charged == [1, 2, 2]


def test_log_in_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text = PRIVACY.replace("[privacy.outputs]", 'audit_log = "~/clinic.sqlite"\n[privacy.outputs]')
    clinic = Clinic(tmp_path / "clinic", text, PRIVATE).ready()
    call(clinic, 0)
    assert (tmp_path / "clinic.sqlite").exists()


def test_locked_or_full_log_refuses_before_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clinic = private(tmp_path / "clinic").ready()
    log = clinic.folder / "audit.sqlite"
    monkeypatch.setattr("fedstill.node.audit_database.LOCK_TIMEOUT", 0.1)
    clinic.again()
    with closing(sqlite3.connect(log, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")  # another process holds the lock for longer than the node waits
        assert (
            clinic.say("join", plan=clinic.plan.to_dict())["text"] == "its data or model failed: see its log"
        )
        other.execute("ROLLBACK")
        clinic.ready()
        other.execute("BEGIN IMMEDIATE")
        refused = call(clinic, 0)
        other.execute("ROLLBACK")
    assert refused["text"] == "its data or model failed: see its log"
    assert clinic.charged_releases() == []
    clinic.session.audit._database.execute("PRAGMA max_page_count = 1")  # simulates a full disk
    for number in range(300):
        reply = call(clinic, number)
        if isinstance(reply, dict):
            break
    assert reply["text"] == "its data or model failed: see its log"
    assert len(clinic.charged_releases()) == number, "only actual releases are charged"
    assert call(clinic, number)["text"] == reply["text"], "the repeated query is refused too"


@pytest.mark.parametrize("crash", ["before the entry", "after the entry"])
def test_crash_at_release_never_reports_less_than_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    """A response that a killed process did not send may be charged; one that was sent always is."""
    clinic = private(tmp_path / "clinic").ready()
    charge_all = AuditLog.charge_all

    class Killed(BaseException):
        pass

    def killed(audit: AuditLog, charges: Sequence[Charge]) -> list[int]:
        if crash == "after the entry":
            charge_all(audit, charges)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(AuditLog, "charge_all", killed)
        with pytest.raises(Killed):
            call(clinic, 0)
    assert len(clinic.charged_releases()) == (crash == "after the entry")
    clinic.again()
    clinic.ready()
    _, first = call(clinic, 0)
    assert len(clinic.charged_releases()) == 1, "equal bytes are charged once"
    clinic.again()
    clinic.ready()
    same(call(clinic, 0)[1], first)
    assert len(clinic.charged_releases()) == 1
