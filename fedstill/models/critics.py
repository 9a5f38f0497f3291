"""Critics of image patches, which each node trains on its own data: FedIOD's critic and the PatchGAN."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import ClassVar, Literal

from torch import nn

from fedstill.models.norm_layers import GroupNorm

Norm = Literal["batch", "group"]


class PatchCritic(nn.Sequential):
    """Map images ``(B, channels, H, W)`` to one value per patch, ``(B, H/4, W/4)``, high for generated
    patches.

    As published: a 4x4 stride-2 convolution to w, leaky ReLU 0.2; 4x4 stride-2 to 2w, batch norm, leaky ReLU;
    1x1 to one map. The published width w is 128. Batch norm always uses the statistics of the batch.

    Args:
        channels: channels of the input.
        width: w.
        norm: ``"batch"``, or ``"group"`` for group norm with up to 8 groups. Batch norm mixes examples and
            therefore excludes DP-SGD.

    Example:
        >>> import torch
        >>> PatchCritic(1, width=8)(torch.zeros(2, 1, 32, 32)).shape
        torch.Size([2, 8, 8])
    """

    def __init__(self, channels: int, width: int, norm: Norm = "batch") -> None:
        double_width = 2 * width
        super().__init__(
            nn.Conv2d(channels, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, double_width, 4, 2, 1),
            _norm(double_width, norm),
            nn.LeakyReLU(0.2),
            nn.Conv2d(double_width, 1, 1),
            nn.Flatten(1, 2),
        )


class PatchGAN(nn.Sequential):
    """Map images ``(B, channels, H, W)`` to one value per 70 x 70 patch, ``(B, H/8 - 2, W/8 - 2)``.

    Isola, Zhu, Zhou, Efros, "Image-to-Image Translation with Conditional Adversarial Networks", CVPR 2017,
    appendix 6.1.2: 4x4 convolutions to w, 2w, 4w (stride 2) and 8w (stride 1), all but the first with batch
    norm, leaky ReLU 0.2; a 4x4 convolution to one map. The published width w is 64. Images have at least 24
    pixels per side.

    Args:
        channels: channels of the input.
        width: w.
        norm: see :class:`PatchCritic`.

    Example:
        >>> import torch
        >>> PatchGAN(1, width=8)(torch.zeros(2, 1, 64, 64)).shape
        torch.Size([2, 6, 6])
    """

    min_side: ClassVar[int] = 24  # pixels, for one output value

    def __init__(self, channels: int, width: int, norm: Norm = "batch") -> None:
        widths = [width, 2 * width, 4 * width, 8 * width]
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for in_channels, out_channels in pairwise(widths):
            stride = 1 if out_channels == widths[-1] else 2
            layers += [
                nn.Conv2d(in_channels, out_channels, 4, stride, 1),
                _norm(out_channels, norm),
                nn.LeakyReLU(0.2),
            ]
        super().__init__(*layers, nn.Conv2d(widths[-1], 1, 4, 1, 1), nn.Flatten(1, 2))


def _norm(channels: int, norm: Norm) -> nn.Module:
    if norm == "group":
        return GroupNorm(math.gcd(8, channels), channels)
    return nn.BatchNorm2d(channels, track_running_stats=False)
