"""Masks of the imaged body in medical scans. The area around the body is air and carries no information."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

BODY_THRESHOLD = 0.1  # share of an image's range; air is below it, tissue above
MAX_PERCENTILE = 99.0  # upper end of the range; single bright pixels would stretch the maximum


def body_mask(images: torch.Tensor) -> torch.Tensor:
    """Return the pixels of the body: the largest connected piece, with holes filled, ``(N, H, W)`` uint8.

    Each channel of ``(N, C, H, W)`` is scaled to its own range, and the median over channels is thresholded.
    One channel with a raised background therefore does not decide. A constant image has no body.

    >>> image = torch.zeros(1, 1, 5, 5)
    >>> image[0, 0, 1:4, 1:4] = 1.0
    >>> image[0, 0, 2, 2] = 0.0  # a hole
    >>> body_mask(image)[0, 2].tolist()
    [0, 1, 1, 1, 0]
    """
    bodies = [_single_body_mask(image) for image in images.detach().float().cpu().numpy()]
    masks = np.stack(bodies) if bodies else np.zeros((0, *images.shape[2:]), dtype=bool)
    return torch.from_numpy(masks.astype(np.uint8)).to(images.device)


def _single_body_mask(image: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Return the mask ``(H, W)`` bool of one image ``(C, H, W)``."""
    from scipy import ndimage

    pixels = image.reshape(len(image), -1)
    darkest = pixels.min(1)
    span = np.percentile(pixels, MAX_PERCENTILE, axis=1) - darkest
    # For a body of few pixels the percentile equals the minimum.
    span = np.where(span > 0, span, pixels.max(1) - darkest)
    shade = np.median((image - darkest[:, None, None]) / np.where(span > 0, span, 1)[:, None, None], axis=0)
    bright: npt.NDArray[np.bool_] = shade > BODY_THRESHOLD
    # Opening removes thinly connected parts: noise, the rim of the scanner's field of view.
    opened = ndimage.binary_opening(bright)
    pieces, count = ndimage.label(opened if opened.any() else bright)
    if count == 0:
        return bright
    largest = 1 + np.bincount(pieces.ravel())[1:].argmax()
    filled: npt.NDArray[np.bool_] = ndimage.binary_fill_holes(pieces == largest)
    return filled
