"""Shared rounds of FedMD-CG and FedCG, whose nodes train their own feature generators.

In each round a node trains its model with the global generator G, then its own generator G_i. The server
averages generators and heads and distills into the averages. Symbols and equation numbers are those of
FedMD-CG, see :mod:`fedstill.methods._feature_generators`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import nn

from fedstill.core.options import NonNegativeFloat
from fedstill.methods import (
    ArgumentError,
    LabelHistogram,
    Node,
    NodeGroup,
    Tensors,
    TrainStep,
    seeded,
    train_round,
)
from fedstill.methods._feature_generators import (
    FeatureGeneratorMethod,
    GlobalGenerator,
    sample_noise_and_labels,
    stack_uploads,
)
from fedstill.methods._server import Server, adam, descend
from fedstill.models.extractor_head import HEAD, split_model
from fedstill.models.generators import append_one_hot
from fedstill.models.module_utils import load_vector, to_vector, weighted_mean
from fedstill.node import local_training
from fedstill.protocol.local_config import Span
from fedstill.protocol.payload_kinds import (
    GENERATOR_PARAMETERS,
    HEAD_PARAMETERS,
    LABEL_COUNTS,
    PARAMETERS,
    SCHEDULE,
)
from fedstill.protocol.queries import NodeSetting, query

CONSISTENCY = 512  # examples on which the consistency loss is measured, the same each round
SHARED_KINDS = {"generator": GENERATOR_PARAMETERS, "head": HEAD_PARAMETERS}


@dataclass
class LocalGeneratorState:
    """Server state besides the student, whose head is D. The student's extractor is only the nodes' initial
    one."""

    G: nn.Module
    histogram: LabelHistogram  # n_i^y and n_i


@dataclass(frozen=True, kw_only=True)
class LocalGeneratorMethod(FeatureGeneratorMethod, ABC):
    """Base class of methods whose nodes train their own generators."""

    roles: ClassVar[Sequence[str]] = ("generator",)  # networks that a node trains besides its model
    beta: ClassVar[float] = 0.9  # Adam's beta_1 for these
    restarts_from_global: ClassVar[bool] = False  # G_i starts from G in each round

    generator_lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for the nodes' generators, the same in all rounds."""
    aggregation: Literal["kdc", "kd", "ave", "ave*"] = "kdc"
    """Aggregation at the server: crossed distillation (Eq. 12), FedCG's distillation, or averages alone."""

    # --- at the nodes -----------------------------------------------------------------------------------

    def prepare(self, nodes: Sequence[Node], setting: NodeSetting) -> None:
        """Add a local generator G_i to each node; query ``initialize_nodes`` loads its weights.

        Raises:
            ArgumentError: batches of one example, which batch norm cannot train on.
        """
        if setting.local.batch < 2:
            raise ArgumentError(
                "nodes.local.batch", setting.local.batch, "2 or more, for the generator's batch norm"
            )
        for node in nodes:
            with seeded(node.seed, node.name, "generator"):
                G = self.make_generator(node.model, node.data.inputs[:2], setting.task.classes)
            node.add_module("generator", G, self.adam)

    def adam(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a network that a node trains besides its model."""
        return adam(module, self.generator_lr, self.beta)

    @query(sends={"parameters": PARAMETERS, "generator": GENERATOR_PARAMETERS}, times=1)
    def initialize_nodes(  # type: ignore[override]  # a generator comes with the model
        self, nodes: NodeGroup, parameters: torch.Tensor, generator: torch.Tensor
    ) -> Tensors:
        """Load the server's initial weights at all nodes; nothing is released."""
        nodes.load_parameters("model", parameters)
        nodes.load_parameters("generator", generator)
        return {}

    @query(
        sends={**SHARED_KINDS, "counts": LABEL_COUNTS, "round": SCHEDULE},
        releases=SHARED_KINDS,
        times=lambda self, setting: self.rounds,
        extra_loss="distances from what the global generator gives",
    )
    def train(
        self, nodes: NodeGroup, generator: torch.Tensor, head: torch.Tensor, counts: torch.Tensor, round: int
    ) -> Tensors:
        """Run one round at a node: load the global generator and head, train, and return the local ones.

        ``counts`` are the label counts of all nodes together, which define p(y).
        """
        G = GlobalGenerator(self, nodes, generator, counts, round)
        nodes.load_parameters("model", head, HEAD)
        train_round(nodes, round, self.rounds, self.make_model_step(nodes, G))
        if self.restarts_from_global:
            nodes.load_parameters("generator", generator)
        span = Span.part(round, self.rounds)
        self.train_generators(nodes, span, self.make_generator_step(nodes, round))
        return {
            "generator": nodes.parameter_vectors("generator"),
            "head": nodes.parameter_vectors("model", HEAD),
        }

    @abstractmethod
    def make_model_step(self, nodes: NodeGroup, G: GlobalGenerator) -> TrainStep:
        """Return a training step of F_i and D_i."""

    @abstractmethod
    def make_generator_step(self, nodes: NodeGroup, t: int) -> TrainStep:
        """Return a training step of G_i in round ``t``, with F_i and D_i after the model's training."""

    def train_generators(self, nodes: NodeGroup, span: Span, work: TrainStep) -> None:
        """Train a group's generators on the nodes' own data for a round's part, ``span``."""
        setting = nodes.setting
        local_training.train(
            nodes.nodes,
            setting.task,
            replace(setting.local, lr=self.generator_lr, lr_end=self.generator_lr),
            setting.compute,
            span=span,
            train_step=work,
            roles=self.roles,
            purpose="generator",
        )

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> LocalGeneratorState:
        G = self.init_generator(server).eval()
        split_model(server.student, "the student").head.eval()
        return LocalGeneratorState(G, LabelHistogram())

    def step(self, server: Server, state: LocalGeneratorState, t: int) -> Mapping[str, float]:
        """Run one round. ``consistency`` is the loss of local heads on local generators' features (Fig.
        5)."""
        G, D, histogram = state.G, split_model(server.student, "the student").head, state.histogram
        if not histogram.names:
            server.query("initialize_nodes", parameters=to_vector(server.student), generator=to_vector(G))
            histogram.fetch(server)
        responses = server.query(
            "train",
            nodes=self.sample_participants(histogram.present_nodes(server.federation), server.seed, t),
            generator=to_vector(G),
            head=to_vector(D),
            counts=histogram.counts.sum(0),
            round=t,
        )
        participants = histogram.select(responses.nodes)
        n_y, n = participants.counts, participants.sizes  # (K, C), (K,)
        uploads = UploadedModels(G, D, responses["generator"], responses["head"])
        losses = {"consistency": self.consistency_loss(server, uploads, n_y)}
        load_vector(G, weighted_mean(responses["generator"], n))
        load_vector(D, weighted_mean(responses["head"], n))
        return losses | self.distill(server, G, D, uploads, participants, t)

    def distill(
        self,
        server: Server,
        G: nn.Module,
        D: nn.Module,
        uploads: UploadedModels,
        participants: LabelHistogram,
        t: int,
    ) -> dict[str, float]:
        """Take steps on Eq. 12, or on FedCG's loss, from the averages."""
        if self.aggregation not in ("kdc", "kd"):
            return {}
        n_y, n = participants.counts, participants.sizes  # (K, C), (K,)
        tau = server.task.importance_weights(n_y).squeeze(1)  # tau_{i, y}  (K, C)
        learning = [w for w in (*G.parameters(), *D.parameters()) if w.requires_grad]
        optimizer = torch.optim.Adam(learning, self.server_lr, fused=True)
        losses = torch.zeros(1)
        for index in range(self.server_steps):
            z, y = sample_noise_and_labels(
                server.compute, n_y, self.server_batch, self.noise, server.seed, t, index
            )
            c = append_one_hot(z, y, server.task.classes)
            with server.compute.step(server.seed, "student", t, index):
                if self.aggregation == "kdc":
                    losses = crossed_distillation_loss(uploads, G, D, c, tau[:, y], self.divergence)
                else:
                    losses = ensemble_distillation_loss(uploads, G, D, c, n / n.sum()).unsqueeze(0)
            descend(optimizer, losses.sum())
        names = ("kl1", "kl2", "kl3") if self.aggregation == "kdc" else ("kl",)
        return dict(zip(names, losses.tolist(), strict=False))

    def divergence(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the divergence of a student's from a teacher's logits in Eq. 10 and 11: ``(..., C)`` to
        ``(...)``."""
        return kl(student, teacher)

    def consistency_loss(self, server: Server, uploads: UploadedModels, n_y: torch.Tensor) -> float:
        """Return CE(rho(D_i(G_i(z, y))), y), nodes weighted by their numbers of examples of y."""
        z, y = sample_noise_and_labels(
            server.compute, n_y, CONSISTENCY, self.noise, server.seed, "consistency"
        )
        tau = server.task.importance_weights(n_y).squeeze(1)[:, y]  # (K, B)
        with torch.no_grad(), server.compute.autocast():
            log_p = uploads.heads(uploads.features(append_one_hot(z, y, server.task.classes)))
            log_p = log_p.log_softmax(-1)  # (K, B, C)
        correct = log_p.gather(2, y.expand(len(n_y), -1).unsqueeze(2)).squeeze(2)  # (K, B)
        return -(tau * correct).sum(0).mean().item()


class UploadedModels:
    """The generators and heads of K nodes, evaluated as one: ``(K, B, ...)``."""

    def __init__(self, G: nn.Module, D: nn.Module, generators: torch.Tensor, heads: torch.Tensor) -> None:
        self.generators, self.heads = stack_uploads(G, generators), stack_uploads(D, heads)

    def features(self, c: torch.Tensor) -> torch.Tensor:
        """Return G_i(z, y): ``c = [z; y]`` (B, q + C) to ``(K, B, p)``."""
        return self.generators(c.expand(len(self.generators.modules), *c.shape))


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return ``KL(softmax(p) || softmax(q))`` of logits ``(..., C)``: ``(...)``, in nats.

    >>> round(kl(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0])).item(), 4)
    0.1201
    """
    log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)  # small values have many digits
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def crossed_distillation_loss(
    uploads: UploadedModels,
    G: nn.Module,
    D: nn.Module,
    c: torch.Tensor,
    tau: torch.Tensor,
    divergence: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return L_kl,1, L_kl,2 and L_kl,3 of Eq. 10 and 11, means over a batch: ``(3,)``.

    Gradients flow to G and D only: in L_kl,2 to D, in L_kl,3 to G.

    Args:
        uploads: the nodes' generators and heads.
        G, D: the averages.
        c: ``[z; y]`` (B, q + C).
        tau: tau_{i, y} of each example's label ``(K, B)``.
        divergence: function of a student's and a teacher's logits.
    """
    with torch.no_grad():
        f_i = uploads.features(c)  # G_i(z, y)  (K, B, p)
        d_i = uploads.heads(f_i)  # D_i(G_i(z, y))  (K, B, C)
    f = G(c)  # G(z, y)  (B, p)
    d_g = D(f).expand_as(d_i)  # D(G(z, y))
    d_ig = D(f_i.flatten(0, 1)).view_as(d_i)  # D(G_i(z, y))
    d_gi = uploads.heads(f.expand_as(f_i))  # D_i(G(z, y))
    return torch.stack([(tau * divergence(d, d_i)).sum(0).mean() for d in (d_g, d_ig, d_gi)])


def ensemble_distillation_loss(
    uploads: UploadedModels, G: nn.Module, D: nn.Module, c: torch.Tensor, pi: torch.Tensor
) -> torch.Tensor:
    """Return FedCG's server loss: KL from the mean of D_i(G_i), weighted by pi ``(K,)``, to D(G)."""
    with torch.no_grad():
        d_i = uploads.heads(uploads.features(c))  # (K, B, C)
        teacher = torch.tensordot(pi, d_i, 1)  # (B, C)
    return kl(teacher, D(G(c))).mean()
