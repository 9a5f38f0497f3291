"""Files of queries at a node: imported code, records of refusals, and unusual folder names."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from fedstill.cli import main as cli
from fedstill.core.config_tables import to_table
from fedstill.core.errors import ArgumentError, QueryRefused, RunFolderError
from fedstill.core.registry import searching_in
from fedstill.data.data_spec import DataSpec
from fedstill.data.public import PublicData
from fedstill.federation import offline_files, signed_files
from fedstill.federation.offline_files import Queries, write_queries
from fedstill.methods._public_data import StudentTraining
from fedstill.methods.fedkd import FedKD
from fedstill.node import folder_check, owner_folder
from fedstill.node.approvals import ApprovalRequests
from fedstill.node.replies import TrainingProgress
from fedstill.node.session import Session
from fedstill.protocol.run_plan import RunPlan, public_fingerprint
from fedstill.tasks.classification import ClassificationConfig
from tests.support.audit_logs import entries, security_events
from tests.support.errors import raises_invalid, raises_refused

pytest.importorskip("cryptography")

SHAPE = (1, 8, 8)
SPEC = DataSpec(ClassificationConfig(), ("a", "b", "c"), SHAPE, (0.5,), (0.5,))
CONFIG = FedKD(student=StudentTraining(epochs=3, batch=6), predictions=2, z_max=4.0)
NODE = """
name = "clinic"
seed = 3
online = false
[data]
path = "data.npz"
[model]
name = "mlp:8"
[local]
epochs = 1
batch = 8
[policy]
"""
ASKS = 3  # queries in a file
METHOD = """
from dataclasses import dataclass
from fedstill.methods.fedkd import FedKD

@dataclass(frozen=True, kw_only=True)
class OwnKD(FedKD):
    pass
"""


def make_node(folder: Path, policy: str = "") -> Path:
    folder.mkdir()
    draw = np.random.default_rng(0)
    images = draw.uniform(0, 1, (30, *SHAPE)).astype(np.float32)
    np.savez(folder / "data.npz", images=images, labels=draw.integers(0, 3, 30))
    (folder / "node.toml").write_text(NODE + policy)
    (folder / "secret").touch(mode=0o600)
    (folder / "secret").write_text("rehearsal 7\n")
    return folder


def make_queries(path: Path, method: str = "fedkd", **other: torch.Tensor) -> Path:
    """Write a file of queries; ``other`` replaces tensors of the last query."""
    public = PublicData(
        "made", torch.randn(23, *SHAPE, generator=torch.Generator().manual_seed(9)), note="by hand"
    )
    table = {**to_table(CONFIG), "name": method}
    plan = RunPlan(path.stem, table, SPEC, public=public_fingerprint(public), public_note=("made", "by hand"))
    *calls, last = CONFIG.planned_queries(public, 4)
    calls.append(replace(last, tensors={**last.tensors, **other}))
    key = signed_files.load_or_create_key(path.with_name("server.key"))
    write_queries(path, Queries(plan, public, tuple(calls)), key)
    return path


@pytest.fixture
def node_module() -> Iterator[str]:
    original_path = list(sys.path)
    yield "own_distillation"
    sys.path[:] = original_path
    sys.modules.pop("own_distillation", None)


def test_imports_code_from_node_folder_only(
    tmp_path: Path, node_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = f"{node_module}:OwnKD"
    node = make_node(tmp_path / "clinic", f'plugins = ["{named}"]\n')
    (node / f"{node_module}.py").write_text(METHOD)
    with searching_in(node):  # the server has the same module
        queries = make_queries(tmp_path / "queries.safetensors", named)
    del sys.modules[node_module]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"{node_module}.py").write_text(f"open('ran', 'w').close()\n{METHOD}")
    monkeypatch.chdir(elsewhere)
    outcome = offline_files.answer_queries(node, queries)
    assert outcome.released_bytes["logits"] > 0
    assert not (elsewhere / "ran").exists()
    assert Path(str(sys.modules[node_module].__file__)).parent == node
    assert offline_files.answer_queries(node, queries).was_released


def test_audit_hash_of_responses_is_keyed(tmp_path: Path) -> None:
    node = make_node(tmp_path / "clinic")
    queries = make_queries(tmp_path / "queries.safetensors")
    offline_files.answer_queries(node, queries, tmp_path / "answers")
    (entry,) = [line for line in entries(node) if line["part"] == "response file"]
    (stored,) = node.glob(f"runs/*/{offline_files.RELEASED_FILE}")
    blob = stored.read_bytes()
    tried = {hashlib.new(name, blob).hexdigest() for name in ("sha256", "blake2s", "sha3_256")}
    assert entry["content_hash"] not in {*tried, hashlib.blake2b(blob, digest_size=32).hexdigest()}
    (node / "secret").write_text("rehearsal 8\n")
    with pytest.raises(RunFolderError, match="was modified"):
        offline_files.answer_queries(node, queries, tmp_path / "again")


def test_responds_to_approved_files_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = make_node(tmp_path / "clinic", 'approve = "each run"\n')
    queries, out = make_queries(tmp_path / "queries.safetensors"), tmp_path / "answers"
    with raises_refused("approve: run", "waits"):
        offline_files.answer_queries(node, queries, out)
    assert entries(node) == []
    with pytest.raises(SystemExit):
        cli.main(["offline", "show", str(queries)])
    shown = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("run "))
    with pytest.raises(SystemExit):  # the hash that the server prints is the one to approve
        cli.main(["node", "approve", str(node), shown.removeprefix("run ")])
    offline_files.answer_queries(node, queries, out)
    assert offline_files.answer_queries(node, queries, out).was_released
    with pytest.raises(SystemExit):
        cli.main(["node", "reject", str(node), shown.removeprefix("run ")])
    with raises_refused("approve: run", "rejected"):
        offline_files.answer_queries(node, queries, out)  # not even responses that were already released
    result = [(line["event"], line["actor"]) for line in security_events(node)]
    signer = signed_files.fingerprint(signed_files.read_public_key(tmp_path / "server.pub"))
    assert [event for event, _ in result] == [
        *("policy", "waits", "refused", "approved", "joined", "rejected", "refused")
    ]  # fmt: skip
    assert {who for event, who in result if event in ("waits", "joined")} == {signer}


def test_approval_depends_on_server_key(tmp_path: Path) -> None:
    node, out = make_node(tmp_path / "clinic", 'approve = "each run"\n'), tmp_path / "answers"
    files = []
    for server in ("first", "second"):
        (tmp_path / server).mkdir()
        files.append(make_queries(tmp_path / server / "queries.safetensors"))
    first, second = files
    assert first.read_bytes() == second.read_bytes()
    with pytest.raises(QueryRefused):
        offline_files.answer_queries(node, first, out)
    requests = ApprovalRequests(node, owner_folder.read_node_file(node))
    (pending,) = requests.list_all()
    requests.decide(pending.sha256, True)
    for _ in range(2):
        with raises_refused("approve: run", "waits"):
            offline_files.answer_queries(node, second, out)
    offline_files.answer_queries(node, first, out)
    with raises_refused("approve: run", "waits"):
        offline_files.answer_queries(node, second, out)  # not even responses that were already released
    assert {request.server == pending.server: request.state for request in requests.list_all()} == {
        True: "used",
        False: "waits",
    }


@pytest.mark.parametrize("at", ["training", "answers", "the end"])
def test_revoked_approval_releases_nothing(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, out = make_node(tmp_path / "clinic", 'approve = "each run"\n'), tmp_path / "answers"
    queries = make_queries(tmp_path / "queries.safetensors")
    with pytest.raises(QueryRefused):
        offline_files.answer_queries(node, queries, out)
    requests = ApprovalRequests(node, owner_folder.read_node_file(node))
    (sha256,) = [request.sha256 for request in requests.list_all()]
    requests.decide(sha256, True)
    queried: list[str] = []

    def reject(*_: object) -> None:
        requests.decide(sha256, False)

    learned: list[float] = []

    def learn(self: Session, seconds: float) -> TrainingProgress:
        learned.append(seconds)
        return TrainingProgress(30 * len(learned), len(learned) == 3)

    plain = Session.respond

    def respond(self: Session, name: str, *words: Any) -> Any:
        queried.append(name)
        if at == "answers" or len(queried) == ASKS:
            reject()
        return plain(self, name, *words)

    if at == "training":
        monkeypatch.setattr(Session, "train_locally", learn)
    monkeypatch.setattr(Session, "respond", respond)
    with raises_refused("approve: run", "rejected"):
        offline_files.answer_queries(
            node, queries, out, report=reject if at == "training" else lambda _: None
        )
    assert len(queried) == {"training": 0, "answers": 1, "the end": ASKS}[at]
    assert len(learned) == (at == "training")
    assert not out.exists()
    assert not list(node.glob(f"runs/*/{offline_files.RELEASED_FILE}"))


def test_responds_to_files_of_allowed_keys_only(tmp_path: Path) -> None:
    queries = make_queries(tmp_path / "queries.safetensors")
    signer = signed_files.fingerprint(signed_files.read_public_key(tmp_path / "server.pub"))
    one, other = (
        make_node(tmp_path / allowed[:4], f'allowed_servers = ["{allowed}"]\n')
        for allowed in (signer, "0" * 32)
    )
    assert offline_files.answer_queries(one, queries, tmp_path / "answers").signer
    with pytest.raises(QueryRefused, match=f"by rule allowed_servers: not {signer}"):
        offline_files.answer_queries(other, queries, tmp_path / "others")


def test_records_refusal_after_computation(tmp_path: Path) -> None:
    node = make_node(tmp_path / "clinic")
    queries = make_queries(tmp_path / "queries.safetensors", rows=torch.tensor([3, 1000]).int())
    with raises_refused("rows", "outside", "23"):
        offline_files.answer_queries(node, queries, tmp_path / "answers")
    (refusal,) = entries(node, "refused")
    assert refusal["number"] == len(list(entries(node, "response"))) > 0
    assert refusal["query"] == "predict"
    assert "rows outside the 23" in refusal["rule"]


def test_checks_remaining_limit_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query_count = len(CONFIG.planned_queries(PublicData("made", torch.zeros(23, *SHAPE)), 4))
    node = make_node(tmp_path / "clinic", f"max_queries = {query_count + 1}\n")
    offline_files.answer_queries(node, make_queries(tmp_path / "one.safetensors"), tmp_path / "one")
    monkeypatch.setattr(Session, "train_locally", lambda *given: pytest.fail("trained before the refusal"))
    with pytest.raises(QueryRefused, match=f"max_queries: 1, and the file asks {query_count}"):
        offline_files.answer_queries(node, make_queries(tmp_path / "two.safetensors"), tmp_path / "two")


def test_records_errors_of_other_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: Any) -> Any:
        raise ValueError("patient 4711 is not square")

    node = make_node(tmp_path / "clinic")
    monkeypatch.setattr(Session, "respond", fails)
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="patient 4711"):
        offline_files.answer_queries(
            node, make_queries(tmp_path / "queries.safetensors"), tmp_path / "answers"
        )
    (refusal,) = entries(node, "refused")
    assert refusal["rule"] == "its data or model failed: see its log"
    assert not caplog.messages


def test_handles_folder_name_that_is_not_utf8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = make_queries(tmp_path / "queries.safetensors")
    try:
        node = make_node(Path(os.fsdecode(bytes(tmp_path / "clinic") + b"\xff")))
    except OSError:
        pytest.skip("this file system holds no such name")
    with pytest.raises(ArgumentError, match="UTF-8"):
        owner_folder.read_node_file(node)
    (fault,) = folder_check.check_folder(node).faults
    assert "clinic\\xff" in fault
    monkeypatch.chdir(node)
    for words in (
        ["node", "check", str(node)],
        ["node", "check", "."],
        ["offline", "answer", ".", str(queries)],
    ):
        with pytest.raises(SystemExit) as exit_info:
            cli.main(words)
        output = capsys.readouterr()
        assert (exit_info.value.code, output.out) == (2, "")
        assert output.err.count("\n") == 1
        assert "utf-8" in output.err.lower()


def test_does_not_overwrite_other_responses(tmp_path: Path) -> None:
    node, out = make_node(tmp_path / "clinic"), tmp_path / "answers"
    first, second = (make_queries(tmp_path / name) for name in ("one.safetensors", "two.safetensors"))
    offline_files.answer_queries(node, first, out)
    before = out.read_bytes()
    with raises_invalid("--out", ANY, "responses to other queries"):
        offline_files.answer_queries(node, second, out)
    assert out.read_bytes() == before
    # the same responses may be written again
    assert offline_files.answer_queries(node, first, out).was_released
