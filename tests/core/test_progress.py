"""Progress files: remaining time, stop reasons, and callbacks at intervals."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstill.core import progress
from fedstill.core.errors import DataError, RunFolderError
from fedstill.core.private_files import is_locked
from fedstill.core.progress import ProgressBar, ProgressFile, ProgressSnapshot, follow_file
from fedstill.core.run_writer import lock_folder


def test_seconds_left_follow_pace_of_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress.json"
    clock = iter([0.0, 1000.0, 1010.0, 1040.0, 1041.0])
    monkeypatch.setattr(time, "time", lambda: next(clock))
    noted = ProgressFile(path)
    noted.update("local training", 10, 10)
    assert ProgressSnapshot.read(path).seconds_left is None  # type: ignore[union-attr]
    noted.update(
        "distillation", 20, 100, "accuracy 50.0 %"
    )  # like after a resume: the duration of the first 20 is unknown
    assert ProgressSnapshot.read(path).seconds_left is None  # type: ignore[union-attr]
    noted.update("distillation", 40, 100, "accuracy 60.0 %")  # 20 steps in 30 s
    snapshot = ProgressSnapshot.read(path)
    assert snapshot is not None
    assert snapshot.seconds_left == 90.0
    assert snapshot.describe() == "distillation 40 of 100, accuracy 60.0 %, about 1 min 30 s left"


def test_callback_takes_small_share_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, called = [0.0], []

    def report(note: ProgressSnapshot) -> None:
        called.append((now[0], note.done))
        now[0] += 2.0  # at 1 % of the time, the next call is 200 s later
        raise OSError("no space left")  # does not end the run

    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with ProgressFile(tmp_path / "progress.json", on_update=report, interval=5.0) as noted:
        for step in range(1, 1001):
            now[0] += 1.0
            noted.update("distillation", step, 1000)
    assert [at for at, _ in called] == [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]
    assert caplog.messages == ["progress callback failed: OSError: no space left"]


def test_stop_reason_is_written_and_reported(tmp_path: Path) -> None:
    errors: list[str] = []
    path = tmp_path / "progress.json"
    with (
        pytest.raises(DataError),
        ProgressFile(path, on_update=lambda snapshot: errors.append(snapshot.error), interval=1e9),
    ):
        raise DataError("no such column")
    with (
        pytest.raises(ZeroDivisionError),
        ProgressFile(path, on_update=lambda snapshot: errors.append(snapshot.error)),
    ):
        raise ZeroDivisionError("at a node's record 17")  # the message may contain private data
    assert errors == ["", "no such column", "", "unexpected error"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"phase": 3}', '{"done": "x"}', "[" * 9999])
def test_rejects_invalid_snapshots(text: str) -> None:
    with pytest.raises(RunFolderError):
        ProgressSnapshot.parse(text, Path("progress.json"))


def test_clamps_large_numbers_of_other_machines() -> None:
    for counts in (
        {"done": 10**400, "total": 1},
        {"done": -(10**400), "total": 10**400},
        {"first": -(10**400)},
    ):
        for times in ({"since": 1e308, "began": -1e308}, {"since": 9.0, "began": 0.0}):
            text = json.dumps({"phase": "rounds", "done": 5, "total": 9, **counts, **times})
            assert len(ProgressSnapshot.parse(text, Path("progress.json")).describe()) < 100


def test_snapshots_of_another_process_are_copied(tmp_path: Path) -> None:
    source, here = tmp_path / "there.json", tmp_path / "here.json"
    noted = ProgressFile(source)
    noted.set_run_info({"title": "FedIOD"})
    noted.update("rounds", 3, 9, "\x1b[31maccuracy 50.0 %")
    with follow_file(source, ProgressFile(here)):
        end = time.monotonic() + 60
        while json.loads(here.read_text())["done"] != 3 and time.monotonic() < end:
            time.sleep(0.05)
    snapshot = ProgressSnapshot.read(here)
    assert snapshot is not None
    assert (snapshot.run_info, snapshot.note) == ({"title": "FedIOD"}, "[31maccuracy 50.0 %")


def test_lock_check_does_not_block_start_of_run(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "none")
    assert not is_locked(tmp_path)
    with lock_folder(tmp_path, "run"):
        assert is_locked(tmp_path)
        with pytest.raises(RunFolderError), lock_folder(tmp_path, "run"):
            pass
    assert not is_locked(tmp_path)


def test_prints_line_at_start_and_end_of_phase_without_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ProgressBar(True) as bars:
        bars.print_line("a line of its own")
        bars.update("local training", 0, 50)
        bars.update("local training", 25, 50)
        bars.update("local training", 50, 50)
        bars.update("rounds", 0, 2)
        bars.update("rounds", 2, 2, "accuracy 50.0 %")
        bars.update("rounds", 2, 2)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert (out, lines[0], len(lines)) == ("", "a line of its own", 5)
    assert [line.split(",")[0] for line in lines[1:]] == [
        "local training 0 of 50", "local training 50 of 50", "rounds 0 of 2", "rounds 2 of 2",
    ]  # fmt: skip
    assert "accuracy 50.0 %" in lines[4]


def test_prints_lines_during_long_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress.ProgressLines, "MAX_SILENCE", 0.05)
    with ProgressBar(True) as bars:
        bars.update("rounds", 0, 4)
        time.sleep(0.1)
        bars.update("rounds", 1, 4)
        time.sleep(0.5)  # the second round
    lines = capsys.readouterr().err.splitlines()
    during = [line for line in lines if line.startswith("rounds 1 of 4")]
    assert len(during) > 1
    assert all("left" in line for line in during)


@pytest.mark.parametrize(
    "make", [lambda path: ProgressBar(False), lambda path: ProgressFile(path / "progress.json")]
)
def test_disabled_progress_prints_nothing(
    make: Callable[[Path], ProgressBar], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with make(tmp_path) as bars:
        bars.print_line("a line")
        bars.update("rounds", 0, 2)
        bars.update("rounds", 2, 2)
    assert capsys.readouterr() == ("", "")


def test_prints_snapshots_of_another_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bars = ProgressFile(tmp_path / "here.json", enabled=True)
    for done in (3, 3, 9, 9):
        bars.show_snapshot(ProgressSnapshot("rounds", done, 9))
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "rounds 3 of 9",
        "rounds 9 of 9",
    ]


def test_skipped_phase_is_shown_as_done() -> None:
    bars = progress.ProgressBar(False)
    bars.show_snapshot(ProgressSnapshot("local training", 70, 100, waiting_for=("north",)))
    bars.show_snapshot(ProgressSnapshot("distillation", 1, 9))
    shown = [(task.description, task.completed, task.fields["note"]) for task in bars._progress.tasks]
    assert shown == [("local training", 100, " "), ("distillation", 1, " ")]
