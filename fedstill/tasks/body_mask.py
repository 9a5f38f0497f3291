"""Where in an image the imaged body is: what medical scans show around it is air and tells nothing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

BODY_THRESHOLD = 0.1  # of an image's own range; air is below it, tissue above
MAX_PERCENTILE = 99.0  # per cent: where the range ends, as single bright pixels would stretch it


def body_mask(images: torch.Tensor) -> torch.Tensor:
    """Which pixels are of the imaged body: its largest piece, with all holes filled: ``(N, H, W)`` uint8, 1
    inside.

    A channel of ``(N, C, H, W)`` is scaled to its own range in that image, and the median over channels
    decides, so that one sequence with a raised background does not. An image of one value has no body.

    >>> image = torch.zeros(1, 1, 5, 5)
    >>> image[0, 0, 1:4, 1:4] = 1.0
    >>> image[0, 0, 2, 2] = 0.0  # a hole
    >>> body_mask(image)[0, 2].tolist()
    [0, 1, 1, 1, 0]
    """
    bodies = [_single_body_mask(image) for image in images.detach().float().cpu().numpy()]
    found = np.stack(bodies) if bodies else np.zeros((0, *images.shape[2:]), dtype=bool)
    return torch.from_numpy(found.astype(np.uint8)).to(images.device)


def _single_body_mask(image: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Of one image ``(C, H, W)``: ``(H, W)`` bool."""
    from scipy import ndimage

    pixels = image.reshape(len(image), -1)
    darkest = pixels.min(1)
    span = np.percentile(pixels, MAX_PERCENTILE, axis=1) - darkest
    # A body of few pixels leaves nothing below the percentile.
    span = np.where(span > 0, span, pixels.max(1) - darkest)
    shade = np.median((image - darkest[:, None, None]) / np.where(span > 0, span, 1)[:, None, None], axis=0)
    bright: npt.NDArray[np.bool_] = shade > BODY_THRESHOLD
    # Opening cuts off what hangs on by a thread: noise, the rim of the scanner's field of view.
    opened = ndimage.binary_opening(bright)
    pieces, count = ndimage.label(opened if opened.any() else bright)
    if count == 0:
        return bright
    largest = 1 + np.bincount(pieces.ravel())[1:].argmax()
    filled: npt.NDArray[np.bool_] = ndimage.binary_fill_holes(pieces == largest)
    return filled
