"""What methods that share parameters have in common: the same start, rounds of local training, averages.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017, Algorithm 1, with the parts in which its successors differ as functions to override.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedstill.core.options import PositiveInt, Share
from fedstill.methods import (
    ArgumentError,
    Method,
    Needs,
    NodeGroup,
    Server,
    Span,
    TrainStep,
    query,
    torch_generator,
    train_round,
)
from fedstill.methods._label_histogram import CountsSamples, HistogramState, Tensors
from fedstill.models.extractor_head import EXTRACTOR, HEAD
from fedstill.models.module_utils import integer_mask, load_vector, to_vector, weighted_mean
from fedstill.protocol.payload_kinds import EXTRACTOR_PARAMETERS, HEAD_PARAMETERS, PARAMETERS, SCHEDULE
from fedstill.protocol.secure_aggregation import SumWeighting

PARAMETER_KINDS: Mapping[str, str] = {"": PARAMETERS, EXTRACTOR: EXTRACTOR_PARAMETERS, HEAD: HEAD_PARAMETERS}


@dataclass(frozen=True, kw_only=True)
class Rounds(Method):
    """What all methods in rounds have."""

    initial_training: ClassVar[Span | None] = None  # local training happens in the rounds

    rounds: PositiveInt = 20
    """Rounds; the local training budget (nodes.local.epochs) is divided among them."""
    participation: Share = 1.0
    """Share of the nodes that take part in a round, drawn anew each round; at least one node does. Who is
    not drawn leaves out that part of its local training."""

    @property
    def needs_initial_weights(self) -> bool:
        """Whether the first round gives some node less than the whole network, so that it needs a start."""
        return True

    @query(sends={"parameters": PARAMETERS}, times=1, when=lambda self, setting: self.needs_initial_weights)
    def initialize_nodes(self, nodes: NodeGroup, parameters: torch.Tensor) -> Tensors:
        """All nodes take the server's first weights; nothing leaves."""
        nodes.load_parameters("model", parameters)
        return {}

    def round_span(self, sent: Tensors) -> Span:
        """The part of the local training in the round that ``sent`` names."""
        return Span.part(int(sent["round"]), self.rounds)

    def sample_participants(self, nodes: Sequence[str], seed: int, t: int) -> list[str]:
        """The nodes that take part in round ``t``, in their order: max(share K, 1) of them.

        >>> rounds = Rounds(participation=0.5)
        >>> rounds.sample_participants(["a", "b", "c", "d"], 0, 0) == rounds.sample_participants(["a", "b", "c", "d"], 0, 0)
        True
        """
        count = max(int(self.participation * len(nodes) + 1e-9), 1)
        order = torch.randperm(len(nodes), generator=torch_generator(seed, "taking part", t))
        return [nodes[index] for index in sorted(order[:count].tolist())]


@dataclass(frozen=True, kw_only=True)
class Averaging(CountsSamples, Rounds):
    """FedAvg, and what differs from it by little."""

    shared_part: ClassVar[str] = ""  # what is exchanged: "" the whole network, "extractor" or "head"
    extra_loss: ClassVar[str] = ""  # what local training descends beside the task's own loss

    def needs(self) -> Needs:
        return Needs(trainable=True, same_architecture=True, split_models=bool(self.shared_part))

    @property
    def needs_initial_weights(self) -> bool:
        """Not where every node takes the whole network in the first round."""
        return bool(self.shared_part or self.participation < 1)

    # --- at the nodes -----------------------------------------------------------------------------------

    @query(
        sends=lambda self, setting: {"parameters": PARAMETER_KINDS[self.shared_part], "round": SCHEDULE},
        releases=lambda self, setting: {"parameters": PARAMETER_KINDS[self.shared_part]},
        times=lambda self, setting: self.rounds,
        depends_on_records=lambda self, setting: (
            () if type(self).make_train_step is Averaging.make_train_step else None
        ),
        span=Rounds.round_span,
        extra_loss=lambda self, setting: self.extra_loss,
        sums=lambda self, setting: self.sum_weightings(),
    )
    def train(self, nodes: NodeGroup, parameters: torch.Tensor, round: int) -> Tensors:
        """Take parameters w, train on your own data, give yours back."""
        nodes.load_parameters("model", parameters, self.shared_part)
        train_round(nodes, round, self.rounds, self.make_train_step(nodes))
        trained = nodes.parameter_vectors("model", self.shared_part)
        if (
            nodes.setting.secure_aggregation
        ):  # numbers of batches follow from a node's size, and would be a second sum of it
            model = nodes.nodes[0].model
            counts = integer_mask(model.get_submodule(self.shared_part)).to(trained.device)
            trained = torch.where(counts, parameters, trained)
        return {"parameters": trained}

    def sum_weightings(self) -> Mapping[str, SumWeighting]:
        """sum_k n_k w_k and sum_k n_k, and no w_k.

        Raises:
            ArgumentError: rounds of other nodes each, whose sums less each other are single nodes'; or
                another program than this one, which may want each w_k: who knows better overrides this.
        """
        kind = type(self)
        if kind.combine is not Averaging.combine or kind.step is not Averaging.step:
            allowed = f"false for {self.title}, which combines the nodes' parameters one by one"
            raise ArgumentError("link.secure_aggregation", True, allowed)
        return self.round_sum_weightings()

    def round_sum_weightings(self) -> Mapping[str, SumWeighting]:
        """The same, of rounds of all nodes."""
        if self.participation < 1:
            raise ArgumentError("method.participation", self.participation, "1 where link.secure_aggregation")
        return {"parameters": "size"}

    def make_train_step(self, nodes: NodeGroup) -> TrainStep | None:
        """A round's training step, with the models as the server sent them; None is the task's own loss."""
        return None

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> Any:
        return HistogramState()

    def step(self, server: Server, state: Any, t: int) -> Mapping[str, float]:
        self.prepare_nodes(server, state)
        shared = server.student.get_submodule(self.shared_part)
        w = to_vector(shared)  # (P,)
        known = state.histogram.present_nodes(server.federation)
        updates = server.query(
            "train", of=self.sample_participants(known, server.seed, t), parameters=w, round=t
        )
        n = state.histogram.select(updates.nodes).sizes  # n_k (K,)
        load_vector(shared, self.combine(state, w, updates["parameters"], n))
        return {"moved": (to_vector(shared) - w).norm().item()}

    def prepare_nodes(self, server: Server, state: Any) -> None:
        """Once: learn the data sizes, and give all nodes the same start unless the first round does."""
        known = bool(state.histogram.names)
        state.histogram.fetch(server)
        if not known and "initialize_nodes" in server.federation.queries:
            server.query("initialize_nodes", parameters=to_vector(server.student))

    def combine(self, state: Any, w: torch.Tensor, updates: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        """The next ``w`` (P,) from the last one, the nodes' updates ``(K, P)`` and data sizes ``(K,)``."""
        return weighted_mean(updates, n)  # sum_k (n_k / n) w_k
