"""Runs of a comparison share the training of equal nodes, and reach the metrics of separate runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fedstill.compare import comparison_runner
from fedstill.compare.comparison import read_comparison
from fedstill.core.compute import Workers
from fedstill.core.run_writer import RunWriter
from fedstill.node import local_training
from fedstill.runs import run
from fedstill.runs.simulation import Simulation, build_simulation
from fedstill.runs.spec import RunSpec, from_dict
from fedstill.runs.trained_model_cache import TrainedModels

FEDKD = {"name": "fedkd", "student": {"epochs": 2}}
CENTRALIZED = "centralised"  # node of centralized training; the name of its random streams
FEDIOD = {"name": "fediod", "steps": 2, "batch": 8, "generator": {"width": 4}, "critic": {"width": 4}}


PLAN = """
seeds = 2
methods = ["standalone", "ensemble"]

[base]
data = { name = "digits", train_limit = 100 }
split = { nodes = 2 }
nodes = { models = ["mlp:8"], local = { epochs = 1 } }
student = { model = "mlp:8" }
engine = { threads = 1 }
"""
MANY = {"models": ["mlp:8"], "local": {"epochs": 60.0}}


def config(method: dict[str, Any], **more: Any) -> RunSpec:
    return from_dict(
        {
            "data": {"name": "digits", "train_limit": 150},
            "split": {"name": "dirichlet", "nodes": 3, "alpha": 1.0},
            "public": {"name": "held-out"},
            "nodes": {"models": ["mlp:8", "small-cnn:4"], "local": {"epochs": 2.0}},
            "student": {"model": "small-cnn:4"},
            "engine": {"threads": 1},
            "evaluation": {"every": 0},
            "method": method,
            **more,
        }
    )


def run_result(of: RunSpec, out: Path, trained: Path | None) -> dict[str, Any]:
    run.run(of, out, command="", progress=False, trained=trained)
    result: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return result


def untimed(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the names of trained nodes are added."""
    who, train = [], local_training.train

    def counting(nodes: Any, *args: Any, **options: Any) -> int:
        who.extend(node.name for node in nodes)
        return train(nodes, *args, **options)

    monkeypatch.setattr(local_training, "train", counting)
    return who


def test_cached_models_reach_equal_metrics(tmp_path: Path, counted: list[str]) -> None:
    trained = tmp_path / "trained"
    first = run_result(config(FEDKD), tmp_path / "fedkd", trained)
    assert {"node-0", "node-1", "node-2", CENTRALIZED} <= set(counted)
    counted.clear()
    second = run_result(config(FEDIOD), tmp_path / "fediod", trained)
    assert counted == []
    alone = run_result(config(FEDIOD), tmp_path / "alone", None)
    assert counted
    for name in ("accuracy", "standalone", "centralized", "ensemble", "bytes", "queries"):
        assert second[name] == alone[name]
    students = [(tmp_path / name / "student.safetensors").read_bytes() for name in ("fediod", "alone")]
    assert students[0] == students[1]
    assert untimed(tmp_path / "fediod") == untimed(tmp_path / "alone")
    for phase in ("local_training", "centralized"):  # reported as if trained
        assert second["seconds"][phase] == pytest.approx(first["seconds"][phase], rel=0.5, abs=0.2)
    assert second["seconds"]["total"] > second["seconds"]["local_training"]


def test_caches_outputs_on_test_set(tmp_path: Path) -> None:
    """The nodes' and the ensemble's metrics use the same outputs, and so do another run's."""
    evaluated: list[str] = []
    for of, expected in ((FEDKD, ["node-0", "node-1", "node-2", CENTRALIZED]), (FEDIOD, [])):
        simulation: Simulation = build_simulation(config(of))[0]
        simulation.trained = TrainedModels(tmp_path, config(of))
        tested = simulation.test.inputs.untyped_storage().data_ptr()

        def about(
            model: nn.Module, given: tuple[Any, ...], run: Simulation = simulation, of: int = tested
        ) -> None:
            nodes = [*run.nodes, *([] if run.centralized_node is None else [run.centralized_node])]
            if isinstance(given[0], torch.Tensor) and given[0].untyped_storage().data_ptr() == of:
                evaluated.extend(node.name for node in nodes if node.model is model)

        hook = register_module_forward_pre_hook(about)
        simulation.run(None)
        hook.remove()
        assert evaluated == expected
        evaluated.clear()


def test_comparison_trains_once_per_setting_and_seed(tmp_path: Path, counted: list[str]) -> None:
    made = tmp_path / "plan.toml"
    made.write_text(PLAN, encoding="utf-8")
    out = tmp_path / "out"
    comparison_runner.compare(read_comparison(made), out, command="", report=lambda folder: None, quiet=True)
    assert sorted(counted) == ["node-0", "node-0", "node-1", "node-1"]
    assert {path.name for path in out.iterdir() if path.is_dir()} == {
        f"{method}-seed{seed}" for method in ("standalone", "ensemble") for seed in (0, 1)
    }


def test_resumed_run_keeps_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the steps of a stack would be saved as those of its first node."""
    many = config({"name": "standalone"}, split={"name": "dirichlet", "nodes": 4, "alpha": 1.0}, nodes=MANY)
    whole = build_simulation(many)[0].run(None)

    monkeypatch.setattr(RunWriter, "is_save_due", lambda records: True)
    monkeypatch.setattr(Simulation, "save_state", stopping(Simulation.save_state))
    with pytest.raises(KeyboardInterrupt):
        build_simulation(many)[0].run(tmp_path)
    monkeypatch.undo()
    later = build_simulation(many)[0]
    later.compute.workers = Workers(4)  # on such a machine, four nodes are not stacked
    results = later.run(tmp_path)
    assert results["standalone"] == whole["standalone"]


def stopping(save: Callable[[Simulation], None]) -> Callable[[Simulation], None]:
    """Return a save function that is interrupted after its first save."""

    def saving(simulation: Simulation) -> None:
        save(simulation)
        raise KeyboardInterrupt

    return saving


def files(of: RunSpec, about: object = 0) -> Path | None:
    simulation: Simulation = build_simulation(of)[0]
    return TrainedModels(Path("trained"), of).model_file([[node] for node in simulation.nodes], about)


def test_cache_key_depends_on_training() -> None:
    base = config(FEDKD)
    assert files(base) == files(dataclasses.replace(base, name="other")) == files(config(FEDIOD)) is not None
    local = {"models": ["mlp:8", "small-cnn:4"], "local": {"epochs": 3.0}}
    others = [
        config(FEDKD, seed=1),
        config(FEDKD, nodes=local),
        config(FEDKD, data={"name": "digits", "train_limit": 149}),
    ]
    model_files = [files(other) for other in others]
    assert len({*model_files, files(base), files(base, "another span")}) == 5
    one, other = (build_simulation(base)[0] for _ in range(2))
    with torch.no_grad():
        next(other.nodes[1].model.parameters()).view(-1)[0] += 1e-6
    keys = [TrainedModels(Path("trained"), base).model_file([made.nodes]) for made in (one, other)]
    assert keys[0] != keys[1]


def test_private_training_is_not_cached() -> None:
    nodes = {"models": ["mlp:8"], "privacy": {"mechanism": "dp-sgd", "epsilon": 5.0}}
    private = config(FEDKD, nodes=nodes)
    assert files(private) is None
