"""Recent queries and responses, kept for a server that repeats a query because a reply was lost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fedstill.node.audit_entries import ReceivedQuery
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors, tensor_bytes

MAX_EXCHANGES = 4
MAX_BYTES = 2**26  # fewer if they are large, but at least one


@dataclass
class Exchange:
    """One query and its response, from arrival until it is dropped.

    Attributes:
        query: the declaration.
        content_hash: digest of the query.
        received: the query as received, one per node in the group's order.
        tensors: tensors that came with it, until all responses are released.
        differentiable: whether the graph is kept.
        inputs: ``(G, ...)``, leaves of the graph.
        outputs: ``(G, ...)``, with the graph until the next query; lists if they cannot be stacked.
        releases: released tensors, one per node in the group's order.
        received_gradients: output gradients as received, by node.
        input_gradients: ``(G, ...)``, one per differentiable input.
        released_gradients: released input gradients, by node.
        is_graph_freed: whether graph and outstanding responses were dropped.
    """

    query: Query
    content_hash: str
    received: list[ReceivedQuery]
    tensors: Tensors
    differentiable: bool
    inputs: Tensors = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    releases: list[Tensors] = field(default_factory=list)
    received_gradients: dict[str, ReceivedQuery] = field(default_factory=dict)
    input_gradients: list[torch.Tensor] = field(default_factory=list)
    released_gradients: dict[str, Tensors] = field(default_factory=dict)
    is_graph_freed: bool = False


class RecentExchanges(OrderedDict[int, Exchange]):
    """The last exchanges, by query number."""

    def keep(self, number: int, exchange: Exchange) -> None:
        """Add an exchange; free the graphs of earlier ones and drop the oldest."""
        for older in self.values():
            older.inputs, older.outputs, older.is_graph_freed = {}, {}, True
        self[number] = exchange
        while len(self) > (MAX_EXCHANGES if self._bytes() <= MAX_BYTES else 1):
            self.popitem(last=False)

    def _bytes(self) -> int:
        releases = [release for exchange in self.values() for release in exchange.releases]
        return sum(tensor_bytes(tensor) for release in releases for tensor in release.values())
