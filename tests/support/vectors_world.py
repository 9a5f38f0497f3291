"""Nodes with feature vectors of three classes, extremely skewed, for methods that need vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedstill.core.compute import EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.models import build
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.method import Method
from fedstill.runs.build import Setting
from fedstill.tasks.classification import Classification
from tests.support.runs import make_setting

FEATURES, CLASSES = 4, 3
TASK = Classification(CLASSES).on_features()
OPEN = PolicyConfig(outputs_only=False)


def vectors(count: int = 90, seed: int = 0) -> TensorData:
    """Return samples of classes with different means and a common covariance that is not diagonal."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % CLASSES
    mixing = torch.tensor(
        [[1.0, 0.5, 0.0, 0.0], [0.0, 1.0, 0.3, 0.0], [0.0, 0.0, 0.5, 0.2], [0.0, 0.0, 0, 1]]
    )
    means = 3 * torch.eye(CLASSES, FEATURES) + 0.5
    x = means[y] + torch.randn(count, FEATURES, generator=generator) @ mixing
    return TensorData(x, y)


def by_class(data: TensorData) -> list[TensorData]:
    """Return one node per class; the first node also has a few samples of the others."""
    at = [torch.nonzero(data.targets == c).flatten() for c in range(CLASSES)]
    rows = [torch.cat([at[0], at[1][:5]]), at[1][5:], at[2]]
    return [data.subset(each) for each in rows]


def setting(method: Method, parts: Sequence[TensorData] | None = None, **changes: Any) -> Setting:
    """Return a federation of nodes with vectors and linear models."""
    parts = by_class(vectors()) if parts is None else parts
    shape = tuple(parts[0].inputs.shape[1:])
    given: dict[str, Any] = {
        "task": TASK,
        "parts": parts,
        "models": [build("linear", shape, CLASSES, 0, index) for index in range(len(parts))],
        "student": build("linear", shape, CLASSES, 0, "student"),
        "test": vectors(60, seed=1),
        "policies": [OPEN] * len(parts),
        "engine": EngineConfig(batching="one-by-one"),
        **changes,
    }
    return make_setting(method=method, **given)
