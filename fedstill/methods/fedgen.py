"""FedGEN: the server trains a generator of features that all nodes' heads recognize, and sends it to them.

Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, Algorithm
1. Symbols are FedMD-CG's, which compares with it: extractors F_i, heads D_i, the generator G([z; y]).

In each round a node trains its model on its own data and its head on G's features, and (published code) keeps
its outputs for own data close to those for G's features of the same labels; shared parameters are averaged;
then the server trains G on features that the nodes' heads, ensembled, classify as label y.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from torch import nn

from fedstill.core.options import NonNegativeFloat
from fedstill.methods import LabelHistogram, Server, Tensors, TrainStep, adam, descend, query, train_round
from fedstill.methods._averaging import PARAMETER_KINDS
from fedstill.methods._feature_generators import (
    Diversity,
    FeatureGeneratorMethod,
    GlobalGenerator,
    diversity_loss,
    sample_noise_and_labels,
    stack_uploads,
)
from fedstill.models.extractor_head import EXTRACTOR, HEAD, split_model
from fedstill.models.generators import append_one_hot
from fedstill.models.module_utils import load_vector, to_vector, weighted_mean
from fedstill.node.node_group import NodeGroup, StackedModules
from fedstill.protocol.payload_kinds import GENERATOR_PARAMETERS, LABEL_COUNTS, SCHEDULE
from fedstill.tasks import Task


@dataclass
class FedGENState:
    """Server state besides the student."""

    G: nn.Module
    adam: torch.optim.Optimizer  # G's
    histogram: LabelHistogram  # n_i^y and n_i


@dataclass(frozen=True, kw_only=True)
class FedGEN(FeatureGeneratorMethod):
    """FedGEN's options."""

    title: ClassVar[str] = "FedGEN"
    paper: ClassVar[str] = "Zhu et al., ICML 2021"

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

    @property
    def shared_part(self) -> str:
        """Name of the shared part of the model."""
        return HEAD if self.shares == "head" else ""

    # --- at the nodes -----------------------------------------------------------------------------------

    @query(
        sends=lambda self, setting: {
            "generator": GENERATOR_PARAMETERS,
            "parameters": PARAMETER_KINDS[self.shared_part],
            "counts": LABEL_COUNTS,
            "round": SCHEDULE,
        },
        releases=lambda self, setting: {"parameters": PARAMETER_KINDS[self.shared_part]},
        times=lambda self, setting: self.rounds,
        extra_loss="cross-entropy on the global generator's features",
    )
    def train(
        self,
        nodes: NodeGroup,
        generator: torch.Tensor,
        parameters: torch.Tensor,
        counts: torch.Tensor,
        round: int,
    ) -> Tensors:
        """Train a node's head or model for one round, on its own data and on G's features."""
        G = GlobalGenerator(self, nodes, generator, counts, round)
        nodes.load_parameters("model", parameters, self.shared_part)
        train_round(nodes, round, self.rounds, self.make_train_step(nodes, G))
        return {"parameters": nodes.parameter_vectors("model", self.shared_part)}

    def make_train_step(self, nodes: NodeGroup, G: GlobalGenerator) -> TrainStep:
        """Return a step of F_i and D_i on own data, on G(z, y') and, with beta, on G(z, y)."""
        task, smoothing, call_counter = nodes.setting.task, nodes.setting.local.smoothing, itertools.count()
        alpha, beta = (weight * self.decay**G.t for weight in (self.alpha, self.beta))

        def train_step(group: NodeGroup, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            call, model = next(call_counter), group.module("model")
            d = model(model(x, EXTRACTOR), HEAD)  # D_i(F_i(x))  (G, B, C)
            loss: torch.Tensor = task.loss(d, y, smoothing)  # (G,)
            if G.t:  # G is untrained before the first round
                y_hat = G.sample_labels(group, y.shape, call)
                d_hat = model(G.sample_features(group, y_hat, call), HEAD)  # D_i(G(z, y'))
                loss = loss + alpha * task.loss(d_hat, y_hat)
            if G.t and beta:
                d_bar = model(G.sample_features(group, y, "same", call), HEAD).detach()  # D_i(G(z, y))
                kl = task.distillation_loss(d.flatten(0, 1), d_bar.flatten(0, 1), 1.0)  # (G B,)
                loss = loss + beta * kl.view(len(d), -1).mean(1)
            group.step("model", loss)
            return loss

        return train_step

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FedGENState:
        G = self.init_generator(server)
        return FedGENState(G, adam(G, self.server_lr), LabelHistogram())

    def step(self, server: Server, state: FedGENState, t: int) -> Mapping[str, float]:
        shared, histogram = (
            split_model(server.student, "the student").get_submodule(self.shared_part),
            state.histogram,
        )
        if not histogram.names:
            server.query("initialize_nodes", parameters=to_vector(server.student))
            histogram.fetch(server)
        responses = server.query(
            "train",
            nodes=self.sample_participants(histogram.present_nodes(server.federation), server.seed, t),
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
        for index in range(self.server_steps):
            z, y = sample_noise_and_labels(
                server.compute, n_y, self.server_batch, self.noise, server.seed, t, index
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
