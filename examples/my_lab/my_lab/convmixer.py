"""ConvMixer: patches, then blocks that mix places and channels in turn.

Trockman, Kolter: "Patches Are All You Need?", TMLR 2023. With group norm in place of batch norm, so that it
can also learn privately, example by example.
"""

from __future__ import annotations

import torch
from torch import nn

DEPTH, PATCH, KERNEL = 4, 2, 3


class Block(nn.Module):
    """A convolution within each channel next to a shortcut, then one within each place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.places = nn.Sequential(
            nn.Conv2d(width, width, KERNEL, padding="same", groups=width), nn.GELU(), nn.GroupNorm(1, width)
        )
        self.channels = nn.Sequential(nn.Conv2d(width, width, 1), nn.GELU(), nn.GroupNorm(1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.channels(x + self.places(x))
        return mixed


def convmixer(shape: tuple[int, int, int], classes: int, width: int = 32) -> nn.Module:
    """A ConvMixer for images ``shape`` (channels, H, W), with an even H and W."""
    return nn.Sequential(
        nn.Conv2d(shape[0], width, PATCH, stride=PATCH),
        nn.GELU(),
        *(Block(width) for _ in range(DEPTH)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, classes),
    )
