"""The server's generators of images: from noise (FedIOD), or from label maps (AsynDGAN's, too)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fedstill.models.group_norm import GroupNorm


class _Normalised(nn.Module):
    """Gives images normalised by a data set's declared mean and standard deviation, per channel."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        return (pixels - self.mean) / self.std


class Generator(_Normalised):
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

    def __init__(
        self, shape: tuple[int, int, int], noise: int, width: int, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__(mean, std)
        channels, height, side = shape
        half = width // 2
        self.start = (2 * width, height // 4, side // 4)
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

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        """``w`` (B, noise) to ``x`` (B, channels, H, W), normalised like the data."""
        return self.normalised(self.body(self.linear(w).view(-1, *self.start)))


def _layer(convolution: nn.Conv2d | nn.ConvTranspose2d) -> tuple[nn.Module, ...]:
    """A convolution, which has no bias: the instance norm behind it would take that away again."""
    return convolution, instance_norm(convolution.out_channels), nn.ReLU()


def instance_norm(channels: int) -> nn.Module:
    """Instance norm without weights: group norm of one channel a group, which is quicker in bfloat16."""
    return GroupNorm(channels, channels, affine=False)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with instance norm around a shortcut (Johnson et al. 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_layer(nn.Conv2d(width, width, 3, padding=1, padding_mode="reflect", bias=False)),
            nn.Conv2d(width, width, 3, padding=1, padding_mode="reflect", bias=False),
            instance_norm(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, width, H, W)`` to the same."""
        y: torch.Tensor = self.body(x)
        return x + y


class ConditionalGenerator(_Normalised):
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
    """

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
        super().__init__(mean, std)
        self.body = nn.Sequential(
            *_layer(nn.Conv2d(conditions, width, 7, padding=3, padding_mode="reflect", bias=False)),
            *_layer(nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False)),
            *_layer(nn.Conv2d(2 * width, 4 * width, 3, 2, 1, bias=False)),
            *(ResidualBlock(4 * width) for _ in range(blocks)),
            *_layer(nn.ConvTranspose2d(4 * width, 2 * width, 3, 2, 1, output_padding=1, bias=False)),
            *_layer(nn.ConvTranspose2d(2 * width, width, 3, 2, 1, output_padding=1, bias=False)),
            nn.Conv2d(width, channels, 7, padding=3, padding_mode="reflect"),
            nn.Sigmoid(),
        )

    def forward(self, condition: torch.Tensor) -> torch.Tensor:
        """Maps ``(B, conditions, H, W)``, H and W multiples of 4, to ``(B, channels, H, W)``, normalised."""
        return self.normalised(self.body(condition))
