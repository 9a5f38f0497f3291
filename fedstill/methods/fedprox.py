"""FedProx: FedAvg whose local training is held back near the weights that the server sent.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks",
MLSys 2020, Eq. 2: each node descends F_k(w) + mu/2 ||w - w^t||^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstill.methods import parameters
from fedstill.methods.parameters import AveragingServer, RoundsConfig
from fedstill.node.group import Group
from fedstill.node.training import Work
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide


@dataclass(frozen=True, kw_only=True)
class FedProxConfig(RoundsConfig):
    """FedProx's options."""

    name: ClassVar[str] = "fedprox"

    mu: float = 0.01
    """Weight of the proximal term mu/2 ||w - w^t||^2; 0 is FedAvg."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parameters.finite(self, "mu")


def node_side(config: FedProxConfig, setting: NodeSetting) -> NodeSide:
    """What a node answers: its data's size, and its model after a round of training."""

    def make_work() -> Work:
        task, smoothing = setting.task, setting.local.smoothing
        sent: dict[str, torch.Tensor] = {}  # w^t, by name (G, ...)

        def work(group: Group, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            model = group.bench("model")
            if not sent:  # the models are as they were sent until the first step is taken
                everyone = model.trained(len(group))
                sent.update({name: w.detach().clone() for name, w in everyone.items()})
            losses = task.loss(model(inputs), targets, smoothing)  # F_k(w)  (G,)
            held = losses + config.mu / 2 * squared_distance(model.trained(len(inputs)), sent)  # Eq. 2
            group.step("model", held)
            return losses

        return work

    return parameters.node_side(
        setting, parameters.questions(config, setting, make_work=make_work, beside="the proximal term")
    )


def squared_distance(w: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> torch.Tensor:
    """||w - w^t||^2 of G models, from parameters by name ``(G, ...)``, to ``(G,)``."""
    squares = [(now - sent[name][: len(now)]).square().flatten(1).sum(1) for name, now in w.items()]
    return torch.stack(squares).sum(0)


METHOD = Method(
    name="fedprox",
    title="FedProx",
    paper="Li et al., MLSys 2020",
    config=FedProxConfig,
    node_side=node_side,
    server=AveragingServer,
    needs=lambda config: Needs(trainable=True, same_architecture=True),
)
