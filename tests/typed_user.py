"""A user's code, which ``mypy`` checks as code outside of the package: public names have exact types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import assert_type

import fedstill


def focal_loss(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p = z.softmax(1).gather(1, y[:, None])
    return ((1 - p) ** 2 * -p.log()).mean()


def run(folder: Path) -> float:
    data = fedstill.datasets.digits(nodes=3, alpha=0.3)
    assert_type(data.shape, tuple[int, ...])
    outcome = fedstill.distil(
        data.nodes,
        [fedstill.models.SmallCNN((1, 8, 8), 10) for _ in data.nodes],
        fedstill.models.SmallCNN((1, 8, 8), 10),
        data.test,
        data.classes,
        method=fedstill.FedIOD(steps=10),
        local=fedstill.LocalConfig(epochs=2),
        local_loss=focal_loss,
        out=folder,
    )
    assert_type(outcome, fedstill.Outcome)
    assert_type(outcome.student, nn.Module | None)
    assert_type(outcome.models, tuple[nn.Module, ...])
    assert_type(outcome.history, list[dict[str, Any]])
    assert_type(outcome.predictions, torch.Tensor | None)
    assert_type(outcome.metrics, Mapping[str, float | None])
    compared = fedstill.compare_methods(["fedkd", "fedavg"], out=folder / "compare", seeds=3)
    assert_type(compared, fedstill.Compared)
    return assert_type(outcome.accuracy, float)


def refused(data: fedstill.datasets.FederatedData) -> None:
    fedstill.datasets.digits(nodes="3")  # type: ignore[arg-type]
    fedstill.FedIOD(steps="many")  # type: ignore[arg-type]
    data.nodez  # type: ignore[attr-defined]  # noqa: B018
