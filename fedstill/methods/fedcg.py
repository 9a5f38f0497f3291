"""FedCG: extractors stay private; conditional GANs of their features are shared in their place.

Wu, Kang, Luo, He, Yang: "FedCG: Leverage Conditional GAN for Protecting Privacy and Maintaining Competitive
Performance in Federated Learning", arXiv:2111.08211. Symbols are FedMD-CG's, which compares with it:
extractors F_i, heads D_i, generators G_i([z; y]), the global G and D.

In each round a node trains its model to classify and to give features like the global generator's; then it
trains its own generator, from the global one on, against a critic that distinguishes its features from real
ones. The server averages generators and heads and distills the ensemble of the nodes' ones into the averages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from fedstill.core.options import NonNegativeFloat, PositiveInt, Share
from fedstill.methods import (
    Method,
    Needs,
    Node,
    NodeSetting,
    NodeView,
    Query,
    QueryDetails,
    Server,
    Span,
    Tensors,
    adam,
    count_labels_query,
    seeded,
)
from fedstill.methods._feature_generators import (
    FeatureGeneratorOptions,
    GlobalGenerator,
    ServerTraining,
    kl,
    sample_noise,
)
from fedstill.methods.fedmd_cg import SHARED_KINDS, FedMDCGState, add_generator, initialize_query, run_round
from fedstill.models.extractor_head import EXTRACTOR, HEAD, count_features, split_model
from fedstill.models.gan import FeatureCritic, append_one_hot, hidden_widths
from fedstill.protocol.payload_kinds import LABEL_COUNTS, SCHEDULE


@dataclass(frozen=True, kw_only=True)
class FedCG(Method):
    """FedCG's options."""

    title: ClassVar[str] = "FedCG"
    paper: ClassVar[str] = "Wu et al., arXiv:2111.08211"
    query_names: ClassVar[tuple[str, ...]] = ("count_labels", "initialize_nodes", "train")
    evaluated_model: ClassVar[Literal["virtual"]] = "virtual"
    initial_training: ClassVar[Span | None] = None  # local training happens in the rounds

    rounds: PositiveInt = 20
    """Rounds; the local training (nodes.local.epochs) is divided among them."""
    participation: Share = 1.0
    """Share of the nodes that take part in a round, sampled in each round; at least one node does. Other
    nodes skip that part of their local training.
    """
    gamma: NonNegativeFloat = 1.0
    """Weight of the distance of features from the global generator's. It rises to this from 0 in the first
    round, as 2 / (1 + e^(-10 t / rounds)) - 1 of it in round t.
    """
    generator_lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for the nodes' generators and critics, the same in all rounds."""
    aggregation: Literal["kd", "kdc", "ave*"] = "kd"
    """Aggregation at the server: FedCG's distillation, FedMD-CG's crossed one, or averages alone (FedMD-CG,
    Table 3)."""

    generator: FeatureGeneratorOptions = field(default_factory=FeatureGeneratorOptions)
    """The generators G and G_i."""
    server: ServerTraining = field(default_factory=ServerTraining)
    """The server's training of G and D."""

    def needs(self) -> Needs:
        return Needs(trainable=True, same_architecture=True, split_models=True, single_label=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield count_labels_query(setting)
        yield initialize_query()
        yield Query(
            self.train,
            sends={**SHARED_KINDS, "counts": LABEL_COUNTS, "round": SCHEDULE},
            releases=SHARED_KINDS,
            times=self.rounds,
            stackable=True,
            details=QueryDetails(extra_loss="distances from what the global generator gives"),
        )

    # --- at a node --------------------------------------------------------------------------------------

    def prepare(self, node: Node, setting: NodeSetting) -> None:
        """Add a generator G_i and a critic of features."""
        make_optimizer = partial(adam, lr=self.generator_lr, beta=0.5)
        add_generator(node, setting, self.generator, make_optimizer)
        parts = split_model(node.model, node.name)
        p = count_features(parts, node.data.inputs[:2], node.name)
        with seeded(node.seed, node.name, "critic"):
            critic = FeatureCritic(p, setting.task.classes, hidden_widths(parts.head))
        node.add_module("critic", critic, make_optimizer)

    def train(
        self, node: NodeView, generator: torch.Tensor, head: torch.Tensor, counts: torch.Tensor, round: int
    ) -> Tensors:
        """Run one round at a node: load the global generator and head, train, and return the local ones."""
        G = GlobalGenerator(self.generator, node, generator, counts, round)
        node.load_parameters(head, HEAD)
        span, local = Span.part(round, self.rounds), node.setting.local
        node.train(span, partial(self.model_step, G))
        node.load_parameters(generator, role="generator")  # G_i starts from G in each round
        constant = replace(local, lr=self.generator_lr, lr_end=self.generator_lr)
        step = partial(self.generator_step, round)
        node.train(span, step, roles=("generator", "critic"), purpose="generator", local=constant)
        return {"generator": node.parameters(role="generator"), "head": node.parameters(HEAD)}

    def model_step(
        self, G: GlobalGenerator, node: NodeView, step: int, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """Take a step of F_i and D_i on CE + gamma ||F_i(x) - G(z, y)||^2 (classification)."""
        gamma = self.gamma * gamma_share(G.t, self.rounds)
        f = node.model(x, EXTRACTOR)  # F_i(x)  (B, p)
        loss = node.loss(node.model(f, HEAD), y)
        if gamma:
            loss = loss + gamma * (f - G.sample_features(node, y, step)).square().mean()
        node.step("model", loss)
        return loss

    def generator_step(
        self, t: int, node: NodeView, step: int, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """Take a step of the critic on (F_i(x), y) against (G_i(z, y), y), then one of G_i (generation)."""
        critic, classes = node.module("critic"), node.task.classes
        with torch.no_grad():
            f = node.model(x, EXTRACTOR)  # F_i(x)  (B, p)
        z = sample_noise(node, len(y), self.generator.noise, "generator", t, step)
        f_hat = node.module("generator")(append_one_hot(z, y, classes))  # G_i(z, y)
        real = critic(append_one_hot(f, y, classes))  # (B, 1)
        fake = critic(append_one_hot(f_hat.detach(), y, classes))
        L_D = (F.softplus(-real) + F.softplus(fake)).mean()
        node.step("critic", L_D)
        L_G = F.softplus(-critic(append_one_hot(f_hat, y, classes))).mean()
        node.step("generator", L_G)
        return L_D + L_G

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FedMDCGState:
        split_model(server.student, "the student").head.eval()
        return FedMDCGState(self.generator.make_global(server).eval())

    def step(self, server: Server, state: FedMDCGState, t: int) -> Mapping[str, float]:
        """Run one round; ``consistency`` is FedMD-CG's loss of local heads on local generators' features."""
        arguments = (self.server, self.aggregation, kl, self.participation, self.generator.noise)
        return run_round(server, state, t, *arguments)


def gamma_share(t: int, rounds: int) -> float:
    """Return the share of gamma in round t.

    >>> [round(gamma_share(t, 10), 2) for t in (0, 1, 5, 9)]
    [0.0, 0.46, 0.99, 1.0]
    """
    return 2 / (1 + math.exp(-10 * t / rounds)) - 1
