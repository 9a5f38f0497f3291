"""FedMD-CG: extractors stay private; generators of features and heads travel in their place.

Luo, Wang, Li, Lan, Gao, Shu: "Privacy-Preserving Federated Learning with Consistency via Knowledge
Distillation Using Conditional Generator", arXiv:2409.06955 (as FedMD-CG under review, 2023). Symbols and
equation numbers are the paper's: extractors F_i, heads D_i, generators G_i([z; y]), the global G and D.

In each round a node (a) trains its model on its own data and on what G gives, (b) trains its generator to
give what its extractor gives. The server averages generators and heads and distils them, crosswise.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedstill.core.choices import check_choices
from fedstill.methods import generators, parameters
from fedstill.methods.counting import count_labels
from fedstill.methods.diversity import Diversity, diversity
from fedstill.methods.generators import (
    GeneratorServer,
    LocalGeneratorConfig,
    Received,
    draw_noise,
    kl,
    train_generators,
)
from fedstill.methods.server import ServerSetting
from fedstill.models.features import condition
from fedstill.models.split import EXTRACTOR, HEAD
from fedstill.node import training
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.node.training import Work
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide
from fedstill.protocol.schedule import WHOLE, Span


@dataclass(frozen=True, kw_only=True)
class FedMDCGConfig(LocalGeneratorConfig):
    """FedMD-CG's options."""

    name: ClassVar[str] = "fedmd-cg"

    rounds: int = 10
    """Rounds; the local training budget (nodes.local.epochs) is divided among them. In fewer, longer ones
    the generators know more before anybody listens to them."""
    lambda1: float = 1.0
    """Weight in Eq. 4 of the head's cross-entropy on what G gives (Eq. 3)."""
    lambda2: float = 1.0
    """Weight in Eq. 4 of the distance of features from what G gives (Eq. 2)."""
    lambda3: float = 1.0
    """Weight in Eq. 4 of the divergence of predictions from those on what G gives (Eq. 2)."""
    lambda4: float = 1.0
    """Weight in Eq. 9 of the generator's distance from features (Eq. 5)."""
    lambda5: float = 1.0
    """Weight in Eq. 9 of the head's cross-entropy on what the generator gives (Eq. 6)."""
    lambda6: float = 1.0
    """Weight in Eq. 9 of the diversity loss."""
    diversity: Diversity = "div2"
    """The diversity loss: none, div0 (Eq. 7), div1 (noise and label together) or div2 (Eq. 8)."""
    diversity_scale: Literal["per-value", "printed"] = "per-value"
    """Distances in it as root means of squares, or as printed: then the loss is 0 for most features, since
    its exponent grows with their number."""
    aggregation: Literal["kdc", "kd", "ave", "ave*"] = "kdc"
    """At the server (Table 3): crossed distillation (Eq. 12), FedCG's distillation, or averages alone;
    ave* besides leaves out the divergence of predictions in Eq. 2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, "method")
        parameters.finite(self, *(f"lambda{index}" for index in range(1, 7)))


# --- at the nodes -----------------------------------------------------------------------------------


def node_side(config: FedMDCGConfig, setting: NodeSetting) -> NodeSide:
    """What a node keeps, its extractor, and what it answers: generator and head after a round."""
    task, local, compute = setting.task, setting.local, setting.compute

    def prepare(nodes: Sequence[Node]) -> None:
        generators.give_generators(nodes, config, setting, beta=0.9)

    def train(
        group: Group,
        number: int,
        generator: torch.Tensor,
        head: torch.Tensor,
        counts: torch.Tensor,
        round: torch.Tensor,
    ) -> Mapping[str, torch.Tensor]:
        """One round at a node. The global generator does not replace the local one, the head does."""
        t = int(round[0])
        G = Received(config, group, generator, counts, t)
        group.load("model", head, HEAD)
        # Before the first round nobody has taught G anything.
        parameters.train_round(
            group, setting, t, config.rounds, model_work(config, setting, G if t else None)
        )
        span = Span(t, t + 1, config.rounds)
        train_generators(group, config, setting, span, generator_work(config, setting, t))
        return {"generator": group.vectors("generator"), "head": group.vectors("model", HEAD)}

    def rehearse(group: Group) -> None:
        """One step of the model and one of the generator, for the engine to time."""
        G = group.vectors("generator")
        counts = torch.ones(len(group), task.classes, device=group.device)
        work = model_work(config, setting, Received(config, group, G, counts, 0))
        training.prepare(group.nodes, local)
        training.train(group.nodes, task, local, compute, steps=1, work=work)
        train_generators(group, config, setting, WHOLE, generator_work(config, setting, 0), steps=1)

    questions = (generators.begin(), count_labels(task), generators.train(train, config.rounds))
    return NodeSide({question.name: question for question in questions}, prepare, rehearse, first=None)


def model_work(config: FedMDCGConfig, setting: NodeSetting, G: Received | None) -> Work:
    """Stage (a), Eq. 4: a step of F_i and D_i; without a G, on Eq. 1 alone."""
    task, turns = setting.task, itertools.count()

    def work(group: Group, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        turn, model = next(turns), group.bench("model")
        f = model(x, EXTRACTOR)  # F_i(x)  (G, B, p)
        d = model(f, HEAD)  # D_i(F_i(x))  (G, B, C)
        loss = task.loss(d, y, setting.local.smoothing)  # Eq. 1  (G,)
        if G is not None:
            f_hat = G.features(group, y, turn)  # G(z, y), constant
            loss = loss + config.lambda2 * (f - f_hat).square().mean((1, 2))  # Eq. 2
            if config.lambda3 and config.aggregation != "ave*":
                d_hat = model(f_hat, HEAD).detach()
                loss = loss + config.lambda3 * kl(d, d_hat).mean(1)  # Eq. 2
            y_hat = G.labels(group, y.shape, turn)
            d_hat = model(G.features(group, y_hat, "resampled", turn), HEAD)
            loss = loss + config.lambda1 * task.loss(d_hat, y_hat)  # Eq. 3
        group.step("model", loss)
        return loss

    return work


def generator_work(config: FedMDCGConfig, setting: NodeSetting, t: int) -> Work:
    """Stage (b), Eq. 9: a step of G_i, with F_i and D_i as stage (a) left them."""
    task, turns = setting.task, itertools.count()

    def work(group: Group, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        turn, model = next(turns), group.bench("model")
        with torch.no_grad():
            f = model(x, EXTRACTOR)  # F_i(x)  (G, B, p)
            d = model(f, HEAD)  # D_i(F_i(x))  (G, B, C)
        z = draw_noise(group, y.shape, config.noise, "generator", t, turn)  # (G, B, q)
        c = condition(z, y, task.classes)
        f_hat = group.bench("generator")(c)  # G_i(z, y)
        d_hat = model(f_hat, HEAD)  # D_i(G_i(z, y))
        loss = kl(d_hat, d).mean(1)  # Eq. 5
        loss = loss + config.lambda4 * (f_hat - f).square().mean((1, 2))  # Eq. 5
        loss = loss + config.lambda5 * task.loss(d_hat, y)  # Eq. 6
        if config.diversity != "none":
            per_value = config.diversity_scale == "per-value"
            L_div = diversity(config.diversity, f_hat, z, c[..., config.noise :], per_value)
            loss = loss + config.lambda6 * L_div  # Eq. 7, 8
        group.step("generator", loss)
        return loss

    return work


# --- at the server ----------------------------------------------------------------------------------


def server(config: FedMDCGConfig, setting: ServerSetting) -> GeneratorServer:
    """Averages, then Eq. 12."""
    how = {"kdc": "crossed", "kd": "ensemble", "ave": "none", "ave*": "none"}
    return GeneratorServer(config, setting, how[config.aggregation])


METHOD = Method(
    name="fedmd-cg",
    title="FedMD-CG",
    paper="Luo et al., arXiv:2409.06955",
    config=FedMDCGConfig,
    node_side=node_side,
    server=server,
    needs=lambda config: Needs(trainable=True, same_architecture=True, split=True, one_label=True),
    central="virtual",
)
