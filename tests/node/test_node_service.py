"""A node behind messages: responses, refusals, log entries, and resuming after a restart."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import shutil
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import UnidentifiedImageError

from fedstill.core.errors import FedstillError
from fedstill.federation.transport import parse_reply
from fedstill.models import PREDICTION_ONLY
from fedstill.models.module_utils import to_vector
from fedstill.node import dp_training, initial_training, run_folder
from fedstill.node import session as at
from fedstill.node.admission import SIZE_RULES, SizeFacts, require
from fedstill.node.audit_entries import ALL_RUNS, NODE_DATA, refusal_count
from fedstill.node.audit_log import FILE, AuditError, AuditLog
from fedstill.node.node_service import NodeService
from fedstill.node.replies import NOT_JOINED, NodeStatus
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.events import cost_from_dict
from fedstill.protocol.messages import MESSAGES
from fedstill.protocol.queries import Query
from fedstill.protocol.run_plan import PROTOCOL
from fedstill.protocol.wire_format import WireConfig, pack, unpack
from tests.support.audit_logs import releases
from tests.support.errors import raises_refused
from tests.support.node_services import (
    CLASSES,
    FEDIOD,
    MAP,
    PLAN,
    PRIVATELY,
    SHAPE,
    WIDE,
    B,
    Clinic,
    gradients,
    image,
    labels_of,
    same,
)


class Ticking:
    """A clock that advances by a second per call, so that 1.5 s are one chunk of training."""

    def __init__(self) -> None:
        self.perf_counter, self._seconds = time.perf_counter, itertools.count()

    def monotonic(self) -> float:
        return float(next(self._seconds))


def tick(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking()
    for module in (at, initial_training, run_folder):
        monkeypatch.setattr(module, "time", clock)


@pytest.fixture
def clinic(tmp_path: Path) -> Clinic:
    return Clinic(tmp_path / "clinic").ready()


# --- status -------------------------------------------------------------------------------------------


def test_status_reports_versions_and_refusals(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", 'queries = ["count_labels"]\nmax_queries = 5')
    hello, _ = clinic.say("identify")
    assert hello.keys() == {"protocol", "versions"}  # the link knows the name
    assert hello["protocol"] == PROTOCOL
    assert hello["versions"]["torch"] == torch.__version__
    reply, released = clinic.say("join", plan=PLAN.to_dict())
    assert not released
    assert reply["refused_queries"] == {"predict_logits": "queries: count_labels"}
    assert (reply["max_queries"], reply["is_trained"], reply["checkpoints"], reply["last_query"]) == (
        5,
        False,
        [],
        -1,
    )
    assert (reply["model"], reply["is_frozen"]) == ("MLP", False)
    assert reply["parameters"] == (64 * 8 + 8) + (8 * 8 + 8) + (8 * CLASSES + CLASSES)
    assert clinic.lines() == []


@pytest.mark.parametrize("differentiable", [True, False])
def test_node_that_predicts_only_refuses_queries_with_gradients(tmp_path: Path, differentiable: bool) -> None:
    plan = replace(PLAN, method={**FEDIOD, "backpropagate": differentiable})
    clinic = Clinic(tmp_path / "clinic", plan=plan)
    module = f"forest_{differentiable}_of_services"  # each test imports another file
    (clinic.folder / f"{module}.py").write_text(
        "import torch\n"
        "class Forest(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        f"        return torch.from_numpy(x.flatten(1)[:, :{CLASSES}].numpy())\n"
        "def make(shape, classes):\n"
        "    return Forest()\n"
    )
    file = clinic.folder / "node.toml"
    file.write_text(file.read_text().replace("mlp:8", f"{module}:make"))
    clinic.again()
    reply, _ = clinic.say("join", plan=clinic.plan.to_dict())
    assert reply["refused_queries"] == ({"predict_logits": PREDICTION_ONLY} if differentiable else {})


def test_training_progress_is_percent_only(tmp_path: Path, monkeypatch: Any) -> None:
    clinic = Clinic(tmp_path / "clinic")
    monkeypatch.setattr(initial_training, "STEPS_PER_CHUNK", 7)
    tick(monkeypatch)
    clinic.say("join", plan=PLAN.to_dict())
    assert (
        clinic.query(0)["text"] == "node 'clinic', query 'predict_logits': its local training is not done yet"
    )
    assert clinic.say("train_locally", seconds=0)[0] == {"percent": 0, "is_trained": False}
    # 4 epochs of 40 examples, 8 at a time, are 20 steps.
    assert clinic.say("train_locally", seconds=1.5)[0] == {"percent": 30, "is_trained": False}
    assert clinic.say("train_locally", seconds=1.5)[0] == {"percent": 70, "is_trained": False}
    assert clinic.say("train_locally", seconds=60)[0] == {"percent": 100, "is_trained": True}
    assert clinic.say("train_locally", seconds=60)[0] == {"percent": 100, "is_trained": True}


# --- responses ----------------------------------------------------------------------------------------


def test_response_and_gradient_bytes_are_exact(clinic: Clinic) -> None:
    reply, released = clinic.query(0)
    assert {name: tuple(tensor.shape) for name, tensor in released.items()} == {
        "logits": (B, CLASSES),
        "critic": (B, *MAP),
    }
    assert reply == {"privacy": {"mechanism": "none", "cost": None, "history_hash": "", "release_hash": ""}}
    assert clinic.pull(0)[1]["d/dx"].shape == (B, *SHAPE)
    response, gradient = clinic.lines()
    numbers = B * CLASSES + B * 4
    assert response["down"] == {"inputs": 4 * B * 64}
    assert response["up"] == {"logits": 4 * B * CLASSES, "critic": 4 * B * 4}
    assert gradient["down"] == {"gradients": 4 * numbers}
    assert gradient["up"] == {"gradients": 4 * B * 64}


def test_repeated_query_gives_same_response(clinic: Clinic) -> None:
    first, pulled = clinic.query(0), clinic.pull(0)
    critic = clinic.critic()
    same(clinic.query(0)[1], first[1])
    same(clinic.pull(0)[1], pulled[1])
    assert torch.equal(clinic.critic(), critic)
    assert clinic.charged_releases() == [(0, "response"), (0, "gradient")]


def test_compressed_formats_work_both_ways(tmp_path: Path) -> None:
    wire = WireConfig(inputs="int8", gradients="float16")
    clinic = Clinic(tmp_path / "clinic", plan=replace(PLAN, wire=wire)).ready()
    sent = wire.compress({"x": image(0)}, {"x": "inputs"})
    header = {"number": 0, "query": "predict_logits", "differentiable": True}
    assert clinic.say("answer_query", sent, **header)[1]["logits"].dtype == torch.float32
    _, released = clinic.pull(0)
    assert {name: tensor.dtype for name, tensor in released.items()} == {
        "d/dx": torch.float16,
        "d/dx:scale": torch.float32,
    }
    response, gradient = clinic.lines()
    assert response["down"] == {"inputs": B * 64 + 4 * B}
    assert gradient["up"] == {"gradients": 2 * B * 64 + 4 * B}


# --- restarts -----------------------------------------------------------------------------------------


def test_local_training_resumes_from_saved_state(tmp_path: Path, monkeypatch: Any) -> None:
    whole = to_vector(Clinic(tmp_path / "whole").ready().session.node.model)
    clinic = Clinic(tmp_path / "clinic")
    monkeypatch.setattr(initial_training, "STEPS_PER_CHUNK", 6)
    tick(monkeypatch)
    monkeypatch.setattr(at, "SECONDS_BETWEEN_SAVES", -1.0)
    clinic.say("join", plan=PLAN.to_dict())
    clinic.session.train_locally(1.5)
    monkeypatch.setattr(at, "SECONDS_BETWEEN_SAVES", 100.0)
    clinic.session.train_locally(1.5)  # not saved
    assert clinic.session.training.steps == 12
    clinic.again()
    clinic.say("join", plan=PLAN.to_dict())
    assert clinic.session.training.steps == 6
    clinic.ready()
    assert torch.equal(to_vector(clinic.session.node.model), whole)


def test_restored_checkpoint_gives_same_responses_without_charge(clinic: Clinic) -> None:
    for number in range(3):
        clinic.query(number)
    clinic.say("save_checkpoint", checkpoint=3)
    replies = [(clinic.query(number)[1], clinic.pull(number)[1]) for number in (3, 4)]
    critic, lines = clinic.critic(), clinic.lines()
    clinic.again()
    assert "run" in clinic.query(5)["text"]  # it has not joined
    about, _ = clinic.say("join", plan=PLAN.to_dict())
    assert (about["checkpoints"], about["is_trained"]) == ([3], True)
    clinic.say("load_checkpoint", checkpoint=3)
    for number, (response, gradient) in zip((3, 4), replies, strict=True):
        same(clinic.query(number)[1], response)
        same(clinic.pull(number)[1], gradient)
    assert torch.equal(clinic.critic(), critic)
    assert clinic.lines() == lines


@pytest.mark.sample(1)
@pytest.mark.parametrize("mechanism", PRIVATELY)
def test_resumed_private_run_is_charged_once(tmp_path: Path, mechanism: str) -> None:
    whole, broken = (
        Clinic(tmp_path / name, PRIVATELY[mechanism]).salted().ready() for name in ("whole", "broken")
    )
    counted = {"query": "count_labels", "number": 0, "differentiable": False}
    same(whole.say("answer_query", **counted)[1], broken.say("answer_query", **counted)[1])
    for number in range(1, 7):  # all declared queries
        if number == 4:
            broken.say("save_checkpoint", checkpoint=4)
            broken.again()
            broken.say("join", plan=PLAN.to_dict())
            broken.say("load_checkpoint", checkpoint=4)
        same(whole.query(number)[1], broken.query(number)[1])
        same(whole.pull(number)[1], broken.pull(number)[1])
    spendings = [clinic.session.audit.spending(NODE_DATA, "one") for clinic in (whole, broken)]
    for clinic, spent in zip((whole, broken), spendings, strict=True):
        costs = [Counter(line["cost"]) + Counter(line["training_cost"]) for line in releases(clinic.folder)]
        assert sum(costs, Counter()) == spent.run_events, "the server receives all charges"
        assert spent.run_no_guarantee == 0
    assert spendings[0] == spendings[1], "training is charged once, and each response"


def test_each_run_has_own_noise_kept_on_resume(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", WIDE).ready()
    first = labels_of(clinic)
    clinic.again()
    clinic.ready()
    clinic.say("load_checkpoint", checkpoint=0)
    assert torch.equal(labels_of(clinic), first), "the same run"
    clinic.say("leave")
    other = Clinic(clinic.folder, WIDE, replace(PLAN, run="two")).ready()
    second = labels_of(other)
    assert ((second - first).abs() > 1).any(), "the same plan with another run name"
    other.say("leave")
    shutil.rmtree(clinic.folder / "runs/one")
    assert ((labels_of(Clinic(clinic.folder, WIDE).ready()) - first).abs() > 1).any(), (
        "or another folder of the run"
    )
    salts = {path.read_text() for path in clinic.folder.glob("runs/*/salt")}
    assert len(salts) == 2
    assert all(len(salt) >= 32 for salt in salts)


def test_salt_in_folder_holds_for_all_runs(tmp_path: Path) -> None:
    labels = []
    for name, salt, run in (("a", "x", "one"), ("b", "x", "two"), ("c", "y", "one")):
        clinic = Clinic(tmp_path / name, WIDE, replace(PLAN, run=run)).salted(salt).ready()
        labels.append(labels_of(clinic))
        assert not list(clinic.folder.glob("runs/*/salt"))
    assert torch.equal(labels[0], labels[1])
    assert ((labels[0] - labels[2]).abs() > 1).any()


@pytest.mark.parametrize("mechanism", PRIVATELY)
def test_salt_is_never_sent(tmp_path: Path, mechanism: str) -> None:
    clinic = Clinic(tmp_path / "clinic", PRIVATELY[mechanism]).ready()
    (path,) = clinic.folder.glob("runs/one/salt")
    about, _ = clinic.say("join", plan=PLAN.to_dict())
    texts = [str(about), str(clinic.query(0)[0]), str(clinic.pull(0)[0]), str(clinic.lines())]
    assert path.read_text() not in "".join(texts)


def test_seconds_are_rounded_up_under_private_training(tmp_path: Path) -> None:
    seconds: dict[str, list[float]] = {}
    for name, text in (("plain", ""), ("private", PRIVATELY["dp-sgd"])):
        clinic = Clinic(tmp_path / name, text).ready()
        replies = [
            clinic.host.serve(
                pack(
                    {"operation": "answer_query", "run": "one", "query": "predict_logits", "number": number}
                    | {"differentiable": False},
                    {"x": image(number)},
                )
            )
            for number in range(3)
        ]
        seconds[name] = [unpack(reply)[0]["seconds"] for reply in replies]
    assert all(value > 0 and value == round(value, 1) for value in seconds["private"])
    assert any(value != round(value, 1) for value in seconds["plain"])


# --- rounds of private training -----------------------------------------------------------------------

ROUNDS = """
[privacy]
mechanism = "dp-sgd"
epsilon = 4.0
[privacy.training]
noise = 3.0
"""


def in_rounds(folder: Path, policy: str = "") -> tuple[Clinic, Any]:
    """Return a node in a FedMD run under DP-SGD with 400 public examples, and its first scores (8, C)."""
    from fedstill.data.public import PublicData
    from fedstill.protocol.run_plan import public_fingerprint, public_tensors

    public = PublicData(
        "shared", torch.randn(400, *SHAPE, generator=torch.Generator().manual_seed(0)), None, ""
    )
    method = {"name": "fedmd", "initial_rounds": 1, "rounds": 2, "subset": 8}
    plan = replace(PLAN, method=method, public=public_fingerprint(public), public_note=("shared", ""))
    clinic = Clinic(folder, policy + ROUNDS, plan)
    about, _ = clinic.say("join", public_tensors(public), plan=plan.to_dict())
    assert about["refused_queries"] == {}
    clinic.say("train_locally", seconds=60)
    header = {"query": "communicate", "number": 0, "differentiable": False}
    return clinic, clinic.say("answer_query", {"rows": ROWS}, **header)[1]["logits"]


ROWS = torch.arange(8).int()


def a_round(clinic: Clinic, scores: torch.Tensor, rows: Any, number: int, round_: int = 0) -> Any:
    tensors = {"rows": ROWS.clone(), "consensus": scores, "round": torch.tensor(round_), "rows_next": rows}
    header = {"query": "digest_and_communicate", "number": number, "differentiable": False}
    return clinic.say("answer_query", tensors, **header)


def charges_by_part(clinic: Clinic) -> dict[str, int]:
    """Return the charges of the run, by the parts of releases."""
    times: Counter[str] = Counter()
    for row in clinic.rows():
        times[row["part"]] += sum(row["cost"].values())
    return dict(times)


def steps(monkeypatch: pytest.MonkeyPatch, fails_at: int = 0) -> list[int]:
    """Count private steps from now on; optionally fail after one of them."""
    taken: list[int] = []
    step = dp_training.private_step

    def counted(*args: Any, **more: Any) -> float:
        loss = step(*args, **more)
        taken.append(len(taken) + 1)
        if len(taken) == fails_at:
            raise RuntimeError("out of memory")
        return loss

    monkeypatch.setattr(dp_training, "private_step", counted)
    return taken


@pytest.mark.parametrize("bad", [10**6, 401, -1])
def test_missing_public_rows_are_refused_before_training(
    tmp_path: Path, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clinic, scores = in_rounds(tmp_path / "clinic")
    taken, before, weights = steps(monkeypatch), clinic.rows(), to_vector(clinic.session.node.model)
    for number in range(1, 4):
        refused = a_round(clinic, scores, torch.tensor([3, bad]).int(), number)
        assert (
            refused["rule"] == "rows: the server sent rows_next with rows outside the 400 of the public data"
        )
    assert taken == []
    assert clinic.rows() == before
    assert torch.equal(to_vector(clinic.session.node.model), weights)
    assert "logits" in a_round(clinic, scores, torch.tensor([0, 399]).int(), 1)[1]
    assert taken


def test_training_is_charged_if_response_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clinic, scores = in_rounds(tmp_path / "clinic", "max_bytes = 8000\n")
    taken, before = steps(monkeypatch), sum(charges_by_part(clinic).values())
    for number in range(1, 31):
        refused = a_round(clinic, scores, torch.arange(400).int(), number, (number - 1) % 2)
        assert refused["kind"] == REFUSED
    assert "privacy budget" in refused["rule"], "the budget ends the training"
    assert len(taken) > 7
    assert charges_by_part(clinic) == {"training": before + len(taken), "training result": 0, "response": 0}
    events = cost_from_dict(clinic.session.audit.spending(NODE_DATA, "one").run_events)
    assert 0.9 * 4 < compute_epsilon(events, 1e-5) <= 4


def test_failed_rounds_are_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the public data is a valid end of a range, but no valid row."""
    clinic, scores = in_rounds(tmp_path / "clinic")
    clinic.say("save_checkpoint", checkpoint=1)
    taken, before = steps(monkeypatch), sum(charges_by_part(clinic).values())
    for index in range(3):
        bad = torch.tensor([index, 400]).int()
        for number in range(1, 4):
            assert a_round(clinic, scores, bad, number)["kind"] == (
                "NodeFault" if number > 1 else "NodeDataError"
            )
        assert clinic.say("load_checkpoint", checkpoint=1) == ({}, {})
    assert len(taken) > 3
    assert charges_by_part(clinic) == {"training": before + len(taken), "response": 0, "training result": 0}


def test_failed_round_is_charged_and_needs_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clinic, scores = in_rounds(tmp_path / "clinic")
    clinic.say("save_checkpoint", checkpoint=1)
    before, weights = charges_by_part(clinic)["training"], to_vector(clinic.session.node.model).clone()
    with monkeypatch.context() as patch:
        taken = steps(patch, fails_at=3)
        assert a_round(clinic, scores, ROWS, 1)["rule"].startswith("max_memory")
    after = charges_by_part(clinic)["training"]
    assert after - before >= len(taken) == 3
    assert not torch.equal(to_vector(clinic.session.node.model), weights), "training changed the model"
    failed = "it failed at query 1 (digest_and_communicate): resume the run from an earlier checkpoint"
    taken = steps(monkeypatch)
    for number in (1, 2):
        refused = a_round(clinic, scores, ROWS, number)
        assert refused["kind"] == "NodeFault"
        assert failed in refused["text"]
    communicate = {"query": "communicate", "number": 3, "differentiable": False}
    assert failed in clinic.say("answer_query", {"rows": ROWS}, **communicate)["text"], (
        "other queries get the same error"
    )
    assert taken == []
    assert charges_by_part(clinic)["training"] == after
    clinic.say("load_checkpoint", checkpoint=1)
    assert torch.equal(to_vector(clinic.session.node.model), weights)
    reply, _ = a_round(clinic, scores, ROWS, 1)
    assert len(taken) == after - before, "all training is charged exactly once"
    assert charges_by_part(clinic)["training"] == after
    assert sum(reply["privacy"]["cost"].values()) == after - before, "the reply reports the training cost"


def test_run_over_budget_is_refused_at_join(tmp_path: Path) -> None:
    text = '[privacy]\nmechanism = "dp-sgd"\nepsilon = 2.0\n'
    noise = "[privacy.training]\nnoise = 0.5\n[privacy.critic]\nnoise = 0.5\n"
    reply, _ = Clinic(tmp_path / "clinic", text + noise).say("join", plan=PLAN.to_dict())
    assert set(reply["refused_queries"]) == {"predict_logits", "count_labels"}
    assert reply["refused_queries"]["predict_logits"].startswith(
        "privacy budget: the budget is epsilon 2 at delta 1e-05"
    )
    assert reply["privacy"]["budget"] == 2.0
    assert reply["privacy"]["noise"] == {"training": 0.5, "critic": 0.5}


def test_rows_without_public_data_are_refused(clinic: Clinic) -> None:
    query = Query(lambda node: {}, sends={"rows": "indices"}, name="rows")
    facts = SizeFacts(clinic.session.sizes, query, {"rows": torch.ones(1).int()})
    with raises_refused("rows", "outside", "0 of"):
        require("clinic", "rows", SIZE_RULES, facts)


def test_two_checkpoints_are_kept(clinic: Clinic) -> None:
    for checkpoint in (1, 2, 3):
        clinic.query(checkpoint - 1)
        clinic.say("save_checkpoint", checkpoint=checkpoint)
    assert clinic.session.status().checkpoints == (2, 3)
    assert (
        "checkpoint 1 does not exist: the node has 2, 3"
        in clinic.say("load_checkpoint", checkpoint=1)["text"]
    )
    clinic.say("load_checkpoint", checkpoint=2)
    assert clinic.session.status().checkpoints == (2,)
    assert clinic.session.status().last_query == 1
    assert clinic.query(1)["kind"] == "QueryMismatch"  # before the checkpoint
    clinic.say("load_checkpoint", checkpoint=0)
    assert clinic.session.status().checkpoints == ()


# --- refusals -----------------------------------------------------------------------------------------

REFUSED = "QueryRefused"
BAD: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str, str]] = {
    "too many channels": ({}, {"x": torch.zeros(2, 3, 8, 8)}, REFUSED, "expected float32 (B, 1, 8, 8)"),
    "no batch": ({}, {"x": torch.zeros(8, 8)}, REFUSED, "expected float32 (B, 1, 8, 8)"),
    "no numbers": ({}, {"x": torch.zeros(0, 1, 8, 8)}, REFUSED, "has 0"),
    "too many rows": ({}, {"x": torch.zeros(65, 1, 8, 8)}, REFUSED, "max_rows: 64, and x has 65"),
    "float64": ({}, {"x": torch.zeros(2, 1, 8, 8).double()}, REFUSED, "the server sent x: torch.float64"),
    "nan": (
        {},
        {"x": torch.full((2, 1, 8, 8), float("nan"))},
        REFUSED,
        "the server sent x with NaN or infinity",
    ),
    "an infinite scale": (
        {},
        {"x": torch.ones(2, 1, 8, 8).char(), "x:scale": torch.tensor([1.0, float("inf")])},
        REFUSED,
        "the server sent x with NaN or infinity",
    ),
    "scales of another length": (
        {},
        {"x": torch.ones(2, 1, 8, 8).char(), "x:scale": torch.ones(3)},
        "DataError",
        "(3,) scales",
    ),
    "float8 with scales": (
        {},
        {"x": torch.ones(2, 1, 8, 8).to(torch.float8_e4m3fn), "x:scale": torch.ones(2)},
        "DataError",
        "x torch.float8_e4m3fn came with scales",
    ),
    "uint16 with scales": (
        {},
        {"x": torch.ones(2, 1, 8, 8).to(torch.uint16), "x:scale": torch.ones(2)},
        "DataError",
        "x torch.uint16 came with scales",
    ),
    "other tensors": ({}, {"y": torch.zeros(2, 1, 8, 8)}, REFUSED, "expected ['x']"),
    "no tensors": ({}, {}, REFUSED, "expected ['x']"),
    "an unknown query": ({"query": "tell_all"}, {}, "ArgumentError", "count_labels, predict_logits"),
    "other content": ({"number": 1}, {"x": image(9)}, "QueryMismatch", "again as number 1"),
    "an old number with other content": ({"number": 0}, {"x": image(9)}, "QueryMismatch", "number 0"),
    "a negative number": ({"number": -5}, {"x": image(0)}, "ArgumentError", "number = -5"),
    "a number beyond all": ({"number": 10**30}, {"x": image(0)}, "ArgumentError", "an integer"),
    "a word for a number": ({"number": "six"}, {"x": image(0)}, "ArgumentError", "an integer"),
    "true for a number": ({"number": True}, {"x": image(0)}, "ArgumentError", "an integer"),
    "another run": ({"run": "two"}, {"x": image(0)}, "ArgumentError", "run = 'two'"),
    "pulled before asked": (
        {"operation": "compute_gradients"},
        {"logits": torch.ones(2, 10)},
        "QueryMismatch",
        "2",
    ),
    "pulled with other gradients": (
        {"operation": "compute_gradients", "number": 1},
        gradients(1.0),
        "QueryMismatch",
        "number 1",
    ),
    "pulled with nan": (
        {"operation": "compute_gradients", "number": 1},
        gradients(float("nan")),
        REFUSED,
        "with NaN or infinity",
    ),
    "to do something else": ({"operation": "send the data"}, {}, "ArgumentError", "send the data"),
    "a checkpoint that is no number": (
        {"operation": "save_checkpoint", "checkpoint": "../x"},
        {},
        "ArgumentError",
        "an integer",
    ),
}


@pytest.mark.parametrize("end", ["leave", "another run"])
def test_counted_refusals_are_in_the_log_when_the_run_ends(tmp_path: Path, end: str) -> None:
    """Also refusals of undeclared queries, and of a node that continues to serve."""
    clinic = Clinic(tmp_path / "clinic", "max_rows = 1\n").ready()
    for number in range(55):
        assert clinic.query(0, torch.zeros(2, 1, 8, 8))["kind"] == REFUSED
        assert clinic.query(0, query=f"made up {number}")["kind"] == "ArgumentError"
    if end == "leave":
        clinic.say("leave")
    else:
        clinic.say("join", run="two", plan=replace(PLAN, run="two").to_dict())
    refused = [entry for entry in clinic.lines() if entry["part"] == "refused"]
    by_rows = [entry for entry in refused if entry["rule"].startswith("max_rows")]
    assert [entry["query"] for entry in by_rows] == ["predict_logits"] * 3
    assert [refusal_count(entry) for entry in by_rows] == [1, 10, 44]
    assert sum(map(refusal_count, refused)) == 110


def test_refusals_of_a_full_run_folder_are_counted(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", "max_disk = 500_000\n").ready()
    (clinic.folder / "runs/one/checkpoint-9.safetensors").write_bytes(bytes(500_000))
    for number in range(3):
        assert clinic.query(number)["rule"].startswith("max_disk")
        assert clinic.query(number, query="made up")["kind"] == "ArgumentError"
    clinic.say("leave")
    assert sum(refusal_count(entry) for entry in clinic.lines()) == 6


@pytest.mark.parametrize("case", BAD)
def test_malformed_queries_are_refused_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    clinic = Clinic(tmp_path / "clinic", "max_rows = 64").ready()
    clinic.query(0)
    clinic.query(1)
    clinic.pull(1, 2.0)
    sums, critic, before = clinic.session.audit.traffic_totals(), clinic.critic(), len(clinic.lines())
    files = sorted(path for path in clinic.folder.rglob("*") if path.is_file())
    header, tensors, kind, text = BAD[case]
    given = {
        "operation": "answer_query",
        "run": "one",
        "query": "predict_logits",
        "number": 2,
        "differentiable": True,
    }
    with caplog.at_level(logging.WARNING, "fedstill.node"):
        reply, released = unpack(clinic.host.serve(pack({**given, **header}, tensors)))
    assert not released
    assert reply["error"]["kind"] == kind
    assert text in reply["error"]["text"]
    (line,) = caplog.messages
    assert line.startswith("refused ")
    refusals = clinic.lines()[before:]
    fields = {**given, **header}
    if fields["operation"] in ("answer_query", "compute_gradients") and fields["run"] == "one":
        (refusal,) = refusals
        assert refusal["rule"] in reply["error"]["text"]
        assert text != "an integer" or refusal["number"] == -1  # matches no query
    else:
        assert refusals == []
    # Nothing was released or trained, and the node continues as before, also after a restart.
    assert clinic.session.audit.traffic_totals() == sums
    assert torch.equal(clinic.critic(), critic)
    assert sorted(path for path in clinic.folder.rglob("*") if path.is_file()) == files
    assert "logits" in clinic.query(2)[1]
    with closing(AuditLog(clinic.folder / FILE)) as again:
        assert again.traffic_totals("one")["queries"] == 3


def test_outputs_only_refuses_parameters_and_data(tmp_path: Path) -> None:
    for method, query, rule in (
        ({"name": "fedavg", "rounds": 2}, "train", "outputs_only: parameters may not leave"),
        ({"name": "centralized"}, "upload_data", "private data"),
    ):
        plan = replace(PLAN, method=method, run=f"run-{query}")
        clinic = Clinic(tmp_path / query, plan=plan)
        about, _ = clinic.say("join", plan=plan.to_dict())
        assert about["refused_queries"][query].startswith(rule)
        assert about["max_queries"] is None
        refused = clinic.say("answer_query", query=query, number=0, differentiable=False)
        assert refused["kind"] == REFUSED
        assert refused["rule"].startswith(rule)


def name_of(value: Any) -> str:
    return str(value)[:40]


ASKED = {"query": "predict_logits", "number": 0, "differentiable": True}


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("plan", {"protocol": PROTOCOL + 1}, "protocol ="),
        ("plan", {"method": {"name": "os.system"}}, "method.name = 'os.system'"),
        ("plan", {"method": []}, "plan ="),
        ("plan", {"spec": {}}, "spec ="),
        ("plan", {"wire": {"inputs": "float1"}}, "wire.inputs = 'float1'"),
        ("plan", {"public": "../../data"}, "public = '../../data'"),
        ("plan", {"data": "/etc/passwd"}, "plan ="),
        *[
            ("plan", {"run": run}, "run = ")
            for run in ("../../x", "..", "", "a/b", ".a", "x" * 101, "a\nb", "a b")
        ],
        ("spec", {"task": "spying"}, "task"),
        ("spec", {"shape": [1, True, 8]}, "spec.shape[1] = True"),
        ("spec", {"shape": [1, -8, 8]}, "spec.shape = (1, -8, 8)"),
        ("spec", {"shape": [1, 10**4000, 8]}, "spec.shape = (1, 1000"),
        ("spec", {"vocabulary": False}, "spec.vocabulary = False"),
        ("spec", {"mean": [float("nan")]}, "spec.mean[0] = nan"),
        *[("spec", {"std": [std]}, "spec.std") for std in (10**400, float("inf"), 1e-38, 1e5)],
        ("spec", {"classes": "0123456789"}, "spec.classes = '0123456789'"),
        ("method", {"code": "x"}, "method.code"),
        ("method", {"critic": {"width": 10**4000}}, "method.critic.width = "),
        ("method", {"critic": {"width": True}}, "method.critic.width = "),
        ("method", {"batch": -(2**60)}, "method.batch = "),
        ("train_locally", {"seconds": float("nan")}, "invalid seconds = nan (expected a number"),
        (
            "answer_query",
            {"query": ["predict_logits"], "number": 0, "differentiable": True},
            "expected a text",
        ),
        ("compute_gradients", {"number": "0"}, "invalid number = '0' (expected an integer"),
        ("answer_query", {**ASKED, "sum": float("nan")}, "invalid sum = nan (expected a table"),
        (
            "answer_query",
            {**ASKED, "sum": {"number": 1, "members": ["a"], "more": 1}},
            "unknown key 'sum.more'",
        ),
        ("load_checkpoint", {"checkpoint": 10**4000}, "...' (expected an integer from 0 to 2147483647"),
        (
            "save_checkpoint",
            {"checkpoint": 0, "message": float("nan")},
            "invalid message = nan (expected an integer",
        ),
        (
            "save_checkpoint",
            {"checkpoint": 0, "message": 2**31},
            "expected an integer from 0 to 2147483647",
        ),
        ("join", {"plan": PLAN.to_dict(), "server": "s" * 101}, "up to 100 letters"),
    ],
    ids=name_of,
)
def test_invalid_values_give_one_line_error(
    tmp_path: Path, part: str, change: dict[str, Any], message: str
) -> None:
    clinic, plan = Clinic(tmp_path / "clinic"), PLAN.to_dict()
    files = sorted(tmp_path.rglob("*"))
    if part in ("plan", "spec", "method"):
        plan = plan | change if part == "plan" else {**plan, part: plan[part] | change}
        change, part = {"plan": plan}, "join"
    elif part != "join":
        clinic.say("join", plan=plan)
        files = sorted(tmp_path.rglob("*"))
    refused = clinic.say(part, **change)
    assert refused["kind"] in ("ArgumentError", "UnknownName")
    assert message in refused["text"]
    assert "\n" not in refused["text"]
    assert part != "join" or clinic.host.session is None
    assert [path for path in sorted(tmp_path.rglob("*")) if "audit" not in path.name] == [
        path for path in files if "audit" not in path.name
    ]


@pytest.mark.parametrize("garbage", [b"", b"\0" * 8, b"{}", bytes(range(256)), b"\xff" * 100])
def test_invalid_bytes_get_a_reply(clinic: Clinic, garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    reply, released = unpack(clinic.host.serve(garbage))
    assert reply["error"]["kind"] == "DataError"
    assert not released
    assert "not a message of fedstill" in caplog.text
    assert clinic.lines() == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
DOS = st.sampled_from(sorted(MESSAGES.keys() - {"leave"})) | VALUES
TENSORS = st.dictionaries(
    st.sampled_from(["x", "x:scale", "logits", "parameters", "inputs", "x:scale:scale"]),
    st.lists(st.integers(0, 3), max_size=4).map(torch.ones),
    max_size=3,
)


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Clinic:
    return Clinic(tmp_path_factory.mktemp("standing") / "clinic").ready()


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(
    do=DOS,
    header=st.fixed_dictionaries(
        {},
        optional={
            "query": st.sampled_from(["predict_logits", "gradient"]) | VALUES,
            "number": VALUES,
            "differentiable": VALUES,
            "seconds": VALUES,
            "plan": VALUES,
            "checkpoint": VALUES.filter(lambda number: not isinstance(number, int | float)),
            **dict.fromkeys(("sum", "survivors", "words", "server", "message"), VALUES),
        },
    ),
    tensors=TENSORS,
)
def test_any_input_gets_a_reply_without_release(
    standing: Clinic, do: Any, header: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    reply, released = unpack(standing.host.serve(pack({"run": "one", **header, "operation": do}, tensors)))
    assert set(reply) in ({"error"}, {"body", "seconds"})
    assert not released
    assert standing.session.audit.traffic_totals()["up"] == 0


@pytest.mark.parametrize("kind", [RuntimeError, UnidentifiedImageError, OSError])
def test_library_errors_stay_in_owners_log(
    kind: type[Exception], clinic: Clinic, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Some libraries raise OSError with a text that may be private."""

    def fails(*given: Any) -> Any:
        raise kind("patient 4711 is not square")

    monkeypatch.setattr(clinic.session.handler, "admit_query", fails)
    reply = clinic.query(0)
    assert reply == {
        "kind": "NodeDataError",
        "text": "its data or model failed: see its log",
        "query": "predict_logits",
    }
    assert "patient 4711" in caplog.text


class Patient4711(OSError):
    """An owner's exception type; its name and its attributes, named like a refusal's, may be private."""

    rule, number = "patient 4711", object()


@pytest.mark.parametrize("error", [Patient4711(), Patient4711(errno.ENOENT, "no file")])
def test_attributes_and_types_of_owners_errors_are_not_sent(
    error: Exception, clinic: Clinic, monkeypatch: Any
) -> None:
    def fails(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(clinic.session.handler, "admit_query", fails)
    reply = clinic.query(0)
    assert reply.keys() == {"kind", "text", "query"}
    assert "4711" not in json.dumps(reply)


# --- a full disk --------------------------------------------------------------------------------------


def test_full_disk_blocks_releases_without_lasting_effect(
    clinic: Clinic, tmp_path: Path, monkeypatch: Any
) -> None:
    other = Clinic(tmp_path / "other").ready()
    for each in (clinic, other):
        each.query(0)

    def full(*given: Any) -> None:
        raise AuditError("audit.sqlite", "cannot be used: database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(AuditLog, "_insert_entry", full)
        for _ in range(2):
            reply = clinic.query(1)
            assert reply["text"] == "its data or model failed: see its log"
        # a refusal holds even if it cannot be logged
        assert "policy" not in clinic.query(2, torch.zeros(1))["text"]
    assert clinic.charged_releases() == [(0, "response")]
    assert clinic.session.audit.spending(NODE_DATA, ALL_RUNS).total_bytes == 4 * B * (CLASSES + 4)
    same(clinic.query(1)[1], other.query(1)[1])
    same(clinic.pull(1)[1], other.pull(1)[1])
    assert torch.equal(clinic.critic(), other.critic())
    assert clinic.charged_releases() == other.charged_releases()


def test_unwritable_checkpoint_keeps_old_one(clinic: Clinic, monkeypatch: Any) -> None:
    clinic.query(0)
    clinic.say("save_checkpoint", checkpoint=1)
    clinic.query(1)

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fedstill.core.checkpoint.os.fsync", full)
        assert "No space" in clinic.say("save_checkpoint", checkpoint=2)["text"]
    assert [path.name for path in (clinic.folder / "runs/one").glob("checkpoint-*")] == [
        "checkpoint-1.safetensors"
    ]
    assert clinic.say("save_checkpoint", checkpoint=2) == ({}, {})


# --- public data --------------------------------------------------------------------------------------


def test_public_data_are_sent_once_and_match_plan(tmp_path: Path) -> None:
    from fedstill.data.public import PublicData
    from fedstill.protocol.run_plan import public_fingerprint, public_tensors

    public = PublicData("shared", image(5), torch.tensor([1, 2, 3, 4]), "a note")
    method = {"name": "fedmd", "rounds": 2}
    plan = replace(PLAN, method=method, public=public_fingerprint(public), public_note=("shared", "a note"))
    clinic = Clinic(tmp_path / "clinic", plan=plan)
    reply, _ = clinic.say("join", plan=plan.to_dict())
    assert parse_reply(NodeStatus, reply) == replace(
        NOT_JOINED, needs_public_data=True
    )  # no further information before approval
    other = replace(public, inputs=image(6))
    assert "not those of the plan" in clinic.say("join", public_tensors(other), plan=plan.to_dict())["text"]
    assert clinic.host.session is None
    assert "refused_queries" in clinic.say("join", public_tensors(public), plan=plan.to_dict())[0]
    clinic.again()
    assert "refused_queries" in clinic.say("join", plan=plan.to_dict())[0]


def test_folder_without_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedstillError, match=r"no node\.toml"):
        NodeService(tmp_path)


def test_failed_training_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training that is not counted would be repeated and reported again."""
    clinic = Clinic(tmp_path / "clinic")
    clinic.say("join", plan=clinic.plan.to_dict())

    def fails(*given: Any, **options: Any) -> int:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(initial_training, "train", fails)
        assert clinic.say("train_locally", seconds=1)["rule"].startswith("max_memory")
    refused = clinic.say("train_locally", seconds=1)
    assert refused["kind"] == "NodeFault"
    assert "failed half-way" in refused["text"]
