"""FedProx: FedAvg with local training that stays close to the weights that the server sent.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020,
Eq. 2: each node descends F_k(w) + mu/2 ||w - w^t||^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstill.core.options import NonNegativeFloat
from fedstill.methods import NodeView, Span
from fedstill.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedProx's options."""

    title: ClassVar[str] = "FedProx"
    paper: ClassVar[str] = "Li et al., MLSys 2020"
    extra_loss: ClassVar[str] = "the proximal term"

    mu: NonNegativeFloat = 0.01
    """Weight of the proximal term mu/2 ||w - w^t||^2; 0 is FedAvg."""

    def train_locally(self, node: NodeView, round: int) -> None:
        """Descend F_k(w) + mu/2 ||w - w^t||^2 (Eq. 2), from w = w^t on."""
        w_t = {name: w.detach().clone() for name, w in node.model.named_parameters().items()}
        node.train(Span.part(round, self.rounds), term=self.proximal_term, given=w_t)

    def proximal_term(self, node: NodeView, step: int, **w_t: torch.Tensor) -> torch.Tensor:
        """Return mu/2 ||w - w^t||^2, which depends on no record."""
        distance = [
            (w - w_t[name]).square().flatten().sum() for name, w in node.model.named_parameters().items()
        ]
        return self.mu / 2 * torch.stack(distance).sum()
