"""FedMD: nodes of any architectures learn from each other by their class scores on public data.

Li, Wang: "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS 2019 workshop,
arXiv:1910.03581, Algorithm 1. Symbols are the paper's: nodes' models f_k, public data D_0, a round's subset
d_j of it, the consensus f~.

Transfer learning (on labeled public data, then on the node's own) comes first. Then, in each round, the nodes
*communicate* their class scores on d_j, the server *aggregates* and *distributes* the consensus, and each
node *digests* it (trains towards it on d_j) and *revisits* its own data.

The paper has no global model. Here the server's student digests every consensus too, as a node without data
would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from fedstill.core.options import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveOrInf
from fedstill.methods import Needs, NodeGroup, Server, Span, Tensors, cosine_lr, set_lr, train_round
from fedstill.methods._public_data import (
    NodeWeightingMethod,
    WeightedState,
    compute_logits,
    finetune_on_public,
    make_student_optimizer,
    require_labeled,
    require_public,
    sample_rows,
    train_student,
)
from fedstill.node import local_training
from fedstill.protocol.payload_kinds import INDICES, LOGITS, SCHEDULE
from fedstill.protocol.queries import NodeSetting, query
from fedstill.tasks import Task

DIGEST_INPUTS = {"rows": INDICES, "consensus": LOGITS, "round": SCHEDULE}


@dataclass
class FedMDState(WeightedState):
    """Server state besides the student."""

    scores: dict[str, torch.Tensor] = field(default_factory=dict)  # f_k on this round's d_j (B, C, ...)


@dataclass(frozen=True, kw_only=True)
class FedMD(NodeWeightingMethod):
    """FedMD's options."""

    title: ClassVar[str] = "FedMD"
    batch_options: ClassVar[tuple[str, ...]] = ("digest_batch",)
    paper: ClassVar[str] = "Li and Wang, NeurIPS 2019 workshop"
    ensemble = "logits"  # no option: f~ is the mean of class scores

    public_epochs: NonNegativeInt = 0
    """Transfer learning: passes of each node over labeled public data, before its own data; 0: none."""
    initial_rounds: NonNegativeInt = 10
    """Local training before the first round, in parts as long as a round's."""
    rounds: PositiveInt = 10
    """Rounds (P); the local training (nodes.local.epochs) is divided into initial_rounds + rounds parts."""
    subset: PositiveInt = 5000
    """Examples of d_j, sampled in each round; at most all public ones."""
    weights: Literal["equal", "counts"] = "equal"
    """Weights of the nodes: equal, as in the paper, or their shares of the examples of each class."""

    distance: Literal["l1", "l2", "kl"] = "kl"
    """Loss of digesting: absolute or squared differences of class scores, or the divergence of the
    distributions at temperature tau.
    """
    tau: PositiveOrInf = 1.0
    """Temperature of kl."""
    digest_epochs: NonNegativeInt = 1
    """Passes of each node over d_j."""
    digest_batch: PositiveInt = 32
    """Public examples in a batch, of nodes and student."""
    digest_lr: NonNegativeFloat = 1e-3
    """Learning rate of the nodes' second optimizer, a new Adam in each round."""

    student_epochs: NonNegativeInt = 10
    """Passes of the student over d_j."""
    student_lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for the student, falling over the rounds on a cosine to student_lr_end."""
    student_lr_end: NonNegativeFloat = 1e-4
    """The student's learning rate in the last round."""

    def needs(self) -> Needs:
        return Needs(public=True, public_labels=self.public_epochs > 0)

    @property
    def initial_training(self) -> Span | None:
        """Local training before the first query, unless transfer learning comes before it."""
        return self.training_part_before_rounds if self.initial_rounds and not self.public_epochs else None

    @property
    def training_part_before_rounds(self) -> Span:
        """Part of the local training before the first round."""
        return Span(0, self.initial_rounds, self.initial_rounds + self.rounds)

    def revisit_training_part(self, sent: Tensors) -> Span:
        """Return the part of the local training of the round in ``sent``."""
        return Span.part(int(sent["round"]), self.rounds, offset=self.initial_rounds)

    def max_rows(self, setting: NodeSetting) -> int:
        """Return the largest number of examples in d_j."""
        return self.subset if setting.public is None else min(self.subset, len(setting.public))

    # --- at the nodes -----------------------------------------------------------------------------------

    @query(
        when=lambda self, setting: self.public_epochs > 0,
        times=1,
        depends_on_records=(),
        span=lambda self, sent: self.training_part_before_rounds,
    )
    def transfer(self, nodes: NodeGroup) -> Tensors:
        """Train f_k on the labeled public data, then on the first part of its own."""
        setting: NodeSetting = nodes.setting
        if not nodes.nodes[0].is_frozen:
            public, losses = (
                require_labeled(setting.public),
                partial(setting.task.loss, smoothing=setting.local.smoothing),
            )
            steps = {"epochs": self.public_epochs, "batch": self.digest_batch}
            finetune_on_public(
                nodes, public.inputs, public.targets, losses, "transfer", **steps, lr=self.digest_lr
            )
            if self.initial_rounds:
                local_training.attach_optimizers(nodes.nodes, setting.local)
                local_training.train(
                    nodes.nodes,
                    setting.task,
                    setting.local,
                    setting.compute,
                    span=self.training_part_before_rounds,
                )
        return {}

    @query(
        sends={"rows": INDICES},
        releases={"logits": LOGITS},
        times=1,
        rows=max_rows,
        depends_on_records=(),
    )
    def communicate(self, nodes: NodeGroup, rows: torch.Tensor) -> Tensors:
        """Return f_k(x) for x in d_j, ``(G, B, C, ...)``."""
        nodes.module("model").train(False)
        z = compute_logits(nodes, require_public(nodes.setting.public).inputs[rows[0].long()])
        return {"logits": z}

    @query(sends=DIGEST_INPUTS, times=1, depends_on_records=(), span=revisit_training_part)
    def digest(self, nodes: NodeGroup, rows: torch.Tensor, consensus: torch.Tensor, round: int) -> Tensors:
        """Train towards the consensus on d_j, then on the node's own data."""
        if not nodes.nodes[0].is_frozen:
            d = require_public(nodes.setting.public).inputs[rows[0].long()]
            self.train_towards(nodes, d, consensus[0], self.digest_epochs, "digest", round)
            train_round(nodes, self.initial_rounds + round, self.initial_rounds + self.rounds)
        return {}

    @query(
        sends={**DIGEST_INPUTS, "rows_next": INDICES},
        releases={"logits": LOGITS},
        times=lambda self, setting: self.rounds - 1,
        rows=max_rows,
        depends_on_records=(),
        span=revisit_training_part,
    )
    def digest_and_communicate(
        self,
        nodes: NodeGroup,
        rows: torch.Tensor,
        consensus: torch.Tensor,
        round: int,
        rows_next: torch.Tensor,
    ) -> Tensors:
        """Digest and revisit, then return the class scores of the next round."""
        self.digest(nodes, rows, consensus, round)
        return self.communicate(nodes, rows_next)

    def train_towards(
        self, nodes: NodeGroup, x: torch.Tensor, consensus: torch.Tensor, epochs: int, *purpose: str | int
    ) -> None:
        """Train each node's model towards a consensus ``(N, C, ...)`` on public examples."""
        task = nodes.setting.task

        def losses(z: torch.Tensor, consensus: torch.Tensor) -> torch.Tensor:
            distances = self.digest_loss(task, z.flatten(0, 1), consensus.flatten(0, 1))
            return distances.view(len(z), -1).mean(1)  # (G,)

        steps = {"epochs": epochs, "batch": self.digest_batch}
        finetune_on_public(nodes, x, consensus, losses, *purpose, **steps, lr=self.digest_lr)

    def digest_loss(self, task: Task, z: torch.Tensor, consensus: torch.Tensor) -> torch.Tensor:
        """Return the loss of digesting for class scores and consensus ``(B, C, ...)``: ``(B,)``."""
        if self.distance == "l1":
            return (z - consensus).abs().flatten(1).mean(1)
        return task.distillation_loss(z, consensus, self.tau if self.distance == "kl" else math.inf)

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FedMDState:
        return FedMDState(make_student_optimizer(server.student, self.student_lr))

    def step(self, server: Server, state: FedMDState, t: int) -> Mapping[str, float]:
        """Run one round: aggregate, distribute, and have the consensus digested everywhere."""
        d = sample_rows(server, self.subset, t).int()
        if not state.scores:
            if self.public_epochs:
                server.query("transfer")
            self.fetch_weights(server, state)
            state.scores = server.query("communicate", nodes=state.histogram.names, rows=d).by_node("logits")
        f = torch.stack([*state.scores.values()])  # (K, B, C, ...)
        omega = self.omega(server, state, tuple(state.scores))
        consensus = server.task.ensemble(f, omega, self.ensemble)  # f~ = sum_k w_k f_k  (B, C, ...)
        sent: dict[str, Any] = {"rows": d, "consensus": consensus, "round": t}
        if t + 1 < self.rounds:
            query, sent["rows_next"] = "digest_and_communicate", sample_rows(server, self.subset, t + 1).int()
            state.scores = server.query(query, nodes=state.histogram.names, **sent).by_node("logits")
        else:
            server.query("digest", nodes=state.histogram.names, **sent)
        set_lr(state.optimizer, cosine_lr(t, self.rounds, self.student_lr, self.student_lr_end))
        rows, distance = d.long().to(server.device), partial(self.digest_loss, server.task)
        passes = {"epochs": self.student_epochs, "batch": self.digest_batch}
        loss = train_student(server, state.optimizer, rows, consensus, distance, t, **passes)
        return {"disagreement": (f - consensus).abs().mean().item(), "student": loss}
