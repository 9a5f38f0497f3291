"""FedProto: each node keeps its features of each class close to the mean features of all nodes.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: "FedProto: Federated Prototype Learning across Heterogeneous Clients",
AAAI 2022, Algorithm 1. Symbols are the paper's: an extractor f_i, a prototype C_i^(j), which is the mean of
f_i over node i's records of class j (Eq. 3), the global prototype C^(j) (Eq. 6), and lambda of the local
objective L_S + lambda L_R (Eq. 7).

Networks may differ if their prototypes have one size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from fedstill.core.options import NonNegativeFloat, NonNegativeInt, PositiveInt, Share
from fedstill.methods import (
    ArgumentError,
    LabelHistogramState,
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
    predict,
)
from fedstill.methods._class_means import check_class_vectors, class_means, vectors_of_labels
from fedstill.methods.fedavg import sample_nodes
from fedstill.models import example_inputs
from fedstill.models.extractor_head import EXTRACTOR, HEAD, count_features, split_model
from fedstill.protocol.payload_kinds import SCHEDULE, PayloadKind

PROTOTYPES = PayloadKind(
    "prototypes",
    "the mean of a node's extractor features over its own records of each class; for "
    "a class with one record, that record's features",
)


@dataclass(kw_only=True)
class FedProtoState(LabelHistogramState):
    """Server state, with the nodes' label counts."""

    C: torch.Tensor  # global prototypes (classes, p), 0: none yet


@dataclass(frozen=True, kw_only=True)
class FedProto(Method):
    """FedProto's options."""

    title: ClassVar[str] = "FedProto"
    paper: ClassVar[str] = "Tan et al., AAAI 2022"
    query_names: ClassVar[tuple[str, ...]] = ("count_labels", "train_locally")
    evaluated_model: ClassVar[Literal["nodes"]] = "nodes"
    initial_training: ClassVar[Span | None] = None  # local training happens in the rounds

    rounds: PositiveInt = 20
    """Rounds; the local training (nodes.local.epochs) is divided among them."""
    participation: Share = 1.0
    """Share of the nodes that take part in a round, sampled in each round; at least one node does. Other
    nodes skip that part of their local training.
    """
    lam: NonNegativeFloat = 1.0
    """Weight (lambda) of the mean squared distance of an example's features to its class's prototype."""
    features: NonNegativeInt = 0
    """Values of a prototype: means over neighboring features, so that networks with different numbers of
    features can take part. 0: the features themselves, which must be equally many at all nodes.
    """

    def needs(self) -> Needs:
        return Needs(trainable=True, single_label=True, split_models=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield count_labels_query(setting)
        yield self.prototype_query()

    def prototype_query(self) -> Query:
        """Return the query for a round of local training and the node's prototypes."""
        return Query(
            self.train_locally,
            sends={"C": PROTOTYPES, "round": SCHEDULE},
            releases={"C": PROTOTYPES},
            times=self.rounds,
            span=SpanOfRound(self.rounds),
            stackable=True,
            details=QueryDetails(
                extra_loss="the distance of features to the prototype of an example's class"
            ),
        )

    # --- at a node --------------------------------------------------------------------------------------

    def train_locally(self, node: NodeView, C: torch.Tensor, round: int) -> Tensors:
        """Train towards the global prototypes; return C_i^(j), ``(C, p)``, 0 for absent classes."""
        check_class_vectors("C", C, node.task.classes)
        node.train(Span.part(round, self.rounds), self.train_step, given={"C": C})
        return {"C": node.separately(self.prototypes)}

    def train_step(
        self, node: NodeView, step: int, x: torch.Tensor, y: torch.Tensor, C: torch.Tensor
    ) -> torch.Tensor:
        """Take a step on L_S + lambda L_R (Eq. 7); L_R is 0 for classes without a prototype."""
        f = node.model(x, EXTRACTOR)  # (B, p')
        check_class_vectors("C", C, node.task.classes, self.features or f.shape[1])
        L_S = node.loss(node.model(f, HEAD), y)
        target = vectors_of_labels(node, C, y)  # (B, p)
        is_known = (target != 0).any(1)  # (B,)
        L_R = ((self.pool(f) - target).square().mean(1) * is_known).mean()
        node.step("model", L_S + self.lam * L_R)
        return L_S

    def prototypes(self, node: NodeView) -> torch.Tensor:
        """Return C_i^(j), the mean features of each class of the node's records (Eq. 3)."""
        extractor = node.network().get_submodule(EXTRACTOR)
        f = predict(extractor, node.data.inputs, node.setting.compute)  # (N, p')
        return class_means(self.pool(f), node.data.targets, node.task.classes)

    def pool(self, f: torch.Tensor) -> torch.Tensor:
        """Return features ``(..., p')`` in the size of prototypes."""
        return F.adaptive_avg_pool1d(f, self.features) if self.features else f

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

    def init_state(self, server: Server) -> Any:
        return FedProtoState(
            C=torch.zeros(server.task.classes, self.prototype_size(server), device=server.device)
        )

    def step(self, server: Server, state: Any, t: int) -> Mapping[str, float]:
        state.histogram.fetch(server)
        known = state.histogram.present_nodes(server.federation)
        names, previous = sample_nodes(known, self.participation, server.seed, t), state.C
        responses = server.query("train_locally", nodes=names, C=previous, round=t)
        state.C = self.aggregate(state, responses)
        return {"moved": (state.C - previous).norm().item()}

    def aggregate(self, state: FedProtoState, responses: Responses) -> torch.Tensor:
        """Return C^(j), the mean over nodes with the class, weighted by their numbers of examples of it (Eq.
        6).

        A class without prototypes in this round keeps its last one.
        """
        C, n = (
            responses["C"],
            state.histogram.select(responses.nodes).counts,
        )  # (K, classes, p) and |D_i,j| (K, classes)
        weight = (n * (C != 0).any(2)).unsqueeze(2)  # (K, classes, 1)
        total = weight.sum(0)
        return torch.where(total > 0, (weight * C).sum(0) / total.clamp_min(1e-9), state.C)


def _device_of(network: torch.nn.Module) -> torch.device:
    """Return the device of a network."""
    return next(network.parameters()).device
