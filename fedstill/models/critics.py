"""Critics of an image's patches, which each node trains on its own data: FedIOD's, and the PatchGAN."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import ClassVar, Literal

from torch import nn

from fedstill.models.normalization import GroupNorm

Norm = Literal["batch", "group"]


class PatchCritic(nn.Sequential):
    """``(B, channels, H, W)`` to one value a patch, ``(B, H/4, W/4)``: large where it looks generated.

    As published: 4x4 stride-2 convolution to w, leaky ReLU 0.2; 4x4 stride-2 to 2w, batch norm, leaky
    ReLU; 1x1 to one map. Published width w: 128. Batch norm always uses the batch's own statistics.

    Args:
        channels: of the input.
        width: w.
        norm: ``group`` puts group norm, of up to 8 groups, in place of batch norm, which mixes examples: a
            critic that learns privately must not.
    """

    def __init__(self, channels: int, width: int, norm: Norm = "batch") -> None:
        wide = 2 * width
        super().__init__(
            nn.Conv2d(channels, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, wide, 4, 2, 1),
            _norm(wide, norm),
            nn.LeakyReLU(0.2),
            nn.Conv2d(wide, 1, 1),
            nn.Flatten(1, 2),
        )


class PatchGAN(nn.Sequential):
    """``(B, channels, H, W)`` to one value for each patch of 70 x 70 pixels, ``(B, H/8 - 2, W/8 - 2)``.

    Isola, Zhu, Zhou, Efros, "Image-to-Image Translation with Conditional Adversarial Networks", CVPR 2017,
    appendix 6.1.2: 4x4 convolutions to w, 2w, 4w (stride 2) and 8w (stride 1), each but the first with batch
    norm, leaky ReLU 0.2; a 4x4 convolution to one map. Published width w: 64. Images have 24 pixels a side or
    more.

    Args:
        channels: of the input.
        width: w.
        norm: as of :class:`PatchCritic`.
    """

    least: ClassVar[int] = 24  # pixels a side, of which one value is left

    def __init__(self, channels: int, width: int, norm: Norm = "batch") -> None:
        widths = [width, 2 * width, 4 * width, 8 * width]
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for inside, outside in pairwise(widths):
            stride = 1 if outside == widths[-1] else 2
            layers += [nn.Conv2d(inside, outside, 4, stride, 1), _norm(outside, norm), nn.LeakyReLU(0.2)]
        super().__init__(*layers, nn.Conv2d(widths[-1], 1, 4, 1, 1), nn.Flatten(1, 2))


def _norm(channels: int, norm: Norm) -> nn.Module:
    if norm == "group":
        return GroupNorm(math.gcd(8, channels), channels)
    return nn.BatchNorm2d(channels, track_running_stats=False)
