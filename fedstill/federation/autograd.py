"""Autograd through a federation: forward sends a query, backward has the nodes backpropagate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors


class ResponseSource(Protocol):
    """Source of valid responses to queries, and of the gradients of their inputs."""

    queries: Mapping[str, Query]

    def valid_responses(
        self, queried: tuple[str, ...], query: str, number: int, tensors: Tensors, differentiable: bool
    ) -> Mapping[str, Tensors]:
        """Send one query and return the valid responses by name."""

    def valid_gradients(
        self, number: int, query: str, output_gradients: Mapping[str, Tensors], inputs: Tensors
    ) -> Mapping[str, Tensors]:
        """Return the valid input gradients by name, for gradients of the loss with respect to responses."""


@dataclass
class DifferentiableQueryState:
    """State of a differentiable query between forward and backward.

    Args:
        source: where responses and gradients come from.
        queried_nodes: names of the nodes that get the query.
        query: its name.
        number: its number.
        input_names: names of the inputs, in order.
        responding_nodes: names of the nodes that responded, in order.
        output_names: names of the outputs, in order.
    """

    source: ResponseSource
    queried_nodes: tuple[str, ...]
    query: str
    number: int
    input_names: tuple[str, ...]
    responding_nodes: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()


class FederatedQuery(torch.autograd.Function):
    """Autograd function whose forward and backward passes run at the nodes."""

    @staticmethod
    def forward(ctx: Any, call: DifferentiableQueryState, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = dict(zip(call.input_names, tensors, strict=True))
        responses = call.source.valid_responses(call.queried_nodes, call.query, call.number, inputs, True)
        call.responding_nodes = tuple(responses)
        call.output_names = tuple(next(iter(responses.values())))
        ctx.call = call
        # Nodes get no gradients of outputs that the loss does not use, but for sums.
        ctx.set_materialize_grads(bool(call.source.queries[call.query].sums))
        ctx.save_for_backward(*tensors)
        return tuple(
            torch.stack([response[name] for response in responses.values()]) for name in call.output_names
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: DifferentiableQueryState = ctx.call
        input_names = call.source.queries[call.query].differentiable
        named = [
            (name, grad) for name, grad in zip(call.output_names, grads, strict=True) if grad is not None
        ]
        output_gradients = {
            node: {name: grad[row] for name, grad in named} for row, node in enumerate(call.responding_nodes)
        }
        inputs = dict(zip(call.input_names, ctx.saved_tensors, strict=True))
        differentiable = {name: tensor for name, tensor in inputs.items() if name in input_names}
        by_node = call.source.valid_gradients(call.number, call.query, output_gradients, differentiable)
        input_grads: list[torch.Tensor | None] = [None]
        for name, tensor in inputs.items():
            if name in input_names:
                input_grads.append(_sum([released[f"d/d{name}"] for released in by_node.values()], tensor))
            else:
                input_grads.append(None)
        return tuple(input_grads)


def _sum(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Add tensors in the order of the nodes, so that rounding is equal on all engines; zeros if there are
    none."""
    if not tensors:
        return torch.zeros_like(like)
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
