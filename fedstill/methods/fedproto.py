"""FedProto: each node keeps its features of each class close to the mean features of all nodes.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: "FedProto: Federated Prototype Learning across Heterogeneous Clients",
AAAI 2022, Algorithm 1. Symbols are the paper's: an extractor f_i, a prototype C_i^(j), which is the mean of
f_i over node i's records of class j (Eq. 3), the global prototype C^(j) (Eq. 6), and lambda of the local
objective L_S + lambda L_R (Eq. 7).

Networks may differ if their prototypes have one size.
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
    HistogramState,
    LabelCountQuery,
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
from fedstill.methods._averaging import RoundsMethod
from fedstill.methods._class_means import (
    ClassMeansMethod,
    check_class_vectors,
    class_means,
    vectors_of_classes,
)
from fedstill.models import example_inputs
from fedstill.models.extractor_head import EXTRACTOR, count_features, split_model
from fedstill.protocol.payload_kinds import SCHEDULE, PayloadKind
from fedstill.tasks import Task

PROTOTYPES = PayloadKind(
    "prototypes",
    "the mean of a node's extractor features over its own records of each class; for "
    "a class with one record, that record's features",
)


@dataclass(kw_only=True)
class PrototypeState:
    """Server state of the method."""

    C: torch.Tensor  # global ones (classes, p), 0: none yet


@dataclass(kw_only=True)
class FedProtoState(PrototypeState, HistogramState):
    """Server state, with the nodes' label counts."""


@dataclass(frozen=True, kw_only=True)
class PrototypeMethod(ClassMeansMethod):
    """Base class of FedProto and FedTGP, with all that runs at the nodes."""

    lam: NonNegativeFloat = 1.0
    """Weight (lambda) of the mean squared distance of an example's features to its class's prototype."""
    features: NonNegativeInt = 0
    """Values of a prototype: means over neighboring features, so that networks with different numbers of
    features can take part. 0: the features themselves, which must be equally many at all nodes.
    """

    def needs(self) -> Needs:
        return Needs(trainable=True, single_label=True, split_models=True)

    # --- at the nodes -----------------------------------------------------------------------------------

    @query(
        sends={"C": PROTOTYPES, "round": SCHEDULE},
        releases={"C": PROTOTYPES},
        times=lambda self, setting: self.rounds,
        span=RoundsMethod.round_training_part,
        extra_loss="the distance of features to the prototype of an example's class",
    )
    def train_locally(self, nodes: NodeGroup, C: torch.Tensor, round: int) -> Tensors:
        """Train towards the global prototypes; return C_i^(j), ``(G, C, p)``, 0 for absent classes."""
        setting: NodeSetting = nodes.setting
        check_class_vectors("C", C, len(nodes), setting.task.classes)
        by_name = {node.name: C_i for node, C_i in zip(nodes.nodes, C, strict=True)}
        train_round(
            nodes, round, self.rounds, self.make_train_step(setting.task, setting.local.smoothing, by_name)
        )
        prototypes = []
        for node in nodes.nodes:
            f = predict(node.model.get_submodule(EXTRACTOR), node.data.inputs, setting.compute)  # (N, p')
            prototypes.append(class_means(self.pool(f), node.data.targets, setting.task.classes))  # Eq. 3
        return {"C": torch.stack(prototypes)}

    def pool(self, f: torch.Tensor) -> torch.Tensor:
        """Return features ``(..., p')`` in the size of prototypes."""
        return F.adaptive_avg_pool1d(f, self.features) if self.features else f

    def make_train_step(self, task: Task, smoothing: float, C: dict[str, torch.Tensor]) -> TrainStep:
        """Return a step on L_S + lambda L_R (Eq. 7); L_R is 0 for classes without a prototype."""

        def train_step(group: NodeGroup, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            model = group.module("model")
            f = model(x, EXTRACTOR)  # (G, B, p')
            sent = C[group.nodes[0].name].unsqueeze(0)  # equal for all nodes
            check_class_vectors("C", sent, 1, task.classes, self.features or f.shape[2])
            losses: torch.Tensor = task.loss(model(f, "head"), y, smoothing)  # L_S (G,)
            target = vectors_of_classes(C, group, y)  # (G, B, p)
            known = (target != 0).any(2)  # (G, B)
            L_R = ((self.pool(f) - target).square().mean(2) * known).mean(1)
            group.step("model", losses + self.lam * L_R)
            return losses

        return train_step

    # --- at the server ----------------------------------------------------------------------------------

    def prototype_size(self, server: Server) -> int:
        """Return the number of values p of a prototype.

        Raises:
            ArgumentError: networks differ in it.
        """
        inputs = example_inputs(server.shape, server.task.form).to(server.device)
        nets = {"the student": server.student, **{names[0]: net for names, net in server.architectures}}
        sizes = {
            name: count_features(split_model(net, name), inputs.to(_device_of(net)), name)
            for name, net in nets.items()
        }
        if not self.features and len({*sizes.values()}) > 1:
            details = ", ".join(f"{p} values of {name}" for name, p in sizes.items())
            raise ArgumentError("method.features", 0, f"a common size, as features differ; {details}")
        return self.features or sizes["the student"]

    def queryable_nodes(self, server: Server, state: Any) -> Sequence[str]:
        """Return the nodes that can be queried."""
        return server.federation.present

    def step(self, server: Server, state: Any, t: int) -> Mapping[str, float]:
        names, previous = (
            self.sample_participants(self.queryable_nodes(server, state), server.seed, t),
            state.C,
        )
        responses = server.query("train_locally", nodes=names, C=previous, round=t)
        losses = self.aggregate(server, state, responses, t)
        return {"moved": (state.C - previous).norm().item(), **losses}

    @abstractmethod
    def aggregate(self, server: Server, state: Any, responses: Responses, t: int) -> Mapping[str, float]:
        """Compute the next global prototypes from the nodes', ``(K, classes, p)``; return its losses."""


@dataclass(frozen=True, kw_only=True)
class FedProto(LabelCountQuery, PrototypeMethod):
    """FedProto's options."""

    title: ClassVar[str] = "FedProto"
    paper: ClassVar[str] = "Tan et al., AAAI 2022"

    def init_state(self, server: Server) -> FedProtoState:
        return FedProtoState(
            C=torch.zeros(server.task.classes, self.prototype_size(server), device=server.device)
        )

    def queryable_nodes(self, server: Server, state: FedProtoState) -> list[str]:
        """Return the nodes with known label counts."""
        state.histogram.fetch(server)
        return state.histogram.present_nodes(server.federation)

    def aggregate(
        self, server: Server, state: FedProtoState, responses: Responses, t: int
    ) -> Mapping[str, float]:
        """Set C^(j) to the mean over nodes with the class, weighted by their numbers of examples of it (Eq.
        6).

        A class without prototypes in this round keeps its last one.
        """
        C, n = (
            responses["C"],
            state.histogram.select(responses.nodes).counts,
        )  # (K, classes, p) and |D_i,j| (K, classes)
        weight = (n * (C != 0).any(2)).unsqueeze(2)  # (K, classes, 1)
        total = weight.sum(0)
        state.C = torch.where(total > 0, (weight * C).sum(0) / total.clamp_min(1e-9), state.C)
        return {}


def _device_of(network: torch.nn.Module) -> torch.device:
    """Return the device of a network."""
    return next(network.parameters()).device
