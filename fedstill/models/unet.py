"""U-Nets: networks with one output per pixel of their input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from fedstill.core.errors import ModelError
from fedstill.models.extractor_head import Split
from fedstill.models.norm_layers import GroupNorm

Norm = Callable[[int], nn.Module]  # maps a number of channels to a normalization layer


def unet_depth(height: int, width: int) -> int:
    """Return the number of halvings of a U-Net: 4, or fewer if a side is not divisible or would be below 2
    pixels.

    >>> unet_depth(64, 64), unet_depth(8, 8), unet_depth(12, 32), unet_depth(4, 4)
    (4, 2, 2, 1)
    """
    depths = (depth for depth in (4, 3, 2, 1) if height % 2**depth == width % 2**depth == 0)
    return next((depth for depth in depths if min(height, width) >= 2 * 2**depth), 0)


def make_group_norm(channels: int) -> nn.Module:
    """Return group norm with the most groups up to 8."""
    return GroupNorm(math.gcd(8, channels), channels)


def conv_block(in_channels: int, out_channels: int, norm: Norm) -> nn.Sequential:
    """Return two 3x3 convolutions with norm and ReLU: ``(B, in_channels, H, W)`` to
    ``(B, out_channels, H, W)``.
    """
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        norm(out_channels),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        norm(out_channels),
        nn.ReLU(),
    )


class UNetEncoder(nn.Module):
    """Contracting path: ``(B, channels, H, W)`` to ``(B, w 2^depth, H / 2^depth, W / 2^depth)``."""

    def __init__(self, channels: int, width: int, depth: int, norm: Norm) -> None:
        super().__init__()
        widths = [channels, *(width * 2**level for level in range(depth + 1))]
        self.blocks = nn.ModuleList(conv_block(*pair, norm) for pair in pairwise(widths))
        self.pool = nn.MaxPool2d(2)

    def levels(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the output of each level, from fine to coarse."""
        outputs: list[torch.Tensor] = []
        for level, body in enumerate(self.blocks):
            outputs.append(body(self.pool(outputs[-1]) if level else x))
        return outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the coarsest level, the latent features of an image."""
        return self.levels(x)[-1]


class Decoder(nn.Module):
    """Expanding path: at each level a transposed convolution, concatenation with the encoder's level, block.

    Args:
        channels: channels of the encoder's levels, from fine to coarse.
        widths: channels of this path's levels, from fine to coarse, without the coarsest.
        factors: factor by which each of the encoder's levels is smaller than the image.
        norm: normalization of the blocks.
    """

    def __init__(
        self, channels: Sequence[int], widths: Sequence[int], factors: Sequence[int], norm: Norm
    ) -> None:
        super().__init__()
        pairs = list(pairwise([channels[-1], *reversed(widths)]))  # coarsest first
        ratios = [coarse // fine for fine, coarse in pairwise(factors)][::-1]
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(*pair, ratio, ratio) for pair, ratio in zip(pairs, ratios, strict=True)
        )
        skips = reversed(channels[:-1])
        self.blocks = nn.ModuleList(
            conv_block(skip + width, width, norm) for skip, (_, width) in zip(skips, pairs, strict=True)
        )

    def forward(self, levels: list[torch.Tensor]) -> torch.Tensor:
        """Map the encoder's levels, from fine to coarse, to ``(B, widths[0], H, W)``."""
        x = levels[-1]
        for up, body, skip in zip(self.ups, self.blocks, reversed(levels[:-1]), strict=True):
            x = body(torch.cat([skip, up(x)], 1))
        return x


class Body(nn.Module):
    """U-Net without its last layer: ``(B, channels, H, W)`` to features of each pixel, ``(B, w, H, W)``."""

    def __init__(self, channels: int, width: int, depth: int, norm: Norm) -> None:
        super().__init__()
        self.encoder = UNetEncoder(channels, width, depth, norm)
        widths, factors = ([first * 2**level for level in range(depth + 1)] for first in (width, 1))
        self.decoder = Decoder(widths, widths[:-1], factors, norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of each pixel."""
        features: torch.Tensor = self.decoder(self.encoder.levels(x))
        return features


class UNet(Split):
    """U-Net (Ronneberger, Fischer, Brox, MICCAI 2015): ``(B, channels, H, W)`` to ``(B, classes, H, W)``.

    It differs from the publication in group norm after each convolution, padding (the output has the input's
    size), and fewer levels for images whose sides cannot be halved four times (:func:`unet_depth`). Each
    level has twice the channels of the one above. The published width is 64. The head is the last layer. The
    latent features are those of the submodule ``extractor.encoder``.

    Args:
        shape: ``(channels, H, W)`` of an image, H and W divisible by 2 or more.
        classes: number of output channels.
        width: channels of the finest level.

    Example:
        >>> UNet((1, 16, 16), classes=2, width=4)(torch.zeros(3, 1, 16, 16)).shape
        torch.Size([3, 2, 16, 16])
    """

    norm: Norm = staticmethod(make_group_norm)

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 16) -> None:
        channels, height, image_width = shape
        body = Body(channels, width, unet_depth(height, image_width), self.norm)
        super().__init__(body, nn.Conv2d(width, classes, 1))


class BatchNormUNet(UNet):
    """U-Net with batch norm, as in FedIOD's published code."""

    norm = nn.BatchNorm2d


class ResidualBody(Body):
    """:class:`Body` whose features also contain the input: ``(B, w + channels, H, W)``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of each pixel and the input."""
        return torch.cat([super().forward(x), x], 1)


class ResidualUNet(UNet):
    """U-Net that is the identity at initialization, for outputs that are close to the input.

    For reconstruction the input is right except for aliasing, which a plain U-Net must first learn to copy.
    The last layer also receives the input, with initial weight 1 from each channel to the same output and 0
    elsewhere.

    Raises:
        ModelError: the number of output channels differs from that of the input.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 16) -> None:
        super().__init__(shape, classes, width)
        channels, height, image_width = shape
        self.extractor = ResidualBody(channels, width, unet_depth(height, image_width), self.norm)
        self.head = identity_head(width, channels, classes)


def identity_head(width: int, channels: int, classes: int) -> nn.Conv2d:
    """Return the last layer of a residual U-Net, of features ``(B, width + channels, H, W)``.

    Raises:
        ModelError: the number of output channels differs from that of the input.
    """
    if classes != channels:
        expected = f"{channels}, as many as its input has"
        raise ModelError(f"a residual U-Net of {classes} output channels (expected {expected})")
    head = nn.Conv2d(width + channels, classes, 1)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[:, width:, 0, 0].copy_(torch.eye(channels))
        nn.init.zeros_(head.bias)  # type: ignore[arg-type]
    return head
