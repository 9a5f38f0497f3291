"""Generators of inputs at the server: x = G(w) from noise w, or from noise and a label.

For inputs that are generated from label maps see ``_label_maps``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import nn

from fedstill.core.compute import copy_to_device, match_parameter_layout
from fedstill.core.options import CheckedOptions, NonNegativeFloat, PositiveInt
from fedstill.methods import (
    ArgumentError,
    NodeSetting,
    NodeView,
    Query,
    Server,
    TensorData,
    adam,
    cosine_lr,
    descend,
    seeded,
    set_lr,
    torch_generator,
)
from fedstill.models.gan import Generator, NoisyFeatureGenerator, TableGenerator
from fedstill.protocol.payload_kinds import PayloadKind
from fedstill.tasks import Task


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


class InputSource(Protocol):
    """Source of the arguments of a generator."""

    @property
    def is_ready(self) -> bool:
        """True if it can be sampled."""

    def fetch(self, server: Server) -> None:
        """Query the nodes for what the source needs, unless that is done."""

    def sample_batch(self, count: int, *purpose: str | int) -> GeneratorBatch:
        """Return arguments for ``count`` inputs, equal for equal purposes."""

    def state_dict(self) -> dict[str, Any] | None: ...

    def load_state_dict(self, state: Mapping[str, Any] | None, device: torch.device) -> None: ...


@dataclass
class NoiseSource:
    """Source of noise w ``(B, size)``, or of w with the one-hot code of a label y, sampled uniformly.

    Args:
        size: values in w.
        seed: seed of the noise.
        device: device of the noise.
        classes: number of labels; 0: none.
    """

    size: int
    seed: int
    device: torch.device
    classes: int = 0
    is_ready = True

    def fetch(self, server: Server) -> None:
        """Do nothing: noise needs no query."""

    def sample_batch(self, count: int, *purpose: str | int) -> GeneratorBatch:
        """Return w ``(count, size)``, or [w; y] ``(count, size + classes)`` and y."""
        generator = torch_generator(self.seed, *purpose)
        w = torch.randn(count, self.size, generator=generator)
        if not self.classes:
            return GeneratorBatch(copy_to_device(w, self.device))
        y = torch.randint(self.classes, (count,), generator=generator)
        w_y = torch.cat([w, F.one_hot(y, self.classes)], 1)
        return GeneratorBatch(copy_to_device(w_y, self.device), labels=copy_to_device(y, self.device))

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None, device: torch.device) -> None:
        """Do nothing: noise has no state."""


@dataclass(frozen=True, kw_only=True)
class InputGenerator(CheckedOptions):
    """Options of a generator G of inputs x from noise w."""

    section: ClassVar[str] = "method.generator"
    takes_labels: ClassVar[bool] = False

    noise: PositiveInt = 100
    """Values in the generator's noise w. A generator of features has one more for each feature."""
    width: Annotated[int, Ge(2)] = 64
    """Channels of the generator's first convolution (published: 128), or width of its first layer."""
    lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for the generator, falling on a cosine to lr_end."""
    lr_end: NonNegativeFloat = 1e-4
    """Learning rate of the generator's last step."""

    def sends(self, task: Task, *, is_judged: bool) -> Mapping[str, PayloadKind]:
        """Return the payload kinds of the tensors that are sent with x: none."""
        return {}

    def compares_images(self, task: Task) -> bool:
        """Return whether nodes compare generated images with their own: no."""
        return False

    def pairs(self, setting: NodeSetting) -> Callable[[TensorData], TensorData] | None:
        """Return the function from a node's data to images and label maps: none."""
        return None

    def difference(self, node: NodeView, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Return the distance of images from the node's own images ``(B,)``: 0, as no map has an owner."""
        return x.new_zeros(len(x))

    def source(self, server: Server) -> InputSource:
        """Return the source of the generator's arguments."""
        size = self.noise + (server.shape[0] if server.feature_normalization else 0)
        return NoiseSource(size, server.seed, server.device, server.task.classes if self.takes_labels else 0)

    def network(self, server: Server) -> nn.Module:
        """Return the network G.

        Raises:
            ArgumentError: rows of a table without their columns.
        """
        size = self.noise + (server.task.classes if self.takes_labels else 0)
        if server.feature_normalization:
            (features,) = server.shape
            return NoisyFeatureGenerator(size, features, self.width, server.feature_normalization)
        if server.task.form == "rows":
            if not server.schema:
                expected = (
                    "a table's columns, as the generator makes rows and needs their ranges; or choose a "
                    "method with public data, such as FedKD"
                )
                raise ArgumentError("schema", "", expected)
            return TableGenerator(server.schema, size, self.width)
        channels, height, width = server.shape
        return Generator((channels, height, width), size, self.width, server.mean, server.std)


@dataclass(frozen=True, kw_only=True)
class LabelGenerator(InputGenerator):
    """Options of a generator G of inputs x from noise w and a label y."""

    takes_labels: ClassVar[bool] = True


class GeneratorTraining:
    """Generator G at the server, with the source of its arguments and its optimizer.

    Args:
        options: its options: an :class:`InputGenerator` or a ``MapGenerator``.
        server: the server.
    """

    def __init__(self, options: Any, server: Server) -> None:
        self.options = options
        self.source: Any = options.source(server)
        with seeded(server.seed, "generator"):
            self.G: nn.Module = server.compute.to_device(options.network(server))
        self.adam = adam(self.G, options.lr, beta=0.5)

    def __call__(self, w: GeneratorBatch) -> torch.Tensor:
        """Return x = G(w) ``(B, C, H, W)`` in float32."""
        x: torch.Tensor = self.G(w.generator_input).float()
        return x

    def set_lr(self, t: int, steps: int) -> None:
        """Set the learning rate of step ``t`` of ``steps``."""
        set_lr(self.adam, cosine_lr(t, steps, self.options.lr, self.options.lr_end))

    def step(self, loss: torch.Tensor) -> None:
        """Take one step of G on a loss."""
        descend(self.adam, loss)

    def evaluate(self, w: GeneratorBatch) -> torch.Tensor:
        """Return G(w) in evaluation mode, without gradients."""
        self.G.eval()
        with torch.no_grad():
            x = self(w)
        self.G.train()
        return x

    def preview_samples(self, count: int) -> torch.Tensor | None:
        """Return ``count`` inputs, the same at each call; None before the source is ready."""
        return self.evaluate(self.source.sample_batch(count, "imagine")) if self.source.is_ready else None

    def preview_maps(self, count: int) -> torch.Tensor | None:
        """Return the label maps of :meth:`preview_samples`; None without maps."""
        return self.source.sample_batch(count, "imagine").maps if self.source.is_ready else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "G": dict(self.G.state_dict()),
            "adam": self.adam.state_dict(),
            "source": self.source.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.G.load_state_dict(state["G"])
        self.adam.load_state_dict(state["adam"])
        match_parameter_layout(self.adam)
        self.source.load_state_dict(state["source"], device)
