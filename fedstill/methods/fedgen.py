"""FedGEN: the server trains a generator of features that all nodes' heads recognize, and sends it to them.

Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, Algorithm
1. Symbols are FedMD-CG's, which compares with it: extractors F_i, heads D_i, the generator G([z; y]).

In each round a node trains its model on its own data and its head on G's features, and (published code) keeps
its outputs for own data close to those for G's features of the same labels; shared parameters are averaged;
then the server trains G on features that the nodes' heads, ensembled, classify as label y.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from torch import nn

from fedstill.core.options import NonNegativeFloat, PositiveInt, Share
from fedstill.methods import (
    LabelHistogram,
    Method,
    Needs,
    NodeSetting,
    NodeView,
    Query,
    QueryDetails,
    Server,
    Span,
    SpanOfRound,
    Tensors,
    adam,
    count_labels_query,
    descend,
)
from fedstill.methods._feature_generators import (
    Diversity,
    FeatureGeneratorOptions,
    GlobalGenerator,
    ServerTraining,
    diversity_loss,
    sample_noise_and_labels,
    stack_uploads,
)
from fedstill.methods.fedavg import PARAMETER_KINDS, initialize_query, sample_nodes
from fedstill.models.extractor_head import EXTRACTOR, HEAD, split_model
from fedstill.models.gan import append_one_hot
from fedstill.models.module_utils import load_vector, to_vector, weighted_mean
from fedstill.node.stacked_modules import StackedModules
from fedstill.protocol.payload_kinds import GENERATOR_PARAMETERS, LABEL_COUNTS, SCHEDULE
from fedstill.tasks import Task


@dataclass
class FedGENState:
    """Server state besides the student."""

    G: nn.Module
    adam: torch.optim.Optimizer  # G's
    histogram: LabelHistogram  # n_i^y and n_i


@dataclass(frozen=True, kw_only=True)
class FedGEN(Method):
    """FedGEN's options."""

    title: ClassVar[str] = "FedGEN"
    paper: ClassVar[str] = "Zhu et al., ICML 2021"
    query_names: ClassVar[tuple[str, ...]] = ("count_labels", "initialize_nodes", "train")
    evaluated_model: ClassVar[Literal["virtual"]] = "virtual"
    initial_training: ClassVar[Span | None] = None  # local training happens in the rounds

    rounds: PositiveInt = 20
    """Rounds; the local training (nodes.local.epochs) is divided among them."""
    participation: Share = 1.0
    """Share of the nodes that take part in a round, sampled in each round; at least one node does. Other
    nodes skip that part of their local training.
    """

    shares: Literal["head", "model"] = "head"
    """Shared part: the head alone (partial sharing, as FedMD-CG compares with it) or the whole model."""
    alpha: NonNegativeFloat = 1.0
    """Weight of the head's cross-entropy on G's features, at the nodes."""
    beta: NonNegativeFloat = 0.0
    """Weight of KL(D_i(G(z, y)) || D_i(F_i(x))), x of label y, at the nodes (published code: as alpha)."""
    decay: Annotated[float, Gt(0), Le(1)] = 1.0
    """Decay of alpha and beta from round to round (published code: 0.98)."""
    diversity: Diversity = "div0"
    """The generator's diversity loss: none, div0 (FedMD-CG's Eq. 7), or FedMD-CG's own div1 and div2."""

    generator: FeatureGeneratorOptions = field(default_factory=FeatureGeneratorOptions)
    """The generator G."""
    server: ServerTraining = field(default_factory=ServerTraining)
    """The server's training of G."""

    @property
    def shared_part(self) -> str:
        """Name of the shared part of the model."""
        return HEAD if self.shares == "head" else ""

    def needs(self) -> Needs:
        return Needs(trainable=True, same_architecture=True, split_models=True, single_label=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        kind = PARAMETER_KINDS[self.shared_part]
        yield count_labels_query(setting)
        yield initialize_query()
        yield Query(
            self.train,
            sends={
                "generator": GENERATOR_PARAMETERS,
                "parameters": kind,
                "counts": LABEL_COUNTS,
                "round": SCHEDULE,
            },
            releases={"parameters": kind},
            times=self.rounds,
            depends_on_records=(),
            span=SpanOfRound(self.rounds),
            stackable=True,
            details=QueryDetails(
                extra_loss="cross-entropy on the global generator's features",
                extra_loss_reads_records=self.beta > 0,
            ),
        )

    # --- at a node --------------------------------------------------------------------------------------

    def train(
        self,
        node: NodeView,
        generator: torch.Tensor,
        parameters: torch.Tensor,
        counts: torch.Tensor,
        round: int,
    ) -> Tensors:
        """Train a node's head or model for one round, on its own data and on G's features."""
        G = GlobalGenerator(self.generator, node, generator, counts, round)
        node.load_parameters(parameters, self.shared_part)
        span = Span.part(round, self.rounds)
        if round == 0:  # G is untrained
            node.train(span)
        elif self.beta:
            node.train(span, partial(self.train_step, G))
        else:
            node.train(span, term=partial(self.generated_loss, G))
        return {"parameters": node.parameters(self.shared_part)}

    def generated_loss(self, G: GlobalGenerator, node: NodeView, step: int) -> torch.Tensor:
        """Return alpha times the cross-entropy of D_i(G(z, y')), which depends on no record."""
        y_hat = G.sample_labels(node, node.setting.local.batch, step)
        d_hat = node.model(G.sample_features(node, y_hat, step), HEAD)  # D_i(G(z, y'))
        return self.alpha * self.decay**G.t * node.loss(d_hat, y_hat, smoothing=0.0)

    def train_step(
        self, G: GlobalGenerator, node: NodeView, step: int, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """Take a step of F_i and D_i on own data, on G(z, y') and on G(z, y)."""
        d = node.model(node.model(x, EXTRACTOR), HEAD)  # D_i(F_i(x))  (B, C)
        d_bar = node.model(G.sample_features(node, y, "same", step), HEAD).detach()  # D_i(G(z, y))
        loss = node.loss(d, y) + self.generated_loss(G, node, step)
        loss = loss + self.beta * self.decay**G.t * node.task.distillation_loss(d, d_bar, 1.0).mean()
        node.step("model", loss)
        return loss

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FedGENState:
        G = self.generator.make_global(server)
        return FedGENState(G, adam(G, self.server.lr), LabelHistogram())

    def step(self, server: Server, state: FedGENState, t: int) -> Mapping[str, float]:
        shared, histogram = (
            split_model(server.student, "the student").get_submodule(self.shared_part),
            state.histogram,
        )
        if not histogram.names:
            server.query("initialize_nodes", parameters=to_vector(server.student))
            histogram.fetch(server)
        known = histogram.present_nodes(server.federation)
        responses = server.query(
            "train",
            nodes=sample_nodes(known, self.participation, server.seed, t),
            generator=to_vector(state.G),
            parameters=to_vector(shared),
            counts=histogram.counts.sum(0),
            round=t,
        )
        responding = histogram.select(responses.nodes)
        load_vector(shared, weighted_mean(responses["parameters"], responding.sizes))
        return self.train_generator(
            server, state, stack_uploads(shared, responses["parameters"]), responding.counts, t
        )

    def train_generator(
        self, server: Server, state: FedGENState, uploads: StackedModules, n_y: torch.Tensor, t: int
    ) -> Mapping[str, float]:
        """Take steps of G, which is in training mode: no node uses it at the same time."""
        losses = torch.zeros(2)
        state.G.train()
        for index in range(self.server.steps):
            z, y = sample_noise_and_labels(
                server.compute, n_y, self.server.batch, self.generator.noise, server.seed, t, index
            )
            with server.compute.step(server.seed, "student", t, index):
                losses = self.generator_loss(server.task, state.G, uploads, z, y, n_y)
            descend(state.adam, losses[0] + losses[1])
        state.G.eval()
        return dict(zip(("generator", "diversity"), losses.tolist(), strict=True))

    def generator_loss(
        self,
        task: Task,
        G: nn.Module,
        uploads: StackedModules,
        z: torch.Tensor,
        y: torch.Tensor,
        n_y: torch.Tensor,
    ) -> torch.Tensor:
        """Return the CE of the heads' weighted ensemble on G(z, y), and the diversity loss, unweighted:
        ``(2,)``.

        Args:
            task: the task.
            G: the generator.
            uploads: the nodes' heads or models.
            z: noise ``(B, q)``.
            y: labels ``(B,)``.
            n_y: the nodes' numbers of examples of each class ``(K, C)``.
        """
        c = append_one_hot(z, y, task.classes)
        f = G(c).float()  # G(z, y)  (B, p)
        d = uploads(f.expand(len(n_y), *f.shape), "" if self.shared_part else HEAD)  # D_k(G(z, y))  (K, B, C)
        alpha = task.importance_weights(n_y).squeeze(1)[:, y]  # alpha_k^y  (K, B)
        ensemble = (alpha.unsqueeze(2) * d).sum(0)  # (B, C)
        L_ce = task.loss(ensemble.unsqueeze(0), y.unsqueeze(0)).squeeze(0)
        return torch.stack([L_ce, diversity_loss(self.diversity, f, z, c[:, z.shape[1] :])])
