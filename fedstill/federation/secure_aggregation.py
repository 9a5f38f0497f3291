"""Secure aggregation at the server: request sums over nodes, read them, and distribute their gradients."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedstill.core.errors import ArgumentError, NodeFault, QueryMismatch
from fedstill.federation.link_config import LinkConfig
from fedstill.federation.response_checks import mismatched_gradient_faults, require_finite_gradients
from fedstill.protocol.queries import Query
from fedstill.protocol.secure_aggregation import (
    MIN_SUM_NODES,
    SUM,
    SumRequest,
    add_contributions,
    contribution_faults,
    decode_sums,
    is_corrupted,
    power_of_two_scale,
)
from fedstill.protocol.wire_format import Tensors


@dataclass(frozen=True)
class SentQuery:
    """A query as it is sent to nodes.

    Args:
        query: its name.
        number: its number.
        tensors: inputs in wire format.
        differentiable: whether gradients will be requested.
        call: the sum that the responses belong to; None without secure aggregation.
    """

    query: str
    number: int
    tensors: Tensors
    differentiable: bool
    call: SumRequest | None = None


class SumAggregation(ABC):
    """Secure aggregation of a federation, for every engine."""

    link: LinkConfig
    queries: Mapping[str, Query]
    # Of the last sum: query number, nodes that contributed, and their total weights, for its gradients.
    _last_sum: tuple[int, tuple[str, ...], Tensors] = (-1, (), {})
    _sum_count = 0  # the last one's number

    def _summed_responses(self, members: tuple[str, ...], sent: SentQuery) -> dict[str, torch.Tensor]:
        """Return the sum, or the weighted mean, of all responses to one query."""
        kinds, call = self.queries[sent.query].released_kinds(), self._new_sum_request(members)
        received = self._collect_responses(call.members, replace(sent, call=call))
        parts = [name for name in kinds if not name.startswith("d/d")]
        total_ring, contributions = self._sum(call, sent.query, received, parts)
        sums, weights = decode_sums(total_ring, kinds)
        self._last_sum = sent.number, contributions, self._to_device(weights)
        return self._to_device(sums)

    def _new_sum_request(self, members: tuple[str, ...]) -> SumRequest:
        """Start another sum, with a number above those of earlier processes of this server."""
        self._sum_count = max(self._sum_count + 1, time.time_ns() // 1_000_000)
        return SumRequest(self._sum_count, members, self.link.quorum < 1)

    def _sum(
        self, call: SumRequest, query: str, received: Mapping[str, Tensors], parts: Sequence[str]
    ) -> tuple[Tensors, tuple[str, ...]]:
        """Return the sum of the contributions, in the total_ring, and the names of the nodes that
        contributed."""
        contributions = dict(received)
        for node, fault in contribution_faults(contributions, parts).items():
            self.exclude(node, query, fault, may_rejoin=False)
            del contributions[node]
        if not contributions or (len(contributions) < len(call.members) and not call.recover):
            missing = ", ".join(name for name in call.members if name not in contributions)
            raise NodeFault(missing, query, "without it the sum of all nodes' responses cannot be read")
        total_ring = self._unmask(call, add_contributions(list(contributions.values())), tuple(contributions))
        if is_corrupted(total_ring):
            why = "a response held NaN or numbers too large to add, now or in an earlier run"
            fault = f"the sum is corrupted: {why} (`fedstill node check` shows its owner which)"
            raise NodeFault(SUM, query, fault)
        return total_ring, tuple(contributions)

    def _summed_gradients(
        self, number: int, query: str, pull: Tensors, inputs: Tensors
    ) -> dict[str, torch.Tensor]:
        """Return the sum of all nodes' input gradients.

        Args:
            pull: gradient of the loss with respect to the sum of the responses.
        """
        last_number, contributors, weights = self._last_sum
        if last_number != number:
            raise QueryMismatch(SUM, query, number)
        # Divide by the total weight here; each node multiplies by its own weight.
        pull = {
            name: grad / weights[name].to(grad) if name in weights else grad for name, grad in pull.items()
        }
        require_finite_gradients({SUM: pull}, query)
        scale = power_of_two_scale(pull)  # nodes refuse any scale but 1
        scaled = {name: grad / scale for name, grad in pull.items()}
        members = tuple(name for name in contributors if name in self.present)
        call = self._new_sum_request(members)
        received = self._collect_gradients(number, query, dict.fromkeys(call.members, scaled), call)
        declared = self.queries[query]
        parts = [f"d/d{name}" for name in declared.differentiable]
        sums, _ = decode_sums(self._sum(call, query, received, parts)[0], declared.released_kinds())
        if faults := mismatched_gradient_faults({SUM: sums}, inputs):
            raise NodeFault(SUM, query, faults[SUM])
        return self._to_device({name: grad * scale for name, grad in sums.items()})

    def _unmask(self, call: SumRequest, total_ring: Tensors, contributions: tuple[str, ...]) -> Tensors:
        """Remove from a sum the masks that do not cancel in it."""
        return total_ring

    def _to_device(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Move tensors to the server's device."""
        return dict(tensors)

    @property
    @abstractmethod
    def present(self) -> tuple[str, ...]:
        """See :class:`~fedstill.federation.federation.Federation`."""

    @abstractmethod
    def exclude(
        self, node: str, query: str, reason: str, *, may_rejoin: bool, since_query: int | None = None
    ) -> None: ...

    @abstractmethod
    def _collect_responses(self, asked: tuple[str, ...], sent: SentQuery) -> Mapping[str, Tensors]:
        """Return the response of each queried node, or its contribution to a sum, by name and in order.

        Nodes that are excluded meanwhile have no entry.
        """

    @abstractmethod
    def _collect_gradients(
        self, number: int, query: str, pulls: Mapping[str, Tensors], call: SumRequest | None
    ) -> Mapping[str, Tensors]:
        """Return each node's gradients with respect to the query's inputs, by name and in order.

        Args:
            pulls: by node, gradients of the loss with respect to its outputs.
        """


def check_secure_aggregation(nodes: Sequence[str], queries: Mapping[str, Query]) -> None:
    """Refuse secure aggregation of too few nodes, or of queries whose responses cannot be contributions.

    Raises:
        ArgumentError: naming the first of them.
    """
    if len(nodes) < MIN_SUM_NODES:
        raise ArgumentError(
            "link.secure_aggregation",
            True,
            f"false with {len(nodes)} nodes: it needs {MIN_SUM_NODES} or more",
        )
    for name, query in queries.items():
        if query.released_kinds() and not query.sums:
            kinds = ", ".join(dict.fromkeys(query.released_kinds().values()))
            reason = f"query {name} releases each node's {kinds}, which are not added"
            raise ArgumentError("link.secure_aggregation", True, f"false for this method: {reason}")
