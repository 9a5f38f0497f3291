"""FedAvgM: FedAvg with momentum at the server.

Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv:1909.06335, section 4.3: v <- beta v + dw, w <- w - v, where dw is the
weighted mean of w - w_k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedstill.core.errors import ArgumentError
from fedstill.methods import parameters
from fedstill.methods.fedavg import node_side
from fedstill.methods.parameters import AveragingServer, RoundsConfig
from fedstill.methods.server import ServerSetting
from fedstill.models.vector import to_vector, weighted_mean
from fedstill.protocol.method import Method, Needs


@dataclass(frozen=True, kw_only=True)
class FedAvgMConfig(RoundsConfig):
    """FedAvgM's options."""

    name: ClassVar[str] = "fedavgm"

    beta: float = 0.7
    """Momentum of the server, from 0 (FedAvg) to below 1."""
    server_lr: float = 1.0
    """Server learning rate: w <- w - server_lr v."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parameters.finite(self, "server_lr")
        if not 0 <= self.beta < 1:
            raise ArgumentError("method.beta", self.beta, "from 0 to below 1")


class FedAvgMServer(AveragingServer):
    """FedAvg's server, which goes on in the direction in which it went."""

    def __init__(self, config: FedAvgMConfig, setting: ServerSetting) -> None:
        super().__init__(config, setting)
        self.config = config
        self.v = torch.zeros_like(to_vector(self.shared))  # (P,)
        self.steered = parameters.trained_places(self.shared)  # (P,) true where a parameter lies

    def combine(self, w: torch.Tensor, updates: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        """``w - server_lr v``; buffers are averaged, since momentum would carry a variance below 0."""
        mean = weighted_mean(updates, n)
        self.v = self.config.beta * self.v + (w - mean)
        return torch.where(self.steered, w - self.config.server_lr * self.v, mean)

    def state(self) -> dict[str, Any]:
        """See :class:`Server`."""
        return {**super().state(), "v": self.v}

    def load(self, state: Mapping[str, Any]) -> None:
        """See :class:`Server`."""
        super().load(state)
        self.v = state["v"].to(self.v.device)


METHOD = Method(
    name="fedavgm",
    title="FedAvgM",
    paper="Hsu et al., arXiv:1909.06335",
    config=FedAvgMConfig,
    node_side=node_side,
    server=FedAvgMServer,
    needs=lambda config: Needs(trainable=True, same_architecture=True),
)
