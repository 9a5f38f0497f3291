"""Small runs on digits, in Python and through the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import nn

from fedstill.attacks.membership_scores import RecordLogits
from fedstill.attacks.simulated_updates import (
    ModelPart,
    ObservedUpdate,
    Schedule,
    loss_gradients,
    shared_parameter_names,
)
from fedstill.attacks.transcript import ReplayedRun
from fedstill.cli import main as cli
from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.data.in_memory_data import InMemoryData, InMemorySplit
from fedstill.federation.link_config import LinkConfig
from fedstill.models.inference import predict
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import PrivacyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import Method
from fedstill.runs import run
from fedstill.runs.build import Setting, make_nodes
from fedstill.runs.spec import EvaluationConfig, NodesConfig, RunSpec, from_dict

PACKS = Path(os.environ.get("FEDSTILL_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
needs_fashion = pytest.mark.skipif(
    not (PACKS / "fashion_mnist.npz").is_file(), reason="needs fashion_mnist.npz in FEDSTILL_DATA"
)

FEDAVG = {"name": "fedavg", "rounds": 2}
FEDIOD = {
    "name": "fediod",
    "steps": 6,
    "batch": 16,
    "generator": {"width": 4},
    "critic": {"width": 2},
    "student": {"steps": 1, "batch": 16, "memory": 32},
}
FEDKD = {"name": "fedkd", "student": {"epochs": 2}}
SGD = {"optimizer": "sgd", "lr": 0.1, "smoothing": 0.0, "epochs": 2.0}


def config(method: dict[str, Any], *, outputs_only: bool = False, **changes: Any) -> RunSpec:
    """Return a run of three nodes with 200 digits in total and small MLPs; ``changes`` replaces tables."""
    table: dict[str, Any] = {
        "data": {"name": "digits", "train_limit": 200},
        "split": {"nodes": 3, "alpha": 5.0},
        "nodes": {"models": ["mlp:32"], "local": SGD, "policy": {"outputs_only": outputs_only}},
        "student": {"model": "mlp:32"},
        "evaluation": {"centralized": False, "samples": 0, "every": 0},
        "engine": {"batching": "one-by-one", "threads": 1},
    }
    return from_dict({**table, **changes, "method": method})


def predict_records(
    target: nn.Module,
    shadows: Sequence[nn.Module],
    records: TensorData,
    inside: torch.Tensor | None = None,
    compute: Compute | None = None,
) -> RecordLogits:
    """Return logits of target and shadows for records; without ``inside`` no shadow trained on any."""
    logits = [predict(model, records.inputs, compute or Compute()) for model in (target, *shadows)]
    never_inside = torch.zeros(len(shadows), len(records), dtype=torch.bool)
    return RecordLogits(
        logits[0], torch.stack(logits[1:]), never_inside if inside is None else inside, records.targets
    )


def make_release(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    part: ModelPart = "all",
    smoothing: float = 0.0,
) -> ObservedUpdate:
    """Return one gradient of a batch, as observed by the server."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    schedule, gradients = (
        Schedule(smoothing=smoothing),
        loss_gradients(model, parameters, inputs, targets, smoothing),
    )
    return ObservedUpdate(
        model, {name: gradients[name].detach() for name in shared_parameter_names(model, part)}, schedule
    )


def replay(method: dict[str, Any], **changes: Any) -> ReplayedRun:
    return ReplayedRun.from_config(config(method, **changes))


def make_run(folder: Path, method: dict[str, Any], **changes: Any) -> Path:
    """Run a method, and return the folder of the finished run."""
    run.run(config(method, **changes), folder, command="fedstill run digits", progress=False)
    return folder


def small_run(
    out: Path, *words: str, task: str, method: str, model: str, local: dict[str, Any], **tables: Any
) -> int:
    """Run ``run.toml`` into ``out / "run"`` and return the exit code.

    ``tables`` are the data, and tables that replace those of this function.
    """
    config = {
        "task": {"name": task},
        "method": {"name": method},
        "student": {"model": model},
        "split": {"nodes": 3, "alpha": 5.0},
        "public": {"name": "held-out", "share": 0.4},
        "nodes": {"models": [model], "local": local, "policy": {"outputs_only": False}},
        "evaluation": {"centralized": False, "every": 0},
        **tables,
    }
    (out / "run.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    with pytest.raises(SystemExit) as exit:
        cli.main(["run", str(out / "run.toml"), *words, "--engine.threads", "1", "--out", str(out / "run")])
    assert isinstance(exit.value.code, int)
    return exit.value.code


def result_of(out: Path) -> dict[str, Any]:
    """Return the content of the run's ``result.json``."""
    result: dict[str, Any] = json.loads((out / "run" / "result.json").read_text(encoding="utf-8"))
    return result


def make_setting(
    *,
    method: Method,
    parts: Sequence[TensorData],
    models: Sequence[nn.Module],
    names: Sequence[str] = (),
    policies: Sequence[PolicyConfig] = (),
    privacies: Sequence[PrivacyConfig] = (),
    local: LocalConfig | None = None,
    engine: EngineConfig | None = None,
    link: LinkConfig | None = None,
    seed: int = 0,
    every: int | None = None,
    samples: int = 12,
    perceptual: str = "",
    **objects: Any,
) -> Setting:
    """Return the setting of a simulation; ``objects`` are further fields of :class:`Setting`."""
    spec = RunSpec(
        method=method,
        seed=seed,
        data=InMemoryData(),
        split=InMemorySplit(nodes=len(parts)),
        nodes=NodesConfig(
            models=tuple(type(model).__name__ for model in models),
            local=local or LocalConfig(),
            perceptual=perceptual,
        ),
        engine=engine or EngineConfig(),
        link=link or LinkConfig(),
        evaluation=EvaluationConfig(every=every, samples=samples, centralized=False),
    )
    nodes = make_nodes(parts, models, names, policies, privacies)
    return Setting(spec=spec, nodes=nodes, **objects)


def node_models(setting: Setting) -> list[nn.Module]:
    return [node.model for node in setting.nodes]


def node_data(setting: Setting) -> list[TensorData]:
    return [node.data for node in setting.nodes]


SHORT = [
    *("--nodes.local.epochs", "2", "--method.steps", "24", "--evaluation.every", "8", "--method.batch", "16"),
    *("--data.train_limit", "300"),
    *("--nodes.models", "small-cnn:8", "--student.model", "small-cnn:8", "--engine.threads", "1"),
    *("--method.generator.width", "16", "--method.critic.width", "8", "--engine.batching", "one-by-one"),
]


def fedstill_run(*words: str) -> int:
    """Run the command line in this process and return the exit code."""
    with pytest.raises(SystemExit) as exit:
        cli.main(["run", *words])
    assert isinstance(exit.value.code, int)
    return exit.value.code
