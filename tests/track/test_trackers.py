"""Trackers hear what ``metrics.jsonl`` holds, each step once; one that fails is let go."""

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

import pytest

import fedstill
from fedstill.core.errors import ArgumentError, FedstillError, RunFolderError
from fedstill.core.run_writer import RunWriter
from fedstill.privacy.pate import PATE
from fedstill.privacy.statement import make_statement, summarize_privacy
from fedstill.runs.config import RunConfig, from_dict
from fedstill.runs.run import resume, run
from fedstill.track import TRACKERS, Tracker, final_metrics, flatten_metrics
from fedstill.track.tracker_group import TrackerGroup
from tests.own_lab import MY_LAB

RESULT = {"metrics": [{"key": "accuracy"}], "accuracy": 80.0, "bytes": {"up": 10, "down": 20}}
Told = Counter[tuple[str, int, float]]  # how often each figure of each step is there


def turn(step: int) -> dict[str, Any]:
    return {"phase": "distillation", "step": step, "losses": {"student": 1 / step}, "seconds": 0.5}


def of_tensorboard(folder: Path) -> Told:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return Counter((n, e.step, e.value) for n in found.Tags()["scalars"] for e in found.Scalars(n))


def of_mlflow(folder: Path) -> Told:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    [there] = client.search_runs(
        [client.get_experiment_by_name("fedstill").experiment_id]
    )  # deleted: no more
    assert there.data.params["split.nodes"] == "5"
    histories = {name: client.get_metric_history(there.info.run_id, name) for name in there.data.result}
    return Counter((name, each.step, each.value) for name, found in histories.items() for each in found)


def of_wandb(folder: Path) -> Told:
    """An offline run is a log in LevelDB's form: seven bytes, then parts of records in blocks of 32 KiB. A
    process of its own writes it, and its last record may come after ``finish``."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = (folder / "wandb").glob("offline-run-*/*.wandb")
    over = time.monotonic() + 30
    while not file.read_bytes().endswith(b"\x92\x01\x00") and time.monotonic() < over:  # Record.exit, 0
        time.sleep(0.1)
    data, at, part, found = file.read_bytes(), 7, b"", Told()
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:  # no room for a head: the block ends in zeros
            at += 32768 - at % 32768
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record.FromString(part)
            told = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            [step] = [value for name, value in told.items() if name.endswith("/step")] or [0]
            for name, value in told.items():
                if name.startswith(("local/", "distillation/")) and not name.endswith("/step"):
                    found[name, step, value] += 1
            for each in record.summary.update:
                if each.key.startswith("result/"):
                    found[each.key, 3, json.loads(each.value_json)] += 1
            part = b""
    return found


def test_epsilon_is_maximum_over_nodes_or_none() -> None:
    """As results have it: the guarantee is yes or nothing, and each node has its own epsilon."""
    said, cheap, dear = make_statement(PATE(), {}, ()), {"gaussian(2.0)": 1}, {"gaussian(1.5)": 1}
    both = summarize_privacy({"a": said, "b": said}, {"a": (cheap, 0), "b": (dear, 0)})
    assert final_metrics({"privacy": both}) == {"epsilon": both["nodes"][1]["epsilon"]}
    assert (
        final_metrics(
            {"privacy": summarize_privacy({"a": said, "b": said}, {"a": (cheap, 0), "b": (dear, 1)})}
        )
        == {}
    )


@pytest.mark.parametrize(
    ("name", "read"), list(zip(TRACKERS.builtin, (of_tensorboard, of_mlflow, of_wandb), strict=True))
)
def test_logged_metrics_are_read_back_once_per_step_after_resume(
    tmp_path: Path, name: str, read: Callable[[Path], Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for stopped in (True, False):
        listeners = TrackerGroup([name], {"split": {"nodes": 5}})
        records = RunWriter(tmp_path, listeners.log)
        listeners.start(tmp_path, "FedIOD")
        records.load()
        if stopped:
            records.add_metrics({"phase": "local", "node": "north", "step": 50, "loss": 0.25})
            records.add_metrics(turn(1))
            records.save({})
            records.add_metrics(turn(2))  # on disk and told, and void: no state counts it
            records._write_metrics()
            listeners.close(None)
        else:
            records.add_metrics(turn(2))
            records.add_metrics(turn(3))
            records.finish(RESULT, None)
            listeners.close(RESULT)
        assert listeners.notes == []
    expected = [
        ("local/north/loss", 50, 0.25),
        *(("distillation/losses/student", step, 1 / step) for step in (1, 2, 3)),
        *(("distillation/seconds", step, 0.5) for step in (1, 2, 3)),
        ("result/accuracy", 3, 80.0),
        ("result/bytes/up", 3, 10.0),
        ("result/bytes/down", 3, 20.0),
    ]
    told = Counter({(n, step, round(value, 6)): count for (n, step, value), count in read(tmp_path).items()})
    assert told == Counter((n, step, round(value, 6)) for n, step, value in expected)


class Stops(Tracker):
    """Keeps what it hears, and presses Ctrl-C when a distillation has begun."""

    heard: ClassVar[list[Any]] = []
    stops: ClassVar[bool] = True

    def start(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.heard[:] = [about]

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.heard.extend(lines)
        if self.stops and lines[-1]["phase"] == "distillation":
            raise KeyboardInterrupt

    def close(self, result: Mapping[str, Any] | None) -> None:
        self.heard.append(result)


def tiny_run(tracker: str) -> RunConfig:
    return from_dict(
        {
            "data": {"name": "digits", "train_limit": 100},
            "split": {"nodes": 2},
            "nodes": {"models": ["linear"], "local": {"epochs": 30.0}},
            "student": {"model": "linear"},
            "public": {"name": "held-out"},
            "method": {"name": "fedkd", "epochs": 30},
            "evaluation": {"centralized": False},
            "track": [tracker],
        }
    )


def test_resumed_run_logs_all_metrics_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunWriter, "is_save_due", lambda self: True)
    config = tiny_run(f"{__name__}:Stops")
    monkeypatch.setattr(Stops, "stops", True)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", command="", progress=False)
    assert Stops.heard[-1] is None
    monkeypatch.setattr(Stops, "stops", False)
    file = tmp_path / "run" / "config.toml"
    told = file.read_text(encoding="utf-8")
    file.write_text(told.replace("quorum = 1.0", "quorum = 0.5").replace("gamma = 10.0", "gamma = 0.5"))
    with pytest.raises(RunFolderError, match=r"method.gamma = 10.0, and now it is 0.5"):
        resume(tmp_path / "run", progress=False)
    file.write_text(told.replace("quorum = 1.0", "quorum = 0.5"))  # whom it waits for may change
    result = resume(tmp_path / "run", progress=False)
    about, *lines, last = Stops.heard
    assert about["options"]["method.epochs"] == 30
    assert (about["name"], about["method"]) == ("run", "FedKD")
    kept = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert lines == [json.loads(line) for line in kept]
    assert [line["step"] for line in lines if line["phase"] == "distillation"] == list(range(1, 31))
    assert last["accuracy"] == result["accuracy"]


class Fails(Stops):
    """Its disk is full."""

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        raise OSError("no space left")


def test_failing_tracker_is_disabled_and_failing_start_stops_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Stops()
    monkeypatch.setattr(Stops, "stops", False)
    listeners = TrackerGroup([Fails(), other])
    listeners.start(tmp_path, "FedIOD")
    listeners.log([turn(1)])
    listeners.log([turn(2)])
    assert other.heard[1:] == [turn(1), turn(2)]
    assert listeners.notes == ["tracker 'Fails' failed and was disabled: no space left"]
    assert "no space left" in capsys.readouterr().err
    monkeypatch.setattr(Stops, "start", lambda *_: 1 / 0)
    listeners = TrackerGroup([other])
    with pytest.raises(FedstillError, match="tracker 'Stops' cannot start: division by zero"):
        listeners.start(tmp_path, "FedIOD")
    listeners.start(tmp_path, "FedIOD", finished=True)  # all has been trained, and the result is worth more
    assert listeners.notes == ["tracker 'Stops' failed and was disabled: division by zero"]
    listeners.close(None)
    assert other.heard[1:] == [turn(1), turn(2)]  # what has not begun is not told of an end


class FailsLast(Stops):
    """Its disk is full as it is told of the last metrics, or of the end."""

    at: ClassVar[str] = ""

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        if self.at == "log":
            raise OSError("no space left")

    def close(self, result: Mapping[str, Any] | None) -> None:
        raise OSError("no space left")


@pytest.mark.parametrize("at", ["log", "close"])
def test_failure_at_close_is_in_result(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told of metrics here before the run is over, as no state is saved."""
    monkeypatch.setattr(FailsLast, "at", at)
    monkeypatch.setattr(RunWriter, "is_save_due", lambda self: False)
    result = run(tiny_run(f"{__name__}:FailsLast"), tmp_path / "run", command="", progress=False)
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    note = f"tracker '{__name__}:FailsLast' failed and was disabled: no space left"
    assert note in told["notes"]
    assert told["notes"] == result["notes"]


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (["tensorbord"], r"invalid track = 'tensorbord' \(expected tensorboard, mlflow, wandb"),
        (["tests.own_lab:Lab"], "a subclass of Tracker"),
        ([f"{__name__}:Stops"] * 2, "each tracker once"),
    ],
)
def test_rejects_unknown_tracker(named: list[str], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        TrackerGroup(named)


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "tensorboard"), ("mlflow", "alembic"), ("wandb", "wandb")]
)
def test_missing_tracker_package_names_its_extra(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = from_dict({"method": {"name": "fedavg"}, "track": [name]})
    with pytest.raises(ArgumentError, match=rf"track is '{name}': .* pip install 'fedstill\[track\]'"):
        run(config, tmp_path / "run", command="", progress=False)
    assert not (tmp_path / "run").exists()


def test_custom_tracker_receives_metrics_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(MY_LAB)
    import torch

    x, y = torch.rand(60, 1, 8, 8) * 2 - 1, torch.arange(60) % 3
    net = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)) for _ in range(3)]
    given: dict[str, Any] = {
        "method": fedstill.FedKD(epochs=2),
        "public": x,
        "track": ["my_lab.csv_tracker:CsvTracker"],
    }
    data = ([(x[:30], y[:30]), (x[30:], y[30:])], net[:2], net[2], (x, y), 3)
    with pytest.raises(ArgumentError, match="none without out="):
        fedstill.distil(*data, **given)
    metrics = fedstill.distil(*data, **given, out=tmp_path / "run").result
    with (tmp_path / "run" / "tracked.csv").open() as file:
        rows = [tuple(row) for row in csv.reader(file)]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    wanted = [
        (str(line["step"]), name, str(value)) for line in lines for name, value in flatten_metrics(line)
    ]
    assert rows[1 : 1 + len(wanted)] == wanted
    assert ("", "result/accuracy", str(metrics["accuracy"])) in rows
