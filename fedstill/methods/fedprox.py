"""FedProx: FedAvg with local training that stays close to the weights that the server sent.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020,
Eq. 2: each node descends F_k(w) + mu/2 ||w - w^t||^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstill.core.options import NonNegativeFloat
from fedstill.methods import NodeGroup, TrainStep
from fedstill.methods._averaging import AveragingMethod


@dataclass(frozen=True, kw_only=True)
class FedProx(AveragingMethod):
    """FedProx's options."""

    title: ClassVar[str] = "FedProx"
    paper: ClassVar[str] = "Li et al., MLSys 2020"
    extra_loss: ClassVar[str] = "the proximal term"

    mu: NonNegativeFloat = 0.01
    """Weight of the proximal term mu/2 ||w - w^t||^2; 0 is FedAvg."""

    def make_train_step(self, nodes: NodeGroup) -> TrainStep:
        """Return a step on F_k(w) + mu/2 ||w - w^t||^2."""
        task, smoothing = nodes.setting.task, nodes.setting.local.smoothing
        sent: dict[str, torch.Tensor] = {}  # w^t, by name (G, ...)

        def train_step(
            group: NodeGroup, step: int, inputs: torch.Tensor, targets: torch.Tensor
        ) -> torch.Tensor:
            model = group.module("model")
            if not sent:  # before the first step the models are as they were sent
                parameters = model.trainable_parameters(len(group))
                sent.update({name: w.detach().clone() for name, w in parameters.items()})
            losses: torch.Tensor = task.loss(model(inputs), targets, smoothing)  # F_k(w)  (G,)
            total = losses + self.mu / 2 * squared_distance(
                model.trainable_parameters(len(inputs)), sent
            )  # Eq. 2
            group.step("model", total)
            return losses

        return train_step


def squared_distance(w: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return ||w - w^t||^2 of G models, from parameters by name ``(G, ...)``, as ``(G,)``."""
    squares = [(now - sent[name][: len(now)]).square().flatten(1).sum(1) for name, now in w.items()]
    return torch.stack(squares).sum(0)
