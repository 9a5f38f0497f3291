"""FedMD-CG: extractors stay private; feature generators and heads are shared in their place.

Luo, Wang, Li, Lan, Gao, Shu: "Privacy-Preserving Federated Learning with Consistency via Knowledge
Distillation Using Conditional Generator", arXiv:2409.06955 (as FedMD-CG under review, 2023). Symbols and
equation numbers are the paper's: extractors F_i, heads D_i, generators G_i([z; y]), the global G and D.

In each round a node (a) trains its model on its own data and on G's features, and (b) trains its generator to
reproduce its extractor's features. The server averages generators and heads and distills them crosswise.
Where defaults are the published code's, the option's text gives the printed value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import nn

from fedstill.core.optimizers import Adam
from fedstill.core.options import NonNegativeFloat, PositiveFloat, PositiveInt, Share
from fedstill.methods import (
    ArgumentError,
    LabelHistogram,
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
    descend,
    seeded,
)
from fedstill.methods._feature_generators import (
    Divergence,
    Diversity,
    FeatureGeneratorOptions,
    GlobalGenerator,
    ServerTraining,
    UploadedGenerators,
    consistency_loss,
    crossed_distillation_loss,
    diversity_loss,
    ensemble_distillation_loss,
    kl,
    sample_noise,
    sample_noise_and_labels,
)
from fedstill.methods.fedavg import sample_nodes
from fedstill.models.extractor_head import EXTRACTOR, HEAD, split_model
from fedstill.models.gan import append_one_hot
from fedstill.models.module_utils import load_vector, to_vector, weighted_mean
from fedstill.node.node import MakeOptimizer
from fedstill.protocol.payload_kinds import (
    GENERATOR_PARAMETERS,
    HEAD_PARAMETERS,
    LABEL_COUNTS,
    PARAMETERS,
    SCHEDULE,
)

SHARED_KINDS = {"generator": GENERATOR_PARAMETERS, "head": HEAD_PARAMETERS}


@dataclass
class FedMDCGState:
    """Server state besides the student, whose head is D. The student's extractor is only the nodes' initial
    one."""

    G: nn.Module
    histogram: LabelHistogram = field(default_factory=LabelHistogram)  # n_i^y and n_i


@dataclass(frozen=True, kw_only=True)
class FedMDCG(Method):
    """Rounds that share feature generators and heads in place of extractors."""

    title: ClassVar[str] = "FedMD-CG"
    paper: ClassVar[str] = "Luo et al., arXiv:2409.06955"
    query_names: ClassVar[tuple[str, ...]] = ("count_labels", "initialize_nodes", "train")
    evaluated_model: ClassVar[Literal["virtual"]] = "virtual"
    initial_training: ClassVar[Span | None] = None  # local training happens in the rounds

    rounds: PositiveInt = 10
    """Rounds; the local training (nodes.local.epochs) is divided among them. In fewer, longer rounds the
    generators are better trained before they are used.
    """
    participation: Share = 1.0
    """Share of the nodes that take part in a round, sampled in each round; at least one node does. Other
    nodes skip that part of their local training.
    """
    lambda1: NonNegativeFloat = 1.0
    """Weight in Eq. 4 of the head's cross-entropy on G's features (Eq. 3)."""
    lambda2: NonNegativeFloat = 0.1
    """Weight in Eq. 4 of the distance of features from G's (Eq. 2). As printed about 1 (Fig. 6)."""
    lambda3: NonNegativeFloat = 1.0
    """Weight in Eq. 4 of the divergence of predictions from those on G's features (Eq. 2)."""
    ramp: NonNegativeFloat = 0.0
    """Growth of lambda1 to lambda3: to (t / (R - 1))^ramp of themselves in round t of R = rounds. 0 is all of
    them from the second round on, as printed; the published code has 3.
    """
    temperature: PositiveFloat = 10.0
    """Temperature of predictions in Eq. 2 and 10 to 12; in Eq. 5 it is 1. As printed it is 1 everywhere."""
    kl_first: Literal["teacher", "student"] = "teacher"
    """First argument of each KL: the teacher's predictions, which are constant, or as printed the student's.
    """
    lambda4: NonNegativeFloat = 1.0
    """Weight in Eq. 9 of the generator's distance from features (Eq. 5)."""
    lambda5: NonNegativeFloat = 1.0
    """Weight in Eq. 9 of the head's cross-entropy on the generator's features (Eq. 6)."""
    lambda6: NonNegativeFloat = 1.0
    """Weight in Eq. 9 of the diversity loss."""
    diversity: Diversity = "div2"
    """Diversity loss: none, div0 (Eq. 7), div1 (noise and label together) or div2 (Eq. 8)."""
    generator_lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for the nodes' generators, the same in all rounds."""
    aggregation: Literal["kdc", "kd", "ave", "ave*"] = "kdc"
    """Aggregation at the server (Table 3): crossed distillation (Eq. 12), FedCG's distillation, or averages
    alone; ave* also omits the divergence of predictions in Eq. 2.
    """

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
        """Add a local generator G_i; query ``initialize_nodes`` loads its weights."""
        add_generator(node, setting, self.generator, partial(adam, lr=self.generator_lr))

    def train(
        self, node: NodeView, generator: torch.Tensor, head: torch.Tensor, counts: torch.Tensor, round: int
    ) -> Tensors:
        """Run one round at a node: load the global generator and head, train, and return the local ones.

        ``counts`` are the label counts of all nodes together, which define p(y).
        """
        G = GlobalGenerator(self.generator, node, generator, counts, round)
        node.load_parameters(head, HEAD)
        span, local = Span.part(round, self.rounds), node.setting.local
        node.train(span, partial(self.model_step, G))
        constant = replace(local, lr=self.generator_lr, lr_end=self.generator_lr)
        step = partial(self.generator_step, round)
        node.train(span, step, roles=("generator",), purpose="generator", local=constant)
        return {"generator": node.parameters(role="generator"), "head": node.parameters(HEAD)}

    def model_step(
        self, G: GlobalGenerator, node: NodeView, step: int, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """Take stage (a), Eq. 4: a step of F_i and D_i; in the first round on Eq. 1 alone."""
        share = (G.t / max(self.rounds - 1, 1)) ** self.ramp
        f = node.model(x, EXTRACTOR)  # F_i(x)  (B, p)
        d = node.model(f, HEAD)  # D_i(F_i(x))  (B, C)
        loss = node.loss(d, y)  # Eq. 1
        if G.t:
            f_hat = G.sample_features(node, y, step)  # G(z, y), constant
            loss = loss + share * self.lambda2 * (f - f_hat).square().mean()  # Eq. 2
            if self.lambda3 and self.aggregation != "ave*":
                d_hat = node.model(f_hat, HEAD).detach()
                loss = loss + share * self.lambda3 * self.divergence(d, d_hat).mean()  # Eq. 2
            y_hat = G.sample_labels(node, len(y), step)
            d_hat = node.model(G.sample_features(node, y_hat, "resampled", step), HEAD)
            loss = loss + share * self.lambda1 * node.loss(d_hat, y_hat, smoothing=0.0)  # Eq. 3
        node.step("model", loss)
        return loss

    def generator_step(
        self, t: int, node: NodeView, step: int, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """Take stage (b), Eq. 9: a step of G_i, with F_i and D_i after stage (a)."""
        with torch.no_grad():
            f = node.model(x, EXTRACTOR)  # F_i(x)  (B, p)
            d = node.model(f, HEAD)  # D_i(F_i(x))  (B, C)
        z = sample_noise(node, len(y), self.generator.noise, "generator", t, step)  # (B, q)
        c = append_one_hot(z, y, node.task.classes)
        f_hat = node.module("generator")(c)  # G_i(z, y)
        d_hat = node.model(f_hat, HEAD)  # D_i(G_i(z, y))
        loss = self.divergence(d_hat, d, 1.0).mean()  # Eq. 5
        loss = loss + self.lambda4 * (f_hat - f).square().mean()  # Eq. 5
        loss = loss + self.lambda5 * node.loss(d_hat, y, smoothing=0.0)  # Eq. 6
        L_div = diversity_loss(self.diversity, f_hat, z, c[..., self.generator.noise :])
        loss = loss + self.lambda6 * L_div  # Eq. 7, 8
        node.step("generator", loss)
        return loss

    def divergence(
        self, student: torch.Tensor, teacher: torch.Tensor, temperature: float | None = None
    ) -> torch.Tensor:
        """Return the KL of a student's and a teacher's logits at a temperature, ``(..., C)`` to ``(...)``.

        It is not multiplied by the temperature's square.
        """
        T = temperature or self.temperature
        p, q = student.float() / T, teacher.float() / T
        return kl(q, p) if self.kl_first == "teacher" else kl(p, q)

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FedMDCGState:
        split_model(server.student, "the student").head.eval()
        return FedMDCGState(self.generator.make_global(server).eval())

    def step(self, server: Server, state: FedMDCGState, t: int) -> Mapping[str, float]:
        """Run one round. ``consistency`` is the loss of local heads on local generators' features (Fig.
        5)."""
        arguments = (self.server, self.aggregation, self.divergence, self.participation, self.generator.noise)
        return run_round(server, state, t, *arguments)


def run_round(
    server: Server,
    state: FedMDCGState,
    t: int,
    training: ServerTraining,
    aggregation: Literal["kdc", "kd", "ave", "ave*"],
    divergence: Divergence,
    participation: float,
    noise: int,
) -> dict[str, float]:
    """Run one round: train at the nodes, average generators and heads, and distill into the averages.

    Args:
        server: the server.
        state: its state.
        t: the round.
        training: options of the distillation.
        aggregation: distillation by Eq. 12 (``kdc``), by FedCG (``kd``), or none.
        divergence: KL of a student's and a teacher's logits.
        participation: share of the nodes that take part.
        noise: values q in z.
    """
    task, compute, seed = server.task, server.compute, server.seed
    G, D, histogram = state.G, split_model(server.student, "the student").head, state.histogram
    if not histogram.names:
        server.query("initialize_nodes", parameters=to_vector(server.student), generator=to_vector(G))
        histogram.fetch(server)
    known = histogram.present_nodes(server.federation)
    responses = server.query(
        "train",
        nodes=sample_nodes(known, participation, seed, t),
        generator=to_vector(G),
        head=to_vector(D),
        counts=histogram.counts.sum(0),
        round=t,
    )
    participants = histogram.select(responses.nodes)
    n_y, n = participants.counts, participants.sizes  # n_i^y (K, C), n_i (K,)
    uploads = UploadedGenerators(G, D, responses["generator"], responses["head"])  # G_i, D_i
    result = {"consistency": consistency_loss(compute, task, uploads, n_y, noise, seed)}
    load_vector(G, weighted_mean(responses["generator"], n))
    load_vector(D, weighted_mean(responses["head"], n))
    if aggregation not in ("kdc", "kd"):
        return result

    tau = task.importance_weights(n_y).squeeze(1)  # tau_{i, y}  (K, C)
    trained = [w for w in (*G.parameters(), *D.parameters()) if w.requires_grad]
    optimizer = Adam(trained, training.lr, fused=True)
    losses = torch.zeros(1)
    for index in range(training.steps):
        z, y = sample_noise_and_labels(compute, n_y, training.batch, noise, seed, t, index)
        c = append_one_hot(z, y, task.classes)  # [z; y]
        with compute.step(seed, "student", t, index):
            if aggregation == "kdc":
                losses = crossed_distillation_loss(uploads, G, D, c, tau[:, y], divergence)  # Eq. 10, 11
            else:
                losses = ensemble_distillation_loss(uploads, G, D, c, n / n.sum()).unsqueeze(0)
        descend(optimizer, losses.sum())  # Eq. 12
    names = ("kl1", "kl2", "kl3") if aggregation == "kdc" else ("kl",)
    return result | dict(zip(names, losses.tolist(), strict=False))


def add_generator(
    node: Node, setting: NodeSetting, options: FeatureGeneratorOptions, make_optimizer: MakeOptimizer
) -> None:
    """Add a local generator G_i of the features of a node's model.

    Raises:
        ArgumentError: batches of one example, which batch norm cannot train on.
    """
    if setting.local.batch < 2:
        expected = "2 or more, for the generator's batch norm"
        raise ArgumentError("nodes.local.batch", setting.local.batch, expected)
    with seeded(node.seed, node.name, "generator"):
        G = options.make(node.model, node.data.inputs[:2], setting.task.classes)
    node.add_module("generator", G, make_optimizer)


def initialize_nodes(node: NodeView, parameters: torch.Tensor, generator: torch.Tensor) -> Tensors:
    """Load the server's initial weights, a generator's too; nothing is released."""
    node.load_parameters(parameters)
    node.load_parameters(generator, role="generator")
    return {}


def initialize_query() -> Query:
    """Return the query that gives all nodes the server's initial weights."""
    kinds = {"parameters": PARAMETERS, "generator": GENERATOR_PARAMETERS}
    return Query(initialize_nodes, sends=kinds, times=1, stackable=True)
