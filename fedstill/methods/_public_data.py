"""Shared parts of methods with public data: weights of the nodes, responses about rows, training on rows.

Server and nodes hold the same public inputs, so a query about them carries row numbers and the seed of an
augmentation, never inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import shuffled_batches
from fedstill.core.options import CheckedOptions, NonNegativeFloat, NonNegativeInt, PositiveInt
from fedstill.methods import (
    ArgumentError,
    PublicData,
    Server,
    TensorData,
    cosine_lr,
    descend,
    set_lr,
    torch_generator,
)
from fedstill.node.local_training import make_optimizer
from fedstill.protocol.local_config import LocalConfig

Distance = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # student, target (B, C, ...) to (B,)
Batch = tuple[torch.Tensor, torch.Tensor]  # inputs (B, ...) and targets (B, C, ...)


# --- the data ------------------------------------------------------------------------------------------


def require_public(public: PublicData | None) -> PublicData:
    """Return the public data.

    Raises:
        ArgumentError: there are none.
    """
    if public is None:
        raise ArgumentError("public", None, "public data")
    return public


def require_labeled(public: PublicData | None) -> TensorData:
    """Return the public data with labels.

    Raises:
        ArgumentError: there are none, or they have no labels.
    """
    public = require_public(public)
    if public.labels is None:
        raise ArgumentError("public.labels", None, "labels, to learn from")
    return TensorData(public.inputs, public.labels)


def split_rows(public: PublicData | None, size: int) -> list[torch.Tensor]:
    """Return ranges of at most ``size`` rows that cover the public data, ``(2,)`` each; none without public
    data.

    >>> [rows.tolist() for rows in split_rows(PublicData("made", torch.zeros(5, 1)), 2)]
    [[0, 2], [2, 4], [4, 5]]
    """
    total = 0 if public is None else len(public)
    return [torch.tensor([first, min(first + size, total)]) for first in range(0, total, size)]


def row_range(rows: torch.Tensor) -> tuple[int, int]:
    """Return start and stop of a received row range ``(2,)``.

    Raises:
        ArgumentError: not a range.

    >>> row_range(torch.tensor([2, 4]))
    (2, 4)
    """
    if rows.shape != (2,) or not rows[0] <= rows[1]:
        expected = "two row numbers, the first no larger: from one up to the other"
        raise ArgumentError("rows", tuple(rows.shape), expected)
    first, last = rows.tolist()
    return first, last


def sample_rows(server: Server, most: int, t: int) -> torch.Tensor:
    """Return the row numbers of a round's subset of the public data, ``(B,)`` on the CPU; at most
    ``most``."""
    generator = torch_generator(server.seed, "subset", t)
    return torch.randperm(len(require_public(server.public)), generator=generator)[:most]


def iterate_batches(
    x: torch.Tensor, target: torch.Tensor, size: int, seed: int, *purpose: str | int
) -> Iterator[Batch]:
    """Yield one shuffled pass over inputs ``(N, ...)`` and targets ``(N, C, ...)``; ``purpose`` names the
    order."""
    for rows in shuffled_batches(len(x), size, torch_generator(seed, *purpose)):
        chosen = rows.to(x.device)
        yield x[chosen], target[chosen]


# --- training -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StudentTraining(CheckedOptions):
    """Options of a student that trains on public data, in passes over them."""

    section: ClassVar[str] = "method.student"

    epochs: NonNegativeInt = 200
    """Passes of the student over the public data."""
    batch: PositiveInt = 64
    """Public examples in a batch of the student."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Adam, or SGD with momentum 0.9."""
    lr: NonNegativeFloat = 1e-3
    """The student's learning rate, falling on a cosine to lr_end."""
    lr_end: NonNegativeFloat = 1e-3
    """Learning rate of the last pass or round."""

    def require_epochs(self) -> None:
        """Check that the student trains at all, for methods whose steps are its passes.

        Raises:
            ArgumentError: no epochs.
        """
        if not self.epochs:
            raise ArgumentError("method.student.epochs", 0, "1 or more")

    def make_optimizer(self, student: nn.Module) -> torch.optim.Optimizer:
        """Return the student's optimizer."""
        return make_student_optimizer(student, self.lr, self.optimizer)

    def set_lr(self, optimizer: torch.optim.Optimizer, t: int, steps: int) -> None:
        """Set the learning rate of pass or round ``t`` of ``steps``."""
        set_lr(optimizer, cosine_lr(t, steps, self.lr, self.lr_end))


def make_student_optimizer(
    model: nn.Module, lr: float, how: Literal["adam", "sgd"] = "adam"
) -> torch.optim.Optimizer:
    """Return Adam, or SGD with momentum 0.9, for a network's trainable parameters."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return make_optimizer(learning, LocalConfig(optimizer=how, lr=lr))


def distill(
    student: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    distance: Distance,
    compute: Compute,
    seed: int,
    *purpose: str | int,
) -> float:
    """Train a student towards targets, one step for each batch, and return the mean distance, or 0.

    The student's training mode is not changed. ``seed`` and ``purpose`` name the random stream of dropout.
    """
    losses = []
    for step, (x, target) in enumerate(batches):
        with compute.step(seed, *purpose, step):
            loss = distance(student(x).float(), target).mean()
        descend(optimizer, loss)
        losses.append(loss.detach())
    return torch.stack(losses).mean().item() if losses else 0.0


def train_student(
    server: Server,
    optimizer: torch.optim.Optimizer,
    rows: torch.Tensor,
    targets: torch.Tensor,
    distance: Distance,
    t: int,
    *,
    epochs: int,
    batch: int,
) -> float:
    """Train the student on the public examples of rows ``(B,)`` in round t and return the mean distance."""
    x = require_public(server.public).inputs[rows]
    orders = [
        iterate_batches(x, targets, batch, server.seed, "student's order", t, epoch)
        for epoch in range(epochs)
    ]
    student, compute = server.student.train(), server.compute
    return distill(student, optimizer, chain(*orders), distance, compute, server.seed, "student", t)
