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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from fedstill.core.options import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveOrInf
from fedstill.methods import (
    LabelHistogram,
    Method,
    Needs,
    NodeSetting,
    NodeView,
    Query,
    QueryDetails,
    Responses,
    Server,
    Span,
    SpanOfRound,
    Tensors,
    count_labels_query,
)
from fedstill.methods._public_data import StudentTraining, require_labeled, sample_rows, train_student
from fedstill.protocol.payload_kinds import INDICES, LOGITS, SCHEDULE
from fedstill.tasks import Ensemble, Task

DIGEST_INPUTS = {"rows": INDICES, "consensus": LOGITS, "round": SCHEDULE}


@dataclass
class FedMDState:
    """Server state besides the student."""

    optimizer: torch.optim.Optimizer  # the student's
    histogram: LabelHistogram  # weights of the nodes
    scores: dict[str, torch.Tensor] = field(default_factory=dict)  # f_k on this round's d_j (B, C, ...)


@dataclass(frozen=True, kw_only=True)
class FedMD(Method):
    """FedMD's options."""

    title: ClassVar[str] = "FedMD"
    paper: ClassVar[str] = "Li and Wang, NeurIPS 2019 workshop"
    query_names: ClassVar[tuple[str, ...]] = (
        "count_labels",
        "transfer",
        "communicate",
        "digest",
        "digest_and_communicate",
    )
    has_ensemble: ClassVar[bool] = True
    batch_options: ClassVar[tuple[str, ...]] = ("digest_batch", "student.batch")

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
    ensemble: Ensemble = "logits"
    """Combination of the class scores: logits, as in the paper, log_probs, probs, consensus, a robust one
    (median and others), or a custom one."""

    distance: Literal["l1", "l2", "kl"] = "kl"
    """Loss of digesting: absolute or squared differences of class scores, or the divergence of the
    distributions at temperature tau.
    """
    tau: PositiveOrInf = 1.0
    """Temperature of kl."""
    digest_epochs: NonNegativeInt = 1
    """Passes of each node over d_j."""
    digest_batch: PositiveInt = 32
    """Public examples in a batch of the nodes."""
    digest_lr: NonNegativeFloat = 1e-3
    """Learning rate of the nodes' second optimizer, a new Adam in each round."""

    student: StudentTraining = field(
        default_factory=partial(StudentTraining, epochs=10, batch=32, lr_end=1e-4)
    )
    """The training of the student: passes over d_j in each round."""

    def needs(self) -> Needs:
        return Needs(public=True, public_labels=self.public_epochs > 0)

    @property
    def initial_training(self) -> Span | None:
        """Local training before the first query, unless transfer learning comes before it."""
        return self.training_before_rounds if self.initial_rounds and not self.public_epochs else None

    @property
    def training_before_rounds(self) -> Span:
        """Part of the local training before the first round."""
        return Span(0, self.initial_rounds, self.initial_rounds + self.rounds)

    def transfer_span(self, sent: Tensors) -> Span:
        """Return the part of the local training in query ``transfer``."""
        return self.training_before_rounds

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        most = self.subset if setting.public is None else min(self.subset, len(setting.public))

        revisit_span = SpanOfRound(self.rounds, offset=self.initial_rounds)

        if self.weights == "counts":
            yield count_labels_query(setting)
        if self.public_epochs:
            yield Query(
                self.transfer,
                times=1,
                depends_on_records=(),
                span=self.transfer_span,
                stackable=True,
                details=QueryDetails(reads_values=True),
            )
        yield Query(
            self.communicate,
            sends={"rows": INDICES},
            releases={"logits": LOGITS},
            times=1,
            rows=most,
            depends_on_records=(),
            stackable=True,
        )
        yield Query(
            self.digest,
            sends=DIGEST_INPUTS,
            times=1,
            depends_on_records=(),
            span=revisit_span,
            stackable=True,
        )
        yield Query(
            self.digest_and_communicate,
            sends={**DIGEST_INPUTS, "rows_next": INDICES},
            releases={"logits": LOGITS},
            times=self.rounds - 1,
            rows=most,
            depends_on_records=(),
            span=revisit_span,
            stackable=True,
        )

    # --- at a node --------------------------------------------------------------------------------------

    def transfer(self, node: NodeView) -> Tensors:
        """Train f_k on the labeled public data, then on the first part of its own."""
        if not node.is_frozen:
            public = require_labeled(node.public)
            passes = {"epochs": self.public_epochs, "batch": self.digest_batch}
            node.train_on(public.inputs, public.targets, None, "transfer", **passes, lr=self.digest_lr)
            if self.initial_rounds:
                node.train(self.training_before_rounds)
        return {}

    def communicate(self, node: NodeView, rows: torch.Tensor) -> Tensors:
        """Return f_k(x) for x in d_j, ``(B, C, ...)``."""
        node.model.train(False)
        return {"logits": node.predict(node.public.inputs[rows.long()])}

    def digest(self, node: NodeView, rows: torch.Tensor, consensus: torch.Tensor, round: int) -> Tensors:
        """Train towards the consensus on d_j, then *revisit* the node's own data."""
        if not node.is_frozen:
            d, loss = node.public.inputs[rows.long()], partial(self.digest_loss, node.task)
            passes = {"epochs": self.digest_epochs, "batch": self.digest_batch}
            node.train_on(d, consensus, loss, "digest", round, **passes, lr=self.digest_lr)
            node.train(Span.part(round, self.rounds, offset=self.initial_rounds))
        return {}

    def digest_and_communicate(
        self,
        node: NodeView,
        rows: torch.Tensor,
        consensus: torch.Tensor,
        round: int,
        rows_next: torch.Tensor,
    ) -> Tensors:
        """Digest and revisit, then return the class scores of the next round."""
        self.digest(node, rows, consensus, round)
        return self.communicate(node, rows_next)

    def preview_response(self, node: NodeView, x: torch.Tensor, z: torch.Tensor) -> Tensors:
        return {"logits": z}

    def digest_loss(self, task: Task, z: torch.Tensor, consensus: torch.Tensor) -> torch.Tensor:
        """Return the loss of digesting for class scores and consensus ``(B, C, ...)``: ``(B,)``."""
        if self.distance == "l1":
            return (z - consensus).abs().flatten(1).mean(1)
        return task.distillation_loss(z, consensus, self.tau if self.distance == "kl" else math.inf)

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FedMDState:
        histogram = LabelHistogram(equal=self.weights == "equal")
        return FedMDState(self.student.make_optimizer(server.student), histogram)

    def step(self, server: Server, state: FedMDState, t: int) -> Mapping[str, float]:
        """Run one round: aggregate, distribute, and have the consensus digested everywhere."""
        d = sample_rows(server, self.subset, t).int()
        if not state.scores:
            if self.public_epochs:
                server.query("transfer")
            state.histogram.fetch(server)
            state.scores = server.query("communicate", nodes=state.histogram.names, rows=d).by_node("logits")
        f = torch.stack([*state.scores.values()])  # (K, B, C, ...)
        w = state.histogram.weights(server.task, tuple(state.scores))
        consensus = server.task.ensemble(f, w, self.ensemble)  # f~ = sum_k w_k f_k  (B, C, ...)
        sent: dict[str, Any] = {"rows": d, "consensus": consensus, "round": t}
        if t + 1 < self.rounds:
            query, sent["rows_next"] = "digest_and_communicate", sample_rows(server, self.subset, t + 1).int()
            state.scores = server.query(query, nodes=state.histogram.names, **sent).by_node("logits")
        else:
            server.query("digest", nodes=state.histogram.names, **sent)
        self.student.set_lr(state.optimizer, t, self.rounds)
        rows, distance = d.long().to(server.device), partial(self.digest_loss, server.task)
        passes = {"epochs": self.student.epochs, "batch": self.student.batch}
        loss = train_student(server, state.optimizer, rows, consensus, distance, t, **passes)
        return {"disagreement": (f - consensus).abs().mean().item(), "student": loss}

    def ensemble_responses(
        self, server: Server, state: FedMDState, responses: Responses
    ) -> torch.Tensor | None:
        w = state.histogram.weights(server.task, responses.nodes)
        return server.task.ensemble(responses["logits"], w, self.ensemble)
