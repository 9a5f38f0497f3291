"""Critics of an image's patches, which each node trains on its own data."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

from fedstill.models.group_norm import GroupNorm


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

    def __init__(self, channels: int, width: int, norm: Literal["batch", "group"] = "batch") -> None:
        wide = 2 * width
        super().__init__(
            nn.Conv2d(channels, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, wide, 4, 2, 1),
            nn.BatchNorm2d(wide, track_running_stats=False)
            if norm == "batch"
            else GroupNorm(math.gcd(8, wide), wide),
            nn.LeakyReLU(0.2),
            nn.Conv2d(wide, 1, 1),
            nn.Flatten(1, 2),
        )
