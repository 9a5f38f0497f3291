"""Gradients with respect to a query's inputs, computed at a node from the server's gradients of the
outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fedstill.node.admission import refuse
from fedstill.node.exchanges import Exchange
from fedstill.node.node import Node
from fedstill.node.node_group import stack_tensors
from fedstill.protocol.wire_format import Tensors, decompress


def check_output_gradients(exchange: Exchange, node: str, gradients: Tensors) -> None:
    """Refuse output gradients that do not belong to a response, before anything is computed with them.

    Only facts that the server knows are used: names and shapes of the released tensors. Whether the numbers
    are finite is checked on arrival (:meth:`~fedstill.node.gate.Gate.check_tensors`).

    Args:
        exchange: the query, with outputs and their graph.
        node: name of the node.
        gradients: output gradients of this node, as they were sent.

    Raises:
        QueryRefused: names that were not released, dtypes other than float32, other shapes, or a query
            without differentiable inputs.
    """
    decompressed, rule = decompress(gradients), None
    outputs = {name: part for name, part in exchange.outputs.items() if isinstance(part, torch.Tensor)}
    if not exchange.query.differentiable:
        rule = "gradients: the response has no differentiable inputs"
    elif not decompressed or not decompressed.keys() <= outputs.keys():
        rule = f"gradients: expected some of {sorted(outputs)}, got {sorted(decompressed)}"
    else:
        for name, tensor in decompressed.items():
            shape = tuple(outputs[name].shape[1:])  # without the node axis
            if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
                received = f"{tensor.dtype} {tuple(tensor.shape)}"
                rule = f"gradients: {name} is {received} (expected torch.float32 {shape})"
    refuse(node, exchange.query.name, rule)


def compute_input_gradients(
    exchange: Exchange, nodes: Sequence[Node], output_gradients: Mapping[str, Tensors]
) -> list[torch.Tensor]:
    """Compute the gradients of a query's inputs, ``(G, ...)`` each, zero for nodes without output
    gradients.

    Args:
        exchange: the query, its inputs, and outputs with their graph.
        nodes: the nodes of the group.
        output_gradients: output gradients, by node and name.

    Returns:
        One tensor per differentiable input; an empty list if no output with a gradient depends on them.
    """
    weighted = {
        node.name: _decode(node, exchange, gradients)
        for node in nodes
        if (gradients := output_gradients.get(node.name))
    }
    sample = next(iter(weighted.values()), {})
    # Outputs that do not depend on the inputs (a mean over the node's examples) have no gradient.
    outputs = {key: output for key, output in exchange.outputs.items() if isinstance(output, torch.Tensor)}
    names = [key for key, output in outputs.items() if output.requires_grad and key in sample]
    if not names:
        return []
    zeros = {key: torch.zeros_like(sample[key]) for key in names}
    per_node = [weighted.get(node.name, zeros) for node in nodes]
    grads = torch.autograd.grad(
        [exchange.outputs[key] for key in names],
        [exchange.inputs[key] for key in exchange.query.differentiable],
        [stack_tensors([gradients[key] for gradients in per_node]) for key in names],
    )
    return list(grads)


def _decode(node: Node, exchange: Exchange, gradients: Tensors) -> Tensors:
    encoder = node.gate.encoder
    return decompress(gradients) if encoder is None else encoder.weight_gradients(exchange.query, gradients)
