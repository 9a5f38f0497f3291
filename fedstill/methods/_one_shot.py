"""Base class of methods that send all queries in the first step and then train the student on the
responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from fedstill.core.options import NonNegativeFloat, PositiveInt, PositiveOrInf
from fedstill.methods import PublicData, QueryCall, Responses, Server, cosine_lr, set_lr
from fedstill.methods._public_data import NodeWeightingMethod, WeightedState, require_public

# Options that only the student's learning depends on.
STUDENT_OPTIONS = ("ensemble", "tau", "epochs", "batch", "lr", "lr_end")


@dataclass
class OneShotState(WeightedState):
    """Server state besides the student."""

    targets: Mapping[str, torch.Tensor] = field(default_factory=dict)  # empty until all is asked


class OneShotMethod(NodeWeightingMethod, ABC):
    """The first step sends all queries; each step is one pass of the student over the public data."""

    unit: ClassVar[Literal["epoch"]] = "epoch"
    one_round: ClassVar[bool] = True
    batch_options: ClassVar[tuple[str, ...]] = ("batch",)

    tau: PositiveOrInf
    epochs: PositiveInt
    batch: PositiveInt
    lr: NonNegativeFloat
    lr_end: NonNegativeFloat

    @property
    def total_steps(self) -> int:
        return self.epochs

    # --- what a method says -----------------------------------------------------------------------------

    @abstractmethod
    def iterate_public_queries(self, public: PublicData, seed: int) -> Iterator[QueryCall]:
        """Yield the queries about public data, in order."""

    @abstractmethod
    def targets(self, server: Server, state: Any) -> Mapping[str, torch.Tensor]:
        """Send all of :meth:`iterate_public_queries` and return the student's targets from the responses."""

    @abstractmethod
    def train_epoch(self, server: Server, state: Any, e: int) -> Mapping[str, float]:
        """Run pass ``e`` of the student over the public data and return its losses."""

    # --- what follows -----------------------------------------------------------------------------------

    def planned_queries(self, public: PublicData | None, seed: int) -> Sequence[QueryCall]:
        """Return the query for label counts, if they are weights, and all queries about public data."""
        counts = [QueryCall("count_labels")] if self.weighted_by_counts else []
        return [*counts, *self.iterate_public_queries(require_public(public), seed)]

    def step(self, server: Server, state: Any, t: int) -> Mapping[str, float]:
        """Run one pass, and before the first one all queries."""
        if not state.targets:
            self.fetch_weights(server, state)
            state.targets = self.targets(server, state)
        set_lr(state.optimizer, cosine_lr(t, self.epochs, self.lr, self.lr_end))
        server.student.train()
        return self.train_epoch(server, state, t)

    def query_with_weights(
        self, server: Server, state: Any, call: QueryCall, **further: float
    ) -> tuple[Responses, torch.Tensor]:
        """Return the responses of the weighted nodes, and their weights omega ``(K, 1, C)``."""
        responses = server.query(call.query, nodes=state.histogram.names, **call.tensors, **further)
        return responses, self.omega(server, state, responses.nodes)
