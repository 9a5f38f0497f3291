"""FedCG: extractors stay private; conditional GANs of their features travel in their place.

Wu, Kang, Luo, He, Yang: "FedCG: Leverage Conditional GAN for Protecting Privacy and Maintaining
Competitive Performance in Federated Learning", arXiv:2111.08211. Symbols are FedMD-CG's, which compares
with it: extractors F_i, heads D_i, generators G_i([z; y]), the global G and D.

In each round a node trains its model to classify and to give features like the global generator's; then,
from the global generator on, its own one against a critic that tells its features from real ones. The
server averages generators and heads and distils the ensemble of the nodes' ones into the averages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from fedstill.core.choices import check_choices
from fedstill.core.seeds import seeded
from fedstill.methods import generators, parameters
from fedstill.methods.counting import count_labels
from fedstill.methods.generators import (
    GeneratorServer,
    LocalGeneratorConfig,
    Received,
    draw_noise,
    make_adam,
    train_generators,
)
from fedstill.methods.server import ServerSetting
from fedstill.models.features import FeatureCritic, condition, hidden_widths
from fedstill.models.split import EXTRACTOR, HEAD, features, split
from fedstill.node import training
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.node.training import Work
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide
from fedstill.protocol.schedule import WHOLE, Span

GAN = ("generator", "critic")


@dataclass(frozen=True, kw_only=True)
class FedCGConfig(LocalGeneratorConfig):
    """FedCG's options."""

    name: ClassVar[str] = "fedcg"

    gamma: float = 1.0
    """Weight of the distance of features from what the global generator gives. It rises to this from 0 in
    the first round, 2 / (1 + e^(-10 t / rounds)) - 1 of it in round t."""
    aggregation: Literal["kd", "kdc", "ave*"] = "kd"
    """At the server: its own distillation, FedMD-CG's crossed one, or averages alone (FedMD-CG, Table 3)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, "method")
        parameters.finite(self, "gamma")


def ramp(t: int, rounds: int) -> float:
    """The share of gamma in round t.

    >>> [round(ramp(t, 10), 2) for t in (0, 1, 5, 9)]
    [0.0, 0.46, 0.99, 1.0]
    """
    return 2 / (1 + math.exp(-10 * t / rounds)) - 1


# --- at the nodes -----------------------------------------------------------------------------------


def node_side(config: FedCGConfig, setting: NodeSetting) -> NodeSide:
    """What a node keeps, extractor and critic, and what it answers: generator and head after a round."""
    task, local, compute = setting.task, setting.local, setting.compute

    def prepare(nodes: Sequence[Node]) -> None:
        generators.give_generators(nodes, config, setting, beta=0.5)
        for node in nodes:
            parts = split(node.model, node.name)
            p = features(parts, node.data.inputs[:2], node.name)
            with seeded(node.seed, node.name, "critic"):
                critic = FeatureCritic(p, task.classes, hidden_widths(parts.head))
            node.add("critic", critic, make_adam(config, 0.5))

    def train(
        group: Group,
        number: int,
        generator: torch.Tensor,
        head: torch.Tensor,
        counts: torch.Tensor,
        round: torch.Tensor,
    ) -> Mapping[str, torch.Tensor]:
        """One round at a node, which starts from the global generator and head."""
        t = int(round[0])
        gamma = config.gamma * ramp(t, config.rounds)
        G = Received(config, group, generator, counts, t)
        group.load("model", head, HEAD)
        parameters.train_round(group, setting, t, config.rounds, model_work(setting, G, gamma))
        group.load("generator", generator)
        span = Span(t, t + 1, config.rounds)
        train_generators(group, config, setting, span, gan_work(config, setting, t), GAN)
        return {"generator": group.vectors("generator"), "head": group.vectors("model", HEAD)}

    def rehearse(group: Group) -> None:
        """One step of the model and one of generator and critic, for the engine to time."""
        G = group.vectors("generator")
        counts = torch.ones(len(group), task.classes, device=group.device)
        work = model_work(setting, Received(config, group, G, counts, 0), 1.0)
        training.prepare(group.nodes, local)
        training.train(group.nodes, task, local, compute, steps=1, work=work)
        train_generators(group, config, setting, WHOLE, gan_work(config, setting, 0), GAN, steps=1)

    questions = (generators.begin(), count_labels(task), generators.train(train, config.rounds))
    return NodeSide({question.name: question for question in questions}, prepare, rehearse, first=None)


def model_work(setting: NodeSetting, G: Received, gamma: float) -> Work:
    """Classification: a step of F_i and D_i on CE + gamma ||F_i(x) - G(z, y)||^2."""
    task, turns = setting.task, itertools.count()

    def work(group: Group, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        turn, model = next(turns), group.bench("model")
        f = model(x, EXTRACTOR)  # F_i(x)  (G, B, p)
        loss = task.loss(model(f, HEAD), y, setting.local.smoothing)  # (G,)
        if gamma:
            loss = loss + gamma * (f - G.features(group, y, turn)).square().mean((1, 2))
        group.step("model", loss)
        return loss

    return work


def gan_work(config: FedCGConfig, setting: NodeSetting, t: int) -> Work:
    """Generation: a step of the critic on (F_i(x), y) against (G_i(z, y), y), and one of G_i against it."""
    classes, turns = setting.task.classes, itertools.count()

    def work(group: Group, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        critic = group.bench("critic")
        with torch.no_grad():
            f = group.bench("model")(x, EXTRACTOR)  # F_i(x)  (G, B, p)
        z = draw_noise(group, y.shape, config.noise, "generator", t, next(turns))
        f_hat = group.bench("generator")(condition(z, y, classes))  # G_i(z, y)
        real = critic(condition(f, y, classes))  # (G, B, 1)
        fake = critic(condition(f_hat.detach(), y, classes))
        L_D = (F.softplus(-real) + F.softplus(fake)).mean((1, 2))
        group.step("critic", L_D)
        L_G = F.softplus(-critic(condition(f_hat, y, classes))).mean((1, 2))
        group.step("generator", L_G)
        return L_D + L_G

    return work


# --- at the server ----------------------------------------------------------------------------------


def server(config: FedCGConfig, setting: ServerSetting) -> GeneratorServer:
    """Averages, then distillation from the ensemble of the nodes' heads on their own generators."""
    how = {"kd": "ensemble", "kdc": "crossed", "ave*": "none"}
    return GeneratorServer(config, setting, how[config.aggregation])


METHOD = Method(
    name="fedcg",
    title="FedCG",
    paper="Wu et al., arXiv:2111.08211",
    config=FedCGConfig,
    node_side=node_side,
    server=server,
    needs=lambda config: Needs(trainable=True, same_architecture=True, split=True, one_label=True),
    central="virtual",
)
