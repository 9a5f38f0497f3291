"""A federation differentiated by its answers alone: finite differences along random directions.

Ma, Wang, Zhang: "Data-Free Black-Box Federated Learning via Zeroth-Order Gradient Estimation", AAAI 2025
(FedZGE): nodes are asked about x and about x + epsilon u_j for q random directions u_j of length 1, and the
slope along u_j, times d values of an input, is an estimate of the gradient. So nodes give no gradients, and
their models need not have any.

There the loss is differenced. Here the nodes' answers are, and autograd does the rest: what the server
computes of the answers, and of x itself, is differentiated exactly, each input by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedstill.methods import Responses, Server, torch_generator


def directions(q: int, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """u_j, evenly on the sphere of length 1: q for each input of x ``(B, ...)``, as ``(q, B, ...)``."""
    u = torch.randn(q, *x.shape, generator=generator)
    length = u.flatten(2).norm(dim=2).clamp_min(1e-12)  # (q, B)
    unit: torch.Tensor = u / length.view(q, len(x), *(1,) * (x.ndim - 1))
    return unit.to(x.device)


def linearize(z: torch.Tensor, x: torch.Tensor, u: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Answers about x as a linear function of x, from those about x and x + epsilon u_j.

    Its value is what was answered about x. Where g reaches an answer, what is pulled back to x is
    (d / q) sum_j <g, (z_j - z) / epsilon> u_j: in the mean over directions the gradient, but for terms in
    epsilon. Its squared error is (d - 1) / q of the gradient's square, in the mean.

    Args:
        z: answers ``(K, (1 + q) B, ...)``, those about x first.
        x: inputs ``(B, ...)``, d values each.
        u: directions ``(q, B, ...)``.
        epsilon: how far along them.

    Returns:
        ``(K, B, ...)``.

    >>> x = torch.tensor([[3.0]], requires_grad=True)
    >>> z = torch.tensor([[9.0], [9.61]]).view(1, 2, 1)  # squares of 3 and 3.1
    >>> linearize(z, x, torch.ones(1, 1, 1), 0.1).backward()
    >>> x.grad
    tensor([[6.1000]])
    """
    q, B, d = len(u), len(x), x[0].numel()
    z = z.view(len(z), 1 + q, B, *z.shape[2:])
    slopes = (z[:, 1:] - z[:, :1]) / epsilon
    moved = (u * (x - x.detach())).flatten(2).sum(2)  # 0, with gradient u_j  (q, B)
    moved = moved.view(1, q, B, *(1,) * (z.ndim - 3))
    return z[:, 0] + d / q * (slopes * moved).sum(1)


def query_with_differences(
    server: Server,
    query: str,
    x: torch.Tensor,
    q: int,
    epsilon: float,
    *purpose: str | int,
    of: Sequence[str] | None = None,
    **sent: Any,
) -> Responses:
    """QueryCall about x ``(B, ...)`` and its surroundings, (1 + q) B inputs in one query; the answers about x.

    They are linear in x, as :func:`linearize` says; what is no answer to each input by itself is as it came.

    Args:
        purpose: names the draw of the directions.
        sent: what goes down beside x, one for each input.
    """
    u = directions(q, x, torch_generator(server.seed, "directions", *purpose))
    around = torch.cat([x.detach(), (x.detach() + epsilon * u).flatten(0, 1)])
    beside = {name: torch.cat([part] * (1 + q)) for name, part in sent.items()}
    with torch.no_grad():
        told = server.query(query, of=of, x=around, **beside)
    each = {
        name: linearize(z, x, u, epsilon) if z.ndim > 1 and z.shape[1] == len(around) else z
        for name, z in told.tensors.items()
    }
    return Responses(told.number, told.nodes, each)
