"""FedAvgM: FedAvg with momentum at the server.

Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv:1909.06335, section 4.3: v <- beta v + dw, w <- w - v, where dw is the
weighted mean of w - w_k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from annotated_types import Interval

from fedstill.core.options import NonNegativeFloat
from fedstill.methods import HistogramState, Server
from fedstill.methods._averaging import Averaging
from fedstill.models.module_utils import to_vector, weighted_mean
from fedstill.protocol.secure_aggregation import SumWeighting


@dataclass
class FedAvgMState(HistogramState):
    """What changes from round to round: the momentum, too."""

    v: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # (P,)
    steered: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # (P,) true where a parameter lies


@dataclass(frozen=True, kw_only=True)
class FedAvgM(Averaging):
    """FedAvgM's options."""

    title: ClassVar[str] = "FedAvgM"
    paper: ClassVar[str] = "Hsu et al., arXiv:1909.06335"

    beta: Annotated[float, Interval(ge=0, lt=1)] = 0.7
    """Momentum of the server, from 0 (FedAvg) to below 1."""
    server_lr: NonNegativeFloat = 1.0
    """Server learning rate: w <- w - server_lr v."""

    def init_state(self, server: Server) -> FedAvgMState:
        return FedAvgMState(
            v=torch.zeros_like(to_vector(server.student)), steered=trained_places(server.student)
        )

    def sum_weightings(self) -> Mapping[str, SumWeighting]:
        return self.round_sum_weightings()  # the mean of all w_k is all that momentum is of

    def combine(
        self, state: FedAvgMState, w: torch.Tensor, updates: torch.Tensor, n: torch.Tensor
    ) -> torch.Tensor:
        """``w - server_lr v``; buffers are averaged, since momentum would carry a variance below 0."""
        mean = weighted_mean(updates, n)
        state.v = self.beta * state.v + (w - mean)
        return torch.where(state.steered, w - self.server_lr * state.v, mean)


def trained_places(module: torch.nn.Module) -> torch.Tensor:
    """Where in a module's vector its parameters lie: ``(P,)``, true for parameters, false for buffers."""
    learned = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    places = [
        torch.full((tensor.numel(),), name in learned, device=tensor.device)
        for name, tensor in module.state_dict().items()
    ]
    return torch.cat(places)
