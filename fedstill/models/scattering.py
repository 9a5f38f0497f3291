"""A linear layer on a wavelet scattering transform: features that tell apart images of 28 x 28.

Bruna, Mallat, "Invariant Scattering Convolution Networks", PAMI 2013; two scales and two orders, as Tramer
and Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021, learn from
privately. Images are taken as periodic, where others reflect them at the border.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from fedstill.core.errors import ModelError
from fedstill.models.image_classifiers import UnitNorm, zero_head

SCALES = 2  # J: pixels are averaged to squares of 2^J x 2^J
NORM_GROUPS = 27  # that coefficients are normalized in, of the 81 of a gray image with 8 angles
GAUSSIAN_RADIUS = 5  # deviations at which a Gaussian is taken to end
PIXELS_PER_BATCH = 2**16  # pixels whose coefficients are computed at once: some 120 MB


class WaveletModuli(nn.Module):
    """Averages of an image, of the moduli of its wavelets, and of the moduli of their wavelets.

    Forward: ``(B, C, H, W)`` to ``(B, C (1 + 2 L + L^2), H / 4, W / 4)``, with L angles. A shift by 4 pixels
    shifts what comes out by one.
    """

    def __init__(self, height: int, width: int, angles: int) -> None:
        super().__init__()
        with torch.device("cpu"):  # also where a network is laid out without memory, to be filled from a file
            spectra = [
                torch.stack(
                    [torch.fft.fft2(morlet(height, width, j, turn, angles)).real for turn in range(angles)]
                )
                for j in range(SCALES)
            ]
            # Neither weights nor buffers: they follow from the shape, and no file holds them.
            self.filters = (
                torch.stack(spectra).float(),  # (2, L, H, W) the wavelets' spectra: fine, then coarse
                gaussian_averages(height).float(),  # (H / 4, H) over rows
                gaussian_averages(width).float(),  # (W / 4, W)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The transform."""
        filters = tuple(each.to(x.device, non_blocking=True) for each in self.filters)
        if torch.jit.is_tracing():  # type: ignore[no-untyped-call, attr-defined]  # which fixes the number of pieces
            return _scatter(x, *filters)
        few = max(1, PIXELS_PER_BATCH // x[0].numel())
        return torch.cat([_scatter(piece, *filters) for piece in torch.split(x, few)])


def _scatter(x: torch.Tensor, psi: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    x = x.float().unsqueeze(2)  # (B, C, 1, H, W)
    spectrum = torch.fft.fft2(x)
    fine, coarse = (torch.fft.ifft2(spectrum * each).abs() for each in psi)  # (B, C, L, H, W)
    both = torch.fft.fft2(fine).unsqueeze(3) * psi[1]  # (B, C, L, L, H, W)
    second = torch.fft.ifft2(both).abs().flatten(2, 3)
    u = torch.cat([x, fine, coarse, second], 2)
    return (rows @ u @ columns.T).flatten(1, 2)


def morlet(height: int, width: int, j: int, turn: int, angles: int) -> torch.Tensor:
    """A wavelet of scale 2^j and angle (L / 2 - 1 - turn) pi / L on a periodic grid: ``(H, W)`` complex128.

    A wave under a Gaussian that is ``L / 4`` times as long across it as along it, less so much of the
    Gaussian that its sum is 0.
    """
    sigma, slant = 0.8 * 2**j, 4 / angles
    theta = (angles / 2 - 1 - turn) * math.pi / angles
    most = sigma * max(1.0, 1 / slant)  # the longer of both deviations
    (y, rows), (x, columns) = (_periodic_positions(size, most) for size in (height, width))
    along = x * math.cos(theta) + y.unsqueeze(1) * math.sin(theta)  # (rows H, columns W)
    across = y.unsqueeze(1) * math.cos(theta) - x * math.sin(theta)
    bell = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    wave = bell * torch.exp(0.75j * math.pi / 2**j * along)
    bell, wave = (each.view(rows, height, columns, width).sum((0, 2)) for each in (bell, wave))
    psi: torch.Tensor = (wave - wave.sum() / bell.sum() * bell) * slant / (2 * math.pi * sigma**2)
    return psi


def gaussian_averages(size: int) -> torch.Tensor:
    """Gaussian averages of a periodic line about each 4th place: ``(size / 4, size)``, each of sum 1."""
    sigma, step = 0.8 * 2 ** (SCALES - 1), 2**SCALES
    places, copies = _periodic_positions(size, sigma)
    near = torch.exp(-((places - step * torch.arange(size // step).unsqueeze(1)) ** 2) / (2 * sigma**2))
    rows = near.view(size // step, copies, size).sum(1)
    return rows / rows.sum(1, keepdim=True)


def _periodic_positions(size: int, sigma: float) -> tuple[torch.Tensor, int]:
    """A line's places and its copies', as far as a Gaussian about any place goes, and how many copies."""
    beside = max(2, math.ceil(GAUSSIAN_RADIUS * sigma / size))
    return torch.arange(-beside * size, (beside + 1) * size, dtype=torch.float64), 2 * beside + 1


class Scattering(nn.Sequential):
    """A linear layer on scattering coefficients, normalized in groups and then to unit norm.

    ``width`` is the number of angles. An image of 28 x 28 takes 1.6 ms, where ``random-conv`` takes 0.5.
    Its Fourier transforms have no form in ONNX.

    Raises:
        ModelError: an image is smaller than the squares that are averaged over.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 8) -> None:
        channels, height, side = shape
        if min(height, side) < 2**SCALES:
            raise ModelError(
                f"scattering of images of {height} x {side} (expected {2**SCALES} and more a side)"
            )
        coefficients = channels * (1 + SCALES * width + width**2)
        super().__init__(
            WaveletModuli(height, side, width),
            nn.GroupNorm(math.gcd(NORM_GROUPS, coefficients), coefficients, affine=False),
            nn.Flatten(),
            UnitNorm(),
            zero_head(coefficients * (height // 4) * (side // 4), classes),
        )
