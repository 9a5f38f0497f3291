"""Files of a run: metrics agree with the checkpoint, and saving takes a small share of the time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedstill.core import run_writer as records_module
from fedstill.core.errors import RunFolderError
from fedstill.core.run_writer import SECONDS_BETWEEN, STATE_FILE, RunWriter


class Clock:
    """Replaces the time module; saving takes ``cost`` seconds."""

    def __init__(self) -> None:
        self.now, self.cost = 1000.0, 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, save_state = Clock(), records_module.save_state

    def save(*args: Any) -> None:
        save_state(*args)
        clock.now += clock.cost

    monkeypatch.setattr(records_module, "time", clock)
    monkeypatch.setattr(records_module, "save_state", save)
    return clock


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_keeps_everything_in_memory_without_folder() -> None:
    records = RunWriter(None)
    records.add_metrics({"step": 1})
    records.save({"a": 1})
    records.finish({}, nn.Linear(1, 1))
    assert records.metrics == [{"step": 1}]
    assert records.load() == {}
    assert not records.is_save_due()


def test_state_metrics_and_samples_round_trip(tmp_path: Path) -> None:
    records = RunWriter(tmp_path)
    records.add_metrics({"step": 1, "loss": 0.5})
    records.samples["000001"] = torch.arange(4, dtype=torch.uint8)
    records.save({"done": 1, "nested": {0: torch.ones(2)}})

    again = RunWriter(tmp_path)
    state = again.load()
    assert state["done"] == 1
    assert torch.equal(state["nested"][0], torch.ones(2))
    assert again.metrics == [{"step": 1, "loss": 0.5}]
    assert torch.equal(again.samples["000001"], records.samples["000001"])


def test_resume_requires_same_options(tmp_path: Path) -> None:
    begun = {"method.steps": "200", "seed": "0"}
    RunWriter(tmp_path, options=begun).save({"done": 1})
    assert RunWriter(tmp_path, options=begun).load()["done"] == 1
    message = r"began with method.steps = 200, but now it is 110 \(1 more such\)"
    with pytest.raises(RunFolderError, match=message):
        RunWriter(tmp_path, options={"method.steps": "110", "seed": "1"}).load()


def test_resume_drops_metrics_after_last_checkpoint(tmp_path: Path) -> None:
    records = RunWriter(tmp_path)
    for step in (1, 2):
        records.add_metrics({"step": step, "run": "first"})
    records.save({"done": 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:  # lines written after the last checkpoint
        file.write('{"step":3,"run":"first"}\n{"step":4,"ru')

    again = RunWriter(tmp_path)
    again.load()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    for step in (3, 4):
        again.add_metrics({"step": step, "run": "second"})
    again.save({"done": 4})
    runs = [(line["step"], line["run"]) for line in lines(tmp_path)]
    assert runs == [(1, "first"), (2, "first"), (3, "second"), (4, "second")]
    assert again.metrics == lines(tmp_path)


def test_failed_save_keeps_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    records = RunWriter(tmp_path)
    records.add_metrics({"step": 1})
    records.save({"done": 1})
    records.add_metrics({"step": 2})
    with monkeypatch.context() as patch:
        patch.setattr(records_module, "save_state", fail)
        with pytest.raises(OSError, match="no space"):
            records.save({"done": 2})
    again = RunWriter(tmp_path)
    assert again.load()["done"] == 1
    assert lines(tmp_path) == [{"step": 1}]


def test_save_is_due_after_interval(tmp_path: Path, clock: Clock) -> None:
    records = RunWriter(tmp_path)
    assert not records.is_save_due()
    clock.now += SECONDS_BETWEEN + 0.1
    assert records.is_save_due()
    records.save({})
    assert not records.is_save_due()
    clock.now += SECONDS_BETWEEN + 0.1
    assert records.is_save_due()


def test_slow_saves_are_rare(tmp_path: Path, clock: Clock) -> None:
    records = RunWriter(tmp_path)
    clock.cost = 2 * SECONDS_BETWEEN
    records.save({})
    clock.now += 5 * SECONDS_BETWEEN
    assert not records.is_save_due(), "saving would take more than 10 % of the time"
    clock.now += 100 * SECONDS_BETWEEN
    assert records.is_save_due()
    clock.cost = 0.0  # the disk is fast again
    records.save({})
    clock.now += SECONDS_BETWEEN + 0.1
    assert records.is_save_due()


def test_finish_writes_results_and_deletes_checkpoint(tmp_path: Path) -> None:
    records = RunWriter(tmp_path)
    records.add_metrics({"step": 1})
    records.samples["000001"] = torch.arange(4, dtype=torch.uint8)
    records.save({"done": 1})
    records.add_metrics({"step": 2})
    student = nn.Linear(2, 1)
    records.finish({"student": {"accuracy": 97.5}}, student)

    assert json.loads((tmp_path / "result.json").read_text()) == {"student": {"accuracy": 97.5}}
    assert torch.equal(load_file(tmp_path / "student.safetensors")["weight"], student.weight)
    assert load_file(tmp_path / "samples.safetensors")["000001"].tolist() == [0, 1, 2, 3]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert not (tmp_path / STATE_FILE).exists()


def test_nonfinite_numbers_are_null_in_files(tmp_path: Path) -> None:
    """NaN and Infinity are not JSON.

    A resumed run has the same metrics as an uninterrupted one.
    """
    records = RunWriter(tmp_path)
    records.add_metrics({"losses": {"total": float("nan")}, "step": 1})
    records.save({})
    again = RunWriter(tmp_path)
    again.load()
    assert again.metrics == records.metrics == [{"losses": {"total": None}, "step": 1}]
    records.finish({"privacy": {"epsilon": float("inf")}}, None)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"losses":{"total":null},"step":1}\n'
    assert "Infinity" not in (tmp_path / "result.json").read_text()


def test_resume_rejects_missing_metrics(tmp_path: Path) -> None:
    records = RunWriter(tmp_path)
    for step in range(3):
        records.add_metrics({"step": step})
    records.save({})
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(RunFolderError, match=r"2 lines .expected 3."):
        RunWriter(tmp_path).load()


def test_slow_listener_does_not_delay_checkpoint(tmp_path: Path, clock: Clock) -> None:
    state_exists: list[bool] = []

    def on_metrics(lines: Any) -> None:
        state_exists.append((tmp_path / STATE_FILE).exists())
        clock.now += 1000 * SECONDS_BETWEEN

    records = RunWriter(tmp_path, on_metrics)
    records.add_metrics({"step": 1})
    records.save({})
    assert state_exists == [True]  # the checkpoint is saved first
    clock.now += SECONDS_BETWEEN + 0.1
    assert records.is_save_due()
