"""FedTGP: FedProto with global prototypes that are trained at the server to be far apart from each other.

Zhang, Liu, Hua, Cao: "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning
for Data and Model Heterogeneity in Federated Learning", AAAI 2024, Algorithm 1. Symbols are the paper's: the
nodes' prototypes P_i^c, the trained vectors of each class, from which F of parameters theta_F computes the
prototypes ^P^c, the Euclidean distance phi, and the margin delta(t), at most tau.

The nodes do the same as in FedProto.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.dataset import shuffled_batches
from fedstill.core.optimizers import SGD
from fedstill.core.options import NonNegativeFloat, PositiveInt
from fedstill.methods import NodeSetting, Query, Responses, Server, descend, seeded, torch_generator
from fedstill.methods.fedavg import sample_nodes
from fedstill.methods.fedproto import FedProto


class TrainablePrototypes(nn.Module):
    """^P^c = F(theta_F; a learned vector of c), F two layers: ``(classes, p)``."""

    def __init__(self, classes: int, p: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(classes, p))
        self.F = nn.Sequential(nn.Linear(p, p), nn.ReLU(), nn.Linear(p, p))

    def forward(self) -> torch.Tensor:
        """Return all prototypes."""
        prototypes: torch.Tensor = self.F(self.vectors)
        return prototypes


@dataclass
class FedTGPState:
    """Server state: the trained prototypes and their optimizer."""

    C: torch.Tensor  # global prototypes (classes, p), 0: none yet
    P_hat: nn.Module
    sgd: torch.optim.Optimizer


@dataclass(frozen=True, kw_only=True)
class FedTGP(FedProto):
    """FedTGP's options."""

    title: ClassVar[str] = "FedTGP"
    paper: ClassVar[str] = "Zhang et al., AAAI 2024"

    tau: NonNegativeFloat = 100.0
    """Largest margin."""
    server_epochs: PositiveInt = 100
    """Passes of the server over the nodes' prototypes (S)."""
    server_batch: PositiveInt = 10
    """Prototypes in a batch."""
    server_lr: NonNegativeFloat = 1e-2
    """Learning rate of the server's SGD."""

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield self.prototype_query()  # all prototypes count equally

    def init_state(self, server: Server) -> FedTGPState:
        classes, p = server.task.classes, self.prototype_size(server)
        with seeded(server.seed, "prototypes"):
            P_hat = server.compute.to_device(TrainablePrototypes(classes, p))
        sgd = SGD(P_hat.parameters(), self.server_lr)
        return FedTGPState(torch.zeros(classes, p, device=server.device), P_hat, sgd)

    def step(self, server: Server, state: FedTGPState, t: int) -> Mapping[str, float]:
        names = sample_nodes(server.federation.present, self.participation, server.seed, t)
        previous = state.C
        responses = server.query("train_locally", nodes=names, C=previous, round=t)
        losses = self.train_prototypes(server, state, responses, t)
        return {"moved": (state.C - previous).norm().item(), **losses}

    def train_prototypes(
        self, server: Server, state: FedTGPState, responses: Responses, t: int
    ) -> Mapping[str, float]:
        """Train ^P^c for S passes over all P_i^c of the nodes, all with equal weight."""
        C = responses["C"]  # (K, classes, p)
        held = (C != 0).any(2)  # (K, classes)
        P, c = C[held], held.nonzero()[:, 1]  # (N, p) and (N,)
        delta = class_margin(C, held, self.tau)
        loss = torch.zeros(())
        for epoch in range(self.server_epochs if len(P) else 0):
            draw = torch_generator(server.seed, "server's order", t, epoch)
            for rows in shuffled_batches(len(P), self.server_batch, draw):
                chosen = rows.to(P.device)
                loss = contrastive_loss(P[chosen], c[chosen], state.P_hat(), delta)
                descend(state.sgd, loss)
        state.C = state.P_hat().detach()
        return {"contrast": loss.item(), "margin": delta.item()}


def class_margin(P: torch.Tensor, held: torch.Tensor, tau: float) -> torch.Tensor:
    """Return delta(t): the largest distance of two classes' means over nodes, at most tau.

    Args:
        P: prototypes ``(K, classes, p)``.
        held: whether a node holds a class ``(K, classes)``.
        tau: the largest margin.
    """
    weight = held.unsqueeze(2).to(P.dtype)
    Q = ((weight * P).sum(0) / weight.sum(0).clamp_min(1))[
        held.any(0)
    ]  # (classes, p), without absent classes
    return torch.cdist(Q, Q).max().clamp(max=tau) if len(Q) else P.new_zeros(())


def contrastive_loss(
    P: torch.Tensor, c: torch.Tensor, P_hat: torch.Tensor, delta: torch.Tensor
) -> torch.Tensor:
    """Return the adaptive-margin-enhanced contrastive loss, the mean over prototypes ``(N, p)`` of classes
    ``(N,)``.

    It is -log of e^-(phi(P, ^P^c) + delta) over itself plus all e^-phi(P, ^P^c') of other classes: the right
    class must be closer by the margin.
    """
    phi = torch.cdist(P, P_hat, compute_mode="donot_use_mm_for_euclid_dist")  # (N, classes)
    return F.cross_entropy(-(phi + delta * F.one_hot(c, len(P_hat))), c)
