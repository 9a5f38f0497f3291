"""Damaged files of a run, and two processes that begin one run: one-line errors, and no data loss."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
from pathlib import Path
from typing import Any

import pytest

from fedstill.core.checkpoint import load_state, save_state
from fedstill.core.errors import RunFolderError
from fedstill.node import session
from fedstill.node.run_folder import SALT, TRAINING_STATE
from fedstill.protocol.run_plan import PLAN_FILE
from tests.support.node_services import PLAN, PRIVATELY, WIDE, Clinic, labels_of

HIDDEN = "its data or model failed: see its log"


def joined(clinic: Clinic, caplog: pytest.LogCaptureFixture) -> str:
    """Return the owner's log of a join that fails; the server receives no details."""
    clinic.again()
    with caplog.at_level(logging.WARNING, "fedstill.node"):
        reply = clinic.say("join", plan=clinic.plan.to_dict())
    assert (reply["kind"], reply["text"]) == ("NodeDataError", HIDDEN)
    assert clinic.host.session is None
    (line,) = caplog.messages
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b"[1]", "holds a list (expected a JSON object"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"\xff", "cannot be read as JSON: 'utf-8'"),
    ],
    ids=["empty", "a list", "deep", "no text"],
)
def test_damaged_plan_gives_one_line_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: bytes, message: str
) -> None:
    clinic = Clinic(tmp_path / "clinic").ready()
    path = clinic.folder / "runs/one" / PLAN_FILE
    path.write_bytes(text)
    assert f"{path} {message}" in joined(clinic, caplog)


def test_copied_checkpoint_file_is_named_in_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clinic = Clinic(tmp_path / "clinic").ready()
    copied = clinic.folder / "runs/one/checkpoint-3 (copy).safetensors"
    copied.write_bytes(b"")
    assert f"{copied} is not a checkpoint (expected checkpoint-NUMBER" in joined(clinic, caplog)


@pytest.mark.parametrize(
    "change",
    [{"steps": None}, {"steps": 10**30}, {"steps": -1}, {"is_trained": 1}, {"node": {}}, {"node": "x"}],
    ids=str,
)
def test_state_of_another_format_gives_one_line_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any]
) -> None:
    clinic = Clinic(tmp_path / "clinic").ready()
    path = clinic.folder / "runs/one" / TRAINING_STATE
    save_state(path, {**load_state(path), **change})
    assert f"{path} is not a state of this node: " in joined(clinic, caplog)


@pytest.mark.parametrize("state", ["x", [1], {}], ids=str)
def test_state_that_is_not_a_dict_gives_one_line_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: Any
) -> None:
    clinic = Clinic(tmp_path / "clinic").ready()
    save_state(clinic.folder / "runs/one" / TRAINING_STATE, state)
    assert f"{TRAINING_STATE} is not a state of this node: " in joined(clinic, caplog)


def test_endlessly_nested_state_gives_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("fedstill.core.checkpoint.json.dumps", lambda tree: "[" * 100_000)
        save_state(tmp_path / "state", {})
    with pytest.raises(RunFolderError, match="state is not a checkpoint"):
        load_state(tmp_path / "state")


@pytest.mark.parametrize("text", ["", "x" * 32, "0" * 31, "0" * 64])
def test_damaged_salt_gives_one_line_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    clinic = Clinic(tmp_path / "clinic", WIDE).ready()
    path = clinic.folder / "runs/one" / SALT
    path.write_text(text)
    message = f"{path} is not a salt of a run (expected 32 hexadecimal digits"
    assert message in joined(clinic, caplog)


def test_salt_and_plan_are_on_disk_before_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    from fedstill.core import private_files

    replace = private_files.replace_file

    def record_sync(path: Path, content: bytes, *, sync: bool = False) -> None:
        synced.extend([path.name] if sync else [])
        replace(path, content, sync=sync)

    monkeypatch.setattr(private_files, "replace_file", record_sync)
    Clinic(tmp_path / "clinic").say("join", plan=PLAN.to_dict())
    assert [name for name in synced if name in (SALT, PLAN_FILE)] == [SALT, PLAN_FILE]


# --- concurrent processes -----------------------------------------------------------------------------


def test_concurrent_processes_share_one_salt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process is refused at any point, and leaves the salt on disk unchanged."""
    first, other = (Clinic(tmp_path / "clinic", WIDE) for _ in range(2))
    paused, go_on, replies = threading.Event(), threading.Event(), []
    real = secrets.token_hex

    def slow(count: int) -> str:
        if threading.current_thread().name == "other":
            paused.set()
            go_on.wait(60)
        return real(count)

    monkeypatch.setattr(secrets, "token_hex", slow)
    late = threading.Thread(
        target=lambda: replies.append(other.say("join", plan=PLAN.to_dict())), name="other", daemon=True
    )
    late.start()
    assert paused.wait(60)
    begun = first.say("join", plan=PLAN.to_dict())
    go_on.set()
    late.join(60)
    one = [clinic for clinic in (first, other) if clinic.host.session is not None]
    assert len(one) == 1
    (refused,) = [each for each in (begun, replies[0]) if isinstance(each, dict)]
    assert refused["text"].endswith("another run is active here")
    before = labels_of(one[0].ready())
    one[0].again()
    one[0].ready()
    one[0].say("load_checkpoint", checkpoint=0)
    assert (labels_of(one[0]) == before).all(), "the noise depends on the stored salt"


@pytest.mark.parametrize("reason", ["at work", "own trouble"])
def test_refused_join_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    clinic = Clinic(tmp_path / "clinic", PRIVATELY["dp-sgd"])
    if reason == "at work":
        first = clinic.ready()
        clinic = Clinic(first.folder, PRIVATELY["dp-sgd"], dataclasses.replace(PLAN, run="two"))
    else:

        def fails(*given: Any, **more: Any) -> None:
            raise RunFolderError("is broken")

        monkeypatch.setattr(session, "require_unchanged_data", fails)
    runs = sorted(clinic.folder.glob("runs/*"))
    assert "kind" in clinic.say("join", plan=clinic.plan.to_dict())
    assert sorted(clinic.folder.glob("runs/*")) == runs
