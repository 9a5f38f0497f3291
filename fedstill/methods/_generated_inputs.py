"""Inputs that a server's generator makes of noise, and what it is told to make; maps: ``_label_maps``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import nn

from fedstill.core.compute import copy_to_device
from fedstill.core.options import NonNegativeFloat, PositiveInt
from fedstill.methods import ArgumentError, Method, Query, Server, adam, seeded, torch_generator
from fedstill.models.generators import Generator, TableGenerator


@dataclass(frozen=True)
class GeneratorBatch:
    """What a generator is told to make of B images.

    Args:
        told: the generator's argument, ``(B, ...)``.
        maps: the maps ``(B, H, W)`` uint8, where there are any.
        source: of each map its owner, its place among what that node told, and its pose: ``(B, 3)`` int64.
        labels: the class that each is to show ``(B,)`` int64, where the generator is told one.
    """

    told: torch.Tensor
    maps: torch.Tensor | None = None
    source: torch.Tensor | None = None
    labels: torch.Tensor | None = None

    def sent(self, query: Query) -> dict[str, Any]:
        """What goes down with a query beside the images themselves, as it declares."""
        parts = {"maps": self.maps, "source": self.source}
        return {name: part for name, part in parts.items() if part is not None and name in query.sends}


@dataclass
class Noise:
    """Nothing but noise w: for tasks without conditions.

    Args:
        size: values in w.
    """

    size: int
    seed: int
    device: torch.device
    ready = True

    def gather(self, server: Server) -> None:
        """Noise needs nobody's answer."""

    def draw(self, count: int, *purpose: str | int) -> GeneratorBatch:
        """w ``(count, size)``, the same for the same purpose."""
        w = torch.randn(count, self.size, generator=torch_generator(self.seed, *purpose))
        return GeneratorBatch(copy_to_device(w, self.device))

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None, device: torch.device) -> None:
        """Noise has no state."""


@dataclass
class LabeledNoise(Noise):
    """Noise w beside the one-hot code of a label y, drawn evenly.

    Args:
        classes: labels to draw from.
    """

    classes: int

    def draw(self, count: int, *purpose: str | int) -> GeneratorBatch:
        """``[w; y]`` (count, size + classes), and y."""
        draw = torch_generator(self.seed, *purpose)
        w = torch.randn(count, self.size, generator=draw)
        y = torch.randint(self.classes, (count,), generator=draw)
        told = torch.cat([w, F.one_hot(y, self.classes)], 1)
        return GeneratorBatch(copy_to_device(told, self.device), labels=copy_to_device(y, self.device))


class GeneratesInputs(Method):
    """A method whose state has a ``source`` of noise or maps, and a ``generator`` G of inputs."""

    generator_lr: float

    def first_generator(self, server: Server) -> tuple[nn.Module, torch.optim.Optimizer]:
        """G with its first weights, on the device, and its optimizer."""
        with seeded(server.seed, "generator"):
            G = server.compute.to_device(self.generator(server))  # type: ignore[attr-defined]
        return G, adam(G, self.generator_lr, beta=0.5)

    def preview_samples(self, server: Server, state: Any, count: int) -> torch.Tensor | None:
        return made(state.generator, state.source.draw(count, "imagine")) if state.source.ready else None

    def preview_maps(self, server: Server, state: Any, count: int) -> torch.Tensor | None:
        return state.source.draw(count, "imagine").maps if state.source.ready else None


def made(generator: nn.Module, w: GeneratorBatch) -> torch.Tensor:
    """G(w) ``(B, C, H, W)`` in float32; G does not learn from it."""
    generator.eval()
    with torch.no_grad():
        x: torch.Tensor = generator(w.told).float()
    generator.train()
    return x


@dataclass(frozen=True, kw_only=True)
class FromNoise(Method):
    """A generator G that makes inputs x from noise w."""

    noise: PositiveInt = 100
    """Values in w, the generator's noise."""
    generator_width: Annotated[int, Ge(2)] = 64
    """Channels of G's first convolution (published: 128); of rows of a table, width of its first layer."""
    generator_lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for G, falling on a cosine to generator_lr_end."""
    generator_lr_end: NonNegativeFloat = 1e-4
    """Learning rate of G's last step."""

    def source(self, server: Server) -> Any:
        return Noise(self.noise, server.seed, server.device)

    def told(self, server: Server) -> int:
        """Values that G is told of each input."""
        return self.noise

    def generator(self, server: Server) -> nn.Module:
        if server.task.form == "rows":
            if not server.schema:
                raise ArgumentError("schema", "", f"a table's columns, within which {self.title} makes rows")
            return TableGenerator(server.schema, self.told(server), self.generator_width)
        channels, height, width = server.shape
        form, told = (channels, height, width), self.told(server)
        return Generator(form, told, self.generator_width, server.mean, server.std)


@dataclass(frozen=True, kw_only=True)
class FromLabels(FromNoise):
    """A generator G that makes inputs x from noise w and the label y that they are to show."""

    def source(self, server: Server) -> Any:
        return LabeledNoise(self.noise, server.seed, server.device, server.task.classes)

    def told(self, server: Server) -> int:
        return self.noise + server.task.classes
