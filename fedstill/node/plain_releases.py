"""Releases of a deployed node one by one: the server sees each response.

:class:`fedstill.node.secure_aggregation.MaskedReleases` has the same methods, for sums over nodes.
"""

from __future__ import annotations

from fedstill.core.errors import ArgumentError
from fedstill.node.received_tensors import ReceivedTensors
from fedstill.node.replies import ReplyPayload
from fedstill.node.request_handler import RequestHandler, release_gradients, release_responses
from fedstill.protocol.messages import SumMessage
from fedstill.protocol.secure_aggregation import SumRequest
from fedstill.protocol.wire_format import Tensors


class PlainReleases:
    """A node's releases without secure aggregation."""

    def respond(
        self,
        handler: RequestHandler,
        number: int,
        received: ReceivedTensors,
        differentiable: bool,
        request: SumRequest | None,
    ) -> Tensors:
        """Return the response to a query, through the gate.

        Args:
            handler: the node's handler.
            number: the server's number of the query; it rises from query to query.
            received: tensors that came with the query.
            differentiable: keep the graph for :meth:`backward`.
            request: None, as no sum is formed.
        """
        handler.admit_query(received, number, differentiable)
        handler.compute_responses(number)
        (node,) = handler.group.nodes
        return release_responses([handler], number)[node.name]

    def backward(
        self, handler: RequestHandler, number: int, received: ReceivedTensors, request: SumRequest | None
    ) -> Tensors:
        """Return the input gradients, by ``d/dNAME`` of the query's inputs, for gradients of the outputs."""
        (node,) = handler.group.nodes
        handler.compute_gradients(number, {node.name: received})
        return release_gradients([handler], number)[node.name]

    def rules_by_refused_query(self) -> dict[str, str]:
        """Return no rules: none follows from earlier releases."""
        return {}

    def resume(self) -> None:
        """Continue after an earlier process, which has left nothing."""

    def restart(self) -> None:
        """Continue after a checkpoint was loaded."""

    def serve(self, message: SumMessage, tensors: Tensors) -> tuple[ReplyPayload, Tensors]:
        """Refuse messages of secure aggregation."""
        expected = "no secure aggregation: this run's plan has none"
        raise ArgumentError("operation", message.operation, expected)
