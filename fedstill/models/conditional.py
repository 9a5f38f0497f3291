"""The server's generator of images from label maps (FedIOD, segmentation and reconstruction; AsynDGAN)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with instance norm around a shortcut (Johnson et al. 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, padding_mode="reflect", bias=False),
            nn.InstanceNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, padding_mode="reflect", bias=False),
            nn.InstanceNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, width, H, W)`` to the same."""
        y: torch.Tensor = self.body(x)
        return x + y


class ConditionalGenerator(nn.Module):
    """Label maps, as a network takes them, to images of their size: the residual generator of pix2pix.

    Isola et al., "Image-to-Image Translation with Conditional Adversarial Networks", CVPR 2017, in the form
    of Johnson et al., "Perceptual Losses for Real-Time Style Transfer", ECCV 2016: a 7x7 convolution to w
    channels, two of 3x3 and stride 2 to 2w and 4w, residual blocks, two transposed ones back to w, a 7x7
    convolution; instance norm without weights and ReLU behind each but the last, borders reflected. Then a
    sigmoid and the data set's normalisation. Published: w = 64, nine blocks.

    Args:
        conditions: channels of a map, ``Task.conditions``.
        channels: of the images, as ``mean`` and ``std``, the data set's declared normalisation, have them.
        width: w.
        blocks: residual blocks.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self,
        conditions: int,
        channels: int,
        width: int,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        blocks: int = 9,
    ) -> None:
        super().__init__()
        # Convolutions before an instance norm have no bias: it would be taken away again.
        self.body = nn.Sequential(
            nn.Conv2d(conditions, width, 7, padding=3, padding_mode="reflect", bias=False),
            nn.InstanceNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False),
            nn.InstanceNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, 2, 1, bias=False),
            nn.InstanceNorm2d(4 * width),
            nn.ReLU(),
            *(ResidualBlock(4 * width) for _ in range(blocks)),
            nn.ConvTranspose2d(4 * width, 2 * width, 3, 2, 1, output_padding=1, bias=False),
            nn.InstanceNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 3, 2, 1, output_padding=1, bias=False),
            nn.InstanceNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, channels, 7, padding=3, padding_mode="reflect"),
            nn.Sigmoid(),
        )
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, condition: torch.Tensor) -> torch.Tensor:
        """Maps ``(B, conditions, H, W)``, H and W multiples of 4, to ``(B, channels, H, W)``, normalised."""
        images: torch.Tensor = (self.body(condition) - self.mean) / self.std  # the body's are in [0, 1]
        return images
