"""Images with one bright row whose position is the class, and short runs on them."""

from __future__ import annotations

from typing import Any

import torch

import fedstill
from fedstill.core.compute import EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.models import SmallCNN, build
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.runs.build import Setting
from fedstill.tasks.classification import Classification
from tests.support.runs import make_setting

SHAPE = (1, 8, 8)


def bright_rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images with one bright row whose position gives one of three classes."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=draw)
    pixels = -0.8 + 0.1 * torch.rand(count, 1, 8, 8, generator=draw)
    pixels[torch.arange(count), 0, 2 * labels] = 0.8
    return pixels, labels


def few(**changes: Any) -> dict[str, Any]:
    """Return arguments for a short run of two nodes; networks are new, with equal initial weights."""
    torch.manual_seed(0)
    return {
        "data": [bright_rows(60, 1), bright_rows(90, 2)],
        "models": [SmallCNN(SHAPE, 3, 8), SmallCNN(SHAPE, 3, 8)],
        "student": SmallCNN(SHAPE, 3, 8),
        "test": bright_rows(60, 3),
        "classes": 3,
        "method": fedstill.FedIOD(
            steps=6, generator=fedstill.InputGenerator(width=8), critic=fedstill.Discriminators(width=8)
        ),
        "local": fedstill.LocalConfig(epochs=2, batch=16),
        "engine": fedstill.EngineConfig(batching="one-by-one"),
        "every": 2,
        **changes,
    }


SIZES = (10, 20, 30)


def blobs(count: int, seed: int) -> TensorData:
    return TensorData(*bright_rows(count, seed))


def setting(method: Any, spec: str = "mlp:8", *, test: int = 40, nodes: int = 3, **changes: Any) -> Setting:
    given: dict[str, Any] = {
        "task": Classification(3),
        "parts": [blobs(SIZES[index % 3], index) for index in range(nodes)],
        "models": [build(spec, SHAPE, 3, 0, index) for index in range(nodes)],
        "student": build(spec, SHAPE, 3, 0, "student"),
        "test": blobs(test, 9),
        "method": method,
        "policies": [PolicyConfig(outputs_only=False)] * nodes,
        "local": LocalConfig(epochs=2, batch=10),
        "engine": EngineConfig(batching="one-by-one"),
        **changes,
    }
    return make_setting(**given)
