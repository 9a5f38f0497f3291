"""Input gradients: from the server's gradients of a response, the gradients of the query's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fedstill.core.errors import QueryMismatch
from fedstill.node.admission import refuse
from fedstill.node.exchanges import Exchange
from fedstill.node.node import Node
from fedstill.node.received_tensors import ReceivedTensors
from fedstill.node.stacked_modules import stack_tensors
from fedstill.protocol.wire_format import Tensors

OutputGradients = Mapping[str, ReceivedTensors]
"""Gradients of a loss with respect to the response, by node."""


def compute_input_gradients(
    exchange: Exchange, nodes: Sequence[Node], output_gradients: OutputGradients
) -> None:
    """Compute the input gradients of a released response, unless they exist already, and free the graph.

    Args:
        exchange: the query and its response.
        nodes: the nodes of the group.
        output_gradients: output gradients of these nodes, or of some.

    Raises:
        QueryMismatch: other gradients came before, or the graph is gone.
        QueryRefused: gradients that do not belong to the response.
    """
    first_node, query = nodes[0].name, exchange.query
    gradients = {
        node.name: node.gate.ledger.admit_gradients(response, received.content_hash, received.byte_counts)
        for node, response in zip(nodes, exchange.responses, strict=True)
        if (received := output_gradients.get(node.name)) is not None
    }
    if exchange.input_gradients:
        earlier = {node: release.received for node, release in exchange.gradients.items()}
        if earlier != {node: release.received for node, release in gradients.items()}:
            raise QueryMismatch(first_node, query.name, exchange.number)
        return
    if not exchange.outputs:  # the next query has freed the graph
        raise QueryMismatch(first_node, query.name, exchange.number)
    for node, received in output_gradients.items():
        _check_output_gradients(exchange, node, received.decompressed)
    exchange.input_gradients = _backward(exchange, nodes, output_gradients)
    if not exchange.input_gradients:  # no graph
        raise QueryMismatch(first_node, query.name, exchange.number)
    exchange.gradients = gradients
    exchange.inputs, exchange.outputs = {}, {}  # free the graph


def _check_output_gradients(exchange: Exchange, node: str, gradients: Tensors) -> None:
    """Refuse output gradients that do not belong to a response, before anything is computed with them.

    Only facts that the server knows are used: names and shapes of the released tensors. Whether the numbers
    are finite is checked on arrival (:meth:`~fedstill.node.gate.Gate.check_tensors`).

    Raises:
        QueryRefused: names that were not released, dtypes other than float32, other shapes, or a query
            without differentiable inputs.
    """
    rule = None
    outputs = {name: part for name, part in exchange.outputs.items() if isinstance(part, torch.Tensor)}
    if not exchange.query.differentiable:
        rule = "gradients: the response has no differentiable inputs"
    elif not gradients or not gradients.keys() <= outputs.keys():
        rule = f"gradients: expected some of {sorted(outputs)}, got {sorted(gradients)}"
    else:
        for name, tensor in gradients.items():
            shape = tuple(outputs[name].shape[1:])  # without the node axis
            if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
                received = f"{tensor.dtype} {tuple(tensor.shape)}"
                rule = f"gradients: {name} is {received} (expected torch.float32 {shape})"
    refuse(node, exchange.query.name, rule)


def _backward(
    exchange: Exchange, nodes: Sequence[Node], output_gradients: OutputGradients
) -> list[torch.Tensor]:
    """Return the gradients of a query's inputs, ``(G, ...)`` each, zero for nodes without output gradients;
    an empty list without a graph.
    """
    weighted = {
        node.name: _weighted(node, exchange, received)
        for node in nodes
        if (received := output_gradients.get(node.name)) is not None
    }
    sample = next(iter(weighted.values()), {})
    # Outputs that do not depend on the inputs (a mean over the node's examples) have no gradient.
    outputs = {key: output for key, output in exchange.outputs.items() if isinstance(output, torch.Tensor)}
    names = [key for key, output in outputs.items() if output.requires_grad and key in sample]
    inputs = [exchange.inputs[key] for key in exchange.query.differentiable]
    if not names:
        return [torch.zeros_like(each) for each in inputs if each.requires_grad]
    zeros = {key: torch.zeros_like(sample[key]) for key in names if len(weighted) < len(nodes)}
    per_node = [weighted.get(node.name, zeros) for node in nodes]
    grads = torch.autograd.grad(
        [exchange.outputs[key] for key in names],
        inputs,
        [stack_tensors([gradients[key] for gradients in per_node]) for key in names],
        allow_unused=True,  # zeros of an input that these outputs do not depend on
        materialize_grads=True,
    )
    # The layout decides the last digits at the server.
    return [grad.contiguous() if len(nodes) == 1 else grad for grad in grads]


def _weighted(node: Node, exchange: Exchange, received: ReceivedTensors) -> Tensors:
    """Return a node's output gradients, weighted as the response was if it was added to a sum."""
    encoder = node.gate.encoder
    return received.decompressed if encoder is None else encoder.weight_gradients(exchange.query, received)
