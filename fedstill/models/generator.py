"""The server's generator of inputs: noise in, images out (FedIOD, classification)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Generator(nn.Module):
    """Noise to images of any height and width divisible by 4.

    As published for 32x32: a linear layer to ``2w x H/4 x W/4``, batch norm, twice (nearest
    up-sampling by 2, 3x3 convolution to w and w/2, batch norm, leaky ReLU 0.2), a 3x3 convolution,
    a sigmoid, then the data set's normalisation. Published width w: 128.

    Args:
        shape: ``(channels, H, W)`` of the images.
        noise: values in w.
        width: channels of the first convolution.
        mean, std: the data set's declared normalisation, per channel.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self,
        shape: tuple[int, int, int],
        noise: int,
        width: int,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        channels, height, side = shape
        half = width // 2
        self.start = (2 * width, height // 4, side // 4)
        self.noise = noise
        self.linear = nn.Linear(noise, 2 * width * (height // 4) * (side // 4))
        self.body = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(width, half, 3, padding=1),
            nn.BatchNorm2d(half),
            nn.LeakyReLU(0.2),
            nn.Conv2d(half, channels, 3, padding=1),
            nn.Sigmoid(),
        )
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        """``w`` (B, noise) to ``x`` (B, channels, H, W), normalised like the data."""
        x = self.body(self.linear(w).view(-1, *self.start))  # (B, channels, H, W) in [0, 1]
        images: torch.Tensor = (x - self.mean) / self.std
        return images
