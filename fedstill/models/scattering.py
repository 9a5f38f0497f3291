"""A linear layer on a wavelet scattering transform: fixed features that tell images better than random ones.

Bruna, Mallat, "Invariant Scattering Convolution Networks", PAMI 2013; two scales and two orders, as Tramer
and Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021, learn from
privately. Images are taken as periodic, where others reflect them at the border.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from fedstill.models.classifiers import UnitNorm, _head

SCALES = 2  # J: pixels are averaged to squares of 2^J x 2^J
GROUPS = 27  # that coefficients are normalised in, of the 81 of a grey image with 8 angles
COPIES = 2  # of the image to each side, over which what is periodic is added up


class WaveletModuli(nn.Module):
    """Averages of an image, of the moduli of its wavelets, and of the moduli of their wavelets.

    Forward: ``(B, C, H, W)`` to ``(B, C (1 + 2 L + L^2), H / 4, W / 4)``, with L angles. A shift by 4 pixels
    shifts what comes out by one.
    """

    psi: torch.Tensor  # (2, L, H, W) the wavelets' spectra, which are real: fine, then coarse
    rows: torch.Tensor  # (H / 4, H) averages over rows
    columns: torch.Tensor  # (W / 4, W)

    def __init__(self, height: int, width: int, angles: int) -> None:
        super().__init__()
        spectra = [
            torch.stack(
                [torch.fft.fft2(morlet(height, width, j, turn, angles)).real for turn in range(angles)]
            )
            for j in range(SCALES)
        ]
        # Not among a model's weights: they follow from its shape.
        self.register_buffer("psi", torch.stack(spectra).float(), persistent=False)
        self.register_buffer("rows", averages(height).float(), persistent=False)
        self.register_buffer("columns", averages(width).float(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The transform."""
        x = x.float().unsqueeze(2)  # (B, C, 1, H, W)
        spectrum = torch.fft.fft2(x)
        fine, coarse = (torch.fft.ifft2(spectrum * psi).abs() for psi in self.psi)  # (B, C, L, H, W)
        both = torch.fft.fft2(fine).unsqueeze(3) * self.psi[1]  # (B, C, L, L, H, W)
        second = torch.fft.ifft2(both).abs().flatten(2, 3)
        u = torch.cat([x, fine, coarse, second], 2)
        return (self.rows @ u @ self.columns.T).flatten(1, 2)


def morlet(height: int, width: int, j: int, turn: int, angles: int) -> torch.Tensor:
    """A wavelet of scale 2^j and angle (L / 2 - 1 - turn) pi / L on a periodic grid: ``(H, W)`` complex128.

    A wave under a Gaussian that is ``L / 4`` times as long across it as along it, less so much of the
    Gaussian that its sum is 0.
    """
    sigma, slant = 0.8 * 2**j, 4 / angles
    theta = (angles / 2 - 1 - turn) * math.pi / angles
    y, x = (_unrolled(size) for size in (height, width))
    along = x * math.cos(theta) + y.unsqueeze(1) * math.sin(theta)  # (5 H, 5 W)
    across = y.unsqueeze(1) * math.cos(theta) - x * math.sin(theta)
    bell = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    wave = bell * torch.exp(0.75j * math.pi / 2**j * along)
    copies = 2 * COPIES + 1
    bell, wave = (each.view(copies, height, copies, width).sum((0, 2)) for each in (bell, wave))
    psi: torch.Tensor = (wave - wave.sum() / bell.sum() * bell) * slant / (2 * math.pi * sigma**2)
    return psi


def averages(size: int) -> torch.Tensor:
    """Gaussian averages of a periodic line about each 4th place: ``(size / 4, size)``, each of sum 1."""
    sigma, step = 0.8 * 2 ** (SCALES - 1), 2**SCALES
    near = torch.exp(
        -((_unrolled(size) - step * torch.arange(size // step).unsqueeze(1)) ** 2) / (2 * sigma**2)
    )
    rows = near.view(size // step, 2 * COPIES + 1, size).sum(1)
    return rows / rows.sum(1, keepdim=True)


def _unrolled(size: int) -> torch.Tensor:
    return torch.arange(-COPIES * size, (COPIES + 1) * size, dtype=torch.float64)


class Scattering(nn.Sequential):
    """A linear layer on scattering coefficients, normalised in groups and then to unit norm.

    ``width`` is the number of angles. An image of 28 x 28 takes 1.6 ms, where ``random-conv`` takes 0.5.
    Its Fourier transforms have no form in ONNX.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 8) -> None:
        channels, height, side = shape
        coefficients = channels * (1 + SCALES * width + width**2)
        super().__init__(
            WaveletModuli(height, side, width),
            nn.GroupNorm(math.gcd(GROUPS, coefficients), coefficients, affine=False),
            nn.Flatten(),
            UnitNorm(),
            _head(coefficients * (height // 4) * (side // 4), classes),
        )
