"""Recent queries and responses, kept for a server that repeats a query because a reply was lost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fedstill.node.received_tensors import ReceivedTensors
from fedstill.node.release_ledger import Release
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors

NOTHING = ReceivedTensors("", {}, {})
MAX_EXCHANGES = 4
MAX_BYTES = 2**26  # fewer exchanges if they are large, but at least one


@dataclass
class Exchange:
    """One query to a group of nodes, from its admission until it is dropped.

    Attributes:
        query: the declaration.
        number: the server's number of the query.
        received: tensors that came with it, until all responses are released or the next query is computed.
        responses: the responses, one per node in the group's order.
        differentiable: whether the graph is kept.
        inputs: ``(G, ...)``, leaves of the graph.
        outputs: ``(G, ...)``, with the graph until the next query; lists if they cannot be stacked.
        input_gradients: ``(G, ...)``, one per differentiable input.
        gradients: releases of input gradients, by node.
        is_graph_freed: whether graph and outstanding responses were dropped.
        kept_bytes: bytes of the tensors that are kept after that.
    """

    query: Query
    number: int
    received: ReceivedTensors
    responses: list[Release]
    differentiable: bool
    inputs: Tensors = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    input_gradients: list[torch.Tensor] = field(default_factory=list)
    gradients: Mapping[str, Release] = field(default_factory=dict)
    is_graph_freed: bool = False
    kept_bytes: int = 0

    @property
    def is_released(self) -> bool:
        """True if all responses were released."""
        return all(response.is_released for response in self.responses)

    @property
    def content_hash(self) -> str:
        """Digest of the query."""
        return self.responses[0].received.content_hash

    def drop_received(self) -> None:
        """Drop the tensors that came with the query."""
        self.received = NOTHING

    def free_graph(self) -> None:
        """Drop the graph, and with it what was not released yet."""
        self.inputs, self.outputs, self.is_graph_freed = {}, {}, True
        self.drop_received()
        releases = (*self.responses, *self.gradients.values())
        released = [tensor for release in releases for tensor in release.tensors.values()]
        self.kept_bytes = sum([tensor.nbytes for tensor in (*released, *self.input_gradients)])


class RecentExchanges(OrderedDict[int, Exchange]):
    """The last exchanges, by query number."""

    def keep(self, exchange: Exchange) -> None:
        """Add an exchange, whose responses are not released yet; free the graphs of earlier ones and drop
        the oldest.
        """
        for older in self.values():
            if not older.is_graph_freed:
                older.free_graph()
        self[exchange.number] = exchange
        while len(self) > (MAX_EXCHANGES if self._kept_bytes() <= MAX_BYTES else 1):
            self.popitem(last=False)

    def _kept_bytes(self) -> int:
        return sum([exchange.kept_bytes for exchange in self.values()])
