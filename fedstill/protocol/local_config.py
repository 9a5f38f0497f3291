"""Configuration of the nodes' local training: LocalConfig, its parts (Span) and learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Interval

from fedstill.core.errors import ArgumentError
from fedstill.core.options import CheckedOptions, NonNegativeFloat, NonNegativeInt, PositiveInt


class Span(NamedTuple):
    """Part of a node's local training: its steps from ``start / parts`` to ``stop / parts``.

    Rounds are spans, so that a run of R rounds takes exactly the steps of one uninterrupted training.

    >>> [Span(r, r + 1, 3).steps(10) for r in range(3)]
    [range(0, 3), range(3, 6), range(6, 10)]
    """

    start: int
    stop: int
    parts: int

    @classmethod
    def part(cls, t: int, parts: int, offset: int = 0) -> Span:
        """Return part ``t`` of ``parts`` equal ones, preceded by ``offset`` others of that length.

        Raises:
            ArgumentError: ``t`` is not in 0..parts - 1.

        >>> Span.part(0, 5, offset=2)
        Span(start=2, stop=3, parts=7)
        """
        if not 0 <= t < parts:
            raise ArgumentError("round", t, f"an integer from 0 to {parts - 1}")
        return cls(offset + t, offset + t + 1, offset + parts)

    def steps(self, total: int) -> range:
        """Return the steps of this part, of ``total`` steps in all. With fewer steps than parts, each part
        has one."""
        total = max(total, self.parts)
        return range(total * self.start // self.parts, total * self.stop // self.parts)


FULL_TRAINING = Span(0, 1, 1)


@dataclass(frozen=True)
class SpanOfRound:
    """Span of the round that a query names, for :attr:`fedstill.protocol.queries.Query.span`.

    Args:
        rounds: number of rounds, which divide the local training among them.
        offset: parts of a round's length before the first round.
        name: name of the sent tensor with the round's number.

    >>> SpanOfRound(5)({"round": torch.tensor(2)})
    Span(start=2, stop=3, parts=5)
    """

    rounds: int
    offset: int = 0
    name: str = "round"

    def __call__(self, sent: Mapping[str, torch.Tensor]) -> Span:
        return Span.part(int(sent[self.name]), self.rounds, self.offset)


@dataclass(frozen=True)
class LocalConfig(CheckedOptions):
    """Optimizer, learning rate and length of a node's local training.

    Raises:
        ArgumentError: no training at all (``epochs`` and ``min_steps`` are 0), or a value out of range.

    >>> LocalConfig(epochs=2, batch=32).steps(100)
    7
    """

    section: ClassVar[str] = "local"

    epochs: NonNegativeFloat = 30.0
    """Passes over the node's own data."""
    min_steps: NonNegativeInt = 0
    """Minimal number of steps, for small nodes."""
    batch: PositiveInt = 32
    """Examples in a batch."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Adam, or SGD with momentum."""
    lr: NonNegativeFloat = 1e-3
    """Learning rate of the first step."""
    lr_end: NonNegativeFloat = 1e-5
    """Learning rate of the last step, after a cosine schedule."""
    momentum: NonNegativeFloat = 0.9
    """Momentum of SGD."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty."""
    smoothing: Annotated[float, Interval(ge=0, lt=1)] = 0.1
    """Label smoothing: share of each label that is spread over all classes. A node trained without it is
    certain of inputs that it never saw, which costs the ensemble more than it gains the node.
    """
    augment: Literal["none", "shift", "shift-flip", "turn"] = "none"
    """Data augmentation. shift: random shifts by up to an eighth of the image. shift-flip: also mirror
    images. turn: also quarter turns, for images without an upright direction (tissue). Label maps move with
    their images. Not for texts.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs == 0 and self.min_steps == 0:
            raise ArgumentError("local.epochs", self.epochs, "above 0, or local.min_steps above 0")

    def steps(self, examples: int) -> int:
        """Return the number of steps of a node with ``examples`` examples.

        >>> LocalConfig(epochs=2, batch=32).steps(100)
        7
        """
        return max(self.min_steps, math.ceil(self.epochs * examples / self.batch), 1)


def cosine_lr(step: int, steps: int, start: float, end: float) -> float:
    """Return the learning rate of step 0..steps-1 on a cosine schedule from ``start`` to ``end``.

    >>> [round(cosine_lr(step, 3, 1.0, 0.0), 3) for step in range(3)]
    [1.0, 0.5, 0.0]
    """
    progress = step / max(steps - 1, 1)
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups, also for captured CUDA graphs."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # read by captured CUDA graphs (fedstill.core.cuda_graphs)
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
