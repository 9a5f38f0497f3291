"""Gradients that reach answers are pulled back, through each node's networks, to what was asked about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fedstill.node.exchanges import Exchange
from fedstill.node.node import Node
from fedstill.node.node_group import stack
from fedstill.protocol.questions import Question
from fedstill.protocol.summing import spread, weight_of
from fedstill.protocol.wire_format import Tensors, refine


def pulled_back(kept: Exchange, nodes: Sequence[Node], pulls: Mapping[str, Tensors]) -> list[torch.Tensor]:
    """The gradients of the inputs of a question, ``(G, ...)`` each, zero for nodes that were given none.

    Args:
        kept: the question, its inputs, and answers with their graph.
        pulls: the gradients that reached the answers, by node and name.

    Returns:
        One a differentiable input; none where nothing that was pulled depends on them.
    """
    arrived = {
        node.name: _weighed(node, kept.question, pull) for node in nodes if (pull := pulls.get(node.name))
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
        [kept.inputs[key] for key in kept.question.differentiable],
        [stack([pull[key] for pull in each]) for key in names],
    )
    return list(grads)


def _weighed(node: Node, question: Question, pull: Tensors) -> dict[str, torch.Tensor]:
    """What is pulled back through a node: its answer's share of it, where that was weighed in a sum."""
    own = refine(pull)
    for name, how in question.sums.items():
        weight = weight_of(how, node.told)
        if weight is not None:
            own[name] = own[name] * spread(weight, own[name]).to(own[name])
    return own
