"""Queries and gradients for a request handler, in the order of a federation in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedstill.node.received_tensors import ReceivedTensors
from fedstill.node.request_handler import RequestHandler, release_gradients, release_responses
from fedstill.protocol.wire_format import Tensors


def respond(
    handler: RequestHandler, name: str, number: int, tensors: Tensors, differentiable: bool
) -> Sequence[Tensors]:
    """Return each node's response, in the group's order."""
    received = ReceivedTensors.of_query(handler.side.queries[name], tensors)
    handler.admit_query(received, number, differentiable)
    handler.compute_responses(number)
    return list(release_responses([handler], number).values())


def backward(
    handler: RequestHandler, number: int, output_gradients: Mapping[str, Tensors]
) -> Mapping[str, Tensors]:
    """Return the input gradients of the nodes that get gradients of their outputs, by node."""
    query = handler.query_name(number)
    received = {node: ReceivedTensors.of_gradients(query, each) for node, each in output_gradients.items()}
    handler.compute_gradients(number, received)
    return release_gradients([handler], number)
