"""Replay memory of inputs with their ensembled responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from fedstill.core.compute import copy_to_device
from fedstill.data.augmentation import flip_and_rotate, random_shift, require_augmentable
from fedstill.methods import ArgumentError, torch_generator
from fedstill.tasks import Task

Augment = Literal["none", "shift", "shift-flip", "turn"]


# Inputs (B, C, H, W) and their ensembled responses (B, classes, ...).
LabeledBatch = tuple[torch.Tensor, torch.Tensor]


class Replay:
    """Ring buffer of the last ``size`` inputs with their ensembled responses.

    Inputs are augmented when they are sampled, together with responses that are maps of their pixels.

    Raises:
        ArgumentError: an augmentation that does not suit the task or the shape.
    """

    def __init__(self, size: int, augment: Augment, task: Task, shape: tuple[int, ...], seed: int) -> None:
        name = "method.student.augment"
        require_augmentable(task, shape, augment, name)
        if augment != "none" and task.kind == "image":
            raise ArgumentError(name, augment, "none, as an image that is moved was never measured")
        self.size, self.augment, self.seed = size, augment, seed
        self.added = 0
        self._x = self._z = torch.zeros(0)

    def __len__(self) -> int:
        return min(self.added, self.size)

    def add(self, x: torch.Tensor, z: torch.Tensor) -> None:
        """Add inputs and responses in place of the oldest."""
        self._x, self._z = self._grow(self._x, x), self._grow(self._z, z)
        slots = (self.added + torch.arange(len(x), device=x.device)) % self.size
        self._x[slots], self._z[slots] = x, z
        self.added += len(x)

    def sample(self, count: int, *purpose: str | int) -> LabeledBatch:
        """Return ``count`` augmented pairs, sampled with replacement, or all if there are no more."""
        draw = torch_generator(self.seed, "memory", *purpose)
        x, z = self._x[: len(self)], self._z[: len(self)]
        if count < len(self):
            chosen = torch.randint(len(self), (count,), generator=draw)
            chosen = copy_to_device(chosen, x.device)
            x, z = x[chosen], z[chosen]
        if self.augment == "none":
            return x, z
        maps = z.ndim == x.ndim  # augment responses that are maps with their images
        images = torch.cat([x, z], 1) if maps else x
        if self.augment == "turn":
            images = flip_and_rotate(images, torch.randint(8, (len(x),), generator=draw))
        else:
            images = random_shift(images, draw, flip=self.augment == "shift-flip")
        return (images[:, : x.shape[1]], images[:, x.shape[1] :]) if maps else (images, z)

    def state_dict(self) -> dict[str, Any]:
        return {"added": self.added, "x": self._x[: len(self)], "z": self._z[: len(self)]}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.added = state["added"]
        self._x, self._z = state["x"].to(device), state["z"].to(device)

    def _grow(self, kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        # Doubles up to its size, so that a short run uses little memory.
        wanted = min(self.size, self.added + len(new))
        if len(kept) >= wanted:
            return kept
        grown = new.new_empty((min(self.size, max(wanted, 2 * len(kept))), *new.shape[1:]))
        if len(kept):
            grown[: len(kept)] = kept
        return grown
