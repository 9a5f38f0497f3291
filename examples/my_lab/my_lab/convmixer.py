"""ConvMixer: patches, then blocks that alternately mix positions and channels.

Trockman, Kolter: "Patches Are All You Need?", TMLR 2023. With group norm in place of batch norm, so that
DP-SGD can train it.
"""

from __future__ import annotations

import torch
from torch import nn

DEPTH, PATCH, KERNEL = 4, 2, 3


class Block(nn.Module):
    """A convolution within each channel with a shortcut, then one across the channels of each position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.positions = nn.Sequential(
            nn.Conv2d(width, width, KERNEL, padding="same", groups=width), nn.GELU(), nn.GroupNorm(1, width)
        )
        self.channels = nn.Sequential(nn.Conv2d(width, width, 1), nn.GELU(), nn.GroupNorm(1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.channels(x + self.positions(x))
        return mixed


def convmixer(shape: tuple[int, int, int], classes: int, width: int = 32) -> nn.Module:
    """Return a ConvMixer for images ``shape`` (channels, H, W), with even H and W."""
    return nn.Sequential(
        nn.Conv2d(shape[0], width, PATCH, stride=PATCH),
        nn.GELU(),
        *(Block(width) for _ in range(DEPTH)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, classes),
    )
