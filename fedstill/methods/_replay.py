"""What FedIOD's student learns on: remembered inputs with their ensembled answers, perhaps augmented."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator
from fedstill.data.augment import posed, shifted
from fedstill.methods._memory import AnswerMemory
from fedstill.tasks import Task

Augment = Literal["none", "shift", "turn", "mixup"]
Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Known:
    """Inputs and what is known of them.

    Args:
        x: ``(B, C, H, W)``.
        z: what the nodes, ensembled, answered: ``(B, classes, ...)``.
        maps: that x was made from, ``(B, H, W)`` uint8; None: from none.
    """

    x: torch.Tensor
    z: torch.Tensor
    maps: torch.Tensor | None = None

    def parts(self, size: int) -> list[Known]:
        """The same in parts of ``size`` inputs each, in order."""
        count = -(-len(self.x) // size)
        maps = [None] * count if self.maps is None else torch.split(self.maps, size)
        parts = zip(torch.split(self.x, size), torch.split(self.z, size), maps, strict=True)
        return [Known(*part) for part in parts]


class Recall:
    """The answer memory of a server, and how a student is reminded of it.

    Args:
        task: knows how answers mix.
        size: inputs kept at most.
        augment: what is done to remembered inputs, and to answers and maps that have their pixels.
        shape: of an input.
        seed: of the draws.

    Raises:
        ArgumentError: an augmentation that does not suit the task or the shape.
    """

    def __init__(self, task: Task, size: int, augment: Augment, shape: tuple[int, ...], seed: int) -> None:
        height, width = shape[-2:]
        name, why = "method.student_augment", f"not turn, as images are {height} x {width}"
        if augment in ("shift", "turn") and task.kind == "image":
            why = "none or mixup, as an image that is moved would have been measured otherwise"
            raise ArgumentError(name, augment, why)
        if augment == "turn" and height != width:
            raise ArgumentError(name, augment, why)
        self.task, self.augment, self.seed = task, augment, seed
        self.memory = AnswerMemory(size)

    def add(self, known: Known) -> None:
        """Remember, in place of the oldest."""
        z = known.z
        if known.maps is not None:  # behind the answers, as one more channel
            z = torch.cat([z, known.maps.unsqueeze(1).to(z.dtype)], 1)
        self.memory.add(known.x, z)

    def sample(self, count: int, *purpose: str | int) -> Known:
        """``count`` remembered inputs, augmented; the same for the same purpose."""
        draw = torch_generator(self.seed, "memory", *purpose)
        x, z = self.memory.sample(count, draw)
        if self.augment == "shift":
            x, z = _moved(x, z, lambda images: shifted(images, draw, flip=False))
        elif self.augment == "turn":
            pose = torch.randint(8, (len(x),), generator=draw)
            x, z = _moved(x, z, lambda images: posed(images, pose))
        elif self.augment == "mixup":
            x_other, z_other = self.memory.sample(count, draw)
            share = torch.rand(len(x), generator=draw).to(x.device)
            x = torch.lerp(x_other, x, share.view(-1, *(1,) * (x.ndim - 1)))
            if self.task.conditions:  # maps do not mix
                return Known(x, self.task.mix(z_other[:, :-1], z[:, :-1], share))
            z = self.task.mix(z_other, z, share)
        return Known(x, z[:, :-1], z[:, -1].to(torch.uint8)) if self.task.conditions else Known(x, z)

    def state(self) -> dict[str, Any]:
        """For a run to go on."""
        return self.memory.state()

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Take up a remembered state."""
        self.memory.load(dict(state), device)


def _moved(x: torch.Tensor, z: torch.Tensor, move: Move) -> tuple[torch.Tensor, torch.Tensor]:
    """Images moved, and with them what is known of each pixel."""
    if z.ndim < x.ndim:
        return move(x), z
    both = move(torch.cat([x, z], 1))
    return both[:, : x.shape[1]], both[:, x.shape[1] :]
