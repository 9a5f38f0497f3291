"""The patch critics that each node trains on its own data: FedIOD's D_k, and pix2pix' for label maps."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

from torch import nn

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
        super().__init__(
            nn.Conv2d(channels, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            _norm(norm, 2 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 1),
            nn.Flatten(1, 2),
        )


class PatchGAN(nn.Sequential):
    """The patch critic of pix2pix: ``(B, channels, H, W)`` to ``(B, h, w)``, one value for 70 x 70 pixels.

    Isola et al., CVPR 2017, appendix: 4x4 convolutions to w, 2w, 4w, ... (8w at most), the first ``layers``
    of stride 2 and one more of stride 1, leaky ReLU 0.2, a norm in all but the first; then one 4x4
    convolution to one map. What each value sees: 34 pixels for two layers, 70 for three (published), 142 for
    four. AsynDGAN's critic, on a label map and an image, one behind the other in channels.

    h is H / 2^layers - 2: with three layers images need 24 pixels or more a side.

    Args:
        channels: of the input: ``task.conditions`` and the image's.
        width: w; published: 64.
        norm: as of :class:`PatchCritic`.
        layers: convolutions of stride 2.
    """

    def __init__(self, channels: int, width: int, norm: Norm = "batch", layers: int = 3) -> None:
        widths = [width * min(2**depth, 8) for depth in range(layers + 1)]
        body: list[nn.Module] = [nn.Conv2d(channels, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for depth, (inside, outside) in enumerate(pairwise(widths), 1):
            stride = 2 if depth < layers else 1
            body += [nn.Conv2d(inside, outside, 4, stride, 1), _norm(norm, outside), nn.LeakyReLU(0.2)]
        super().__init__(*body, nn.Conv2d(widths[-1], 1, 4, 1, 1), nn.Flatten(1, 2))


def _norm(norm: Norm, width: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(width, track_running_stats=False)
    return nn.GroupNorm(math.gcd(8, width), width)
