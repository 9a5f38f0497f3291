"""Trackers log each line of ``metrics.jsonl`` once. A failing tracker is disabled."""

from __future__ import annotations

import csv
import json
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import ANY

import pytest

import fedstill
from fedstill.core.errors import ArgumentError, FedstillError, RunFolderError
from fedstill.core.run_writer import RunWriter
from fedstill.privacy.pate import PATE
from fedstill.privacy.statement import make_statement, summarize_privacy
from fedstill.runs.run import resume, run
from fedstill.runs.spec import RunSpec, from_dict
from fedstill.track import TRACKERS, Tracker, final_metrics, flatten_metrics
from fedstill.track.trackers import TrackerGroup
from tests.support.errors import raises_invalid
from tests.support.my_lab import MY_LAB

RESULT = {"metrics": [{"key": "accuracy"}], "accuracy": 80.0, "bytes": {"up": 10, "down": 20}}
Logged = Counter[tuple[str, int, float]]  # counts of each metric at each step


def line_at(step: int) -> dict[str, Any]:
    return {"phase": "distillation", "step": step, "losses": {"student": 1 / step}, "seconds": 0.5}


def read_tensorboard(folder: Path) -> Logged:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return Counter((n, e.step, e.value) for n in events.Tags()["scalars"] for e in events.Scalars(n))


def read_mlflow(folder: Path) -> Logged:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("fedstill").experiment_id])  # exactly one run
    assert run.data.params["split.nodes"] == "5"
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return Counter((name, each.step, each.value) for name, history in histories.items() for each in history)


def read_wandb(folder: Path) -> Logged:
    """Read the LevelDB log of an offline run: seven bytes, then parts of records in blocks of 32 KiB.

    A separate process writes it, so the last record may come after ``finish``.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = (folder / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 30
    while not file.read_bytes().endswith(b"\x92\x01\x00") and time.monotonic() < deadline:  # Record.exit, 0
        time.sleep(0.1)
    data, at, part, counts = file.read_bytes(), 7, b"", Logged()
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:  # no space for a header: the block ends in zeros
            at += 32768 - at % 32768
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            record = Record.FromString(part)
            values = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            [step] = [value for name, value in values.items() if name.endswith("/step")] or [0]
            for name, value in values.items():
                if name.startswith(("local/", "distillation/")) and not name.endswith("/step"):
                    counts[name, step, value] += 1
            for each in record.summary.update:
                if each.key.startswith("result/"):
                    counts[each.key, 3, json.loads(each.value_json)] += 1
            part = b""
    return counts


def test_epsilon_is_maximum_over_nodes_or_none() -> None:
    """A run has an epsilon only if all nodes have a guarantee."""
    statement, cheap, costly = make_statement(PATE(), {}, ()), {"gaussian(2.0)": 1}, {"gaussian(1.5)": 1}
    both = summarize_privacy({"a": statement, "b": statement}, {"a": (cheap, 0), "b": (costly, 0)})
    assert final_metrics({"privacy": both}) == {"epsilon": both["nodes"][1]["epsilon"]}
    assert (
        final_metrics(
            {
                "privacy": summarize_privacy(
                    {"a": statement, "b": statement}, {"a": (cheap, 0), "b": (costly, 1)}
                )
            }
        )
        == {}
    )


@pytest.mark.parametrize(
    ("name", "read"), list(zip(TRACKERS.builtin, (read_tensorboard, read_mlflow, read_wandb), strict=True))
)
def test_logged_metrics_are_read_back_once_per_step_after_resume(
    tmp_path: Path, name: str, read: Callable[[Path], Logged], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for stopped in (True, False):
        trackers = TrackerGroup([name], {"split": {"nodes": 5}})
        writer = RunWriter(tmp_path, trackers.log)
        trackers.start(tmp_path, "FedIOD")
        writer.load()
        if stopped:
            writer.add_metrics({"phase": "local", "node": "north", "step": 50, "loss": 0.25})
            writer.add_metrics(line_at(1))
            writer.save({})
            writer.add_metrics(line_at(2))  # written and logged, but invalid, as no checkpoint includes it
            writer._write_metrics()
            trackers.close(None)
        else:
            writer.add_metrics(line_at(2))
            writer.add_metrics(line_at(3))
            writer.finish(RESULT, None)
            trackers.close(RESULT)
        assert trackers.notes == []
    expected = [
        ("local/north/loss", 50, 0.25),
        *(("distillation/losses/student", step, 1 / step) for step in (1, 2, 3)),
        *(("distillation/seconds", step, 0.5) for step in (1, 2, 3)),
        ("result/accuracy", 3, 80.0),
        ("result/bytes/up", 3, 10.0),
        ("result/bytes/down", 3, 20.0),
    ]
    logged = Counter(
        {(n, step, round(value, 6)): count for (n, step, value), count in read(tmp_path).items()}
    )
    assert logged == Counter((n, step, round(value, 6)) for n, step, value in expected)


class InterruptingTracker(Tracker):
    """Stores what it receives, and interrupts the run during distillation."""

    received: ClassVar[list[Any]] = []
    stops: ClassVar[bool] = True

    def start(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.received[:] = [about]

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.received.extend(lines)
        if self.stops and lines[-1]["phase"] == "distillation":
            raise KeyboardInterrupt

    def close(self, result: Mapping[str, Any] | None) -> None:
        self.received.append(result)


def tiny_run(tracker: str) -> RunSpec:
    return from_dict(
        {
            "data": {"name": "digits", "train_limit": 100},
            "split": {"nodes": 2},
            "nodes": {"models": ["linear"], "local": {"epochs": 30.0}},
            "student": {"model": "linear"},
            "public": {"name": "held-out"},
            "method": {"name": "fedkd", "student": {"epochs": 30}},
            "evaluation": {"centralized": False},
            "track": [tracker],
        }
    )


def test_resumed_run_logs_all_metrics_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunWriter, "is_save_due", lambda self: True)
    config = tiny_run(f"{__name__}:InterruptingTracker")
    monkeypatch.setattr(InterruptingTracker, "stops", True)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", command="", progress=False)
    assert InterruptingTracker.received[-1] is None
    monkeypatch.setattr(InterruptingTracker, "stops", False)
    file = tmp_path / "run" / "config.toml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("quorum = 1.0", "quorum = 0.5").replace("gamma = 10.0", "gamma = 0.5"))
    with pytest.raises(RunFolderError, match=r"method.gamma = 10.0, .* 0.5"):
        resume(tmp_path / "run", progress=False)
    file.write_text(text.replace("quorum = 1.0", "quorum = 0.5"))  # the quorum may change
    result = resume(tmp_path / "run", progress=False)
    about, *lines, last = InterruptingTracker.received
    assert about["options"]["method.student.epochs"] == 30
    assert (about["name"], about["method"]) == ("run", "FedKD")
    saved = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert lines == [json.loads(line) for line in saved]
    assert [line["step"] for line in lines if line["phase"] == "distillation"] == list(range(1, 31))
    assert last["accuracy"] == result["accuracy"]


class FailingTracker(InterruptingTracker):
    """Fails on each line."""

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        raise OSError("no space left")


def test_failing_tracker_is_disabled_and_failing_start_stops_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = InterruptingTracker()
    monkeypatch.setattr(InterruptingTracker, "stops", False)
    trackers = TrackerGroup([FailingTracker(), other])
    trackers.start(tmp_path, "FedIOD")
    trackers.log([line_at(1)])
    trackers.log([line_at(2)])
    assert other.received[1:] == [line_at(1), line_at(2)]
    assert trackers.notes == ["tracker 'FailingTracker' failed and was disabled: no space left"]
    assert "no space left" in capsys.readouterr().err
    monkeypatch.setattr(InterruptingTracker, "start", lambda *_: 1 / 0)
    trackers = TrackerGroup([other])
    with pytest.raises(FedstillError, match="'InterruptingTracker' cannot"):
        trackers.start(tmp_path, "FedIOD")
    trackers.start(tmp_path, "FedIOD", finished=True)  # training is over, so the run continues
    assert trackers.notes == ["tracker 'InterruptingTracker' failed and was disabled: division by zero"]
    trackers.close(None)
    assert other.received[1:] == [line_at(1), line_at(2)]  # a tracker that has not started is not closed


class FailingAtEnd(InterruptingTracker):
    """Fails on the last lines, or on closing."""

    at: ClassVar[str] = ""

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        if self.at == "log":
            raise OSError("no space left")

    def close(self, result: Mapping[str, Any] | None) -> None:
        raise OSError("no space left")


@pytest.mark.parametrize("at", ["log", "close"])
def test_failure_at_close_is_in_result(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checkpoints metrics are logged only at the end of the run."""
    monkeypatch.setattr(FailingAtEnd, "at", at)
    monkeypatch.setattr(RunWriter, "is_save_due", lambda self: False)
    result = run(tiny_run(f"{__name__}:FailingAtEnd"), tmp_path / "run", command="", progress=False)
    saved = json.loads((tmp_path / "run" / "result.json").read_text())
    note = f"tracker '{__name__}:FailingAtEnd' failed and was disabled: no space left"
    assert note in saved["notes"]
    assert saved["notes"] == result["notes"]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["tensorbord"], r"invalid track = 'tensorbord' \(expected tensorboard, mlflow, wandb"),
        (["tests.support.my_lab:Lab"], "a subclass of Tracker"),
        ([f"{__name__}:InterruptingTracker"] * 2, "each tracker once"),
    ],
)
def test_rejects_unknown_tracker(named: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TrackerGroup(named)


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "tensorboard"), ("mlflow", "alembic"), ("wandb", "wandb")]
)
def test_missing_tracker_package_names_its_extra(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = from_dict({"method": {"name": "fedavg"}, "track": [name]})
    with pytest.raises(ArgumentError, match=rf"invalid track = '{name}' .* pip install 'fedstill\[track\]'"):
        run(config, tmp_path / "run", command="", progress=False)
    assert not (tmp_path / "run").exists()


def test_custom_tracker_receives_metrics_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(MY_LAB)
    import torch

    x, y = torch.rand(60, 1, 8, 8) * 2 - 1, torch.arange(60) % 3
    net = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)) for _ in range(3)]
    given: dict[str, Any] = {
        "method": fedstill.FedKD(student=fedstill.StudentTraining(epochs=2)),
        "public": x,
        "track": ["my_lab.csv_tracker:CsvTracker"],
    }
    data = ([(x[:30], y[:30]), (x[30:], y[30:])], net[:2], net[2], (x, y), 3)
    with raises_invalid("track", ANY, "out="):
        fedstill.distil(*data, **given)
    metrics = fedstill.distil(*data, **given, out=tmp_path / "run").result
    with (tmp_path / "run" / "tracked.csv").open() as file:
        rows = [tuple(row) for row in csv.reader(file)]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = [
        (str(line["step"]), name, str(value)) for line in lines for name, value in flatten_metrics(line)
    ]
    assert rows[1 : 1 + len(expected)] == expected
    assert ("", "result/accuracy", str(metrics["accuracy"])) in rows
