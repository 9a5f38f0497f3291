"""Shared parts of methods that average parameters: initial weights, rounds of local training, weighted means.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1. The steps in which later methods differ are functions to override.
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
from fedstill.methods._label_histogram import HistogramState, SampleCountQuery, Tensors
from fedstill.models.extractor_head import EXTRACTOR, HEAD
from fedstill.models.module_utils import integer_mask, load_vector, to_vector, weighted_mean
from fedstill.protocol.payload_kinds import EXTRACTOR_PARAMETERS, HEAD_PARAMETERS, PARAMETERS, SCHEDULE
from fedstill.protocol.secure_aggregation import SumWeighting

PARAMETER_KINDS: Mapping[str, str] = {"": PARAMETERS, EXTRACTOR: EXTRACTOR_PARAMETERS, HEAD: HEAD_PARAMETERS}


@dataclass(frozen=True, kw_only=True)
class RoundsMethod(Method):
    """Base class of methods that train in rounds."""

    initial_training: ClassVar[Span | None] = None  # local training happens in the rounds

    rounds: PositiveInt = 20
    """Rounds; the local training (nodes.local.epochs) is divided among them."""
    participation: Share = 1.0
    """Share of the nodes that take part in a round, sampled in each round; at least one node does. Other
    nodes skip that part of their local training.
    """

    @property
    def needs_initial_weights(self) -> bool:
        """True if some node does not get the whole network in the first round."""
        return True

    @query(sends={"parameters": PARAMETERS}, times=1, when=lambda self, setting: self.needs_initial_weights)
    def initialize_nodes(self, nodes: NodeGroup, parameters: torch.Tensor) -> Tensors:
        """Load the server's initial weights at all nodes; nothing is released."""
        nodes.load_parameters("model", parameters)
        return {}

    def round_training_part(self, sent: Tensors) -> Span:
        """Return the part of the local training of the round in ``sent``."""
        return Span.part(int(sent["round"]), self.rounds)

    def sample_participants(self, nodes: Sequence[str], seed: int, t: int) -> list[str]:
        """Return the nodes that take part in round ``t``, in order: max(share K, 1) of them.

        >>> rounds = RoundsMethod(participation=0.5)
        >>> nodes = ["a", "b", "c", "d"]
        >>> rounds.sample_participants(nodes, 0, 0) == rounds.sample_participants(nodes, 0, 0)
        True
        """
        count = max(int(self.participation * len(nodes) + 1e-9), 1)
        order = torch.randperm(len(nodes), generator=torch_generator(seed, "taking part", t))
        return [nodes[index] for index in sorted(order[:count].tolist())]


@dataclass(frozen=True, kw_only=True)
class AveragingMethod(SampleCountQuery, RoundsMethod):
    """FedAvg, and base class of its variants."""

    shared_part: ClassVar[str] = ""  # what is exchanged: "" the whole network, "extractor" or "head"
    extra_loss: ClassVar[str] = ""  # description of the terms added to the task's loss

    def needs(self) -> Needs:
        return Needs(trainable=True, same_architecture=True, split_models=bool(self.shared_part))

    @property
    def needs_initial_weights(self) -> bool:
        """False if every node gets the whole network in the first round."""
        return bool(self.shared_part or self.participation < 1)

    # --- at the nodes -----------------------------------------------------------------------------------

    @query(
        sends=lambda self, setting: {"parameters": PARAMETER_KINDS[self.shared_part], "round": SCHEDULE},
        releases=lambda self, setting: {"parameters": PARAMETER_KINDS[self.shared_part]},
        times=lambda self, setting: self.rounds,
        depends_on_records=lambda self, setting: (
            () if type(self).make_train_step is AveragingMethod.make_train_step else None
        ),
        span=RoundsMethod.round_training_part,
        extra_loss=lambda self, setting: self.extra_loss,
        sums=lambda self, setting: self.sum_weightings(),
    )
    def train(self, nodes: NodeGroup, parameters: torch.Tensor, round: int) -> Tensors:
        """Load parameters w, train on the node's own data, and return the node's parameters."""
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
        """Return the sums under secure aggregation: sum_k n_k w_k and sum_k n_k, and no w_k.

        Raises:
            ArgumentError: rounds with different participants, whose sums differ by single nodes' parameters;
                or a subclass with another algorithm, which may need each w_k. Such a subclass overrides this
                function.
        """
        kind = type(self)
        if kind.combine is not AveragingMethod.combine or kind.step is not AveragingMethod.step:
            allowed = f"false for {self.title}, which combines the nodes' parameters one by one"
            raise ArgumentError("link.secure_aggregation", True, allowed)
        return self.round_sum_weightings()

    def round_sum_weightings(self) -> Mapping[str, SumWeighting]:
        """Return the sums of rounds in which all nodes take part."""
        if self.participation < 1:
            raise ArgumentError("method.participation", self.participation, "1 where link.secure_aggregation")
        return {"parameters": "size"}

    def make_train_step(self, nodes: NodeGroup) -> TrainStep | None:
        """Return the training step of a round, for models as the server sent them.

        None is a step on the task's own loss.
        """
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
            "train", nodes=self.sample_participants(known, server.seed, t), parameters=w, round=t
        )
        n = state.histogram.select(updates.nodes).sizes  # n_k (K,)
        load_vector(shared, self.combine(state, w, updates["parameters"], n))
        return {"moved": (to_vector(shared) - w).norm().item()}

    def prepare_nodes(self, server: Server, state: Any) -> None:
        """In the first round, fetch each node's sample count and, if needed, send the initial weights."""
        known = bool(state.histogram.names)
        state.histogram.fetch(server)
        if not known and "initialize_nodes" in server.federation.queries:
            server.query("initialize_nodes", parameters=to_vector(server.student))

    def combine(self, state: Any, w: torch.Tensor, updates: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        """Return the next ``w`` (P,) from the last one, the nodes' updates ``(K, P)`` and data sizes
        ``(K,)``."""
        return weighted_mean(updates, n)  # sum_k (n_k / n) w_k
