"""The U-Net: a network whose output has a value for each pixel of its input."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from fedstill.core.errors import ModelError
from fedstill.models.extractor_head import Split
from fedstill.models.normalization import GroupNorm

Norm = Callable[[int], nn.Module]  # from a number of channels to the layer that normalizes them


def unet_depth(height: int, side: int) -> int:
    """How often a U-Net halves an image: four times, or as often as both sides divide and 2 pixels are left.

    >>> unet_depth(64, 64), unet_depth(8, 8), unet_depth(12, 32), unet_depth(4, 4)
    (4, 2, 2, 1)
    """
    fits = (depth for depth in (4, 3, 2, 1) if height % 2**depth == side % 2**depth == 0)
    return next((depth for depth in fits if min(height, side) >= 2 * 2**depth), 0)


def make_group_norm(channels: int) -> nn.Module:
    """Group norm, of the most groups up to 8."""
    return GroupNorm(math.gcd(8, channels), channels)


def conv_block(inside: int, outside: int, norm: Norm) -> nn.Sequential:
    """Twice a 3x3 convolution, a norm and ReLU: ``(B, inside, H, W)`` to ``(B, outside, H, W)``."""
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False),
        norm(outside),
        nn.ReLU(),
        nn.Conv2d(outside, outside, 3, padding=1, bias=False),
        norm(outside),
        nn.ReLU(),
    )


class UNetEncoder(nn.Module):
    """The way down: ``(B, channels, H, W)`` to the bottom, ``(B, w 2^depth, H / 2^depth, W / 2^depth)``."""

    def __init__(self, channels: int, width: int, depth: int, norm: Norm) -> None:
        super().__init__()
        widths = [channels, *(width * 2**level for level in range(depth + 1))]
        self.blocks = nn.ModuleList(conv_block(*pair, norm) for pair in pairwise(widths))
        self.pool = nn.MaxPool2d(2)

    def levels(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What each level gives, the finest first and the bottom last."""
        found: list[torch.Tensor] = []
        for level, body in enumerate(self.blocks):
            found.append(body(self.pool(found[-1]) if level else x))
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The bottom: a network's latent features of an image."""
        return self.levels(x)[-1]


class Decoder(nn.Module):
    """The way up, level by level: a 2x2 transposed convolution, what the encoder saw beside it, a block."""

    def __init__(self, width: int, depth: int, norm: Norm) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth, -1, -1)]  # the bottom's first
        pairs = list(pairwise(widths))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(low, high, 2, 2) for low, high in pairs)
        self.blocks = nn.ModuleList(conv_block(2 * high, high, norm) for _, high in pairs)

    def forward(self, levels: list[torch.Tensor]) -> torch.Tensor:
        """The encoder's levels, the finest first, to ``(B, w, H, W)``."""
        x = levels[-1]
        for up, body, beside in zip(self.ups, self.blocks, reversed(levels[:-1]), strict=True):
            x = body(torch.cat([beside, up(x)], 1))
        return x


class Body(nn.Module):
    """Everything but the last layer: ``(B, channels, H, W)`` to features of each pixel, ``(B, w, H, W)``."""

    def __init__(self, channels: int, width: int, depth: int, norm: Norm) -> None:
        super().__init__()
        self.encoder = UNetEncoder(channels, width, depth, norm)
        self.decoder = Decoder(width, depth, norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Down and up again."""
        features: torch.Tensor = self.decoder(self.encoder.levels(x))
        return features


class UNet(Split):
    """Ronneberger, Fischer, Brox, "U-Net", MICCAI 2015: ``(B, channels, H, W)`` to ``(B, classes, H, W)``.

    As published but for group norm behind each convolution, padding (so that the output has the input's
    size), and fewer levels for images whose sides four halvings do not divide (:func:`unet_depth`). Each level
    has twice the channels of the one above; published width: 64. It parts before its last layer; its latent
    features are those of the submodule ``extractor.encoder``.
    """

    norm: Norm = staticmethod(make_group_norm)

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 16) -> None:
        channels, height, side = shape
        body = Body(channels, width, unet_depth(height, side), self.norm)
        super().__init__(body, nn.Conv2d(width, classes, 1))


class BatchNormUNet(UNet):
    """U-Net with batch norm, as FedIOD's published code has it."""

    norm = nn.BatchNorm2d


class ResidualBody(Body):
    """:class:`Body` with the input itself behind its features: ``(B, w + channels, H, W)``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Down and up again, and the input beside that."""
        return torch.cat([super().forward(x), x], 1)


class ResidualUNet(UNet):
    """A U-Net that begins as the identity and learns what to add: for outputs that are nearly the input.

    Reconstruction starts from an image that is right but for its aliasing; a plain U-Net must first learn to
    copy it. The last layer sees the input beside the features, with weight 1 on each channel's own output and
    0 on all else at first.

    Raises:
        ModelError: not as many output channels as the input has.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 16) -> None:
        super().__init__(shape, classes, width)
        channels, height, side = shape
        if classes != channels:
            allowed = f"{channels}, as many as its input has"
            raise ModelError(f"a residual U-Net of {classes} output channels (expected {allowed})")
        self.extractor = ResidualBody(channels, width, unet_depth(height, side), self.norm)
        self.head = nn.Conv2d(width + channels, classes, 1)
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.weight[:, width:, 0, 0].copy_(torch.eye(channels))
            nn.init.zeros_(self.head.bias)  # type: ignore[arg-type]
