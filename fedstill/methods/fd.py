"""FD, federated distillation: each node trains towards the others' mean output for an example's class.

Jeong, Oh, Kim, Park, Bennis, Kim: "Communication-Efficient On-Device Machine Learning: Federated Distillation
and Augmentation under Non-IID Private Data", NeurIPS 2018 workshop, arXiv:1811.11479, Algorithm 1. F_k,l^(i)
is the mean output of node i's model, a distribution, over its records of label l in round k; ^F_k,l^(i) is
the mean of all other nodes, which node i trains towards in the next round.

The server sends the sum of all nodes' means, and a node subtracts its own. As each mean is a distribution,
the rest sums to the number of other nodes that hold the label. Labels that no other node holds have no
target.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

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
    SpanOfRound,
    Tensors,
    predict,
)
from fedstill.methods._class_means import check_class_vectors, class_means, vectors_of_labels
from fedstill.methods.fedavg import sample_nodes
from fedstill.protocol.payload_kinds import SCHEDULE, PayloadKind

CLASS_SCORES = PayloadKind(
    "class scores",
    "mean class probabilities of a node's model over the node's own records of one class",
    category="rows",
    normal_size=1.0,
)


@dataclass
class FDState:
    """Server state of the method."""

    F_sum: torch.Tensor  # sum_i F_k,l^(i), a row a label (C, C)


@dataclass(frozen=True, kw_only=True)
class FD(Method):
    """FD's options."""

    title: ClassVar[str] = "FD"
    paper: ClassVar[str] = "Jeong et al., NeurIPS 2018 workshop"
    query_names: ClassVar[tuple[str, ...]] = ("train_locally",)
    evaluated_model: ClassVar[Literal["nodes"]] = "nodes"
    initial_training: ClassVar[Span | None] = None  # local training happens in the rounds

    rounds: PositiveInt = 20
    """Rounds; the local training (nodes.local.epochs) is divided among them."""
    participation: Share = 1.0
    """Share of the nodes that take part in a round, sampled in each round; at least one node does. Other
    nodes skip that part of their local training.
    """

    gamma: NonNegativeFloat = 1.0
    """Weight of the cross-entropy to the others' mean output for an example's label."""

    def needs(self) -> Needs:
        return Needs(trainable=True, single_label=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield Query(
            self.train_locally,
            sends={"F_sum": CLASS_SCORES, "round": SCHEDULE},
            releases={"F": CLASS_SCORES},
            times=self.rounds,
            rows=setting.task.classes,
            depends_on_records=("F",),
            span=SpanOfRound(self.rounds),
            stackable=True,
            details=QueryDetails(
                extra_loss="the distance to the other nodes' mean output for an example's class"
            ),
        )

    # --- at a node --------------------------------------------------------------------------------------

    def prepare(self, node: Node, setting: NodeSetting) -> None:
        """Add buffers for the node's last response and its round."""
        c = setting.task.classes
        node.add_buffers("sent", F=torch.zeros(c, c), round=torch.tensor(-1))

    def train_locally(self, node: NodeView, F_sum: torch.Tensor, round: int) -> Tensors:
        """Train towards the others' means; return F_k,l^(i), ``(C, C)``, 0 in the rows of absent labels."""
        classes = node.task.classes
        check_class_vectors("F_sum", F_sum, classes, classes)

        def others(node: NodeView) -> torch.Tensor:
            return mean_of_others(F_sum, node.buffers("sent"), round)

        def own(node: NodeView) -> torch.Tensor:
            p = predict(node.network(), node.data.inputs, node.setting.compute).softmax(1)
            sent = node.buffers("sent")
            sent["F"].copy_(class_means(p, node.data.targets, classes))
            sent["round"].fill_(round)
            return sent["F"].clone()  # the next round changes the buffer

        F_hat = node.separately(others)
        node.train(Span.part(round, self.rounds), self.train_step, given={"F_hat": F_hat})
        return {"F": node.separately(own)}

    def train_step(
        self, node: NodeView, step: int, x: torch.Tensor, y: torch.Tensor, F_hat: torch.Tensor
    ) -> torch.Tensor:
        """Take a step on phi(F, y) + gamma phi(F, F_hat of y), phi the cross-entropy."""
        z = node.model(x)  # (B, C)
        loss = node.loss(z, y)
        teacher = vectors_of_labels(node, F_hat, y)  # (B, C), 0 if no other node holds the label
        node.step("model", loss - self.gamma * (teacher * z.log_softmax(1)).sum(1).mean())
        return loss

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FDState:
        return FDState(torch.zeros(server.task.classes, server.task.classes, device=server.device))

    def step(self, server: Server, state: FDState, t: int) -> Mapping[str, float]:
        nodes = sample_nodes(server.federation.present, self.participation, server.seed, t)
        previous = state.F_sum
        state.F_sum = server.query("train_locally", nodes=nodes, F_sum=previous, round=t)["F"].sum(0)
        return {"moved": (state.F_sum - previous).norm().item() / len(nodes)}


def mean_of_others(F_sum: torch.Tensor, sent: Tensors, round: int) -> torch.Tensor:
    """Return ^F_k,l^(i), the mean of all other nodes, ``(C, C)``: 0 if no other node holds the label.

    Args:
        F_sum: the sum of the nodes' responses in the last round.
        sent: F, this node's last response, and its round; a response of an earlier round is not part of the
            sum.
        round: the current round.
    """
    rest = F_sum - sent["F"] * (sent["round"] == round - 1)
    count = rest.sum(1, keepdim=True)  # number of holders of the label, up to the noise of a mechanism
    return torch.where(count > 0.5, rest.clamp(min=0) / count.clamp_min(0.5), 0.0)
