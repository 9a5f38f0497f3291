"""Feature maps of a pretrained network at several scales, for U-Nets and perceptual losses.

A scale is the last output of one height and width before the network halves both. The scales of a network are
measured on an image of zeros, so any convolutional network works: of timm, torchvision or a custom factory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedstill.core.errors import ArgumentError, ModelError
from fedstill.core.registry import USER_CODE_ERRORS, first_line
from fedstill.core.text_format import format_shape
from fedstill.models.backbones import (
    PixelConversion,
    RawInputs,
    is_trainable_kind,
    load_network_weights,
    load_untrained,
)
from fedstill.models.weights_file import digest_weights

PROBED_SIDE = 128  # smallest height and width of the image that is measured
EXPECTED = "timm:NAME, torchvision:NAME or package.module:factory"
LIBRARIES = ("timm:", "torchvision:")


@dataclass(frozen=True)
class Scale:
    """Feature map of a network at one scale.

    Args:
        layer: name of the submodule whose output it is.
        factor: factor by which height and width are smaller than those of the image, a power of 2.
        channels: number of channels.
    """

    layer: str
    factor: int
    channels: int


class FeatureMaps(nn.Module):
    """Feature maps of a network at several scales, from fine to coarse.

    The network stays in evaluation mode, also in training: batch normalization keeps the statistics of the
    pretraining, and no unit is dropped. Its parameters can be trained. So equal weights are equal functions
    at all nodes, and averages of their weights are not mixed with averages of different statistics.

    Images whose height or width is not divisible by the coarsest factor are padded at the bottom and at the
    right by repeating the last pixels.

    Args:
        backbone: ``timm:NAME``, ``torchvision:NAME``, or ``package.module:factory`` for a custom factory
            that receives the shape of an image.
        raw: shape ``(C, H, W)`` and normalization of the images.

    Attributes:
        scales: the scales, from fine to coarse.
        stride: factor of the coarsest scale.

    Raises:
        ArgumentError: an unknown backbone, or one without gradients.
        ModelError: the network cannot be built, takes images of other channels, or has no maps at two scales
            or more.
    """

    def __init__(self, backbone: str, raw: RawInputs) -> None:
        super().__init__()
        check_backbone(backbone)
        network, channels, mean, std = load_untrained(backbone, raw)
        if channels and raw.shape[0] not in (1, channels):
            found = f"images of {raw.shape[0]} channels"
            raise ModelError(f"backbone {backbone} for {found} (expected 1 or {channels}, as it takes)")
        self.backbone, self.network = backbone, network
        self._digest = ""  # private, as public attributes count as architecture
        self.conversion = PixelConversion(raw, channels or raw.shape[0], 0, mean, std)
        self.network.eval()
        self.scales = find_scales(network, self.conversion.channels, raw.shape[1:], backbone)
        self.stride = self.scales[-1].factor

    def load(self, weights: str | Path, option: str) -> None:
        """Load the network's weights from a safetensors file.

        Args:
            weights: the file.
            option: option that names it, for errors.

        Raises:
            ArgumentError: there is no such file, or a library's network has none.
            ModelError: the file is not a safetensors file, or does not fit.
        """
        if weights:
            load_network_weights(self.network, Path(weights).expanduser(), self.backbone, option)
        elif self.backbone.startswith(LIBRARIES):  # a custom factory may have its weights itself
            raise ArgumentError(option, "", f"a local .safetensors file of weights for {self.backbone}")
        self._digest = digest_weights(self.network, {"backbone": self.backbone})

    @property
    def digest(self) -> str:
        """Digest of the pretrained weights, which training does not change; empty before :meth:`load`."""
        return self._digest

    def train(self, mode: bool = True) -> FeatureMaps:
        """Set the mode, except that the network stays in evaluation mode."""
        super().train(mode)
        self.network.eval()
        return self

    def convert(self, x: torch.Tensor) -> torch.Tensor:
        """Return images as the network expects them, padded: ``(B, channels, H', W')``."""
        pixels: torch.Tensor = self.conversion(x)
        for dimension in (2, 3):
            missing = -pixels.shape[dimension] % self.stride
            if missing:
                last = pixels.narrow(dimension, pixels.shape[dimension] - 1, 1)
                pixels = torch.cat([pixels, *[last] * missing], dimension)
        return pixels

    def maps(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        """Return the maps of converted images, each ``(B, scale.channels, H' / factor, W' / factor)``."""
        outputs: dict[str, torch.Tensor] = {}

        def keep(layer: str) -> Any:
            def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
                outputs[layer] = output

            return hook

        handles = [
            self.network.get_submodule(scale.layer).register_forward_hook(keep(scale.layer))
            for scale in self.scales
        ]
        try:
            self.network(pixels)
        finally:
            for handle in handles:
                handle.remove()
        return [outputs[scale.layer] for scale in self.scales]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the maps of a run's images ``(B, C, H, W)``."""
        return self.maps(self.convert(x))


def check_backbone(backbone: str) -> None:
    """Refuse the name of a backbone without gradients, or of another form, without building it.

    Raises:
        ArgumentError: it is an ONNX graph, or not of timm, torchvision or a custom factory.
    """
    if backbone.endswith(".onnx"):
        expected = f"{EXPECTED}; no gradient passes through an ONNX graph"
        raise ArgumentError("features.backbone", backbone, expected)
    if not is_trainable_kind(backbone):
        raise ArgumentError("features.backbone", backbone, EXPECTED)


def find_scales(
    network: nn.Module, channels: int, sides: tuple[int, ...], backbone: str = "the network"
) -> list[Scale]:
    """Return the scales of a network, from fine to coarse.

    Blocks are the outermost submodules that are called once and halve height and width at most once, in the
    order in which they finish. Maps of one pixel, as of global pooling, are no scale.

    Args:
        network: in evaluation mode.
        channels: channels of its images.
        sides: height and width of its images. Small and odd ones are measured on a larger image.
        backbone: name of the network, for errors.

    Raises:
        ModelError: the network does not take such images, or has fewer than two scales.

    >>> layers = nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1)
    >>> find_scales(nn.Sequential(*layers), 1, (8, 8))
    [Scale(layer='0', factor=1, channels=4), Scale(layer='2', factor=2, channels=8)]
    """
    height, width = (max(PROBED_SIDE, math.ceil(side / 32) * 32) for side in sides)
    calls = _measure_calls(network, (channels, height, width), backbone)
    names = [name for name, _, _ in calls]
    blocks = {
        name: (after[1], height // after[2])
        for name, before, after in calls
        if name and names.count(name) == 1 and _is_block(network.get_submodule(name), before, after)
        if after[2] > 1 and height % after[2] == 0 and after[2] * width == after[3] * height
    }
    scales: list[Scale] = []
    for name, (wide, factor) in blocks.items():
        if any(name.startswith(f"{outer}.") for outer in blocks) or factor & (factor - 1):
            continue
        if scales and factor == scales[-1].factor:
            scales.pop()
        if not scales or factor > scales[-1].factor:
            scales.append(Scale(name, factor, wide))
    if len(scales) < 2:
        expected = "a network that halves height and width between its blocks"
        found = f"{len(scales)} scale{'' if len(scales) == 1 else 's'}"
        raise ModelError(f"backbone {backbone} has feature maps at {found} (expected {expected})")
    return scales


Shape = tuple[int, ...]


def _measure_calls(network: nn.Module, shape: Shape, backbone: str) -> list[tuple[str, Shape, Shape]]:
    """Return the calls of submodules, in the order in which they finish: name, shape of input and output."""
    calls: list[tuple[str, Shape, Shape]] = []

    def measure(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            calls.append((name, _shape(inputs[0] if inputs else None), _shape(output)))

        return hook

    handles = [module.register_forward_hook(measure(name)) for name, module in network.named_modules()]
    try:
        with torch.no_grad():
            network(torch.zeros(1, *shape))
    except USER_CODE_ERRORS as error:
        message = f"cannot take inputs of {format_shape(shape)}: {first_line(error)}"
        raise ModelError(f"backbone {backbone} {message}") from error
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _shape(value: Any) -> Shape:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _is_block(module: nn.Module, before: Shape, after: Shape) -> bool:
    """Return whether a submodule maps images to images and halves them at most once; a layer may do more."""
    if len(before) != 4 or len(after) != 4:
        return False
    is_layer = not any(True for _ in module.children())
    return is_layer or before[2] <= 2 * after[2]
