"""Inputs made from noise, and what a generator is told to make; maps: :mod:`fedstill.methods._maps`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import nn

from fedstill.core.checked import NonNegativeFloat, PositiveInt
from fedstill.core.seeds import torch_generator
from fedstill.federation.contract import Federation
from fedstill.methods.server import Server
from fedstill.models.generator import Generator
from fedstill.protocol.method import Method
from fedstill.protocol.questions import Question


@dataclass(frozen=True)
class Wish:
    """What a generator is told to make of B images.

    Args:
        told: the generator's arguments, ``(B, ...)`` each.
        maps: the maps ``(B, H, W)`` uint8, where there are any.
        source: of each map its owner (:func:`whose`), its place among what that node told, and its pose:
            ``(B, 3)`` int64.
    """

    told: tuple[torch.Tensor, ...]
    maps: torch.Tensor | None = None
    source: torch.Tensor | None = None

    def sent(self, question: Question) -> dict[str, Any]:
        """What goes down with a question beside the images themselves, as it declares."""
        parts = {"maps": self.maps, "source": self.source}
        return {name: part for name, part in parts.items() if part is not None and name in question.sends}


@dataclass
class Noise:
    """Nothing but noise w: for tasks without conditions.

    Args:
        size: values in w.
        seed: of the draws.
        device: where w is to be.
    """

    size: int
    seed: int
    device: torch.device
    ready = True

    def gather(self, federation: Federation) -> None:
        """Noise needs nobody's answer."""

    def has(self, node: str) -> bool:
        """Noise is there for everyone."""
        return True

    def draw(self, count: int, *purpose: str | int, of: str | None = None) -> Wish:
        """w ``(count, size)``, the same for the same purpose."""
        w = torch.randn(count, self.size, generator=torch_generator(self.seed, *purpose))
        return Wish((w.to(self.device),))

    def state(self) -> dict[str, Any] | None:
        """Nothing."""
        return None

    def load(self, state: Mapping[str, Any] | None, device: torch.device) -> None:
        """Nothing."""


@dataclass(frozen=True, kw_only=True)
class FromNoise(Method):
    """A generator G that makes inputs x from noise w."""

    noise: PositiveInt = 100
    """Values in w, the generator's noise."""
    generator_width: Annotated[int, Ge(2)] = 64
    """Channels of G's first convolution (published: 128)."""
    generator_lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for G, falling on a cosine to generator_lr_end."""
    generator_lr_end: NonNegativeFloat = 1e-4
    """Learning rate of G's last step."""

    def source(self, server: Server) -> Any:
        """Of what x is made: noise w."""
        return Noise(self.noise, server.seed, server.device)

    def generator(self, server: Server) -> nn.Module:
        """G, on the CPU, with first weights from torch's generator."""
        channels, height, width = server.shape
        return Generator((channels, height, width), self.noise, self.generator_width, server.mean, server.std)
