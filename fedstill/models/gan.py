"""Generators and critics of images, of feature vectors and of table rows.

Images are generated from noise (FedIOD) or from label maps (also AsynDGAN). Critics of image patches are
FedIOD's and the PatchGAN; each node trains them on its own data. Feature vectors are those after a
classifier's extractor (FedCG, FedMD-CG); their generator and critic receive the one-hot label with the vector
(:func:`append_one_hot`). Rows of tables are generated from noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.table_schema import TableSchema
from fedstill.models.norm_layers import GroupNorm

Norm = Literal["batch", "group"]


class _NormalizedImages(nn.Module):
    """Base of generators whose images are normalized by a data set's mean and standard deviation per
    channel.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        return (pixels - self.mean) / self.std


class Generator(_NormalizedImages):
    """Generate images of any height and width divisible by 4 from noise.

    As published for 32x32: a linear layer to ``2w x H/4 x W/4``, batch norm, then twice nearest upsampling by
    2, a 3x3 convolution to w and w/2, batch norm and leaky ReLU 0.2, then a 3x3 convolution, a sigmoid and
    the data set's normalization. The published width w is 128.

    Args:
        shape: ``(channels, H, W)`` of the images.
        noise: length of a noise vector.
        width: w, channels of the first convolution.
        mean: mean of the data set's normalization, per channel.
        std: standard deviation of the data set's normalization, per channel.

    Example:
        >>> generator = Generator((1, 8, 8), noise=4, width=8, mean=(0.5,), std=(0.5,))
        >>> generator(torch.randn(2, 4)).shape
        torch.Size([2, 1, 8, 8])
    """

    def __init__(
        self, shape: tuple[int, int, int], noise: int, width: int, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__(mean, std)
        channels, height, image_width = shape
        half = width // 2
        self.start = (2 * width, height // 4, image_width // 4)
        self.linear = nn.Linear(noise, 2 * width * (height // 4) * (image_width // 4))
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
        """Map noise ``(B, noise)`` to images ``(B, channels, H, W)``, normalized like the data."""
        return self.normalize(self.body(self.linear(w).view(-1, *self.start)))


def instance_norm(channels: int) -> nn.Module:
    """Return instance norm without weights, as group norm with one channel per group, which is faster in
    bfloat16.
    """
    return GroupNorm(channels, channels, affine=False)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with instance norm and a skip connection (Johnson et al. 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm_relu(nn.Conv2d(width, width, 3, padding=1, padding_mode="reflect", bias=False)),
            nn.Conv2d(width, width, 3, padding=1, padding_mode="reflect", bias=False),
            instance_norm(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(B, width, H, W)`` to ``(B, width, H, W)``."""
        y: torch.Tensor = self.body(x)
        return x + y


class LabelMapGenerator(_NormalizedImages):
    """Generate images from encoded label maps of their size: the residual generator of pix2pix.

    Isola et al., "Image-to-Image Translation with Conditional Adversarial Networks", CVPR 2017, in the form
    of Johnson et al., "Perceptual Losses for Real-Time Style Transfer", ECCV 2016: a 7x7 convolution to w
    channels, two 3x3 stride-2 convolutions to 2w and 4w, residual blocks, two transposed convolutions back to
    w, a 7x7 convolution. All but the last have instance norm without weights and ReLU; borders are reflected.
    Then a sigmoid and the data set's normalization.
    Published: w = 64, nine blocks.

    Args:
        conditions: channels of an encoded map, ``Task.condition_channels``.
        channels: channels of the images.
        width: w.
        mean: mean of the data set's normalization, per channel.
        std: standard deviation of the data set's normalization, per channel.
        blocks: number of residual blocks.
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
        """Map ``(B, conditions, H, W)``, H and W multiples of 4, to normalized images
        ``(B, channels, H, W)``.
        """
        return self.normalize(self.body(condition))


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
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, double_width, 4, 2, 1),
            _norm(double_width, norm),
            nn.LeakyReLU(0.2, inplace=True),
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
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
        for in_channels, out_channels in pairwise(widths):
            stride = 1 if out_channels == widths[-1] else 2
            layers += [
                nn.Conv2d(in_channels, out_channels, 4, stride, 1),
                _norm(out_channels, norm),
                nn.LeakyReLU(0.2, inplace=True),
            ]
        super().__init__(*layers, nn.Conv2d(widths[-1], 1, 4, 1, 1), nn.Flatten(1, 2))


def append_one_hot(vectors: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Return ``[v; one-hot y]``: vectors ``(..., n)`` and labels ``(...)`` to ``(..., n + classes)``.

    >>> append_one_hot(torch.tensor([[5.0], [6.0]]), torch.tensor([1, 0]), 2)
    tensor([[5., 0., 1.],
            [6., 1., 0.]])
    """
    return torch.cat([vectors, F.one_hot(labels, classes).to(vectors.dtype)], -1)


class FeatureGenerator(nn.Sequential):
    """Map ``[z; one-hot y]`` (B, noise + classes) to features (B, features) by three linear layers with batch
    norm.

    FedMD-CG, section 3.1. The last layer has no activation, since features may have any range. Layers before
    a batch norm have no bias, which would learn only rounding noise.
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
        """Return features in float32 in any precision: torch does not support stacked batch norm in
        bfloat16.
        """
        with torch.autocast(x.device.type, enabled=False):
            f: torch.Tensor = super().forward(x.float())  # type: ignore[no-untyped-call]
            return f


class NoisyFeatureGenerator(nn.Module):
    """Generate features as noise that a network moves: x = e + G(w), for noise ``[e; w]``.

    Without e the features would fill a subspace of few dimensions, and a student would learn nothing about
    the others.

    Args:
        noise: values in w.
        features: F, values in a vector, and in e.
        width: width of the hidden layers of G.
        normalization: that of real features (``features.normalize``); "example": each vector has mean 0 and
            variance 1.

    Example:
        >>> NoisyFeatureGenerator(noise=4, features=8, width=16)(torch.randn(2, 12)).shape
        torch.Size([2, 8])
    """

    def __init__(self, noise: int, features: int, width: int, normalization: str = "none") -> None:
        super().__init__()
        self.features, self.per_example = features, normalization == "example"
        self.body = FeatureGenerator(noise, 0, features, width)

    def forward(self, e_w: torch.Tensor) -> torch.Tensor:
        """Map noise ``(B, F + noise)`` to features ``(B, F)``."""
        e, w = e_w[:, : self.features], e_w[:, self.features :]
        x = e + self.body(w)
        return F.layer_norm(x, x.shape[1:]) if self.per_example else x


class FeatureCritic(nn.Sequential):
    """Map ``[f; one-hot y]`` (B, features + classes) to one value (B, 1), high for real features.

    As FedMD-CG describes FedCG's critic (section 3.1), it is a classifier's head with one output and hidden
    layers of these ``widths``. Here it also receives y, as in FedCG, and uses leaky ReLU 0.2.
    """

    def __init__(self, features: int, classes: int, widths: Sequence[int]) -> None:
        layers: list[nn.Module] = []
        size = features + classes
        for width in widths:
            layers += [nn.Linear(size, width), nn.LeakyReLU(0.2)]
            size = width
        super().__init__(*layers, nn.Linear(size, 1))


def hidden_widths(head: nn.Module) -> tuple[int, ...]:
    """Return the widths of a head's linear layers without the last.

    >>> hidden_widths(nn.Sequential(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 10)))
    (120,)
    """
    return tuple(layer.out_features for layer in head.modules() if isinstance(layer, nn.Linear))[:-1]


class TableGenerator(nn.Module):
    """Generate rows that fit a schema from noise: linear layers with batch norm and leaky ReLU, then each
    column.

    A number is the output of a hyperbolic tangent and stays within its declared range. Categories are
    one-hot, as in real rows, with the gradient of a softmax: the straight-through estimator (Bengio, Léonard,
    Courville 2013, arXiv:1308.3432). Nothing is random except the noise. If a number may be missing, its
    second feature indicates that, and the number is then 0.

    Args:
        schema: columns of the table.
        noise: length of a noise vector.
        width: width of the first layer; the second is twice as wide.
    """

    def __init__(self, schema: TableSchema, noise: int, width: int) -> None:
        super().__init__()
        self.columns = [(column.type == "number", features) for column, features in schema.feature_slices()]
        self.body = nn.Sequential(
            nn.Linear(noise, width),
            nn.BatchNorm1d(width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 2 * width),
            nn.BatchNorm1d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Linear(2 * width, len(schema.feature_names)),
        )

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        """Map noise ``(B, noise)`` to rows ``(B, F)``."""
        raw = self.body(w)
        return torch.cat(
            [
                _number_and_missing_features(raw[:, features])
                if number
                else straight_through_one_hot(raw[:, features])
                for number, features in self.columns
            ],
            1,
        )


def straight_through_one_hot(scores: torch.Tensor) -> torch.Tensor:
    """Return the one-hot vector of the highest score of ``(B, n)``, with the gradient of the softmax.

    >>> straight_through_one_hot(torch.tensor([[0.5, 2.0, 1.0]])).tolist()
    [[0.0, 1.0, 0.0]]
    """
    soft = scores.softmax(1)
    hard = F.one_hot(soft.argmax(1), soft.shape[1]).to(soft.dtype)
    return hard + (soft - soft.detach())


class TableCritic(nn.Sequential):
    """Map rows ``(B, F)`` to one value per row, ``(B, 1)``, high for generated rows.

    Counterpart of the patch critic: linear to w, leaky ReLU 0.2; linear to 2w, batch norm, leaky ReLU; linear
    to one. Batch norm always uses the statistics of the batch.

    Args:
        features: F.
        width: w.
        norm: see :class:`fedstill.models.gan.PatchCritic`.
    """

    def __init__(self, features: int, width: int, norm: Literal["batch", "group"] = "batch") -> None:
        double_width = 2 * width
        super().__init__(
            nn.Linear(features, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, double_width),
            nn.BatchNorm1d(double_width, track_running_stats=False)
            if norm == "batch"
            else nn.GroupNorm(math.gcd(8, double_width), double_width),
            nn.LeakyReLU(0.2),
            nn.Linear(double_width, 1),
        )


def _conv_norm_relu(convolution: nn.Conv2d | nn.ConvTranspose2d) -> tuple[nn.Module, ...]:
    """Return a convolution, instance norm and ReLU. A bias would be removed by the norm, so there is none."""
    return convolution, instance_norm(convolution.out_channels), nn.ReLU()


def _norm(channels: int, norm: Norm) -> nn.Module:
    if norm == "group":
        return GroupNorm(math.gcd(8, channels), channels)
    return nn.BatchNorm2d(channels, track_running_stats=False)


def _number_and_missing_features(raw: torch.Tensor) -> torch.Tensor:
    """Return a number, and if there are two raw features whether it is missing: ``(B, 1 or 2)``."""
    value = raw[:, :1].tanh()
    if raw.shape[1] == 1:
        return value
    missing = straight_through_one_hot(F.pad(raw[:, 1:], (0, 1)))[:, :1]  # compared with a score of 0
    return torch.cat([value * (1 - missing), missing], 1)
