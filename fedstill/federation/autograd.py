"""Gradients through a federation: forward asks, backward has the nodes pull back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Call:
    """A query that gradients are pulled back through: who was asked what, and who answered."""

    federation: Any  # a Federation
    asked: tuple[str, ...]
    query: str
    number: int
    names: tuple[str, ...]
    nodes: tuple[str, ...] = ()  # that answered
    answered: tuple[str, ...] = ()  # names of what they answered


class FederatedQuery(torch.autograd.Function):
    """Bridges autograd over the wire: forward asks, backward has the nodes pull back."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sent = dict(zip(call.names, tensors, strict=True))
        responses = call.federation.valid_responses(call.asked, call.query, call.number, sent, True)
        call.nodes, first = tuple(responses), next(iter(responses.values()))
        call.answered = tuple(first)
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return tuple(
            torch.stack([response[name] for response in responses.values()]) for name in call.answered
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        through = call.federation.queries[call.query].differentiable
        pulls = {
            node: {name: grad[row] for name, grad in zip(call.answered, grads, strict=True)}
            for row, node in enumerate(call.nodes)
        }
        inputs = dict(zip(call.names, ctx.saved_tensors, strict=True))
        differentiable = {name: tensor for name, tensor in inputs.items() if name in through}
        pulled = call.federation.valid_gradients(call.number, call.query, pulls, differentiable)
        back: list[torch.Tensor | None] = [None]
        for name, tensor in inputs.items():
            if name in through:
                back.append(_sum([released[f"d/d{name}"] for released in pulled.values()], tensor))
            else:
                back.append(None)
        return tuple(back)


def _sum(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """In the order of the nodes, whatever the engine, so that rounding is the same; of none, zeros."""
    if not tensors:
        return torch.zeros_like(like)
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
