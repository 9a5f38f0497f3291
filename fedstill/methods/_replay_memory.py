"""Replay memory of inputs with their ensembled responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from fedstill.core.compute import copy_to_device
from fedstill.data.augmentation import flip_and_rotate, random_shift, require_augmentable
from fedstill.methods import ArgumentError, torch_generator
from fedstill.tasks import Task

Augment = Literal["none", "shift", "shift-flip", "turn"]


class LabeledBatch(NamedTuple):
    """Inputs with their ensembled responses, and the label maps that inputs were generated from."""

    x: torch.Tensor  # (B, C, H, W)
    z: torch.Tensor  # (B, classes, ...)
    maps: torch.Tensor | None = None  # (B, H, W) uint8

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name; without maps, if there are none."""
        return {name: tensor for name, tensor in self._asdict().items() if tensor is not None}


class Replay:
    """Ring buffer of the last ``size`` inputs with their ensembled responses and, if they have any, label
    maps.

    Inputs are augmented when they are sampled, together with their label maps and with responses that are
    maps of their pixels.

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
        self._x = self._z = self._maps = torch.zeros(0)

    def __len__(self) -> int:
        return min(self.added, self.size)

    def add(self, x: torch.Tensor, z: torch.Tensor, maps: torch.Tensor | None = None) -> None:
        """Add inputs and responses in place of the oldest, all with label maps or all without."""
        self._x, self._z = self._grow(self._x, x), self._grow(self._z, z)
        slots = (self.added + torch.arange(len(x), device=x.device)) % self.size
        self._x[slots], self._z[slots] = x, z
        if maps is not None:
            self._maps = self._grow(self._maps, maps)
            self._maps[slots] = maps
        self.added += len(x)

    def sample(self, count: int, *purpose: str | int) -> LabeledBatch:
        """Return ``count`` augmented pairs, sampled with replacement, or all if there are no more."""
        draw = torch_generator(self.seed, "memory", *purpose)
        x, z = self._x[: len(self)], self._z[: len(self)]
        maps = self._maps[: len(self)] if len(self._maps) else None
        if count < len(self):
            chosen = torch.randint(len(self), (count,), generator=draw)
            chosen = copy_to_device(chosen, x.device)
            x, z, maps = x[chosen], z[chosen], None if maps is None else maps[chosen]
        if self.augment == "none":
            return LabeledBatch(x, z, maps)
        # Augment label maps, and responses that are maps, with their images.
        parts = [x] + [z] * (z.ndim == x.ndim) + ([] if maps is None else [maps.unsqueeze(1).to(x.dtype)])
        images = torch.cat(parts, 1)
        if self.augment == "turn":
            images = flip_and_rotate(images, torch.randint(8, (len(x),), generator=draw))
        else:
            images = random_shift(images, draw, flip=self.augment == "shift-flip")
        x, *rest = torch.split(images, [part.shape[1] for part in parts], 1)
        z = rest[0] if z.ndim == x.ndim else z
        return LabeledBatch(x, z, None if maps is None else rest[-1].squeeze(1).to(maps.dtype))

    def state_dict(self) -> dict[str, Any]:
        parts = {"x": self._x, "z": self._z, "maps": self._maps}
        return {"added": self.added, **{name: part[: len(self)] for name, part in parts.items()}}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.added = state["added"]
        self._x, self._z, self._maps = (state[name].to(device) for name in ("x", "z", "maps"))

    def _grow(self, kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        # Doubles up to its size, so that a short run uses little memory.
        wanted = min(self.size, self.added + len(new))
        if len(kept) >= wanted:
            return kept
        grown = new.new_empty((min(self.size, max(wanted, 2 * len(kept))), *new.shape[1:]))
        if len(kept):
            grown[: len(kept)] = kept
        return grown
