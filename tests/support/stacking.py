"""Small networks and nodes to stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from fedstill.core.dataset import TensorData
from fedstill.models import PatchCritic, build
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda module: torch.optim.Adam(module.parameters(), 0.01, eps=1e-3, weight_decay=0.01),
    "sgd": lambda module: torch.optim.SGD(module.parameters(), 0.05, momentum=0.9, weight_decay=0.01),
}
NETWORKS = ("small-cnn:4", "resnet8:4", "mlp:8", "lenet5", "critic")
G, B = 3, 4


def network(name: str, index: int) -> nn.Module:
    if name == "critic":
        torch.manual_seed(index)
        return PatchCritic(1, 4)
    return build(name, (1, 8, 8), 3, 0, index)


def networks(name: str) -> list[nn.Module]:
    return [network(name, index) for index in range(G)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def node(name: str, model: nn.Module, size: int = 6) -> Node:
    data = TensorData(random(size, 1, 8, 8, seed=len(name)), torch.arange(size) % 3)
    return Node(name, data, model, Gate(name, PolicyConfig(), AuditLog()), 0)


def close(a: torch.Tensor | None, b: torch.Tensor | None) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def same_state(stacked: Sequence[nn.Module], alone: Sequence[nn.Module]) -> None:
    for one, other in zip(stacked, alone, strict=True):
        for name, value in other.state_dict().items():
            close(one.state_dict()[name], value)
