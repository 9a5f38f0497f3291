"""Networks that classify images, for nodes and student.

All map ``(B, channels, H, W)`` with H and W divisible by 4 to logits ``(B, classes)``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.errors import ModelError
from fedstill.models.norm_layers import GroupNorm

MAX_POOLED_SIDE = 8  # largest side of RandomConv's averaged feature maps

SCALES = 2  # Scattering's J: averages are over squares of 2^J x 2^J pixels
NORM_GROUPS = 27  # groups for normalization of the 81 coefficients of a gray image with 8 angles
GAUSSIAN_RADIUS = 5  # standard deviations after which a Gaussian is cut off
PIXELS_PER_BATCH = 2**16  # pixels whose coefficients are computed at once, about 120 MB


class SmallCNN(nn.Sequential):
    """Three 3x3 convolutions, the last two with twice the width, and one linear layer.

    Group norm instead of batch norm: a student is trained on generated inputs and used on real ones, and must
    not apply the statistics of the first to the second.

    Args:
        shape: ``(channels, H, W)`` of an image, H and W divisible by 4.
        classes: number of logits.
        width: channels of the first convolution.

    Example:
        >>> SmallCNN((1, 28, 28), classes=10, width=8)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 32) -> None:
        channels, height, image_width = shape
        double_width = 2 * width
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1),
            GroupNorm(math.gcd(8, width), width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, double_width, 3, padding=1),
            GroupNorm(math.gcd(8, double_width), double_width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(double_width, double_width, 3, padding=1),
            GroupNorm(math.gcd(8, double_width), double_width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(double_width * (height // 4) * (image_width // 4), classes),
        )


class LeNet5(nn.Sequential):
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling, as in federated learning papers.

    The first convolution is padded, so that images may have 8x8 pixels as well as 28x28 and 32x32.

    Args:
        shape: ``(channels, H, W)`` of an image, H and W divisible by 4.
        classes: number of logits.
        width: channels of the first convolution; the second has 16/6 of it.

    Example:
        >>> LeNet5((3, 32, 32), classes=10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 6) -> None:
        channels, height, image_width = shape
        second = width * 16 // 6
        small = (
            min(height, image_width) < 24
        )  # two 5x5 convolutions without padding leave nothing of 8x8 pixels
        pad = 2 if small else 0
        flat_size = ((height // 2 + 2 * pad - 4) // 2) * ((image_width // 2 + 2 * pad - 4) // 2)
        super().__init__(
            nn.Conv2d(channels, width, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, second, 5, padding=pad),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(second * flat_size, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )


class BatchNormLeNet(nn.Sequential):
    """LeNet of FedMD-CG's published code: two 3x3 convolutions with batch norm, two linear layers.

    The convolutions have stride 2 and max pooling, the second has twice the width. The first linear layer is
    four times as wide and has no activation. For images below 24x24 the stride is 1. The published width is
    16 for Fashion-MNIST, EMNIST and CIFAR-10.

    Args:
        shape: ``(channels, H, W)`` of an image, H and W divisible by 4.
        classes: number of logits.
        width: channels of the first convolution.

    Example:
        >>> BatchNormLeNet((1, 28, 28), classes=10)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 16) -> None:
        channels, height, image_width = shape
        stride = 1 if min(height, image_width) < 24 else 2
        out_height, out_width = height, image_width
        for _ in range(2):
            out_height, out_width = -(-out_height // stride) // 2, -(-out_width // stride) // 2
        super().__init__(
            nn.Conv2d(channels, width, 3, stride, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, stride, 1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * out_height * out_width, 4 * width),
            nn.Linear(4 * width, classes),
        )


class SigmoidLeNet(nn.Sequential):
    """LeNet of "Deep Leakage from Gradients" (Zhu, Liu, Han 2019), smooth, so that its gradients reveal the
    most.

    Four 5x5 convolutions with strides 2, 2, 1, 1 and sigmoids, and one linear layer. Initial weights and
    biases are uniform in [-0.5, 0.5], as in the published code.

    Args:
        shape: ``(channels, H, W)`` of an image, H and W divisible by 4.
        classes: number of logits.
        width: channels of all convolutions.

    Example:
        >>> SigmoidLeNet((3, 32, 32), classes=10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 12) -> None:
        channels, height, image_width = shape
        super().__init__(
            nn.Conv2d(channels, width, 5, 2, 2),
            nn.Sigmoid(),
            nn.Conv2d(width, width, 5, 2, 2),
            nn.Sigmoid(),
            nn.Conv2d(width, width, 5, 1, 2),
            nn.Sigmoid(),
            nn.Conv2d(width, width, 5, 1, 2),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(width * (height // 4) * (image_width // 4), classes),
        )
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a skip connection (He et al. 2016)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        # For few channels the input is subsampled before the shortcut's convolution instead of by its stride,
        # where torch writes out of bounds (fedstill.core.compute.has_out_of_bounds_gradient).
        # Values are equal.
        self.subsampling = stride if in_channels < 8 else 1
        self.shortcut = (
            nn.Identity()
            if stride == 1 and in_channels == out_channels
            else nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride // self.subsampling, bias=False),
                nn.BatchNorm2d(out_channels),
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(B, in_channels, H, W)`` to ``(B, out_channels, H/stride, W/stride)``."""
        y = torch.relu(self.norm1(self.conv1(x)))
        x = x if self.subsampling == 1 else x[..., :: self.subsampling, :: self.subsampling]
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet8(nn.Sequential):
    """ResNet-8 of the paper: three stages of one basic block, widths (w, 2w, 4w), strides (1, 2, 2).

    The published width is 128. The published head averages over 4x4 and flattens (2048 values at 32x32).
    ``width=16`` is fast enough for a CPU.

    Args:
        shape: ``(channels, H, W)`` of an image, H and W divisible by 4.
        classes: number of logits.
        width: w.

    Example:
        >>> ResNet8((3, 32, 32), classes=10, width=16)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 128) -> None:
        channels, height, image_width = shape
        pool_size = min(4, height // 4, image_width // 4)
        positions = (height // 4 // pool_size) * (image_width // 4 // pool_size)
        super().__init__(
            nn.Conv2d(channels, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            BasicBlock(width, width, 1),
            BasicBlock(width, 2 * width, 2),
            BasicBlock(2 * width, 4 * width, 2),
            nn.AvgPool2d(pool_size),
            nn.Flatten(),
            nn.Linear(4 * width * positions, classes),
        )


class UnitNorm(nn.Module):
    """Center the features ``(B, d)`` of each example and scale them to an L2 norm of 1."""

    def forward(self, f: torch.Tensor) -> torch.Tensor:
        """Map ``(B, d)`` to ``(B, d)``."""
        return F.layer_norm(f, f.shape[1:]) / math.sqrt(f.shape[1])


def zero_head(features: int, classes: int) -> nn.Linear:
    """Return a linear layer for features of unit norm, with weights 0 and no bias.

    A bias would encode class frequencies, and an ensemble of nodes with different frequencies would guess.
    """
    head = nn.Linear(features, classes, bias=False)
    nn.init.zeros_(head.weight)
    return head


class UnitLinear(nn.Sequential):
    """One linear layer on centered pixels of unit norm, the network that DP-SGD trains best on few records.

    The norm of a gradient is at most the square root of 2 for any image, and few weights need little noise.

    Args:
        shape: ``(channels, H, W)`` of an image, H and W divisible by 4.
        classes: number of logits.

    Example:
        >>> UnitLinear((1, 8, 8), classes=10)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(nn.Flatten(), UnitNorm(), zero_head(math.prod(shape), classes))


class RandomConv(nn.Sequential):
    """Linear layer on fixed features of unit norm: random 3x3 convolutions with ReLU, averaged in squares.

    Only the last layer is trained, so noise affects few weights, and the features cost no privacy: they are
    sampled before any data are seen. Tramer and Boneh, "Differentially Private Learning Needs Better Features
    (or Much More Data)", ICLR 2021, propose private linear models on fixed features, with wavelets. Filters
    have unit norm and sum to 0, so that they respond to edges rather than brightness.

    Args:
        shape: ``(channels, H, W)`` of an image, H and W divisible by 4.
        classes: number of logits.
        width: number of filters.

    Example:
        >>> RandomConv((1, 28, 28), classes=10)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 64) -> None:
        channels, height, image_width = shape
        pool = max(2, -(-max(height, image_width) // MAX_POOLED_SIDE))
        conv = nn.Conv2d(channels, width, 3, padding=1, bias=False).requires_grad_(False)
        filters = torch.randn_like(conv.weight).flatten(1)
        filters = F.normalize(filters - filters.mean(1, keepdim=True), dim=1)
        conv.weight.copy_(filters.view_as(conv.weight))
        features = width * (height // pool) * (image_width // pool)
        super().__init__(
            conv, nn.ReLU(), nn.AvgPool2d(pool), nn.Flatten(), UnitNorm(), zero_head(features, classes)
        )


class Scattering(nn.Sequential):
    """Linear layer on wavelet scattering coefficients, normalized in groups and then to unit norm.

    Bruna, Mallat, "Invariant Scattering Convolution Networks", PAMI 2013, with two scales and two orders, as
    Tramer and Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021,
    use for private learning. Images, such as 28 x 28, are periodic here; other implementations reflect them
    at the border.

    ``width`` is the number of angles. A 28 x 28 image takes 1.6 ms, three times as long as with
    ``random-conv``. The Fourier transforms cannot be exported to ONNX.

    Raises:
        ModelError: an image side is shorter than the squares for averaging.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 8) -> None:
        channels, height, image_width = shape
        if min(height, image_width) < 2**SCALES:
            raise ModelError(
                f"invalid image size {height} x {image_width} "
                f"(expected {2**SCALES} or more per side for scattering)"
            )
        coefficients = channels * (1 + SCALES * width + width**2)
        super().__init__(
            WaveletModuli(height, image_width, width),
            nn.GroupNorm(math.gcd(NORM_GROUPS, coefficients), coefficients, affine=False),
            nn.Flatten(),
            UnitNorm(),
            zero_head(coefficients * (height // 4) * (image_width // 4), classes),
        )


class WaveletModuli(nn.Module):
    """Averages of an image, of its wavelet moduli, and of the wavelet moduli of these.

    Maps ``(B, C, H, W)`` to ``(B, C (1 + 2 L + L^2), H / 4, W / 4)`` with L angles. A shift of the input by 4
    pixels shifts the output by one.
    """

    def __init__(self, height: int, width: int, angles: int) -> None:
        super().__init__()
        with torch.device("cpu"):  # also if the network is built on the meta device and loaded from a file
            spectra = [
                torch.stack(
                    [torch.fft.fft2(morlet(height, width, j, angle, angles)).real for angle in range(angles)]
                )
                for j in range(SCALES)
            ]
            # Neither parameters nor buffers: they follow from the shape, so files do not contain them.
            self.filters = (
                torch.stack(spectra).float(),  # (2, L, H, W) wavelet spectra: fine, then coarse
                gaussian_averages(height).float(),  # (H / 4, H) over rows
                gaussian_averages(width).float(),  # (W / 4, W)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the transform."""
        filters = tuple(filter.to(x.device, non_blocking=True) for filter in self.filters)
        if torch.jit.is_tracing():  # type: ignore[no-untyped-call, attr-defined]  # tracing fixes the number of batches
            return _scattering_coefficients(x, *filters)
        size = max(1, PIXELS_PER_BATCH // x[0].numel())
        return torch.cat([_scattering_coefficients(batch, *filters) for batch in torch.split(x, size)])


def _scattering_coefficients(
    x: torch.Tensor, psi: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    x = x.float().unsqueeze(2)  # (B, C, 1, H, W)
    spectrum = torch.fft.fft2(x)
    fine, coarse = (torch.fft.ifft2(spectrum * wavelets).abs() for wavelets in psi)  # (B, C, L, H, W)
    products = torch.fft.fft2(fine).unsqueeze(3) * psi[1]  # (B, C, L, L, H, W)
    second = torch.fft.ifft2(products).abs().flatten(2, 3)
    u = torch.cat([x, fine, coarse, second], 2)
    return (rows @ u @ columns.T).flatten(1, 2)


def morlet(height: int, width: int, j: int, angle_index: int, angles: int) -> torch.Tensor:
    """Return a Morlet wavelet of scale 2^j on a periodic grid: ``(H, W)`` complex128.

    Its angle is (L / 2 - 1 - angle_index) pi / L. It is a wave under a Gaussian that is ``L / 4`` times as
    long across the wave as along it, minus a multiple of the Gaussian that makes the sum 0.
    """
    sigma, slant = 0.8 * 2**j, 4 / angles
    theta = (angles / 2 - 1 - angle_index) * math.pi / angles
    longest = sigma * max(1.0, 1 / slant)  # the larger of both standard deviations
    (y, rows), (x, columns) = (_positions_and_copies(size, longest) for size in (height, width))
    along = x * math.cos(theta) + y.unsqueeze(1) * math.sin(theta)  # (rows H, columns W)
    across = y.unsqueeze(1) * math.cos(theta) - x * math.sin(theta)
    gaussian = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    wave = gaussian * torch.exp(0.75j * math.pi / 2**j * along)
    gaussian, wave = (part.view(rows, height, columns, width).sum((0, 2)) for part in (gaussian, wave))
    psi: torch.Tensor = (wave - wave.sum() / gaussian.sum() * gaussian) * slant / (2 * math.pi * sigma**2)
    return psi


def gaussian_averages(size: int) -> torch.Tensor:
    """Return Gaussian weights around every 4th position of a periodic line: ``(size / 4, size)``, rows of sum
    1.
    """
    sigma, step = 0.8 * 2 ** (SCALES - 1), 2**SCALES

    positions, copies = _positions_and_copies(size, sigma)
    weights = torch.exp(-((positions - step * torch.arange(size // step).unsqueeze(1)) ** 2) / (2 * sigma**2))
    rows = weights.view(size // step, copies, size).sum(1)
    return rows / rows.sum(1, keepdim=True)


def _positions_and_copies(size: int, sigma: float) -> tuple[torch.Tensor, int]:
    """Return the positions of a line and of its periodic copies within a Gaussian's radius, and the number of
    copies.
    """
    copies = max(2, math.ceil(GAUSSIAN_RADIUS * sigma / size))
    return torch.arange(-copies * size, (copies + 1) * size, dtype=torch.float64), 2 * copies + 1
