"""FedCG: extractors stay private; conditional GANs of their features are shared in their place.

Wu, Kang, Luo, He, Yang: "FedCG: Leverage Conditional GAN for Protecting Privacy and Maintaining Competitive
Performance in Federated Learning", arXiv:2111.08211. Symbols are FedMD-CG's, which compares with it:
extractors F_i, heads D_i, generators G_i([z; y]), the global G and D.

In each round a node trains its model to classify and to give features like the global generator's; then it
trains its own generator, from the global one on, against a critic that distinguishes its features from real
ones. The server averages generators and heads and distills the ensemble of the nodes' ones into the averages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from fedstill.core.options import NonNegativeFloat
from fedstill.methods import Node, NodeGroup, NodeSetting, TrainStep, seeded
from fedstill.methods._feature_generators import GlobalGenerator, sample_noise
from fedstill.methods._local_generators import LocalGeneratorMethod
from fedstill.models.extractor_head import EXTRACTOR, HEAD, count_features, split_model
from fedstill.models.generators import FeatureCritic, append_one_hot, hidden_widths


@dataclass(frozen=True, kw_only=True)
class FedCG(LocalGeneratorMethod):
    """FedCG's options."""

    title: ClassVar[str] = "FedCG"
    paper: ClassVar[str] = "Wu et al., arXiv:2111.08211"
    roles: ClassVar[Sequence[str]] = ("generator", "critic")
    beta: ClassVar[float] = 0.5
    restarts_from_global: ClassVar[bool] = True

    gamma: NonNegativeFloat = 1.0
    """Weight of the distance of features from the global generator's. It rises to this from 0 in the first
    round, as 2 / (1 + e^(-10 t / rounds)) - 1 of it in round t.
    """
    aggregation: Literal["kd", "kdc", "ave*"] = "kd"
    """Aggregation at the server: FedCG's distillation, FedMD-CG's crossed one, or averages alone (FedMD-CG,
    Table 3)."""

    def prepare(self, nodes: Sequence[Node], setting: NodeSetting) -> None:
        """Add a generator and a critic to each node."""
        super().prepare(nodes, setting)
        for node in nodes:
            parts = split_model(node.model, node.name)
            p = count_features(parts, node.data.inputs[:2], node.name)
            with seeded(node.seed, node.name, "critic"):
                critic = FeatureCritic(p, setting.task.classes, hidden_widths(parts.head))
            node.add_module("critic", critic, self.adam)

    def make_model_step(self, nodes: NodeGroup, G: GlobalGenerator) -> TrainStep:
        """Return a step of F_i and D_i on CE + gamma ||F_i(x) - G(z, y)||^2 (classification)."""
        task, smoothing, call_counter = nodes.setting.task, nodes.setting.local.smoothing, itertools.count()
        gamma = self.gamma * gamma_share(G.t, self.rounds)

        def train_step(group: NodeGroup, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            call, model = next(call_counter), group.module("model")
            f = model(x, EXTRACTOR)  # F_i(x)  (G, B, p)
            loss: torch.Tensor = task.loss(model(f, HEAD), y, smoothing)  # (G,)
            if gamma:
                loss = loss + gamma * (f - G.sample_features(group, y, call)).square().mean((1, 2))
            group.step("model", loss)
            return loss

        return train_step

    def make_generator_step(self, nodes: NodeGroup, t: int) -> TrainStep:
        """Return a step of the critic on (F_i(x), y) against (G_i(z, y), y), then one of G_i (generation)."""
        classes, call_counter = nodes.setting.task.classes, itertools.count()

        def train_step(group: NodeGroup, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            critic = group.module("critic")
            with torch.no_grad():
                f = group.module("model")(x, EXTRACTOR)  # F_i(x)  (G, B, p)
            z = sample_noise(group, y.shape, self.noise, "generator", t, next(call_counter))
            f_hat = group.module("generator")(append_one_hot(z, y, classes))  # G_i(z, y)
            real = critic(append_one_hot(f, y, classes))  # (G, B, 1)
            fake = critic(append_one_hot(f_hat.detach(), y, classes))
            L_D = (F.softplus(-real) + F.softplus(fake)).mean((1, 2))
            group.step("critic", L_D)
            L_G = F.softplus(-critic(append_one_hot(f_hat, y, classes))).mean((1, 2))
            group.step("generator", L_G)
            return L_D + L_G

        return train_step


def gamma_share(t: int, rounds: int) -> float:
    """Return the share of gamma in round t.

    >>> [round(gamma_share(t, 10), 2) for t in (0, 1, 5, 9)]
    [0.0, 0.46, 0.99, 1.0]
    """
    return 2 / (1 + math.exp(-10 * t / rounds)) - 1
