"""VGG features for the perceptual loss, from a weights file that the user gives.

Johnson, Alahi, Fei-Fei: "Perceptual Losses for Real-Time Style Transfer and Super-Resolution", ECCV 2016, on
VGG-16 or VGG-19 (Simonyan and Zisserman 2015). The library ships no weights and fetches none; the file is
safetensors with torchvision's names, ``features.N.weight`` and ``features.N.bias``. What else it holds, as
the classifier, is left unread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fedstill.core.errors import ArgumentError, DataError, ModelError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what the networks learned with
# Where torchvision has the convolutions among its layers: a ReLU behind each, a pooling behind each block.
CONV_INDICES = {
    "VGG-16": [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28],
    "VGG-19": [0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34],
}
OUTPUT_INDICES = {
    "VGG-16": (2, 7, 14, 21),
    "VGG-19": (2, 7, 14, 23),
}  # those of relu1_2, relu2_2, relu3_3 and relu4_3
TENSOR_NAME = re.compile(r"features\.(\d+)\.(weight|bias)")


class VGGFeatures(nn.Module):
    """Frozen convolutions, given by their places: images to relu1_2, relu2_2, relu3_3 and relu4_3.

    ``told`` are the places of these; ``mean`` and ``std`` are what images were normalized with, per channel;
    pixels are 0..1.
    """

    imagenet_mean: torch.Tensor
    imagenet_std: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self,
        convolutions: Mapping[int, nn.Conv2d],
        told: Sequence[int],
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        layers: list[nn.Module] = []
        for place, convolution in convolutions.items():
            layers += [convolution, nn.ReLU()]
            if place in told:
                parts.append(nn.Sequential(*layers))
                layers = []
            if place + 2 not in convolutions:
                layers.append(nn.MaxPool2d(2))
        self.parts = nn.ModuleList(parts)
        known = {"mean": mean, "std": std, "imagenet_mean": IMAGENET_MEAN, "imagenet_std": IMAGENET_STD}
        for name, values in known.items():
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Normalized images ``(B, 1 or 3, H, W)``, 8 pixels a side or more, to four activations."""
        x = (x * self.std + self.mean).expand(-1, 3, -1, -1)  # gray three times
        x = (x - self.imagenet_mean) / self.imagenet_std
        found: list[torch.Tensor] = []
        for part in self.parts:
            x = part(x)
            found.append(x)
        return tuple(found)


def load_vgg(path: str | Path, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> VGGFeatures:
    """VGG-16 or VGG-19, whichever a file holds, frozen and in evaluation mode.

    Args:
        path: a safetensors file with torchvision's names. Widths may differ from the published ones.
        mean, std: the images' declared normalization, per channel, 1 or 3; without them pixels in 0..1.

    Raises:
        ArgumentError: images of another number of channels.
        DataError: there is no such file, or it is no safetensors file.
        ModelError: what it holds is not the convolutions of a VGG-16 or VGG-19.
    """
    if len(mean) not in (1, 3):
        allowed = "none: a VGG sees images of 1 or 3 channels"
        raise ArgumentError(f"VGG weights for inputs of {len(mean)} channels", str(path), allowed)
    try:
        with safe_open(str(path), "pt") as file:
            # Only what is wanted: the published classifier has 120 million numbers.
            tensors = {name: file.get_tensor(name) for name in file.keys() if TENSOR_NAME.fullmatch(name)}  # noqa: SIM118
    except FileNotFoundError as error:
        raise DataError(f"VGG weights {str(path)!r}: there is no such file") from error
    except (SafetensorError, OSError) as error:
        raise DataError(f"VGG weights {str(path)!r} (expected a safetensors file ({error}))") from error
    form, convolutions = _convolutions(tensors, str(path))
    return VGGFeatures(convolutions, OUTPUT_INDICES[form], mean, std)


def perceptual_loss(
    features: Callable[[torch.Tensor], Sequence[torch.Tensor]], x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """The perceptual loss of each pair of images ``(B, channels, H, W)``: ``(B,)``, with gradients to both.

    Johnson et al., Eq. 2, the mean of squared differences of an activation; here the mean over activations.
    """
    pairs = zip(features(x), features(y), strict=True)
    return torch.stack([(mine - theirs).square().flatten(1).mean(1) for mine, theirs in pairs]).mean(0)


def _convolutions(tensors: Mapping[str, torch.Tensor], path: str) -> tuple[str, dict[int, nn.Conv2d]]:
    """Which form a file has, and its convolutions by their places."""
    whose = f"VGG weights {path!r}"
    places = sorted(int(name.split(".")[1]) for name in tensors if name.endswith(".weight"))
    form = next((form for form, known in CONV_INDICES.items() if known == places), None)
    if form is None:
        allowed = " or ".join(f"those of {name}, features.{known}" for name, known in CONV_INDICES.items())
        raise ModelError(f"{whose} have convolutions at {places} (expected {allowed})")
    channels, convolutions = 3, {}
    for place in places:
        found = [tensors.get(f"features.{place}.{part}", torch.zeros(0)) for part in ("weight", "bias")]
        shapes = [tuple(tensor.shape) for tensor in found]
        out = len(found[0])
        if not out or shapes != [(out, channels, 3, 3), (out,)]:
            wanted = f"(out, {channels}, 3, 3) and (out,)"
            raise ModelError(f"{whose}: features.{place} has shapes {shapes} (expected {wanted})")
        if not all(tensor.isfinite().all() for tensor in found):
            raise ModelError(f"{whose}: features.{place} holds NaN or infinity")
        layer = nn.Conv2d(channels, out, 3, padding=1, device="meta")  # draws nothing
        layer.weight, layer.bias = (nn.Parameter(tensor.float()) for tensor in found)
        convolutions[place], channels = layer, out
    return form, convolutions
