"""Keeps what was asked and answered last, for a server that asks again because a reply was lost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fedstill.node.audit_entries import ReceivedQuery
from fedstill.protocol.queries import Query
from fedstill.protocol.secure_aggregation import SumRequest
from fedstill.protocol.wire_format import Tensors, tensor_bytes

MAX_EXCHANGES = 4  # answers
MAX_BYTES = 2**26  # fewer where they are large: only the last one, if need be


@dataclass
class Exchange:
    """One query and what is answered, from its arrival until it is forgotten."""

    query: Query
    content_hash: str  # digest of the query
    received: list[ReceivedQuery]  # one a node, in the group's order
    tensors: Tensors  # that came down, until all answers are out
    differentiable: bool
    inputs: Tensors = field(default_factory=dict)  # (G, ...) leaves of the graph
    # (G, ...), with the graph until the next query; a list of what is apart
    outputs: Mapping[str, Any] = field(default_factory=dict)
    releases: list[Tensors] = field(default_factory=list)  # one a node, in the group's order
    received_gradients: dict[str, ReceivedQuery] = field(
        default_factory=dict
    )  # what came to be pulled back, by node
    input_gradients: list[torch.Tensor] = field(default_factory=list)  # (G, ...), one a differentiable input
    released_gradients: dict[str, Tensors] = field(default_factory=dict)  # by node
    is_graph_freed: bool = False  # the graph, and answers that are not out yet
    query_history_hash: str = (
        ""  # where answers are summed: a fingerprint of the query, and of what was asked before
    )
    sum_request: SumRequest | None = None  # of which nodes a sum is made of the answers,
    gradient_sum_request: SumRequest | None = None  # and of the gradients; None: each node's by itself


class RecentExchanges(OrderedDict[int, Exchange]):
    """The last exchanges, by the number of their query."""

    def keep(self, number: int, exchange: Exchange) -> None:
        """Keep one more; the graphs of those before go, and what is too old."""
        for older in self.values():
            older.inputs, older.outputs, older.is_graph_freed = {}, {}, True
        self[number] = exchange
        while len(self) > (MAX_EXCHANGES if self._bytes() <= MAX_BYTES else 1):
            self.popitem(last=False)

    def _bytes(self) -> int:
        releases = [release for exchange in self.values() for release in exchange.releases]
        return sum(tensor_bytes(tensor) for release in releases for tensor in release.values())
