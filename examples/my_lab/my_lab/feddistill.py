"""FedDistill: nodes release one mean logit vector per class and train toward the mean over all nodes.

Jeong, Oh, Kim, Park, Bennis, Kim: "Communication-Efficient On-Device Machine Learning: Federated Distillation
and Augmentation under Non-IID Private Data", 2018, Algorithm 1. Here the mean is over all nodes; the paper
leaves out the node that trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from fedstill.methods import (
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
    payload_kinds,
)

CLASS_LOGITS = payload_kinds.PayloadKind(
    "class logits", "a mean score vector for each class, over a node's own records", category="rows"
)


@dataclass
class Shared:
    """Server state: mean logits of each class, ``(C, C)``."""

    logits: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class FedDistill(Method):
    """FedDistill."""

    title: ClassVar[str] = "FedDistill"
    paper: ClassVar[str] = "Jeong et al., 2018"
    evaluated_model: ClassVar[str] = "nodes"  # there is no model at the server
    initial_training: ClassVar[None] = None  # nodes train in the rounds

    rounds: int = 10
    """Rounds; the local training is divided among them."""
    gamma: float = 0.1
    """Weight of the distance to the mean logits of all nodes for an example's class."""

    def needs(self) -> Needs:
        return Needs(trainable=True, single_label=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield Query(
            self.train_locally,
            sends={"shared": CLASS_LOGITS, "round": payload_kinds.SCHEDULE},
            releases={"mean": CLASS_LOGITS},
            times=self.rounds,
            rows=setting.task.classes,
            depends_on_records=("mean",),
            span=SpanOfRound(self.rounds),
            details=QueryDetails(extra_loss="the distance to the shared class logits"),
        )

    # --- at a node --------------------------------------------------------------------------------------

    def train_locally(self, node: NodeView, shared: torch.Tensor, round: int) -> Tensors:
        """Train with F(x) close to the shared logits of x's class; return the mean logits of each class."""
        train_step = self.train_step if round else None  # in the first round there are no shared logits yet
        node.train(Span.part(round, self.rounds), train_step, given={"shared": shared})
        z = node.predict(node.data.inputs)  # (N, C)
        one_hot = F.one_hot(node.data.targets, node.task.classes).to(z.dtype)  # (N, C)
        return {"mean": one_hot.T @ z / one_hot.sum(0).clamp_min(1).unsqueeze(1)}  # (C, C); 0 if absent

    def train_step(
        self, node: NodeView, step: int, x: torch.Tensor, y: torch.Tensor, shared: torch.Tensor
    ) -> torch.Tensor:
        """Take one step on a batch of the node's own data; return the task's loss, which is reported."""
        z = node.model(x)  # (B, C)
        loss = node.loss(z, y)
        node.step("model", loss + self.gamma * (z - shared[y]).square().mean())
        return loss

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> Shared:
        return Shared(torch.zeros(server.task.classes, server.task.classes, device=server.device))

    def step(self, server: Server, state: Shared, t: int) -> Mapping[str, float]:
        means = server.query("train_locally", shared=state.logits, round=t)["mean"]  # (K, C, C)
        holders = (means != 0).any(2).sum(0).clamp_min(1)  # number of nodes with each class  (C,)
        previous, state.logits = state.logits, means.sum(0) / holders.unsqueeze(1)
        return {"moved": (state.logits - previous).norm().item()}
