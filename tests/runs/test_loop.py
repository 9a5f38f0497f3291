"""Samples that a run saves: generated inputs, and the maps that they were generated from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedstill.core.errors import FedstillError
from fedstill.core.timing import Clock
from fedstill.runs.simulation import Simulation, build_simulation
from fedstill.runs.spec import from_dict


class Maker:
    """A server that returns the same images and maps each time, with all that the loop needs."""

    unit, total_steps, federation = "step", 2, SimpleNamespace(excluded={})

    def __init__(self, maps: torch.Tensor | None) -> None:
        self.completed_steps, self.maps = 0, maps

    def step(self) -> Mapping[str, float]:
        self.completed_steps += 1
        return {"loss": 1.0}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def preview_samples(self, count: int) -> torch.Tensor:
        return torch.full((count, 1, 4, 4), 0.5)

    def preview_maps(self, count: int) -> torch.Tensor | None:
        return None if self.maps is None else self.maps[:count]


class Looping(Simulation):
    """A run whose server only generates images."""

    def _train_locally(self) -> None:
        pass

    def _create_server(self, saved: Mapping[str, Any]) -> Any:
        return self.maker

    def evaluate(self) -> Mapping[str, float]:
        return {"accuracy": 50.0}

    def results(self) -> dict[str, Any]:
        return {}

    maker: Maker


@pytest.mark.parametrize("expected", [True, False])
def test_saves_label_maps_with_samples(tmp_path: Path, expected: bool) -> None:
    maps = torch.arange(3, dtype=torch.uint8).view(3, 1, 1).expand(3, 4, 4) if expected else None
    table = {"method": {"name": "fediod"}, "evaluation": {"every": 1, "samples": 2, "centralized": False}}
    run = Looping(build_simulation(from_dict(table))[0].setting)
    run.maker = Maker(maps)
    run.run(tmp_path)
    result: dict[str, Any] = {}
    run.records.finish(result, None)
    saved = load_file(tmp_path / "samples.safetensors")
    pictures = {"000001", "000002"}
    assert set(saved) == (pictures | {"000001.maps", "000002.maps"} if expected else pictures)
    if maps is not None:
        assert torch.equal(saved["000002.maps"], maps[:2])
    assert [line["accuracy"] for line in run.records.metrics] == [50.0, 50.0]


def test_clock_resumes() -> None:
    first, second = Clock(), Clock()
    with first.phase("distillation"):
        state = first.state_dict()  # during a phase
        assert 0 < state["seconds"]["distillation"] <= first.phase_seconds("distillation")
    second.load_state_dict({"seconds": {**state["seconds"], "local_training": 7.0}, "total": 9.0})
    assert second.phase_seconds("local_training") == 7.0
    assert second.total >= 9.0
    with second.phase("local_training"):
        pass
    assert second.seconds["local_training"] >= 7.0
    second.load_state_dict(None)
    assert second.seconds["local_training"] >= 7.0


def test_notes_best_evaluation(tmp_path: Path) -> None:
    table: dict[str, Any] = {
        "data": {"name": "digits", "train_limit": 200},
        "split": {"nodes": 2},
        "nodes": {"models": ["mlp:8"], "local": {"epochs": 3.0}, "policy": {"outputs_only": False}},
        "student": {"model": "mlp:8"},
        "method": {"name": "fedavg", "rounds": 3},
        "evaluation": {"every": 1, "centralized": False},
        "engine": {"threads": 1},
    }
    plain = Simulation(build_simulation(from_dict(table))[0].setting)
    with pytest.raises(FedstillError, match="no server yet"):
        plain.server.step()
    assert not any("best" in note for note in plain.run().get("notes", ()))
    changed = {**table, "evaluation": {**table["evaluation"], "best": True}}
    simulation = Simulation(build_simulation(from_dict(changed))[0].setting)
    result = simulation.run(tmp_path)
    evaluations = {
        line["accuracy"]: line["step"] for line in simulation.records.metrics if "accuracy" in line
    }
    assert len(evaluations) == 3
    [note] = result["notes"]
    best = max(evaluations)
    assert f"best of 3 evaluations on the test data was {best:.1f} % at round {evaluations[best]};" in note
    assert "selection on the test data" in note
    assert evaluations[result["accuracy"]] == 3  # the reported metric is that of the last evaluation
