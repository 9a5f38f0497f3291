"""Small runs of digits whose folders the tests attack."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
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
from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.node.local_training import predict
from fedstill.runs import run
from fedstill.runs.spec import RunSpec, from_dict

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
    """Three nodes of 200 digits with a small MLP each; ``changes`` replaces tables."""
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
    """Logits of target and shadows about records; without ``inside`` no shadow learned from any."""
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
    """One gradient of a batch."""
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
