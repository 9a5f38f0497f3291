"""FedProto: nodes keep what they make of each class near what all nodes together make of it.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: "FedProto: Federated Prototype Learning across Heterogeneous Clients",
AAAI 2022, Algorithm 1. Symbols are the paper's: an extractor f_i, a prototype C_i^(j), which is the mean of
f_i over node i's records of class j (Eq. 3), the global prototype C^(j) (Eq. 6), and lambda of the local
objective L_S + lambda L_R (Eq. 7).

Networks may differ, as long as prototypes have one size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from fedstill.core.options import NonNegativeFloat, NonNegativeInt
from fedstill.methods import (
    ArgumentError,
    CountsLabels,
    HistogramState,
    Needs,
    NodeGroup,
    NodeSetting,
    Responses,
    Server,
    Tensors,
    TrainStep,
    predict,
    query,
    train_round,
)
from fedstill.methods._averaging import Rounds
from fedstill.methods._class_means import ClassMeans, check_class_vectors, class_means, vectors_of_classes
from fedstill.models import example_inputs
from fedstill.models.extractor_head import EXTRACTOR, count_features, split_model
from fedstill.protocol.payload_kinds import SCHEDULE, PayloadKind
from fedstill.tasks import Task

PROTOTYPES = PayloadKind(
    "prototypes",
    "what a node's model makes of its own records half-way through, on average over those of each class; of "
    "a class with one record it is that record's",
)


@dataclass(kw_only=True)
class PrototypeState:
    """What the server knows from round to round."""

    C: torch.Tensor  # global ones (classes, p), 0: none yet


@dataclass(kw_only=True)
class FedProtoState(PrototypeState, HistogramState):
    """And who holds how many records of each class."""


@dataclass(frozen=True, kw_only=True)
class PrototypeMethod(ClassMeans):
    """What FedProto and FedTGP share: all that nodes do."""

    lam: NonNegativeFloat = 1.0
    """lambda, weight of the mean squared distance of an example's features to its class's prototype."""
    features: NonNegativeInt = 0
    """Values of a prototype: so many means over neighboring features, so that networks whose features differ
    in number can go together. 0: the features as they are, which must be equally many at all nodes."""

    def needs(self) -> Needs:
        return Needs(trainable=True, single_label=True, split_models=True)

    # --- at the nodes -----------------------------------------------------------------------------------

    @query(
        sends={"C": PROTOTYPES, "round": SCHEDULE},
        releases={"C": PROTOTYPES},
        times=lambda self, setting: self.rounds,
        span=Rounds.round_span,
        extra_loss="the distance of features to the prototype of an example's class",
    )
    def train_locally(self, nodes: NodeGroup, C: torch.Tensor, round: int) -> Tensors:
        """Train beside the global prototypes; tell C_i^(j), ``(G, C, p)``, 0 of absent classes."""
        setting: NodeSetting = nodes.setting
        check_class_vectors("C", C, len(nodes), setting.task.classes)
        by_name = {node.name: each for node, each in zip(nodes.nodes, C, strict=True)}
        train_round(nodes, round, self.rounds, self.make_train_step(setting.task, setting.local.smoothing, by_name))
        mine = []
        for node in nodes.nodes:
            f = predict(node.model.get_submodule(EXTRACTOR), node.data.inputs, setting.compute)  # (N, p')
            mine.append(class_means(self.pooled(f), node.data.targets, setting.task.classes))  # Eq. 3
        return {"C": torch.stack(mine)}

    def pooled(self, f: torch.Tensor) -> torch.Tensor:
        """Features ``(..., p')`` in the size of prototypes."""
        return F.adaptive_avg_pool1d(f, self.features) if self.features else f

    def make_train_step(self, task: Task, smoothing: float, C: dict[str, torch.Tensor]) -> TrainStep:
        """A step on L_S + lambda L_R (Eq. 7); L_R is 0 for classes that have no prototype yet."""

        def train_step(group: NodeGroup, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            model = group.module("model")
            f = model(x, EXTRACTOR)  # (G, B, p')
            sent = C[group.nodes[0].name].unsqueeze(0)  # all nodes got the same
            check_class_vectors("C", sent, 1, task.classes, self.features or f.shape[2])
            losses: torch.Tensor = task.loss(model(f, "head"), y, smoothing)  # L_S (G,)
            target = vectors_of_classes(C, group, y)  # (G, B, p)
            known = (target != 0).any(2)  # (G, B)
            L_R = ((self.pooled(f) - target).square().mean(2) * known).mean(1)
            group.step("model", losses + self.lam * L_R)
            return losses

        return train_step

    # --- at the server ----------------------------------------------------------------------------------

    def size(self, server: Server) -> int:
        """Values p of a prototype.

        Raises:
            ArgumentError: networks differ in them.
        """
        some = example_inputs(server.shape, server.task.form).to(server.device)
        nets = {"the student": server.student, **{names[0]: net for names, net in server.architectures}}
        found = {
            whose: count_features(split_model(net, whose), some.to(_at(net)), whose)
            for whose, net in nets.items()
        }
        if not self.features and len({*found.values()}) > 1:
            told = ", ".join(f"{p} values of {whose}" for whose, p in found.items())
            raise ArgumentError("method.features", 0, f"a size for all, where features differ: {told}")
        return self.features or found["the student"]

    def present(self, server: Server, state: Any) -> Sequence[str]:
        """Who can be asked."""
        return server.federation.present

    def step(self, server: Server, state: Any, t: int) -> Mapping[str, float]:
        asked, before = self.sample_participants(self.present(server, state), server.seed, t), state.C
        told = server.query("train_locally", of=asked, C=before, round=t)
        losses = self.aggregate(server, state, told, t)
        return {"moved": (state.C - before).norm().item(), **losses}

    @abstractmethod
    def aggregate(self, server: Server, state: Any, told: Responses, t: int) -> Mapping[str, float]:
        """The next global prototypes from what nodes told, ``(K, classes, p)``; its losses."""


@dataclass(frozen=True, kw_only=True)
class FedProto(CountsLabels, PrototypeMethod):
    """FedProto's options."""

    title: ClassVar[str] = "FedProto"
    paper: ClassVar[str] = "Tan et al., AAAI 2022"

    def init_state(self, server: Server) -> FedProtoState:
        return FedProtoState(C=torch.zeros(server.task.classes, self.size(server), device=server.device))

    def present(self, server: Server, state: FedProtoState) -> list[str]:
        """Who has told counts."""
        state.histogram.fetch(server)
        return state.histogram.present_nodes(server.federation)

    def aggregate(self, server: Server, state: FedProtoState, told: Responses, t: int) -> Mapping[str, float]:
        """C^(j), the mean over those who hold the class, weighed by how much of it they hold (Eq. 6).

        A class that nobody told of in this round keeps the one it has.
        """
        C, n = (
            told["C"],
            state.histogram.select(told.nodes).counts,
        )  # (K, classes, p) and |D_i,j| (K, classes)
        weight = (n * (C != 0).any(2)).unsqueeze(2)  # (K, classes, 1)
        total = weight.sum(0)
        state.C = torch.where(total > 0, (weight * C).sum(0) / total.clamp_min(1e-9), state.C)
        return {}


def _at(network: torch.nn.Module) -> torch.device:
    """Where a network is."""
    return next(network.parameters()).device
