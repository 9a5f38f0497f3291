"""How near reconstructed images are to the true ones: SSIM, PSNR and NMSE, each of an image by itself.

Pixels lie in 0..1 throughout, so that the data range is 1 for every image; what a network gives outside is
cut off, as a picture is.
"""

from __future__ import annotations

import torch

AT_ONCE = 256  # images compared at once
LEAST_ERROR = 1e-10  # mean squared error that PSNR is reckoned with at least: 100 dB at most, never infinity


def ssim(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Structural similarity in percent: ``(N, 1, H, W)`` twice to ``(N,)`` float64, at most 100.

    Wang et al. 2004, as torchmetrics has it: an 11 x 11 Gaussian window of sigma 1.5 around every pixel,
    borders reflected. (scikit-image leaves out pixels near the border; fastMRI's code takes a uniform window
    of 7 x 7 and each volume's own range.) H and W must be 6 or more.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure as similarity

    def each(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        told = similarity(found, true, data_range=1.0, reduction="none")
        # A pair only where more than that is asked for.
        return (told if isinstance(told, torch.Tensor) else told[0]).reshape(len(found))

    both = (torch.split(images.clamp(0, 1), AT_ONCE) for images in (found, true))
    parts = zip(*both, strict=True)
    return 100 * torch.cat([each(*part) for part in parts]).double()


def psnr(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio, ``10 log10(1 / MSE)`` in dB: ``(N, C, H, W)`` twice to ``(N,)``.

    The mean is over all pixels of all channels. 100 dB where images are equal, or as good as.

    >>> round(psnr(torch.full((1, 1, 8, 8), 0.5), torch.full((1, 1, 8, 8), 0.4)).item(), 2)
    20.0
    """
    error = _squares(found, true) / true[0].numel()
    return -10 * error.clamp_min(LEAST_ERROR).log10()


def nmse(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Normalised mean squared error, ``|x - y|^2 / |y|^2``: ``(N, 1, H, W)`` twice to ``(N,)``.

    Of each image (fastMRI's is of each volume). NaN where the true image is black.
    """
    energy = true.double().square().flatten(1).sum(1)
    return torch.where(energy > 0, _squares(found, true) / energy, torch.nan)


def _squares(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Summed squared differences of each image, ``(N,)`` float64."""
    return (found.double().clamp(0, 1) - true.double()).square().flatten(1).sum(1)
