"""The server's generators of images: from noise (FedIOD), or from label maps (AsynDGAN's, too).

Networks in the space of features, behind a classifier's extractor: a conditional generator, its critic.

Both take a vector with the label's one-hot vector behind it (:func:`append_one_hot`).

What FedIOD adds to networks for tables: the server's generator of rows, and each node's critic of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.table_schema import Schema
from fedstill.models.normalization import GroupNorm


class _NormalizedImages(nn.Module):
    """Gives images normalized by a data set's declared mean and standard deviation, per channel."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def normalized(self, pixels: torch.Tensor) -> torch.Tensor:
        return (pixels - self.mean) / self.std


class Generator(_NormalizedImages):
    """Noise to images of any height and width divisible by 4.

    As published for 32x32: a linear layer to ``2w x H/4 x W/4``, batch norm, twice (nearest
    up-sampling by 2, 3x3 convolution to w and w/2, batch norm, leaky ReLU 0.2), a 3x3 convolution,
    a sigmoid, then the data set's normalization. Published width w: 128.

    Args:
        shape: ``(channels, H, W)`` of the images.
        noise: values in w.
        width: channels of the first convolution.
        mean, std: the data set's declared normalization, per channel.
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
        """``w`` (B, noise) to ``x`` (B, channels, H, W), normalized like the data."""
        return self.normalized(self.body(self.linear(w).view(-1, *self.start)))


def _conv_norm_relu(convolution: nn.Conv2d | nn.ConvTranspose2d) -> tuple[nn.Module, ...]:
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
            *_conv_norm_relu(nn.Conv2d(width, width, 3, padding=1, padding_mode="reflect", bias=False)),
            nn.Conv2d(width, width, 3, padding=1, padding_mode="reflect", bias=False),
            instance_norm(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, width, H, W)`` to the same."""
        y: torch.Tensor = self.body(x)
        return x + y


class ConditionalGenerator(_NormalizedImages):
    """Label maps, as a network takes them, to images of their size: the residual generator of pix2pix.

    Isola et al., "Image-to-Image Translation with Conditional Adversarial Networks", CVPR 2017, in the form
    of Johnson et al., "Perceptual Losses for Real-Time Style Transfer", ECCV 2016: a 7x7 convolution to w
    channels, two of 3x3 and stride 2 to 2w and 4w, residual blocks, two transposed ones back to w, a 7x7
    convolution; instance norm without weights and ReLU behind each but the last, borders reflected. Then a
    sigmoid and the data set's normalization. Published: w = 64, nine blocks.

    Args:
        conditions: channels of a map, ``Task.condition_channels``.
        channels: of the images, as ``mean`` and ``std``, the data set's declared normalization, have them.
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
            *_conv_norm_relu(nn.Conv2d(conditions, width, 7, padding=3, padding_mode="reflect", bias=False)),
            *_conv_norm_relu(nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False)),
            *_conv_norm_relu(nn.Conv2d(2 * width, 4 * width, 3, 2, 1, bias=False)),
            *(ResidualBlock(4 * width) for _ in range(blocks)),
            *_conv_norm_relu(nn.ConvTranspose2d(4 * width, 2 * width, 3, 2, 1, output_padding=1, bias=False)),
            *_conv_norm_relu(nn.ConvTranspose2d(2 * width, width, 3, 2, 1, output_padding=1, bias=False)),
            nn.Conv2d(width, channels, 7, padding=3, padding_mode="reflect"),
            nn.Sigmoid(),
        )

    def forward(self, condition: torch.Tensor) -> torch.Tensor:
        """Maps ``(B, conditions, H, W)``, H and W multiples of 4, to ``(B, channels, H, W)``, normalized."""
        return self.normalized(self.body(condition))


def append_one_hot(vectors: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """``[v; one-hot y]``: vectors ``(..., n)`` and labels ``(...)`` to ``(..., n + classes)``.

    >>> append_one_hot(torch.tensor([[5.0], [6.0]]), torch.tensor([1, 0]), 2)
    tensor([[5., 0., 1.],
            [6., 1., 0.]])
    """
    return torch.cat([vectors, F.one_hot(labels, classes).to(vectors.dtype)], -1)


class FeatureGenerator(nn.Sequential):
    """``[z; one-hot y]`` (B, noise + classes) to features (B, features): three linear layers with batch norm.

    FedMD-CG, section 3.1. The last layer is bare, since an extractor's features may have any range. Layers
    before a batch norm have no bias: it would only learn rounding noise.
    """

    def __init__(
        self, noise: int, classes: int, features: int, width: int, device: torch.device | str | None = None
    ) -> None:
        super().__init__(
            nn.Linear(noise + classes, width, bias=False, device=device),
            nn.BatchNorm1d(width, device=device),
            nn.ReLU(),
            nn.Linear(width, width, bias=False, device=device),
            nn.BatchNorm1d(width, device=device),
            nn.ReLU(),
            nn.Linear(width, features, device=device),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """In full precision whatever the run's: torch refuses a stacked batch norm in bfloat16."""
        with torch.autocast(x.device.type, enabled=False):
            f: torch.Tensor = super().forward(x.float())  # type: ignore[no-untyped-call]
            return f


class FeatureCritic(nn.Sequential):
    """``[f; one-hot y]`` (B, features + classes) to one value (B, 1), high where f looks real.

    As FedMD-CG says of FedCG (section 3.1), a classifier's head with one output, whose hidden layers have
    those ``widths``: here with y beside f, since FedCG's critic judges both, and leaky ReLU 0.2.
    """

    def __init__(self, features: int, classes: int, widths: Sequence[int]) -> None:
        layers: list[nn.Module] = []
        inside = features + classes
        for width in widths:
            layers += [nn.Linear(inside, width), nn.LeakyReLU(0.2)]
            inside = width
        super().__init__(*layers, nn.Linear(inside, 1))


def hidden_widths(head: nn.Module) -> tuple[int, ...]:
    """The widths of a head's linear layers, but for the last.

    >>> hidden_widths(nn.Sequential(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 10)))
    (120,)
    """
    return tuple(layer.out_features for layer in head.modules() if isinstance(layer, nn.Linear))[:-1]


class TableGenerator(nn.Module):
    """Noise to rows that a schema allows: linear layers with batch norm and leaky ReLU, then each column.

    A number is a hyperbolic tangent, so that it stays within its declared range. Of categories one is 1 and
    the others 0, as in real rows, and gradients are those of a softmax: the straight-through estimator
    (Bengio, Léonard, Courville 2013, arXiv:1308.3432). Nothing is drawn but the noise. Where a number may be
    missing, its second feature says so, and then the number is 0.

    Args:
        noise: values in w.
        width: of the first layer; the second is twice as wide.
    """

    def __init__(self, schema: Schema, noise: int, width: int) -> None:
        super().__init__()
        self.places = [(column.type == "number", place) for column, place in schema.feature_slices()]
        self.body = nn.Sequential(
            nn.Linear(noise, width),
            nn.BatchNorm1d(width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 2 * width),
            nn.BatchNorm1d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Linear(2 * width, len(schema.features)),
        )

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        """``w`` (B, noise) to ``x`` (B, F)."""
        raw = self.body(w)
        return torch.cat(
            [
                _number_features(raw[:, place]) if number else straight_through_one_hot(raw[:, place])
                for number, place in self.places
            ],
            1,
        )


def _number_features(raw: torch.Tensor) -> torch.Tensor:
    """A number, alone or with whether it is missing: ``(B, 1 or 2)``."""
    value = raw[:, :1].tanh()
    if raw.shape[1] == 1:
        return value
    missing = straight_through_one_hot(F.pad(raw[:, 1:], (0, 1)))[:, :1]  # against a score of 0
    return torch.cat([value * (1 - missing), missing], 1)


def straight_through_one_hot(scores: torch.Tensor) -> torch.Tensor:
    """Categories by their scores ``(B, n)``: 1 for the highest and 0, with the gradient of the softmax.

    >>> straight_through_one_hot(torch.tensor([[0.5, 2.0, 1.0]])).tolist()
    [[0.0, 1.0, 0.0]]
    """
    soft = scores.softmax(1)
    hard = F.one_hot(soft.argmax(1), soft.shape[1]).to(soft.dtype)
    return hard + (soft - soft.detach())


class TableCritic(nn.Sequential):
    """``(B, F)`` to one value a row, ``(B, 1)``: large where it looks generated.

    The patch critic's layers, as far as rows have such: linear to w, leaky ReLU 0.2; linear to 2w, batch
    norm, leaky ReLU; linear to one. Batch norm always uses the batch's own statistics.

    Args:
        features: F.
        width: w.
        norm: as of :class:`fedstill.models.critics.PatchCritic`.
    """

    def __init__(self, features: int, width: int, norm: Literal["batch", "group"] = "batch") -> None:
        wide = 2 * width
        super().__init__(
            nn.Linear(features, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, wide),
            nn.BatchNorm1d(wide, track_running_stats=False)
            if norm == "batch"
            else nn.GroupNorm(math.gcd(8, wide), wide),
            nn.LeakyReLU(0.2),
            nn.Linear(wide, 1),
        )
