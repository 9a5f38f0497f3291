"""FedAvg: rounds of local training and weighted averages of the parameters.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, Algorithm 1. Symbols are the paper's: K nodes with n_k examples each, a
share C of them in each round (``participation``), parameters w. Buffers, such as batch norm's running
statistics, are averaged with the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fedstill.core.options import PositiveInt, Share
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
    count_samples_query,
    fetch_sizes,
    torch_generator,
)
from fedstill.models.extractor_head import EXTRACTOR, HEAD
from fedstill.models.module_utils import load_vector, to_vector, weighted_mean
from fedstill.protocol.payload_kinds import EXTRACTOR_PARAMETERS, HEAD_PARAMETERS, PARAMETERS, SCHEDULE
from fedstill.protocol.secure_aggregation import linear_sums

PARAMETER_KINDS = {"": PARAMETERS, EXTRACTOR: EXTRACTOR_PARAMETERS, HEAD: HEAD_PARAMETERS}


@dataclass
class FedAvgState:
    """Server state besides the global model w."""

    n: dict[str, float] = field(default_factory=dict)  # n_k by node; empty before the first round


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Weighted averages of the parameters after rounds of local training (Algorithm 1)."""

    title: ClassVar[str] = "FedAvg"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    query_names: ClassVar[tuple[str, ...]] = ("initialize_nodes", "count_samples", "train")
    initial_training: ClassVar[Span | None] = None  # local training happens in the rounds
    shared_part: ClassVar[str] = ""  # the part that is averaged: "" the whole network, "extractor" or "head"
    extra_loss: ClassVar[str] = ""  # description of a variant's term of the loss, which reads no record
    linear: ClassVar[bool] = True  # the server needs only the weighted mean of the w_k

    rounds: PositiveInt = 20
    """Rounds; the local training (nodes.local.epochs) is divided among them."""
    participation: Share = 1.0
    """Share of the nodes that take part in a round, sampled in each round; at least one node does. Other
    nodes skip that part of their local training.
    """

    def needs(self) -> Needs:
        return Needs(trainable=True, same_architecture=True, split_models=bool(self.shared_part))

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        if self.shared_part or self.participation < 1:  # else all nodes get all weights in the first round
            yield initialize_query()
        yield count_samples_query()
        kind = PARAMETER_KINDS[self.shared_part]
        yield Query(
            self.train,
            sends={"parameters": kind, "round": SCHEDULE},
            releases={"parameters": kind},
            times=self.rounds,
            depends_on_records=(),
            span=SpanOfRound(self.rounds),
            # The sums of n_k w_k and of n_k. Sums of different participants would differ by single w_k.
            sums=linear_sums(
                setting.secure_aggregation and self.linear,
                {"parameters": "size"},
                participation=(self.participation, 1),
            ),
            stackable=True,
            details=QueryDetails(extra_loss=self.extra_loss, extra_loss_reads_records=False),
        )

    # --- at a node: ClientUpdate(k, w) ------------------------------------------------------------------

    def train(self, node: NodeView, parameters: torch.Tensor, round: int) -> Tensors:
        """Load w, train on the node's own data, and return w_k."""
        node.load_parameters(parameters, self.shared_part)
        self.train_locally(node, round)
        w_k = node.parameters(self.shared_part)
        if node.setting.secure_aggregation:
            # Batch norm's numbers of batches follow from a node's size, and would be a second sum of it.
            w_k = torch.where(node.module("model").integer_mask(self.shared_part), parameters, w_k)
        return {"parameters": w_k}

    def train_locally(self, node: NodeView, round: int) -> None:
        """Take E epochs of SGD, or of another optimizer, in all rounds together (nodes.local)."""
        node.train(Span.part(round, self.rounds))

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> Any:
        return FedAvgState()

    def step(self, server: Server, state: Any, t: int) -> Mapping[str, float]:
        """Run one round of Algorithm 1."""
        if not state.n:
            state.n = fetch_sizes(server)
            if "initialize_nodes" in server.federation.queries:
                server.query("initialize_nodes", parameters=to_vector(server.student))
        known = [k for k in server.federation.present_sources if k in state.n]
        S_t = sample_nodes(known, self.participation, server.seed, t)  # m = max(C K, 1) of the nodes
        shared = server.student.get_submodule(self.shared_part)
        w = to_vector(shared)  # (P,)
        updates = server.query("train", nodes=S_t, parameters=w, round=t)
        w_k = updates["parameters"]  # (m, P)
        n_k = torch.tensor([state.n[k] for k in updates.nodes], device=w.device)  # (m,)
        load_vector(shared, self.aggregate(state, w, w_k, n_k))
        return {"moved": (to_vector(shared) - w).norm().item()}

    def aggregate(self, state: Any, w: torch.Tensor, w_k: torch.Tensor, n_k: torch.Tensor) -> torch.Tensor:
        """Return the next parameters ``(P,)``: sum_k (n_k / n) w_k."""
        return weighted_mean(w_k, n_k)


def initialize_nodes(node: NodeView, parameters: torch.Tensor) -> Tensors:
    """Load the server's initial weights; nothing is released."""
    node.load_parameters(parameters)
    return {}


def initialize_query() -> Query:
    """Return the query that gives all nodes the server's initial weights.

    Methods need it in which some node does not get the whole network in its first round.
    """
    return Query(initialize_nodes, sends={"parameters": PARAMETERS}, times=1)


def sample_nodes(names: Sequence[str], share: float, seed: int, t: int) -> list[str]:
    """Return the nodes that take part in round ``t``, in order: max(share K, 1) of them.

    >>> nodes = ["a", "b", "c", "d"]
    >>> sample_nodes(nodes, 0.5, seed=0, t=0) == sample_nodes(nodes, 0.5, seed=0, t=0)
    True
    """
    count = max(int(share * len(names) + 1e-9), 1)
    order = torch.randperm(len(names), generator=torch_generator(seed, "taking part", t))
    return [names[index] for index in sorted(order[:count].tolist())]
