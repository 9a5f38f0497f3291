"""Optimizer steps at the server."""

from __future__ import annotations

import torch
from torch import nn

from fedstill.core.errors import ArgumentError
from fedstill.core.optimizers import Adam


def adam(module: nn.Module, lr: float, beta: float = 0.9) -> torch.optim.Optimizer:
    """Return Adam for the trained parameters of a network; ``beta`` is its momentum.

    Raises:
        ArgumentError: all parameters are frozen.

    >>> adam(nn.Linear(2, 1), lr=1e-3).defaults["betas"]
    (0.9, 0.999)
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise ArgumentError("network of adam", type(module).__name__, "a network with trainable parameters")
    return Adam(trained, lr, betas=(beta, 0.999), fused=True)


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Take one optimizer step on a loss.

    Raises:
        ArgumentError: the loss depends on no parameter, so that there is no gradient.
    """
    if not loss.requires_grad:
        expected = (
            "a loss that depends on a trainable parameter; nodes' responses depend on an input only if their "
            "query is differentiable in it"
        )
        raise ArgumentError("loss of descend", "a tensor without gradient", expected)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
