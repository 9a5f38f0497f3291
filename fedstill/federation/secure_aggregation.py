"""A federation whose server sees sums only: how one is asked for, read, and its gradients shared out."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedstill.core.errors import ArgumentError, NodeFault, QueryMismatch
from fedstill.federation.link_config import LinkConfig
from fedstill.federation.response_checks import mismatched_gradients, require_finite
from fedstill.protocol.queries import Query
from fedstill.protocol.secure_aggregation import (
    LEAST,
    SUM,
    SumRequest,
    decode_sums,
    gradient_scale,
    invalid_contributions,
    spoilt,
    total,
)
from fedstill.protocol.wire_format import Tensors


@dataclass(frozen=True)
class SentQuery:
    """A query on its way to nodes.

    Args:
        call: of which nodes a sum is made of the answers; None: each is that node's own.
    """

    query: str
    number: int
    tensors: Tensors
    differentiable: bool
    call: SumRequest | None = None


class SumAggregation(ABC):
    """What a federation does with answers that are added, whatever its engine."""

    link: LinkConfig
    queries: Mapping[str, Query]
    # Of the last sum: its query, who added, and their weight, by which its gradients are shared out.
    _last_sum: tuple[int, tuple[str, ...], Tensors] = (-1, (), {})
    _sums = 0  # the last one's number

    def _summed_answers(self, members: tuple[str, ...], sent: SentQuery) -> dict[str, torch.Tensor]:
        """The sum, or weighed mean, of all answers to one query."""
        kinds, call = self.queries[sent.query].kinds(), self._next_sum(members)
        given = self._answer(call.members, replace(sent, call=call))
        parts = [name for name in kinds if not name.startswith("d/d")]
        ring, added = self._sum(call, sent.query, given, parts)
        sums, weights = decode_sums(ring, kinds)
        self._last_sum = sent.number, added, self._placed(weights)
        return self._placed(sums)

    def _next_sum(self, members: tuple[str, ...]) -> SumRequest:
        """One more sum, with a number above all of earlier processes of this server, too."""
        self._sums = max(self._sums + 1, time.time_ns() // 1_000_000)
        return SumRequest(self._sums, members, self.link.quorum < 1)

    def _sum(
        self, call: SumRequest, query: str, given: Mapping[str, Tensors], parts: Sequence[str]
    ) -> tuple[Tensors, tuple[str, ...]]:
        """What its members added, in the ring, and who did."""
        added = dict(given)
        for node, fault in invalid_contributions(added, parts).items():
            self.exclude(node, query, fault, may_rejoin=False)
            del added[node]
        if not added or (len(added) < len(call.members) and not call.recover):
            missing = ", ".join(name for name in call.members if name not in added)
            raise NodeFault(missing, query, "without it the sum of all nodes' answers cannot be read")
        ring = self._uncovered(call, total(list(added.values())), tuple(added))
        if spoilt(ring):
            why = "some answer held NaN, or what is too large to add, now or in an earlier run"
            fault = f"a sum is no smaller than random numbers: {why} (`fedstill node check` tells its owner)"
            raise NodeFault(SUM, query, fault)
        return ring, tuple(added)

    def _summed_gradients(
        self, number: int, query: str, pull: Tensors, inputs: Tensors
    ) -> dict[str, torch.Tensor]:
        """The sum of all nodes' gradients, from the one that reached their sum."""
        of, added, weights = self._last_sum
        if of != number:
            raise QueryMismatch(SUM, query, number)
        # Nodes multiply by their own weights what is divided by the weight of all here.
        each = {
            name: grad / weights[name].to(grad) if name in weights else grad for name, grad in pull.items()
        }
        require_finite({SUM: each}, query)
        scale = gradient_scale(each)  # nodes refuse any but 1
        scaled = {name: grad / scale for name, grad in each.items()}
        members = tuple(name for name in added if name in self.present)
        call = self._next_sum(members)
        given = self._pull_back(number, query, dict.fromkeys(call.members, scaled), call)
        declared = self.queries[query]
        parts = [f"d/d{name}" for name in declared.differentiable]
        sums, _ = decode_sums(self._sum(call, query, given, parts)[0], declared.kinds())
        if wrong := mismatched_gradients({SUM: sums}, inputs):
            raise NodeFault(SUM, query, wrong[SUM])
        return self._placed({name: grad * scale for name, grad in sums.items()})

    def _uncovered(self, call: SumRequest, ring: Tensors, added: tuple[str, ...]) -> Tensors:
        """A sum of those that added to it, without the masks that do not cancel in it."""
        return ring

    def _placed(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Tensors where the server computes."""
        return dict(tensors)

    @property
    @abstractmethod
    def present(self) -> tuple[str, ...]:
        """See :class:`~fedstill.federation.federation.Federation`, as all that follows."""

    @abstractmethod
    def exclude(
        self, node: str, query: str, reason: str, *, back: bool, since: int | None = None
    ) -> None: ...

    @abstractmethod
    def _answer(self, asked: tuple[str, ...], sent: SentQuery) -> Mapping[str, Tensors]:
        """Each asked node's answer, or what it adds to a sum, by its name, in order; those left out on the
        way have none."""

    @abstractmethod
    def _pull_back(
        self, number: int, query: str, pulls: Mapping[str, Tensors], call: SumRequest | None
    ) -> Mapping[str, Tensors]:
        """Each node's gradients with respect to the query's inputs, by its name, in order, from those that
        reached its answer."""


def check_secure_aggregation(nodes: Sequence[str], queries: Mapping[str, Query]) -> None:
    """Refuse sums of too few nodes, or queries whose answers cannot be added.

    Raises:
        ArgumentError: naming the first of them.
    """
    if len(nodes) < LEAST:
        raise ArgumentError(
            "link.secure_aggregation", True, f"false with {len(nodes)} nodes: a sum is of {LEAST} or more"
        )
    for name, query in queries.items():
        if query.kinds() and not query.sums:
            kinds = ", ".join(dict.fromkeys(query.kinds().values()))
            reason = f"query {name} gives each node's {kinds}, and does not add them"
            raise ArgumentError("link.secure_aggregation", True, f"false for this method: {reason}")
