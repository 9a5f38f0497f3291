"""VGG features for the perceptual loss, from a weights file that the user provides.

The network is VGG-16 or VGG-19 (Simonyan and Zisserman 2015). The library neither ships nor downloads
weights. The file is a safetensors file with torchvision's names, ``features.N.weight`` and
``features.N.bias``. Other tensors, such as the classifier's, are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fedstill.core.errors import ArgumentError, DataError, ModelError
from fedstill.models.weights_file import digest_weights

IMAGENET_MEAN, IMAGENET_STD = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)  # normalization in the networks' training
# Indices of the convolutions among torchvision's layers. A ReLU follows each, a pooling each block.
CONV_INDICES = {
    "VGG-16": [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28],
    "VGG-19": [0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34],
}
OUTPUT_INDICES = {
    "VGG-16": (2, 7, 14, 21),
    "VGG-19": (2, 7, 14, 23),
}  # convolutions before relu1_2, relu2_2, relu3_3 and relu4_3
TENSOR_NAME = re.compile(r"features\.(\d+)\.(weight|bias)")


class VGGFeatures(nn.Module):
    """Frozen convolutions of a VGG: images to the activations relu1_2, relu2_2, relu3_3 and relu4_3.

    Args:
        convolutions: convolutions by their index among torchvision's layers.
        output_indices: indices of the convolutions whose activations are returned.
        mean: mean with which images were normalized, per channel; pixels are in 0..1.
        std: standard deviation with which images were normalized, per channel.
    """

    imagenet_mean: torch.Tensor
    imagenet_std: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self,
        convolutions: Mapping[int, nn.Conv2d],
        output_indices: Sequence[int],
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        layers: list[nn.Module] = []
        for index, convolution in convolutions.items():
            layers += [convolution, nn.ReLU()]
            if index in output_indices:
                parts.append(nn.Sequential(*layers))
                layers = []
            if index + 2 not in convolutions:
                layers.append(nn.MaxPool2d(2))
        self.parts = nn.ModuleList(parts)
        buffers = {"mean": mean, "std": std, "imagenet_mean": IMAGENET_MEAN, "imagenet_std": IMAGENET_STD}
        for name, values in buffers.items():
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)
        self.eval().requires_grad_(False)

    @cached_property
    def digest(self) -> str:
        """Digest of the weights."""
        return digest_weights(self, {})

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Map normalized images ``(B, 1 or 3, H, W)``, at least 8 pixels per side, to four activations."""
        x = (x * self.std + self.mean).expand(-1, 3, -1, -1)  # repeats gray images three times
        x = (x - self.imagenet_mean) / self.imagenet_std
        activations: list[torch.Tensor] = []
        for part in self.parts:
            x = part(x)
            activations.append(x)
        return tuple(activations)


def load_vgg(path: str | Path, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> VGGFeatures:
    """Return the VGG-16 or VGG-19 in a file, frozen and in evaluation mode.

    Args:
        path: safetensors file with torchvision's names. Widths may differ from the published ones.
        mean: mean of the images' normalization, 1 or 3 channels. Default: pixels in 0..1.
        std: standard deviation of the images' normalization.

    Raises:
        ArgumentError: images have another number of channels.
        DataError: the file does not exist or is not a safetensors file.
        ModelError: the file does not hold the convolutions of a VGG-16 or VGG-19.
    """
    if len(mean) not in (1, 3):
        expected = "none: a VGG takes images of 1 or 3 channels"
        raise ArgumentError(f"VGG weights for inputs of {len(mean)} channels", str(path), expected)
    try:
        with safe_open(str(path), "pt") as file:
            # Read the convolutions only: the published classifier has 120 million parameters.
            tensors = {name: file.get_tensor(name) for name in file.keys() if TENSOR_NAME.fullmatch(name)}  # noqa: SIM118
    except FileNotFoundError as error:
        raise DataError(f"file not found: {path} (VGG weights)") from error
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"invalid VGG weights {str(path)!r}: {error} (expected a safetensors file)"
        ) from error
    form, convolutions = _vgg_name_and_convolutions(tensors, str(path))
    return VGGFeatures(convolutions, OUTPUT_INDICES[form], mean, std)


def _vgg_name_and_convolutions(
    tensors: Mapping[str, torch.Tensor], path: str
) -> tuple[str, dict[int, nn.Conv2d]]:
    """Return ``"VGG-16"`` or ``"VGG-19"``, and the convolutions by their index among torchvision's layers."""
    subject = f"VGG weights {path!r}"
    indices = sorted(int(name.split(".")[1]) for name in tensors if name.endswith(".weight"))
    form = next((form for form, known in CONV_INDICES.items() if known == indices), None)
    if form is None:
        expected = " or ".join(f"those of {name}, features.{known}" for name, known in CONV_INDICES.items())
        raise ModelError(f"{subject} have convolutions at {indices} (expected {expected})")
    channels, convolutions = 3, {}
    for index in indices:
        pair = [tensors.get(f"features.{index}.{part}", torch.zeros(0)) for part in ("weight", "bias")]
        shapes = [tuple(tensor.shape) for tensor in pair]
        out = len(pair[0])
        if not out or shapes != [(out, channels, 3, 3), (out,)]:
            expected = f"(out, {channels}, 3, 3) and (out,)"
            raise ModelError(f"{subject}: features.{index} has shapes {shapes} (expected {expected})")
        if not all(tensor.isfinite().all() for tensor in pair):
            raise ModelError(f"{subject}: features.{index} holds NaN or infinity")
        layer = nn.Conv2d(channels, out, 3, padding=1, device="meta")  # samples no initial weights
        layer.weight, layer.bias = (nn.Parameter(tensor.float()) for tensor in pair)
        convolutions[index], channels = layer, out
    return form, convolutions
