"""Federation of nodes in this process: small networks stacked on a GPU, several at once on a CPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fedstill.core.compute import Compute
from fedstill.federation.federation import Federation, SentQuery
from fedstill.federation.link_config import LinkConfig
from fedstill.models import PREDICTION_ONLY, carries_gradient
from fedstill.node.exchanges import MAX_EXCHANGES
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.received_tensors import ReceivedTensors
from fedstill.node.request_handler import RequestHandler, release_gradients, release_responses
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors


class InProcess(Federation):
    """Federation of nodes that are objects of this process, computed in groups."""

    def __init__(
        self,
        nodes: Sequence[Node],
        groups: Sequence[Sequence[Node]],
        side: NodeSide,
        compute: Compute,
        link: LinkConfig | None = None,
    ) -> None:
        super().__init__([node.name for node in nodes], side.queries, link)
        self._members = {node.name: node for node in nodes}
        self._side, self._compute = side, compute
        self._groups = [[node.name for node in group] for group in groups]
        self._handlers: OrderedDict[tuple[str, ...], RequestHandler] = OrderedDict()
        self._queried_nodes: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # by query number
        for node in nodes:  # a federation numbers its queries from 0
            node.gate.ledger.restart()

    def _refusal_rule(self, node: str, query: Query) -> str | None:
        member = self._members[node]
        shape = tuple(member.data.inputs.shape[1:])
        if query.differentiable and not carries_gradient(member.model, shape):
            return PREDICTION_ONLY
        return member.gate.refusal_reason(query)

    def _query_limit(self, node: str) -> int | None:
        return self._members[node].gate.policy.max_queries or None

    def collect_responses(self, queried: tuple[str, ...], sent: SentQuery) -> Mapping[str, Tensors]:
        self._queried_nodes[sent.number] = queried
        while len(self._queried_nodes) > MAX_EXCHANGES:
            self._queried_nodes.popitem(last=False)
        handlers = self._handlers_for(queried)
        received = ReceivedTensors.of_query(self._side.queries[sent.query], sent.tensors)
        for handler in handlers:
            handler.admit_query(received, sent.number, sent.differentiable)
        self._run_handlers(sent.query, handlers, lambda handler: handler.compute_responses(sent.number))
        responses = release_responses(handlers, sent.number)
        return {name: responses[name] for name in queried}

    def collect_gradients(
        self, number: int, query: str, output_gradients: Mapping[str, Tensors], encoding: Any = None
    ) -> Mapping[str, Tensors]:
        by_handler: dict[RequestHandler, dict[str, ReceivedTensors]] = {}
        received = {
            node: ReceivedTensors.of_gradients(query, gradients)
            for node, gradients in output_gradients.items()
        }
        for gradients in received.values():
            # Before anything is computed, as it copies tensors from the device and would wait for it.
            _ = gradients.content_hash
        for handler in self._handlers_for(self._queried_nodes.get(number, tuple(output_gradients))):
            handler_gradients = {
                node.name: received[node.name] for node in handler.group.nodes if node.name in received
            }
            if handler_gradients:
                by_handler[handler] = handler_gradients
        self._run_handlers(
            f"back {query}",
            list(by_handler),
            lambda handler: handler.compute_gradients(number, by_handler[handler]),
        )
        released = release_gradients(list(by_handler), number)
        return {name: released[name] for name in output_gradients}

    def to_device(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return self._compute.tensors_to_device(tensors)

    def _run_handlers(
        self, name: str, handlers: Sequence[RequestHandler], compute: Callable[[RequestHandler], None]
    ) -> None:
        """Run handlers in parallel; handlers that train privately run alone, as their charges need an
        order."""
        parallel, others = list[RequestHandler](), list[RequestHandler]()
        for handler in handlers:  # a single group uses all cores
            (others if handler.trains_privately or len(self._groups) == 1 else parallel).append(handler)
        if parallel:
            self._compute.workers.map(
                compute,
                parallel,
                kinds=[(name, handler.stacking_key) for handler in parallel],
                random=[handler.group.uses_global_rng for handler in parallel],
            )
        for handler in others:
            compute(handler)

    def _handlers_for(self, queried: tuple[str, ...]) -> list[RequestHandler]:
        """Return a request handler for the queried nodes of each group; equal nodes get the same handler."""
        handlers, selected = [], set(queried)
        for group in self._groups:
            names = tuple(name for name in group if name in selected)
            if not names:
                continue
            if names not in self._handlers:
                members = NodeGroup([self._members[name] for name in names])
                self._handlers[names] = RequestHandler(members, self._side, self._compute, self.link)
            self._handlers.move_to_end(names)
            handlers.append(self._handlers[names])
        # Each keeps its responses, in case a query is repeated.
        while len(self._handlers) > len(self._groups) + MAX_EXCHANGES:
            self._handlers.popitem(last=False)
        return handlers
