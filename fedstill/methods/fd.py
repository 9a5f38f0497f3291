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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstill.core.options import NonNegativeFloat
from fedstill.methods import (
    Node,
    NodeGroup,
    NodeSetting,
    Server,
    Tensors,
    TrainStep,
    predict,
    query,
    train_round,
)
from fedstill.methods._averaging import RoundsMethod
from fedstill.methods._class_means import (
    ClassMeansMethod,
    check_class_vectors,
    class_means,
    vectors_of_classes,
)
from fedstill.methods._node_buffers import add_buffers, get_buffers
from fedstill.protocol.payload_kinds import SCHEDULE, PayloadKind
from fedstill.tasks import Task

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
class FD(ClassMeansMethod):
    """FD's options."""

    title: ClassVar[str] = "FD"
    paper: ClassVar[str] = "Jeong et al., NeurIPS 2018 workshop"

    gamma: NonNegativeFloat = 1.0
    """Weight of the cross-entropy to the others' mean output for an example's label."""

    # --- at the nodes -----------------------------------------------------------------------------------

    def prepare(self, nodes: Sequence[Node], setting: NodeSetting) -> None:
        """Add buffers for a node's last response and its round."""
        c = setting.task.classes
        for node in nodes:
            add_buffers(node, "sent", F=torch.zeros(c, c), round=torch.tensor(-1))

    @query(
        sends={"F_sum": CLASS_SCORES, "round": SCHEDULE},
        releases={"F": CLASS_SCORES},
        times=lambda self, setting: self.rounds,
        rows=lambda self, setting: setting.task.classes,
        depends_on_records=("F",),
        span=RoundsMethod.round_training_part,
        extra_loss="the distance to the other nodes' mean output for an example's class",
    )
    def train_locally(self, nodes: NodeGroup, F_sum: torch.Tensor, round: int) -> Tensors:
        """Train towards the others' means; return F_k,l^(i), ``(G, C, C)``, 0 in the rows of absent
        labels."""
        setting: NodeSetting = nodes.setting
        check_class_vectors("F_sum", F_sum, len(nodes), setting.task.classes, setting.task.classes)
        F_hat = {
            node.name: mean_of_others(all_of, get_buffers(node, "sent"), round)
            for node, all_of in zip(nodes.nodes, F_sum, strict=True)
        }
        train_round(
            nodes, round, self.rounds, self.make_train_step(setting.task, setting.local.smoothing, F_hat)
        )
        for node in nodes.nodes:
            p = predict(node.model, node.data.inputs, setting.compute).softmax(1)
            sent = get_buffers(node, "sent")
            sent["F"].copy_(class_means(p, node.data.targets, setting.task.classes))
            sent["round"].fill_(round)
        return {"F": torch.stack([get_buffers(node, "sent")["F"] for node in nodes.nodes])}

    def make_train_step(self, task: Task, smoothing: float, F_hat: dict[str, torch.Tensor]) -> TrainStep:
        """Return a step on phi(F, y) + gamma phi(F, F_hat of y), phi the cross-entropy."""

        def train_step(group: NodeGroup, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            z = group.module("model")(x)  # (G, B, C)
            losses: torch.Tensor = task.loss(z, y, smoothing)  # (G,)
            teacher = vectors_of_classes(F_hat, group, y)  # (G, B, C), 0 if no other node holds the label
            group.step("model", losses - self.gamma * (teacher * z.log_softmax(2)).sum(2).mean(1))
            return losses

        return train_step

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FDState:
        return FDState(torch.zeros(server.task.classes, server.task.classes, device=server.device))

    def step(self, server: Server, state: FDState, t: int) -> Mapping[str, float]:
        nodes = self.sample_participants(server.federation.present, server.seed, t)
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
