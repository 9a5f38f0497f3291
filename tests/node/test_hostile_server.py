"""Servers that try to get more than a node's owner allows: each test is one attack."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstill.data import node_data
from fedstill.data.public import PublicData
from fedstill.models.module_utils import to_vector
from fedstill.node import node_service as node_service
from fedstill.node import owner_folder, refusals
from fedstill.node.audit_entries import ALL_RUNS, NODE_DATA
from fedstill.node.secure_aggregation import SumEncoder
from fedstill.protocol.digests import digest, keyed_digest
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.payload_kinds import LABEL_COUNTS, SCHEDULE
from fedstill.protocol.run_plan import PLAN_FILE, RunPlan, public_fingerprint, public_tensors
from fedstill.protocol.wire_format import unpack
from fedstill.tasks import TASKS
from tests.support import node_services
from tests.support.audit_logs import security_events
from tests.support.node_services import FEDIOD, NODE, PLAN, SHAPE, SPEC, B, Clinic, same
from tests.support.small_world import SETTING


def test_reordered_queries_are_charged_and_logged(tmp_path: Path) -> None:
    """A critic that was trained in query 1 responds differently to query 2."""
    clinic = Clinic(tmp_path / "clinic", "max_queries = 4").ready()
    first = [clinic.query(number)[1] for number in (0, 1, 2)]
    lines = len(clinic.charged_releases())
    clinic.say("load_checkpoint", checkpoint=0)
    _, skipped = clinic.query(2)
    assert not torch.equal(skipped["critic"], first[2]["critic"])
    assert clinic.session.audit.spending(NODE_DATA, ALL_RUNS).total_queries == 4
    assert len(clinic.charged_releases()) == lines + 1
    assert clinic.lines()[-1].get("history_hash", "") != clinic.lines()[2]["history_hash"]
    # A fifth query exceeds the limit; in the old order, queries get the old responses for free.
    clinic.say("load_checkpoint", checkpoint=0)
    assert "max_queries: 4" in clinic.query(1)["text"]
    clinic.say("load_checkpoint", checkpoint=0)
    for number in (0, 1, 2):
        same(clinic.query(number)[1], first[number])
    assert clinic.session.audit.spending(NODE_DATA, ALL_RUNS).total_queries == 4


def test_limits_hold_over_all_runs(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", "max_queries = 3").ready()
    clinic.query(0)
    clinic.query(1)
    clinic.say("leave")
    other = Clinic(tmp_path / "clinic", "max_queries = 3", dataclasses.replace(PLAN, run="two"))
    reply, _ = other.say("join", plan=other.plan.to_dict())
    assert reply["max_queries"] == 1  # the remaining queries
    other.say("train_locally", seconds=60)
    other.query(0)
    assert "max_queries: 3" in other.query(1)["text"]
    other.say("leave")
    third = Clinic(tmp_path / "clinic", "max_queries = 3", dataclasses.replace(PLAN, run="three"))
    reply, _ = third.say("join", plan=third.plan.to_dict())
    assert reply["refused_queries"] == dict.fromkeys(
        ("count_labels", "predict_logits"), "max_queries: 3, over all runs"
    )
    assert reply["max_queries"] == 0  # not None, which would be no limit


def test_status_counts_queries_of_other_runs_only(tmp_path: Path) -> None:
    """The limit of a run, new or resumed, is reduced by the queries of other runs."""
    Clinic(tmp_path / "clinic", "max_queries = 4").ready().query(0)
    other = Clinic(tmp_path / "clinic", "max_queries = 4", dataclasses.replace(PLAN, run="two")).ready()
    for number in range(3):
        other.query(number)
    other.again()
    reply, _ = other.say("join", plan=other.plan.to_dict())
    assert reply["max_queries"] == 3  # 4 minus the query of run "one"; all three are used
    assert reply["refused_queries"] == {}  # their responses can be requested again


def test_max_bytes_holds_over_all_runs(tmp_path: Path) -> None:
    one = 4 * 10 * 4 + 4 * 4 * 4  # logits and critic values of a response
    policy = f"max_bytes = {one + 1}"
    Clinic(tmp_path / "clinic", policy).ready().query(0)
    other = Clinic(tmp_path / "clinic", policy, dataclasses.replace(PLAN, run="two")).ready()
    assert "max_bytes" in other.query(0)["text"]


def test_run_keeps_its_method_and_data(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic").ready()
    clinic.query(0)
    clinic.say("leave")
    other = dataclasses.replace(PLAN, method={**FEDIOD, "batch": 5})
    message = clinic.say("join", plan=other.to_dict())["text"]
    assert "run 'one' exists here, but it was begun with another setup" in message
    saved = json.loads((clinic.folder / "runs/one" / PLAN_FILE).read_text())
    assert saved["plan"]["method"]["batch"] == 4
    data = node_data.load_node_data(clinic.host.file.data, clinic.folder, PLAN.spec)[0]
    plain = digest("data", {"inputs": data.inputs, "targets": data.targets})
    assert saved["data"] == keyed_digest(owner_folder.read_secret(clinic.folder), plain), (
        "the digest is keyed with the secret of the node"
    )


def test_run_without_releases_may_change(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic", "queries = ['predict']").ready()
    assert "queries: predict" in clinic.query(0)["text"]
    clinic.say("save_checkpoint", checkpoint=1)
    clinic.say("leave")
    other = dataclasses.replace(PLAN, method={**FEDIOD, "batch": 5})
    reply, _ = clinic.say("join", plan=other.to_dict())
    # Training for the first plan does not apply to the second one.
    assert (reply["is_trained"], reply["checkpoints"]) == (False, [])
    clinic.say("leave")
    clinic.say("join", plan=other.to_dict())
    assert json.loads((clinic.folder / "runs/one" / PLAN_FILE).read_text())["plan"]["method"]["batch"] == 5


def test_running_session_keeps_its_setup(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic").ready()  # nothing is released yet
    for change in ({"method": {**FEDIOD, "batch": 5}}, {"run": "two"}):
        other = Clinic(tmp_path / "clinic", plan=dataclasses.replace(PLAN, **change))
        assert "another run is active here" in other.say("join", plan=other.plan.to_dict())["text"]
    assert json.loads((clinic.folder / "runs/one" / PLAN_FILE).read_text())["plan"]["method"]["batch"] == 4
    clinic.say("leave")
    other.ready()


@pytest.mark.parametrize(
    ("change", "secret"),
    [
        (('path = "data.npz"', 'path = "patients.npz"'), "patients.npz"),
        (('name = "mlp:8"', 'name = "mine_of_hostile:make"'), "pa55"),
    ],
)
def test_internal_errors_stay_in_owners_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: tuple[str, str], secret: str
) -> None:
    clinic = Clinic(tmp_path / "clinic")
    (clinic.folder / "mine_of_hostile.py").write_text(
        "def make(shape, classes):\n    raise RuntimeError('no database at postgres://admin:pa55@10.0.0.3')\n"
    )
    path = clinic.folder / "node.toml"
    path.write_text(path.read_text().replace(*change))
    clinic.again()
    with caplog.at_level(logging.WARNING, "fedstill.node"):
        reply = clinic.say("join", plan=PLAN.to_dict())
    assert secret not in json.dumps(reply)
    assert reply["text"] == "its data or model failed: see its log"
    assert secret in caplog.text


def test_plugin_errors_stay_in_owners_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error's first line may quote anything; a missing module's names the searched folders."""
    name = "broken_of_hostile:Method"
    leaky = "leaky_of_hostile:THING"
    clinic = Clinic(
        tmp_path / "clinic", f"plugins = ['{name}', '{leaky}', 'missing_of_hostile:Method', 'gone']"
    )
    code = "from functools import partial\nTHING = partial(print, 'admin:pa66')\n"
    (clinic.folder / "leaky_of_hostile.py").write_text(code)
    code = "raise OSError('admin:pa55@host')\n"
    (clinic.folder / "broken_of_hostile.py").write_text(code)
    with caplog.at_level(logging.WARNING, "fedstill.node"):
        missing = ("missing_of_hostile:Method", str(clinic.folder))
        for each, secret in ((name, "pa55"), (leaky, "pa66"), missing):
            reply = clinic.say("join", plan={**PLAN.to_dict(), "method": {"name": each}})
            assert reply["kind"] == "NodeDataError"
            assert secret not in json.dumps(reply)
            assert secret in caplog.text
    reply = clinic.say("join", plan={**PLAN.to_dict(), "method": {"name": "gone"}})
    assert reply["text"].startswith(
        "invalid method.name = 'gone' (expected a name that is installed at the node"
    )


@pytest.mark.parametrize("name", ["antigravity:geohash", "os:system", "ordinal", 3, None, ["text"]])
def test_disallowed_task_is_refused_without_import(tmp_path: Path, name: Any) -> None:
    clinic = Clinic(tmp_path / "clinic", "plugins = ['json:JSONDecoder']")
    plan = PLAN.to_dict()
    plan["spec"]["task"]["name"] = name
    reply = clinic.say("join", plan=plan)
    allowed = "a name that policy.plugins of the node allows, or one of classification, text,"
    assert f"task.name = {name!r} (expected {allowed}" in reply["text"]
    assert "antigravity" not in sys.modules
    assert clinic.host.session is None


def test_unknown_task_option_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suggestions for a misspelled task only come from the package's own tasks."""
    point = EntryPoint("strange", "antigravity:geohash", TASKS.group)
    monkeypatch.setattr("fedstill.core.registry._installed", lambda group: {"strange": point})
    plan = PLAN.to_dict()
    plan["spec"]["task"]["strangeness"] = 1
    reply = Clinic(tmp_path / "clinic").say("join", plan=plan)
    assert "unknown key 'spec.task.strangeness'" in reply["text"]
    assert "antigravity" not in sys.modules


PUBLIC = PublicData("ours", torch.zeros(6, *SHAPE), None, "")


@pytest.mark.parametrize(
    ("public", "message"),
    [
        (PublicData("ours", torch.full((6, *SHAPE), float("nan"))), "NaN or infinity"),
        (PublicData("ours", torch.zeros(6, 3, 5, 5)), "expected (N, 1, 8, 8)"),
        (PublicData("ours", torch.zeros(65, *SHAPE)), "have 65 inputs (expected 64"),
        (
            PublicData("ours", torch.zeros(6, *SHAPE), torch.full((6,), 10)),
            "label 10 of example 0 is outside 0..9",
        ),
    ],
)
def test_malformed_public_data_are_refused(tmp_path: Path, public: PublicData, message: str) -> None:
    plan = RunPlan(
        "one", {"name": "fedmd", "rounds": 2, "subset": 4}, SPEC, public=public_fingerprint(public)
    )
    clinic = Clinic(tmp_path / "clinic", "max_rows = 64", plan)
    assert message in clinic.say("join", public_tensors(public), plan=plan.to_dict())["text"]
    assert not (clinic.folder / "public").exists()


def test_row_indices_have_row_limits(tmp_path: Path) -> None:
    plan = RunPlan(
        "one", {"name": "fedmd", "rounds": 2, "subset": 4}, SPEC, public=public_fingerprint(PUBLIC)
    )
    clinic = Clinic(tmp_path / "clinic", "max_rows = 64", plan)
    clinic.say("join", public_tensors(PUBLIC), plan=plan.to_dict())
    clinic.say("train_locally", seconds=60)
    rows = {"rows": torch.zeros(50_000, dtype=torch.uint8)}
    given = {"query": "communicate", "number": 0, "differentiable": False}
    assert "max_rows: 64, and rows names 50000" in clinic.say("answer_query", rows, **given)["text"]
    assert clinic.charged_releases() == []


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        (torch.zeros(4, dtype=torch.float32), "tensors: the server sent rows: torch.float32 (4,)"),
        (torch.zeros(4, dtype=torch.bool), "tensors: the server sent rows: torch.bool (4,)"),
        (torch.zeros(4, dtype=torch.uint16), "tensors: the server sent rows: torch.uint16 (4,)"),
        (torch.zeros((), dtype=torch.int64), "tensors: the server sent rows: torch.int64 ()"),
        (torch.zeros(2, 2, dtype=torch.int64), "tensors: the server sent rows: torch.int64 (2, 2)"),
        (torch.tensor([0, 1, 2, -1]), "rows: the server sent rows with rows outside the 6"),
        (torch.tensor([0, 1, 2, 6]), "rows: the server sent rows with rows outside the 6"),
        (torch.tensor([6, 5]), "rows: the server sent rows with rows outside the 6"),
    ],
)
def test_row_indices_out_of_range_are_refused(rows: torch.Tensor, rule: str, tmp_path: Path) -> None:
    plan = RunPlan(
        "one", {"name": "fedmd", "rounds": 2, "subset": 4}, SPEC, public=public_fingerprint(PUBLIC)
    )
    clinic = Clinic(tmp_path / "clinic", plan=plan)
    clinic.say("join", public_tensors(PUBLIC), plan=plan.to_dict())
    clinic.say("train_locally", seconds=60)
    given = {"query": "communicate", "number": 0, "differentiable": False}
    reply = clinic.say("answer_query", {"rows": rows}, **given)
    assert reply["kind"] == "QueryRefused"
    assert reply["rule"].startswith(rule)
    assert clinic.charged_releases() == []
    assert isinstance(clinic.say("answer_query", {"rows": torch.tensor([0, 5, 5, 1])}, **given), tuple)


@pytest.mark.parametrize("bad", ["bool", "int64", "float64", "scalar", "table"])
def test_malformed_parameters_are_refused(bad: str, tmp_path: Path) -> None:
    plan = RunPlan("one", {"name": "fedavg", "rounds": 2}, SPEC)
    clinic = Clinic(tmp_path / "clinic", "outputs_only = false\n", plan)
    clinic.say("join", plan=plan.to_dict())
    clinic.say("train_locally", seconds=60)
    own = to_vector(clinic.session.node.model)
    sent = {
        "scalar": torch.zeros(()),
        "table": own.unsqueeze(0),
        "float64": own.double(),
        "int64": own.long(),
        "bool": own.bool(),
    }
    given = {"query": "train", "number": 0, "differentiable": False}
    reply = clinic.say("answer_query", {"parameters": sent[bad], "round": torch.tensor(0)}, **given)
    assert reply["kind"] == "QueryRefused"
    assert reply["rule"].startswith("tensors: the server sent ")
    assert torch.equal(to_vector(clinic.session.node.model), own)


def test_public_cache_keeps_last_data_only(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic")
    for run, value in (("one", 0.0), ("two", 0.5)):
        public = PublicData("ours", torch.full((6, *SHAPE), value))
        plan = RunPlan(
            run, {"name": "fedmd", "rounds": 2, "subset": 4}, SPEC, public=public_fingerprint(public)
        )
        clinic.say("join", public_tensors(public), plan=plan.to_dict())
    assert len(list((clinic.folder / "public").iterdir())) == 1


def test_tensors_of_a_plan_without_public_data_are_not_stored(tmp_path: Path) -> None:
    """They were not validated, and would replace another run's public data."""
    clinic = Clinic(tmp_path / "clinic")
    cached = clinic.folder / "public" / f"{'0' * 32}.safetensors"
    cached.parent.mkdir()
    cached.write_bytes(b"of another run")
    clinic.say("join", {"inputs": torch.zeros(1000)}, plan=PLAN.to_dict())
    assert list(cached.parent.iterdir()) == [cached]


def test_late_message_changes_no_state(tmp_path: Path) -> None:
    """A link that resends messages may deliver the first copy late."""
    clinic = Clinic(tmp_path / "clinic")
    clinic.say("join", plan=PLAN.to_dict(), server="s", message=0)
    clinic.say("train_locally", seconds=60)
    clinic.query(0)
    clinic.say("save_checkpoint", checkpoint=1, server="s", message=5)
    saved = (clinic.folder / "runs/one/checkpoint-1.safetensors").read_bytes()
    clinic.query(1)
    critic = clinic.critic()
    clinic.say("save_checkpoint", checkpoint=1, server="s", message=5)  # the same message again
    assert (clinic.folder / "runs/one/checkpoint-1.safetensors").read_bytes() == saved
    clinic.say("load_checkpoint", checkpoint=0, server="s", message=3)  # an older message
    assert torch.equal(clinic.critic(), critic)
    # Another server process has taken over; messages of the previous one are ignored.
    clinic.say("join", plan=PLAN.to_dict(), server="t", message=0)
    clinic.say("load_checkpoint", checkpoint=0, server="s", message=99)
    assert torch.equal(clinic.critic(), critic)
    again = clinic.say("join", plan=PLAN.to_dict(), server="s", message=100)
    assert "the current server process" in again["text"]
    clinic.say("load_checkpoint", checkpoint=1, server="t", message=1)
    assert not torch.equal(clinic.critic(), critic)


def test_checkpoint_is_saved_at_current_query_only(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic")
    clinic.say("join", plan=PLAN.to_dict())
    assert "it is not before query 0" in clinic.say("save_checkpoint", checkpoint=0)["text"]  # still training
    clinic.say("train_locally", seconds=60)
    clinic.query(3)
    assert "it is not before query 2" in clinic.say("save_checkpoint", checkpoint=2)["text"]


def test_server_cannot_forge_log_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clinic = Clinic(tmp_path / "clinic").ready()
    name = "x\n2026-11-22 06:05:11 INFO node: number 3, predict: 0 bytes left" + "y" * 900_000
    with caplog.at_level(logging.WARNING, "fedstill.node"):
        clinic.query(0, query=name)
    (line,) = caplog.messages
    assert "\n" not in line
    assert len(line) < 2000
    assert len(clinic.lines()[-1]["query"]) <= 300


def test_refusals_have_bounded_length(tmp_path: Path) -> None:
    """The server chooses names of tensors, which the reply and the log quote."""
    clinic = Clinic(tmp_path / "clinic").ready()
    reply = clinic.say(
        "answer_query",
        {"x" * 10**5: torch.zeros(B, *SHAPE)},
        query="predict_logits",
        number=0,
        differentiable=True,
    )
    assert reply["rule"].startswith("tensors: ")
    assert len(reply["rule"]) == 300
    assert security_events(clinic.folder)[-1]["reason"] == reply["rule"]


def test_late_join_of_former_server_changes_nothing(tmp_path: Path) -> None:
    """Also if it is for another run: the current one continues."""
    clinic = Clinic(tmp_path / "clinic")
    for server in ("first", "second"):
        assert "is_trained" in clinic.say("join", plan=PLAN.to_dict(), server=server)[0]
    session = clinic.session
    late = clinic.say("join", plan=dataclasses.replace(PLAN, run="two").to_dict(), server="first")
    assert "the current server process" in late["text"]
    assert clinic.session is session
    assert not (clinic.folder / "runs" / "two").exists()
    assert clinic.say("train_locally", seconds=60, server="second")[0]["is_trained"]


def test_too_large_message_is_logged_as_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clinic = Clinic(tmp_path / "clinic", "max_message = 20000\n").ready()
    before = clinic.lines()
    with caplog.at_level(logging.WARNING, "fedstill.node"):
        reply = clinic.query(0, torch.ones(400, *SHAPE))
    assert reply["query"] == "message"
    (line,) = caplog.messages
    assert line.startswith("refused message: ")
    assert clinic.lines() == before, "the query of the message is unknown"


def test_too_large_message_is_refused_before_lock(tmp_path: Path) -> None:
    """Otherwise, many concurrent messages would all be in memory."""
    clinic = Clinic(tmp_path / "clinic", "max_message = 20000\n").ready()
    with clinic.host._lock, ThreadPoolExecutor(1) as pool:
        reply = pool.submit(clinic.query, 0, torch.ones(400, *SHAPE)).result(timeout=60)
    assert "max_message: 20000" in reply["rule"]


@pytest.mark.parametrize("message", [None, 5, "text", {}])
def test_non_bytes_message_is_refused(tmp_path: Path, message: Any) -> None:
    reply, released = unpack(Clinic(tmp_path / "clinic").host.serve(message))
    assert set(reply) == {"error"}
    assert not released


def test_server_cannot_fill_a_nodes_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clinic = Clinic(tmp_path / "clinic").ready()
    wrong = torch.zeros(1)
    for _ in range(3):
        assert "kind" in clinic.query(7, wrong)
    refused = [line for line in clinic.lines() if line["part"] == "refused"]
    assert [line["number"] for line in refused] == [7], "equal refusals have one line"
    monkeypatch.setattr("fedstill.node.folder_log.MAX_REFUSALS", 3)
    for number in range(20):
        assert "kind" in clinic.query(number, wrong)
    numbers = [line["number"] for line in clinic.lines() if line["part"] == "refused"]
    assert numbers == [7, 0, 1, -1], "the last line counts ten refusals"
    monkeypatch.setattr(node_service, "MAX_JOINS", 4)
    plans = [dataclasses.replace(PLAN, run=run) for run in ("two", "one", "two", "three", "four")]
    replies = [
        clinic.say("join", plan=plan.to_dict(), server=f"s{index}") for index, plan in enumerate(plans)
    ]
    assert [isinstance(reply, tuple) for reply in replies] == [True, True, True, False, False]
    assert replies[-1]["rule"] == "a process joins 4 runs at most"
    assert [line["event"] for line in security_events(clinic.folder)].count("joined") == 4


def test_refusal_is_replied_if_log_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clinic = Clinic(tmp_path / "clinic", "max_rows = 1\n").ready()

    def unreachable(*given: Any) -> int:
        raise PermissionError(13, "Permission denied", str(clinic.folder))

    monkeypatch.setattr("fedstill.node.folder_log.log_size_bytes", unreachable)
    monkeypatch.setattr("fedstill.node.audit_log.AuditLog.was_replaced", unreachable)
    assert "max_rows" in clinic.query(0)["rule"]
    reply = clinic.say("join", plan="none")
    assert reply["kind"] == "ArgumentError"
    assert str(tmp_path) not in str(reply)


def test_server_cannot_fill_process_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(refusals, "MAX_REFUSALS", 3)
    host = Clinic(tmp_path / "clinic").host

    def lines(messages: int) -> list[str]:
        caplog.clear()
        for _ in range(messages):
            host.serve(b"no message")
        return [record.getMessage() for record in caplog.records]

    first = lines(10)
    assert [line.startswith("refused message: ") for line in first] == [True, True, True, False]
    assert first[-1] == "further refusals in this hour are not logged here"
    assert lines(10) == []
    monkeypatch.setattr(refusals, "SECONDS_PER_HOUR", 0.0)  # simulates the next hour
    assert len(lines(1)) == 1


def test_other_servers_queries_are_not_logged_under_current_run(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path / "clinic").ready()
    assert "a run that this node has joined" in clinic.query(5, run="stranger")["text"]
    assert clinic.lines() == []


# --- information in refusals and failures ----------------------------------------------------------------


def test_refused_response_gives_no_gradient(tmp_path: Path) -> None:
    """Responses of 400 classes exceed the limit; gradients of 8 x 8 images alone would not."""
    spec = dataclasses.replace(SPEC, classes=tuple(map(str, range(400))))
    policy = "max_queries = 1\nmax_bytes = 6000\n"
    clinic = Clinic(tmp_path / "clinic", policy, dataclasses.replace(PLAN, spec=spec)).ready()
    assert "max_bytes" in clinic.query(0)["rule"]
    assert clinic.say("compute_gradients", {"logits": torch.eye(4, 400)}, number=0)["kind"] == "QueryMismatch"
    assert clinic.charged_releases() == []


def test_failing_model_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query may make the model fail depending on what it learned from private data."""
    public = PublicData("p", torch.zeros(4, *SHAPE))
    method = {"name": "fedkd", "weights": "equal", "levels": 200, "z_max": 20.0}
    plan = RunPlan("one", method, SPEC, public=public_fingerprint(public), public_note=("p", ""))
    privacy = "[privacy]\nmechanism = 'dp-sgd'\nepsilon = 1.0\naccountant = 'rdp'\n"
    clinic = Clinic(tmp_path / "clinic", privacy, plan)
    clinic.say("join", public_tensors(public), plan=plan.to_dict())
    clinic.say("train_locally", seconds=60)
    assert not clinic.session.audit.spending(NODE_DATA, ALL_RUNS).total_events

    def fails(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a weight is 3.5")

    monkeypatch.setattr(clinic.session.node.model, "forward", fails)
    rows = {"rows": torch.tensor([0, 2]), "view": torch.tensor(0)}
    reply = clinic.say("answer_query", rows, query="predict", number=0, differentiable=False)
    assert reply["text"] == "its data or model failed: see its log"
    assert clinic.session.audit.spending(NODE_DATA, ALL_RUNS).total_events


def test_nan_response_is_counted(tmp_path: Path) -> None:
    """Extreme public images can cause NaN; a refusal would be a release that is not counted."""
    public = PublicData("p", torch.zeros(4, *SHAPE))
    method = {"name": "fedkd", "weights": "equal", "levels": 200, "z_max": 20.0}
    plan = RunPlan("one", method, SPEC, public=public_fingerprint(public), public_note=("p", ""))
    most = 3 * len(SPEC.classes)
    clinic = Clinic(tmp_path / "clinic", f"max_bytes = {most}\n", plan)
    clinic.say("join", public_tensors(public), plan=plan.to_dict())
    clinic.say("train_locally", seconds=60)
    for parameter in clinic.session.node.model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    call = {"query": "predict", "differentiable": False}
    one, more = ({"rows": torch.tensor([0, rows]), "view": torch.tensor(0)} for rows in (1, 4))
    _, released = clinic.say("answer_query", one, number=0, **call)
    assert (released["logits"] == -128).all()
    assert clinic.session.audit.spending(NODE_DATA, ALL_RUNS).total_bytes == released["logits"].numel()
    assert clinic.say("answer_query", more, number=1, **call)["rule"] == f"max_bytes: {most} bytes", (
        "NaN responses count as bytes"
    )


ESTIMATOR = """
import numpy as np
from pathlib import Path
from sklearn.svm import LinearSVC
def make(shape, classes):
    data = np.load(Path(__file__).parent / "data.npz")
    return LinearSVC(max_iter=20).fit(data["images"].reshape(40, -1), data["labels"])
"""


@pytest.mark.filterwarnings("ignore")  # its fit does not converge, and it overflows
def test_overflowing_predictor_gives_noise_and_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scale of an input at which the model overflows would reveal its weights, one refusal at a time."""
    own = 'name = "own:make"\noutput_format = "logits"\ntrain = false'
    monkeypatch.setattr(node_services, "NODE", NODE.replace('name = "mlp:8"', own))
    (tmp_path / "clinic").mkdir()
    (tmp_path / "clinic" / "own.py").write_text(ESTIMATOR)
    method = {"name": "fedzge", "weights": "equal", "ensemble": "logits", "steps": 3, "batch": 1}
    plan = RunPlan("one", {**method, "directions": 1}, SPEC)
    outputs = "[privacy.outputs]\ndistribution = 'gaussian'\nbound = 10.0\n"
    privacy = f"[privacy]\nmechanism = 'noisy-outputs'\nepsilon = 1.0\n{outputs}"
    clinic = Clinic(tmp_path / "clinic", privacy, plan)
    clinic.say("join", plan=plan.to_dict())
    huge = torch.full((1, *SHAPE), torch.finfo(torch.float32).max)
    huge[..., ::2] *= -1
    _, released = clinic.say(
        "answer_query", {"x": huge}, query="predict_logits", number=0, differentiable=False
    )
    assert released["logits"].isfinite().all()
    assert clinic.session.audit.spending(NODE_DATA, ALL_RUNS).total_events


def test_reason_for_too_large_run_is_not_sent(tmp_path: Path) -> None:
    """Naming the part that is too large, own data or public inputs, would reveal the number of records."""
    spec = dataclasses.replace(SPEC, classes=tuple(map(str, range(100))))
    clinic = Clinic(tmp_path / "clinic", f"max_memory = {50_000_000}\n")
    records = np.zeros((20_000, *SHAPE), dtype=np.float32)
    np.savez(clinic.folder / "data.npz", images=records, labels=np.arange(20_000) % 10)
    outcomes = []
    for run, count in (("one", 20_000), ("two", 40_000), ("three", 60_000)):
        public = PublicData("p", torch.zeros(count, *SHAPE))
        method = {"name": "fedkd", "weights": "equal", "levels": 0}
        plan = RunPlan(run, method, spec, public=public_fingerprint(public), public_note=("p", ""))
        clinic.plan = plan
        reply = clinic.say("join", public_tensors(public), plan=plan.to_dict())
        outcomes.append(reply["rule"] if isinstance(reply, dict) else "joined")
        if clinic.host.session is not None:
            clinic.say("leave")
    assert outcomes == ["joined", *["max_memory: the run would take more than the node's owner allows"] * 2]


def test_frozen_model_is_not_trained() -> None:
    """Its training is not charged, so it must not happen."""
    side = NodeSide({}, SETTING, trains_models=False)
    assert side.initial_training is None
    assert NodeSide({}, SETTING).initial_training is not None


@pytest.mark.parametrize(
    ("privacy", "least"),
    [
        ("", 0.0),
        ("[privacy]\nepsilon = 9.0\n", 0.0),
        ("[privacy]\nmechanism = 'dp-sgd'\nepsilon = 9.0\naccountant = 'rdp'\n", 1.0),
    ],
)
def test_only_noisy_counts_have_minimum_weight(tmp_path: Path, privacy: str, least: float) -> None:
    """Exact counts are equal on every engine."""
    method = {"name": "fedavg", "rounds": 2}
    policy = "outputs_only = false\n" + privacy
    clinic = Clinic(tmp_path / "clinic", policy, dataclasses.replace(PLAN, method=method))
    clinic.say("join", plan=clinic.plan.to_dict())
    encoder, query = SumEncoder(clinic.session.node.gate), clinic.session.side.queries["count_samples"]
    encoder.record(dataclasses.replace(query, sums={"sizes": "sum"}), {"sizes": torch.zeros(())})
    assert encoder.counts["size"].item() == least


# --- invalid tensors -------------------------------------------------------------------------------------


def table_of(classes: int, width: int) -> torch.Tensor:
    return torch.zeros(classes, width)


FORMS: list[tuple[dict[str, Any], str, str, torch.Tensor]] = [
    ({"name": "fd", "rounds": 2}, "train_locally", "F_sum", table_of(10, 10)),
    ({"name": "fedproto", "rounds": 2}, "train_locally", "C", table_of(10, 8)),
    (
        {"name": "fedkd", "levels": 0, "z_max": 4.0, "student": {"epochs": 2}},
        "predict",
        "rows",
        torch.tensor([0, 4]),
    ),
    ({"name": "fedad"}, "predict", "rows", torch.tensor([0, 4])),
]


@pytest.mark.parametrize(("method", "query", "name", "sound"), FORMS, ids=[each[0]["name"] for each in FORMS])
def test_tensors_of_another_shape_are_refused_by_name(
    method: dict[str, Any], query: str, name: str, sound: torch.Tensor, tmp_path: Path
) -> None:
    public = PUBLIC if name == "rows" else None
    plan = RunPlan("one", method, SPEC, public=public_fingerprint(public) if public else "")
    clinic = Clinic(tmp_path / "clinic", "outputs_only = false\n", plan)
    node = clinic.folder / "node.toml"
    node.write_text(
        node.read_text().replace("mlp:8", "small-cnn:4") if method["name"] == "fedad" else node.read_text()
    )
    clinic.again()
    clinic.say("join", public_tensors(public) if public else None, plan=plan.to_dict())
    clinic.say("train_locally", seconds=60)
    schedule = {
        key: torch.tensor(0)
        for key, kind in clinic.session.side.queries[query].sends.items()
        if kind == SCHEDULE
    }
    given = {"query": query, "differentiable": False}
    malformed = [
        sound.unsqueeze(0),
        sound.reshape(-1)[:1],
        torch.zeros((), dtype=sound.dtype),
        sound.reshape(-1)[:0],
        sound.bool(),
        sound.to(torch.complex64),
        torch.cat([sound, sound]),
    ]
    for number, tensor in enumerate(malformed):
        reply = clinic.say("answer_query", {name: tensor.contiguous(), **schedule}, number=number, **given)
        assert reply["kind"] in ("ArgumentError", "QueryRefused"), (tuple(tensor.shape), tensor.dtype, reply)
    assert clinic.charged_releases() == []
    assert isinstance(clinic.say("answer_query", {name: sound, **schedule}, number=50, **given), tuple)


@pytest.mark.parametrize(
    ("name", "tensor", "rule"),
    [
        ("consensus", torch.zeros(3, 10), "tensors: the server sent consensus: torch.float32 (3, 10)"),
        ("consensus", torch.zeros(4, 9), "tensors: the server sent consensus: torch.float32 (4, 9)"),
        (
            "consensus",
            torch.zeros(4, 10, dtype=torch.int64),
            "tensors: the server sent consensus: torch.int64 (4, 10)",
        ),
        ("round", torch.tensor(-1), "schedule: the server sent round"),
        ("round", torch.tensor(-(2**63)), "schedule: the server sent round"),
    ],
)
def test_invalid_logits_and_rounds_are_refused(
    name: str, tensor: torch.Tensor, rule: str, tmp_path: Path
) -> None:
    plan = RunPlan(
        "one", {"name": "fedmd", "rounds": 2, "subset": 4}, SPEC, public=public_fingerprint(PUBLIC)
    )
    clinic = Clinic(tmp_path / "clinic", plan=plan)
    clinic.say("join", public_tensors(PUBLIC), plan=plan.to_dict())
    clinic.say("train_locally", seconds=60)
    rows = torch.tensor([0, 5, 5, 1])
    sound = {"rows": rows, "consensus": torch.zeros(4, 10), "round": torch.tensor(0)}
    before = to_vector(clinic.session.node.model)
    reply = clinic.say(
        "answer_query", {**sound, name: tensor}, query="digest", number=0, differentiable=False
    )
    assert (reply["kind"], reply["rule"].startswith(rule)) == ("QueryRefused", True), reply
    assert torch.equal(to_vector(clinic.session.node.model), before)
    assert isinstance(
        clinic.say("answer_query", sound, query="digest", number=0, differentiable=False), tuple
    )


@pytest.mark.parametrize(
    "counts", [torch.ones(9), torch.ones(10, dtype=torch.bool), torch.ones(()), torch.ones(1, 10)]
)
def test_label_counts_of_other_classes_are_refused(counts: torch.Tensor, tmp_path: Path) -> None:
    plan = RunPlan("one", {"name": "fedgen", "rounds": 2}, SPEC)
    clinic = Clinic(tmp_path / "clinic", "outputs_only = false\n", plan)
    clinic.say("join", plan=plan.to_dict())
    clinic.say("train_locally", seconds=60)
    sends = clinic.session.side.queries["train"].sends
    others = {name: torch.zeros(3) for name, kind in sends.items() if kind not in (LABEL_COUNTS, SCHEDULE)}
    sent = {**others, "counts": counts, "round": torch.tensor(0)}
    reply = clinic.say("answer_query", sent, query="train", number=0, differentiable=False)
    assert reply["kind"] == "QueryRefused"
    assert reply["rule"].startswith("tensors: the server sent counts: ")
