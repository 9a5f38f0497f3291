"""Zeroth-order gradients: finite differences of the nodes' responses along random directions.

Ma, Wang, Zhang: "Data-Free Black-Box Federated Learning via Zeroth-Order Gradient Estimation", AAAI 2025
(FedZGE). Nodes respond to x and to x + epsilon u_j for q random directions u_j of length 1. The slope along
u_j times the number of values of an input is an estimate of the gradient. Nodes thus return no gradients, and
their models need not have any.

The paper takes differences of the loss. Here the responses are differenced and autograd does the rest, so
that the server's own functions of the responses and of x are differentiated exactly, for each input by
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedstill.methods import Responses, Server, torch_generator


def directions(q: int, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return q directions u_j for each input of x ``(B, ...)``, uniform on the unit sphere: ``(q, B,
    ...)``."""
    u = torch.randn(q, *x.shape, generator=generator)
    length = u.flatten(2).norm(dim=2).clamp_min(1e-12)  # (q, B)
    unit: torch.Tensor = u / length.view(q, len(x), *(1,) * (x.ndim - 1))
    return unit.to(x.device)


def linearize(z: torch.Tensor, x: torch.Tensor, u: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return responses to x as a linear function of x, from those to x and x + epsilon u_j.

    The value is the response to x. An output gradient g gives the input gradient (d / q) sum_j <g, (z_j - z)
    / epsilon> u_j: the gradient in the mean over directions, up to terms in epsilon. Its mean squared error
    is (d - 1) / q of the gradient's square.

    Args:
        z: responses ``(K, (1 + q) B, ...)``, those to x first.
        x: inputs ``(B, ...)``, d values each.
        u: directions ``(q, B, ...)``.
        epsilon: step along them.

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
    nodes: Sequence[str] | None = None,
    **sent: Any,
) -> Responses:
    """Query nodes about x ``(B, ...)`` and x + epsilon u_j, (1 + q) B inputs in one query.

    Returns the responses to x, linear in x as :func:`linearize` makes them. Tensors with another number of
    rows are unchanged.

    Args:
        server: the server.
        query: name of the query.
        x: inputs.
        q: number of directions.
        epsilon: step along them.
        purpose: names the random stream of the directions.
        nodes: names of the nodes; None is all.
        sent: further tensors of the query, one row for each input.
    """
    u = directions(q, x, torch_generator(server.seed, "directions", *purpose))
    around = torch.cat([x.detach(), (x.detach() + epsilon * u).flatten(0, 1)])
    repeated = {name: torch.cat([part] * (1 + q)) for name, part in sent.items()}
    with torch.no_grad():
        responses = server.query(query, nodes=nodes, x=around, **repeated)
    tensors = {
        name: linearize(z, x, u, epsilon) if z.ndim > 1 and z.shape[1] == len(around) else z
        for name, z in responses.tensors.items()
    }
    return Responses(responses.number, responses.nodes, tensors)
