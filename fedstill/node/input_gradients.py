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


def check_output_gradients(kept: Exchange, node: str, pull: Tensors) -> None:
    """Refuse gradients that do not belong to an answer, before anything is computed with them.

    All that it goes by is known to the server: names and shapes of what the node has let out. Whether the
    numbers are finite is checked where they arrive (:meth:`~fedstill.node.gate.Gate.inspect`).

    Args:
        kept: the query, with answers and their graph.
        pull: the gradients that reached this node's answer, as they travel.

    Raises:
        QueryRefused: they are of none or of other parts than were answered, not in float32, or of another
            shape than the part; or the query has no input to pull them back to.
    """
    own, rule = decompress(pull), None
    parts = {name: part for name, part in kept.outputs.items() if isinstance(part, torch.Tensor)}
    if not kept.query.differentiable:
        rule = "gradients: none are pulled back through its answer"
    elif not own or not own.keys() <= parts.keys():
        rule = f"gradients: of some of {sorted(parts)}, not of {sorted(own)}"
    else:
        for name, tensor in own.items():
            shape = tuple(parts[name].shape[1:])  # one part a node
            if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
                found = f"{tensor.dtype} {tuple(tensor.shape)}"
                rule = f"gradients: of {name} they are torch.float32 {shape}, not {found}"
    if rule is not None:
        raise QueryRefused(node, kept.query.name, rule)


def compute_input_gradients(
    kept: Exchange, nodes: Sequence[Node], pulls: Mapping[str, Tensors]
) -> list[torch.Tensor]:
    """The gradients of the inputs of a query, ``(G, ...)`` each, zero for nodes that were given none.

    Args:
        kept: the query, its inputs, and answers with their graph.
        pulls: the gradients that reached the answers, by node and name.

    Returns:
        One a differentiable input; none where nothing that was pulled depends on them.
    """
    arrived = {
        node.name: _apply_sum_weights(node, kept.query, pull)
        for node in nodes
        if (pull := pulls.get(node.name))
    }
    sample = next(iter(arrived.values()), {})
    # What does not depend on the inputs (a mean over the node's own examples) has no way back.
    stacked = {key: out for key, out in kept.outputs.items() if isinstance(out, torch.Tensor)}
    names = [key for key, out in stacked.items() if out.requires_grad and key in sample]
    if not names:
        return []
    nothing = {key: torch.zeros_like(sample[key]) for key in names}
    each = [arrived.get(node.name, nothing) for node in nodes]
    grads = torch.autograd.grad(
        [kept.outputs[key] for key in names],
        [kept.inputs[key] for key in kept.query.differentiable],
        [stack_tensors([pull[key] for pull in each]) for key in names],
    )
    return list(grads)


def _apply_sum_weights(node: Node, query: Query, pull: Tensors) -> dict[str, torch.Tensor]:
    """What is pulled back through a node: its answer's share of it, where that was weighed in a sum."""
    own = decompress(pull)
    for name, how in query.sums.items():
        weight = node_weight(how, node.released_counts)
        if weight is not None:
            own[name] = own[name] * broadcast_weight(weight, own[name]).to(own[name])
    return own
