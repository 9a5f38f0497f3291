"""FedAvgM: FedAvg with momentum at the server.

Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv:1909.06335, section 4.3: v <- beta v + dw, w <- w - v, where dw is the
weighted mean of w - w_k.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from annotated_types import Interval

from fedstill.core.options import NonNegativeFloat
from fedstill.methods import Server
from fedstill.methods.fedavg import FedAvg, FedAvgState
from fedstill.models.module_utils import to_vector, weighted_mean


@dataclass
class FedAvgMState(FedAvgState):
    """Server state, with the momentum."""

    v: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # (P,)
    is_parameter: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # (P,) true for parameters


@dataclass(frozen=True, kw_only=True)
class FedAvgM(FedAvg):
    """FedAvgM's options."""

    title: ClassVar[str] = "FedAvgM"
    paper: ClassVar[str] = "Hsu et al., arXiv:1909.06335"

    beta: Annotated[float, Interval(ge=0, lt=1)] = 0.7
    """Momentum of the server, from 0 (FedAvg) to below 1."""
    server_lr: NonNegativeFloat = 1.0
    """Server learning rate: w <- w - server_lr v."""

    def init_state(self, server: Server) -> FedAvgMState:
        return FedAvgMState(
            v=torch.zeros_like(to_vector(server.student)), is_parameter=parameter_mask(server.student)
        )

    def aggregate(
        self, state: FedAvgMState, w: torch.Tensor, w_k: torch.Tensor, n_k: torch.Tensor
    ) -> torch.Tensor:
        """Return ``w - server_lr v``; buffers are averaged, as momentum could make a variance negative."""
        mean = weighted_mean(w_k, n_k)
        state.v = self.beta * state.v + (w - mean)
        return torch.where(state.is_parameter, w - self.server_lr * state.v, mean)


def parameter_mask(module: torch.nn.Module) -> torch.Tensor:
    """Return a mask of a module's vector: ``(P,)``, true for parameters, false for buffers."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    masks = [
        torch.full((tensor.numel(),), name in parameters, device=tensor.device)
        for name, tensor in module.state_dict().items()
    ]
    return torch.cat(masks)
