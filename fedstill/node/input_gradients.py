"""Gradients that reach answers are pulled back, through each node's networks, to what was asked about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fedstill.core.errors import QueryRefused
from fedstill.node.exchanges import Exchange
from fedstill.node.node import Node
from fedstill.node.node_group import stack_tensors
from fedstill.protocol.queries import Query
from fedstill.protocol.secure_aggregation import broadcast_weight, node_weight
from fedstill.protocol.wire_format import Tensors, decompress


def check_output_gradients(exchange: Exchange, node: str, gradients: Tensors) -> None:
    """Refuse gradients that do not belong to an answer, before anything is computed with them.

    All that it goes by is known to the server: names and shapes of what the node has let out. Whether the
    numbers are finite is checked where they arrive (:meth:`~fedstill.node.gate.Gate.inspect`).

    Args:
        exchange: the query, with answers and their graph.
        gradients: the gradients that reached this node's answer, as they travel.

    Raises:
        QueryRefused: they are of none or of other parts than were answered, not in float32, or of another
            shape than the part; or the query has no input to pull them back to.
    """
    decompressed, rule = decompress(gradients), None
    outputs = {name: part for name, part in exchange.outputs.items() if isinstance(part, torch.Tensor)}
    if not exchange.query.differentiable:
        rule = "gradients: none are pulled back through its answer"
    elif not decompressed or not decompressed.keys() <= outputs.keys():
        rule = f"gradients: of some of {sorted(outputs)}, not of {sorted(decompressed)}"
    else:
        for name, tensor in decompressed.items():
            shape = tuple(outputs[name].shape[1:])  # one part a node
            if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
                received = f"{tensor.dtype} {tuple(tensor.shape)}"
                rule = f"gradients: of {name} they are torch.float32 {shape}, not {received}"
    if rule is not None:
        raise QueryRefused(node, exchange.query.name, rule)


def compute_input_gradients(
    exchange: Exchange, nodes: Sequence[Node], output_gradients: Mapping[str, Tensors]
) -> list[torch.Tensor]:
    """The gradients of the inputs of a query, ``(G, ...)`` each, zero for nodes that were given none.

    Args:
        exchange: the query, its inputs, and answers with their graph.
        output_gradients: the gradients that reached the answers, by node and name.

    Returns:
        One a differentiable input; none where nothing that was pulled depends on them.
    """
    weighted = {
        node.name: _apply_sum_weights(node, exchange.query, gradients)
        for node in nodes
        if (gradients := output_gradients.get(node.name))
    }
    sample = next(iter(weighted.values()), {})
    # What does not depend on the inputs (a mean over the node's own examples) has no way back.
    outputs = {key: out for key, out in exchange.outputs.items() if isinstance(out, torch.Tensor)}
    names = [key for key, out in outputs.items() if out.requires_grad and key in sample]
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


def _apply_sum_weights(node: Node, query: Query, gradients: Tensors) -> dict[str, torch.Tensor]:
    """What is pulled back through a node: its answer's share of it, where that was weighed in a sum."""
    weighted = decompress(gradients)
    for name, weighting in query.sums.items():
        weight = node_weight(weighting, node.released_counts)
        if weight is not None:
            weighted[name] = weighted[name] * broadcast_weight(weight, weighted[name]).to(weighted[name])
    return weighted
