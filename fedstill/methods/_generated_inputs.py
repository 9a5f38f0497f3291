"""Inputs that a server's generator makes from noise, and the batches of its arguments.

For inputs that are generated from label maps see ``_label_maps``.
"""

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
    """Arguments of a generator for B inputs.

    Args:
        generator_input: argument of the generator, ``(B, ...)``.
        maps: label maps ``(B, H, W)`` uint8, if there are any.
        source: owner of each map, its index among the maps that this node sent, and its pose: ``(B, 3)``
            int64.
        labels: class of each input ``(B,)`` int64, if the generator is conditioned on it.
    """

    generator_input: torch.Tensor
    maps: torch.Tensor | None = None
    source: torch.Tensor | None = None
    labels: torch.Tensor | None = None

    def query_tensors(self, query: Query) -> dict[str, Any]:
        """Return the tensors that a query declares besides the inputs."""
        parts = {"maps": self.maps, "source": self.source}
        return {name: part for name, part in parts.items() if part is not None and name in query.sends}


@dataclass
class NoiseSource:
    """Source of noise w, for tasks without conditions.

    Args:
        size: values in w.
        seed: seed of the noise.
        device: device of the noise.
    """

    size: int
    seed: int
    device: torch.device
    is_ready = True

    def fetch(self, server: Server) -> None:
        """Do nothing: noise needs no query."""

    def sample(self, count: int, *purpose: str | int) -> GeneratorBatch:
        """Return w ``(count, size)``, equal for equal purposes."""
        w = torch.randn(count, self.size, generator=torch_generator(self.seed, *purpose))
        return GeneratorBatch(copy_to_device(w, self.device))

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None, device: torch.device) -> None:
        """Do nothing: noise has no state."""


@dataclass
class LabeledNoiseSource(NoiseSource):
    """Source of noise w with the one-hot code of a label y, sampled uniformly.

    Args:
        classes: number of labels.
    """

    classes: int

    def sample(self, count: int, *purpose: str | int) -> GeneratorBatch:
        """Return ``[w; y]`` (count, size + classes), and y."""
        draw = torch_generator(self.seed, *purpose)
        w = torch.randn(count, self.size, generator=draw)
        y = torch.randint(self.classes, (count,), generator=draw)
        generator_input = torch.cat([w, F.one_hot(y, self.classes)], 1)
        return GeneratorBatch(
            copy_to_device(generator_input, self.device), labels=copy_to_device(y, self.device)
        )


class InputGeneratorMethod(Method):
    """Base class of methods whose state has a ``source`` of noise or maps and a ``generator`` G of inputs."""

    generator_lr: float

    def init_generator(self, server: Server) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return G with its initial weights, on the device, and its optimizer."""
        with seeded(server.seed, "generator"):
            G = server.compute.to_device(self.generator(server))  # type: ignore[attr-defined]
        return G, adam(G, self.generator_lr, beta=0.5)

    def preview_samples(self, server: Server, state: Any, count: int) -> torch.Tensor | None:
        return (
            generate(state.generator, state.source.sample(count, "imagine"))
            if state.source.is_ready
            else None
        )

    def preview_maps(self, server: Server, state: Any, count: int) -> torch.Tensor | None:
        return state.source.sample(count, "imagine").maps if state.source.is_ready else None


def generate(generator: nn.Module, batch: GeneratorBatch) -> torch.Tensor:
    """Return G(w) ``(B, C, H, W)`` in float32, without gradients."""
    generator.eval()
    with torch.no_grad():
        x: torch.Tensor = generator(batch.generator_input).float()
    generator.train()
    return x


@dataclass(frozen=True, kw_only=True)
class NoiseGeneratorOptions(Method):
    """Options of a generator G of inputs x from noise w."""

    noise: PositiveInt = 100
    """Values in the generator's noise w."""
    generator_width: Annotated[int, Ge(2)] = 64
    """Channels of the generator's first convolution (published: 128); for tables, first layer's width."""
    generator_lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for the generator G, falling on a cosine to generator_lr_end."""
    generator_lr_end: NonNegativeFloat = 1e-4
    """Learning rate of the generator's last step."""

    def source(self, server: Server) -> Any:
        return NoiseSource(self.noise, server.seed, server.device)

    def generator_input_size(self, server: Server) -> int:
        """Return the number of values in G's input."""
        return self.noise

    def generator(self, server: Server) -> nn.Module:
        if server.task.form == "rows":
            if not server.schema:
                raise ArgumentError(
                    "schema",
                    "",
                    f"a table's columns: {self.title} generates rows and needs their ranges; "
                    "or choose a method with public data, such as FedKD",
                )
            return TableGenerator(server.schema, self.generator_input_size(server), self.generator_width)
        channels, height, width = server.shape
        shape, input_size = (channels, height, width), self.generator_input_size(server)
        return Generator(shape, input_size, self.generator_width, server.mean, server.std)


@dataclass(frozen=True, kw_only=True)
class LabelGeneratorOptions(NoiseGeneratorOptions):
    """Options of a generator G of inputs x from noise w and a label y."""

    def source(self, server: Server) -> Any:
        return LabeledNoiseSource(self.noise, server.seed, server.device, server.task.classes)

    def generator_input_size(self, server: Server) -> int:
        return self.noise + server.task.classes
