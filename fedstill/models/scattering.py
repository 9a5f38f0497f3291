"""Linear classifier on a wavelet scattering transform, for images such as 28 x 28.

Bruna, Mallat, "Invariant Scattering Convolution Networks", PAMI 2013, with two scales and two orders, as
Tramer and Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021, use
for private learning. Images are periodic here; other implementations reflect them at the border.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from fedstill.core.errors import ModelError
from fedstill.models.image_classifiers import UnitNorm, zero_head

SCALES = 2  # J: averages are over squares of 2^J x 2^J pixels
NORM_GROUPS = 27  # groups for normalization of the 81 coefficients of a gray image with 8 angles
GAUSSIAN_RADIUS = 5  # standard deviations after which a Gaussian is cut off
PIXELS_PER_BATCH = 2**16  # pixels whose coefficients are computed at once, about 120 MB


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


class Scattering(nn.Sequential):
    """Linear layer on scattering coefficients, normalized in groups and then to unit norm.

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
