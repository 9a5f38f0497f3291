"""Charging by the release ledger: releases are charged before they leave, completely, and once.

A state machine sends a deployed node queries, repeated queries, other content under a used number and output
gradients in any order. It kills the process or fills the disk at each write, interrupts training, changes the
last digits of training, and restores checkpoints. A model of the accountant predicts every charge. The tests
run 5 sequences of 20 steps, and 20 with ``pytest --hypothesis-profile=thorough``.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fedstill.node import dp_training
from fedstill.node.audit_entries import NODE_DATA, RELEASES
from fedstill.node.audit_log import AuditLog, Charge
from fedstill.node.captured_functions import CapturedFunctions
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.config import NoPrivacy
from fedstill.privacy.events import Event, PrivacyCost, cost_from_dict
from tests.support.node_services import PLAN, B, Clinic, image

STEP = Event("gaussian", 2.0, rate=B / 40)  # of a critic, on 4 of 40 records
LOCAL_STEP = Event("gaussian", 2.0, rate=0.2)  # of the model, before the first query
AFFORDABLE_COST = PrivacyCost({STEP: 9, LOCAL_STEP: 1, Event("laplace", NoPrivacy().counts_noise): 1})
EPSILON = 1.0001 * compute_epsilon(AFFORDABLE_COST, 1e-5)  # the plan declares 6 steps
# Affordable steps of the critic if the server does not query the counts.
AFFORDABLE = next(
    steps - 1
    for steps in range(6, 100)
    if compute_epsilon(PrivacyCost({STEP: steps, LOCAL_STEP: 1}), 1e-5) > EPSILON
)
PRIVATE = f"""
[privacy]
mechanism = "dp-sgd"
epsilon = {EPSILON!r}
[privacy.training]
noise = 2.0
[privacy.critic]
noise = 2.0
"""

ORDINARY_SUM, ORDINARY_CHARGE = dp_training.clipped_sum_and_loss, AuditLog.charge_all
ORDINARY_CALL = CapturedFunctions.__call__

WRITES = ("training", "training result", "response", "gradient")
KILLS = tuple((when, part) for when in ("kill before", "kill after") for part in WRITES)
FULL_DISK = tuple(("full disk", part) for part in WRITES)
FAILURES = (("fail", "before training"), ("fail", "after training"), ("kill", "in training"))
NO_TROUBLE = ("none", "")
TROUBLES = st.sampled_from([NO_TROUBLE] * 12 + [*KILLS, *FULL_DISK, *FAILURES])

Reply = tuple[Any, Mapping[str, torch.Tensor]]


class Killed(BaseException):
    """Raised where the process is killed; no handler of the node may catch it."""


@dataclass
class Attempts:
    """Private training for one query after one history: charged attempts, and the digits of the last one."""

    charged: int = 0
    digits: bool | None = None  # None: killed before its result was written


@dataclass
class Model:
    """Predicted charges, by an accountant who sees everything."""

    attempts: dict[Any, Attempts] = field(default_factory=dict)  # by history and query
    releases: dict[Any, tuple[bytes, ...] | None] = field(default_factory=dict)  # None: charged, but not seen
    is_initial_charged: bool = False

    @property
    def steps(self) -> int:
        """Return the charged steps of the critic."""
        return sum(each.charged for each in self.attempts.values())


def content(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, ...]:
    return tuple(tensors[name].numpy().tobytes() for name in sorted(tensors))


class Charging(RuleBasedStateMachine):
    """One node that trains its critic with DP-SGD for each query, and its server."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.patch = pytest.MonkeyPatch()
        self.trouble, self.digits = NO_TROUBLE, False
        self._install()
        self.clinic = Clinic(Path(self.folder.name) / "clinic", PRIVATE)
        file = self.clinic.folder / "node.toml"
        file.write_text(file.read_text().replace("epochs = 4", "epochs = 0.2"))
        self.clinic.again()
        self.clinic.ready()
        self.model = Model()
        self.history: tuple[Any, ...] = ()  # queries that have changed the node
        self.last = -1
        self.checkpoints: list[tuple[int, tuple[Any, ...]]] = [(0, ())]
        self.blocked = False  # after training that may be incomplete
        # The last query of this process; its repetition is served from memory.
        self.kept: tuple[int, int] | None = None
        self.pulled: float | None = None

    def _install(self) -> None:
        """Make the failure of the current message happen at its place."""

        def charge_all(audit: AuditLog, charges: Sequence[Charge]) -> list[int]:
            (what, part), entry = self.trouble, charges[0].entry
            is_here = part == entry.part and entry.number >= 0
            if is_here and what == "full disk":
                raise OSError(28, "No space left on device")
            if is_here and what == "kill before":
                raise Killed
            numbers = ORDINARY_CHARGE(audit, charges)
            if is_here and what == "kill after":
                raise Killed
            return numbers

        def clipped_sum(*given: Any) -> tuple[torch.Tensor, float]:
            if self.trouble == ("kill", "in training"):
                raise Killed
            total, loss = ORDINARY_SUM(*given)
            return (torch.nextafter(total, torch.full_like(total, torch.inf)) if self.digits else total), loss

        def call(runner: CapturedFunctions, *given: Any) -> Any:
            if self.trouble == ("fail", "before training"):
                raise RuntimeError("half-way")
            outputs = ORDINARY_CALL(runner, *given)
            if self.trouble == ("fail", "after training"):
                raise RuntimeError("out of memory")
            return outputs

        self.patch.setattr(AuditLog, "charge_all", charge_all)
        self.patch.setattr(dp_training, "clipped_sum_and_loss", clipped_sum)
        self.patch.setattr(CapturedFunctions, "__call__", call)

    def teardown(self) -> None:
        self.trouble = NO_TROUBLE
        self.clinic.session.audit.verify()
        self.clinic.say("leave")
        self.patch.undo()
        self.folder.cleanup()

    # --- the server's messages ----------------------------------------------------------------------------

    @rule(gap=st.integers(0, 1), seed=st.integers(0, 1), trouble=TROUBLES)
    def new_query(self, gap: int, seed: int, trouble: tuple[str, str]) -> None:
        """Send a query with a number that was not used after this checkpoint."""
        number = self.last + 1 + gap
        if self.blocked:
            rows = len(self.clinic.rows())
            assert "failed at query" in self.clinic.query(number, image(seed))["text"]
            assert len(self.clinic.rows()) == rows
            return
        key = (self.history, number, seed)
        reply = self._send(trouble, lambda: self.clinic.query(number, image(seed)))
        steps = self._predict_attempts(key, trouble)
        if steps == "refused":
            assert reply is not None
            assert "privacy budget" in reply["text"]
            return
        if steps == "killed":
            assert reply is None
            self._restart()
            return
        if steps in ("failed", "blocked"):
            assert isinstance(reply, dict), "a refusal contains no tensors"
            self.blocked = steps == "blocked"
            return
        release = (key, self.model.attempts[key].charged, "response", 0.0)
        if trouble[1] == "response" and trouble[0] != "kill after":
            if trouble[0] == "kill before":
                assert reply is None
                self._restart()
                return
            assert isinstance(reply, dict)
            assert release not in self.model.releases or reply["kind"], "releases are charged"
            reply = self._send(NO_TROUBLE, lambda: self.clinic.query(number, image(seed)))
        if trouble == ("kill after", "response"):
            self.model.releases.setdefault(release, None)
            self._restart()
            return
        self._see(release, reply)
        self.last, self.history = number, (*self.history, (number, seed, release[1]))
        self.kept, self.pulled = (number, seed), None

    def _predict_attempts(self, key: Any, trouble: tuple[str, str]) -> str:
        """Charge the private training of a query in the model; return its outcome."""
        what, where = trouble
        known = self.model.attempts.get(key)
        if known is None or not known.charged:
            if self.model.steps + 1 > AFFORDABLE:
                return "refused"
            self.model.is_initial_charged = True
            if where == "training" and what in ("full disk", "kill before"):
                return "killed" if what == "kill before" else "failed"
            known = self.model.attempts.setdefault(key, Attempts())
            known.charged = 1
            if (what, where) == ("kill after", "training"):
                return "killed"
        if trouble == ("kill", "in training"):
            return "killed"
        if trouble == ("fail", "before training"):
            return "blocked"
        while known.digits is not None and known.digits != self.digits:
            if where == "training" and what == "kill before":
                return "killed"
            if where == "training" and what == "full disk":
                return "blocked"
            if self.model.steps + 1 > AFFORDABLE:
                return "blocked"
            known.charged, known.digits = known.charged + 1, None
            if (what, where) == ("kill after", "training"):
                return "killed"
        if known.digits is None:
            if where == "training result" and what in ("full disk", "kill before"):
                return "killed" if what == "kill before" else "blocked"
            known.digits = self.digits
            if (what, where) == ("kill after", "training result"):
                return "killed"
        return "blocked" if trouble == ("fail", "after training") else "trained"

    @precondition(lambda self: self.kept is not None and not self.blocked)
    @rule()
    def repeated_query(self) -> None:
        """Repeat a query, as after a lost reply: the same bytes, and no new entry."""
        number, seed = self.kept  # type: ignore[misc]
        rows, critic = len(self.clinic.rows()), self.clinic.critic()
        earlier = self.history[:-1]
        release = ((earlier, number, seed), self.history[-1][2], "response", 0.0)
        self._see(release, self.clinic.query(number, image(seed)))
        assert len(self.clinic.rows()) == rows
        assert torch.equal(self.clinic.critic(), critic)

    @precondition(lambda self: self.last >= 0 and not self.blocked)
    @rule(back=st.integers(0, 2))
    def other_content(self, back: int) -> None:
        """Send other content with a used number: neither trained nor charged."""
        rows, critic = len(self.clinic.rows()), self.clinic.critic()
        reply = self.clinic.query(max(self.last - back, 0), image(9))
        assert reply["kind"] == "QueryMismatch"
        assert len(self.clinic.rows()) == rows
        assert torch.equal(self.clinic.critic(), critic)

    @precondition(lambda self: self.kept is not None and not self.blocked)
    @rule(value=st.sampled_from([1.0, 2.0]), trouble=TROUBLES)
    def pull(self, value: float, trouble: tuple[str, str]) -> None:
        """Send output gradients for the last response: input gradients are charged once."""
        trouble = trouble if trouble[1] == "gradient" else NO_TROUBLE
        number, seed = self.kept  # type: ignore[misc]
        first = self.pulled is None
        reply = self._send(trouble if first else NO_TROUBLE, lambda: self.clinic.pull(number, value))
        if not first and self.pulled != value:
            assert reply is not None
            assert reply["kind"] == "QueryMismatch"
            return
        release = ((self.history[:-1], number, seed), self.history[-1][2], "gradient", value)
        what = trouble[0] if first else "none"
        if what.startswith("kill"):
            assert reply is None
            if what == "kill after":
                self.model.releases.setdefault(release, None)
            self._restart()
            return
        if what == "full disk":
            assert isinstance(reply, dict)
            other = self.clinic.pull(number, 3.0)
            assert other["kind"] == "QueryMismatch", "the charge for other gradients failed"
            reply = self.clinic.pull(number, value)
        self.pulled = value
        self._see(release, reply)

    @precondition(lambda self: not self.blocked)
    @rule()
    def save_checkpoint(self) -> None:
        assert self.clinic.say("save_checkpoint", checkpoint=self.last + 1) == ({}, {})
        self.checkpoints = [(0, ()), (self.last + 1, self.history)]

    @rule(newest=st.booleans())
    def load_checkpoint(self, newest: bool) -> None:
        if not newest:
            self.checkpoints = self.checkpoints[:1]
        query_number, self.history = self.checkpoints[-1]
        assert self.clinic.say("load_checkpoint", checkpoint=query_number) == ({}, {})
        self._forget(query_number)

    @rule(newest=st.booleans())
    def stop_and_resume(self, newest: bool) -> None:
        self._restart()
        self.load_checkpoint(newest)

    @precondition(lambda self: self.blocked)
    @rule()
    def save_half_trained(self) -> None:
        """An incompletely trained state is never saved."""
        assert "failed at query" in self.clinic.say("save_checkpoint", checkpoint=self.last + 1)["text"]

    @rule()
    def change_last_digits(self) -> None:
        """Simulate another number of threads or another processor."""
        self.digits = not self.digits

    # --- helpers ------------------------------------------------------------------------------------------

    def _send(self, trouble: tuple[str, str], send: Any) -> Any:
        """Return the node's reply to a message; None if it was killed."""
        self.trouble = trouble
        try:
            return send()
        except Killed:
            return None
        finally:
            self.trouble = NO_TROUBLE

    def _see(self, release: Any, reply: Reply) -> None:
        """Record released tensors, whose charge is on disk by now."""
        assert isinstance(reply, tuple), reply
        bytes_ = content(reply[1])
        assert self.model.releases.get(release) in (None, bytes_), "equal releases have equal bytes"
        self.model.releases[release] = bytes_

    def _restart(self) -> None:
        """Serve the folder from a new process, in the state before the first query."""
        self.clinic.again()
        reply, _ = self.clinic.say("join", plan=PLAN.to_dict())
        assert reply["is_trained"]
        self.history = ()
        self._forget(0)

    def _forget(self, query_number: int) -> None:
        self.last, self.blocked, self.kept, self.pulled = query_number - 1, False, None, None

    # --- invariants ---------------------------------------------------------------------------------------

    @invariant()
    def log_is_exact(self) -> None:
        """Every release and every training attempt is in the file once."""
        rows = self.clinic.rows()  # from another connection, as a reader of the file
        released = [row for row in rows if row["part"] in RELEASES]
        assert len(released) == len(self.model.releases), "each release is logged once"
        steps = sum(row["cost"].get(str(STEP), 0) for row in rows if row["part"] == "training")
        assert steps == self.model.steps, "each attempt is logged once"
        keys = ("number", "part", "content_hash", "history_hash", "release_hash")
        assert len({tuple(row[key] for key in keys) for row in rows}) == len(rows)

    @invariant()
    def spent_covers_releases(self) -> None:
        """The reported epsilon covers all releases, and never exceeds the budget."""
        spent = cost_from_dict(self.clinic.session.audit.spending(NODE_DATA, "one").run_events)
        left = {release[:2] for release, bytes_ in self.model.releases.items() if bytes_ is not None}
        least = PrivacyCost({STEP: len(left), LOCAL_STEP: 1} if left else {})
        assert all(spent.get(event, 0) >= count for event, count in least.items())
        assert spent.get(STEP, 0) <= AFFORDABLE
        assert spent.get(LOCAL_STEP, 0) == int(self.model.is_initial_charged)
        responses = [b for (_, _, part, _), b in self.model.releases.items() if part == "response" and b]
        assert len({*responses}) == len(responses), "each response has its own critic"

    @invariant()
    def server_learns_costs(self) -> None:
        """Replies have reported all costs, except for training whose response has not been released yet."""
        audit = self.clinic.session.audit
        reported = Counter(audit.totals.unreported_training_charges("one", "clinic"))
        for row in self.clinic.rows():
            for name in ("cost", "training_cost"):
                if row["part"] in RELEASES:
                    reported.update(row[name])
        assert reported == Counter(audit.spending(NODE_DATA, "one").run_events)


Charging.TestCase.settings = settings(
    max_examples=settings.default.max_examples // 10,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_charging_holds_in_any_order = Charging.TestCase
