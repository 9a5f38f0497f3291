"""LocalConfig: epochs, batch, optimizer and learning rate of local training; Span, a part of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Interval

from fedstill.core.errors import ArgumentError
from fedstill.core.options import Checked, NonNegativeFloat, NonNegativeInt, PositiveInt


class Span(NamedTuple):
    """A part of a node's local training: from ``first / of`` of its steps to ``last / of``.

    Rounds are spans, so that a run of R rounds takes exactly the steps of a run in one go.

    >>> [Span(r, r + 1, 3).steps(10) for r in range(3)]
    [range(0, 3), range(3, 6), range(6, 10)]
    """

    first: int
    last: int
    of: int

    @classmethod
    def one(cls, t: int, of: int, behind: int = 0) -> Span:
        """Part ``t`` of ``of`` equal ones, behind as many others of that length.

        Raises:
            ArgumentError: there is no such part.

        >>> Span.one(0, 5, behind=2)
        Span(first=2, last=3, of=7)
        """
        if not 0 <= t < of:
            raise ArgumentError("round", t, f"a whole number from 0 to {of - 1}")
        return cls(behind + t, behind + t + 1, behind + of)

    def steps(self, total: int) -> range:
        """The steps, of ``total``, that lie in this part; of fewer steps than parts, each part has one."""
        total = max(total, self.of)
        return range(total * self.first // self.of, total * self.last // self.of)


WHOLE = Span(0, 1, 1)


@dataclass(frozen=True)
class LocalConfig(Checked):
    """How each node trains its own model."""

    under: ClassVar[str] = "local"

    epochs: NonNegativeFloat = 30.0
    """Passes over the node's own data."""
    least_steps: NonNegativeInt = 0
    """Steps that even the smallest node takes."""
    batch: PositiveInt = 32
    """Examples a step."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Adam, or SGD with momentum."""
    lr: NonNegativeFloat = 1e-3
    """Learning rate of the first step."""
    lr_end: NonNegativeFloat = 1e-5
    """Learning rate of the last step; between them a cosine."""
    momentum: NonNegativeFloat = 0.9
    """Of SGD."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty."""
    smoothing: Annotated[float, Interval(ge=0, lt=1)] = 0.1
    """Share of each label spread over all classes. A node that was taught certainty is certain of what
    it never saw, too; that costs the ensemble more than it gains the node."""
    augment: Literal["none", "shift", "shift-flip", "turn"] = "none"
    """Random shifts by up to an eighth of the image; mirror images; turn: both, and quarter turns, where no
    direction is up (tissue). A class of each pixel moves with its pixel. Not for texts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs == 0 and self.least_steps == 0:
            raise ArgumentError("local.epochs", self.epochs, "above 0, or local.least_steps above 0")

    def steps(self, examples: int) -> int:
        """Steps of a node with so many examples.

        >>> LocalConfig(epochs=2, batch=32).steps(100)
        7
        """
        return max(self.least_steps, math.ceil(self.epochs * examples / self.batch), 1)


def cosine(step: int, steps: int, start: float, end: float) -> float:
    """The learning rate of step 0..steps-1 on half a cosine from ``start`` to ``end``.

    >>> [round(cosine(step, 3, 1.0, 0.0), 3) for step in range(3)]
    [1.0, 0.5, 0.0]
    """
    share = step / max(steps - 1, 1)
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameters."""
    for part in optimizer.param_groups:
        if isinstance(part["lr"], torch.Tensor):  # that of a recorded step (fedstill.core.cuda_graphs)
            part["lr"].fill_(lr)
        else:
            part["lr"] = lr
