"""Cartesian undersampling of k-space: what a scanner sees of an image if it measures fewer lines.

The masks follow the fastMRI convention (Zbontar et al., arXiv:1811.08839, section 4.9): a band in the middle
is always measured (0.08 of the lines at 4x, 0.04 at 8x), and of the others so many, drawn at random, that one
line in ``acceleration`` is. Unlike there, their number is fixed, and one mask serves all images: scans of one
protocol, and a network may learn it.
"""

from __future__ import annotations

import torch

from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator

SEED = 0  # of the mask: the same in every run, at every node and at the server


def lines(width: int, acceleration: int, centre: float, seed: int = SEED) -> torch.Tensor:
    """Which of ``width`` lines of k-space are measured: ``(width,)`` bool, the zero frequency in the middle.

    One line in ``acceleration`` is; a share ``centre`` of all, in the middle, always, the others by ``seed``.

    Raises:
        ArgumentError: the centre alone has more lines than may be measured.

    >>> mask = lines(64, 4, 0.08)
    >>> int(mask.sum()), mask[30:35].tolist()
    (16, [True, True, True, True, True])
    """
    measured, middle = max(round(width / acceleration), 1), round(width * centre)
    if middle > measured:
        allowed = f"up to {measured / width:.3g}, as one line of {acceleration} is measured"
        raise ArgumentError("task.centre", centre, allowed)
    mask = torch.zeros(width, dtype=torch.bool)
    first = (width - middle + 1) // 2
    mask[first : first + middle] = True
    others = torch.nonzero(~mask).flatten()
    order = torch.randperm(len(others), generator=torch_generator(seed, "k-space", width, acceleration))
    mask[others[order[: measured - middle]]] = True
    return mask


def undersample(images: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
    """The zero-filled image, ``|F^-1(mask F(x))|``, of pixels ``(..., H, W)`` from 0 and lines ``(W,)``.

    Differentiable; F is orthonormal, so that nothing gets more energy than it had.
    """
    keep = torch.fft.ifftshift(measured).to(images.device)  # zero frequency first, as torch has it
    found: torch.Tensor = torch.fft.ifft2(torch.fft.fft2(images, norm="ortho") * keep, norm="ortho").abs()
    return found
