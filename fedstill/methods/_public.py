"""What methods with public data have in common: how nodes answer about it and how a student learns on it.

Server and nodes hold the same public inputs, so a question about them carries row numbers and the
seed of an augmentation, never inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.data.public import Public
from fedstill.node.group import Group
from fedstill.node.training import at_once, make_optimiser
from fedstill.protocol.schedule import LocalConfig

AT_ONCE = 250  # public inputs that each node of a group computes at once, and fewer where they are large

Distance = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # student, target (B, C, ...) to (B,)
Batch = tuple[torch.Tensor, torch.Tensor]  # inputs (B, ...) and targets (B, C, ...)


def known(public: Public | None) -> Public:
    """The public data.

    Raises:
        ArgumentError: there are none.
    """
    if public is None:
        raise ArgumentError("public", None, "public data")
    return public


def labelled(public: Public | None) -> TensorData:
    """The public data, to learn from.

    Raises:
        ArgumentError: there are none, or they have no labels.
    """
    public = known(public)
    if public.labels is None:
        raise ArgumentError("public.labels", None, "labels, to learn from")
    return TensorData(public.inputs, public.labels)


def parts(public: Public | None, size: int) -> list[torch.Tensor]:
    """Rows of the public data, from one up to another: ``(2,)`` each, at most ``size`` rows; of none, none.

    >>> [rows.tolist() for rows in parts(Public("made", torch.zeros(5, 1)), 2)]
    [[0, 2], [2, 4], [4, 5]]
    """
    total = 0 if public is None else len(public)
    return [torch.tensor([first, min(first + size, total)]) for first in range(0, total, size)]


def logits(group: Group, x: torch.Tensor) -> torch.Tensor:
    """What each node's model answers about the same inputs ``(N, ...)``: ``(G, N, C, ...)``."""
    bench = group.bench("model")
    pieces = torch.split(x, min(AT_ONCE, at_once(x)))
    parts = [bench(part.expand(len(group), *part.shape)) for part in pieces]
    return torch.cat(parts, 1)


def optimiser_of(
    model: nn.Module, lr: float, how: Literal["adam", "sgd"] = "adam", weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Adam, or SGD with momentum 0.9, on what a network's owner did not freeze."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return make_optimiser(learning, LocalConfig(optimiser=how, lr=lr, weight_decay=weight_decay))


def passes(count: int, batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """One shuffled pass over ``count`` rows, in batches of nearly equal size, none above ``batch``.

    >>> sorted(len(rows) for rows in passes(10, 4, torch.Generator()))
    [3, 3, 4]
    """
    order = torch.randperm(count, generator=generator)
    return torch.tensor_split(order, math.ceil(count / batch))


def distil(
    student: nn.Module,
    optimiser: torch.optim.Optimizer,
    batches: Iterable[Batch],
    distance: Distance,
    compute: Compute,
    seed: int,
    *purpose: str | int,
) -> float:
    """Some steps of a student towards targets, in the mode (training or not) that it is in.

    Args:
        student: learns.
        optimiser: of its parameters.
        batches: one a step.
        distance: what is descended, averaged over a batch.
        compute: device and precision.
        seed, purpose: of what the student draws by itself (dropout).

    Returns:
        The mean distance over the steps; 0 without any.
    """
    losses = []
    for step, (x, target) in enumerate(batches):
        with compute.step(seed, *purpose, step):
            loss = distance(student(x).float(), target).mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item() if losses else 0.0
