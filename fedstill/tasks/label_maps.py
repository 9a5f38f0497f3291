"""Label maps without labels: bodies found in images, and random maps of regions and nuclei.

A server that samples random maps learns nothing about the shapes at any node, but they fit the real ones less
well. All sizes below are rough knowledge of anatomy and of tissue at 40x magnification; none comes from data.
"""

from __future__ import annotations

import math

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


WAVES_PER_SHAPE = 4  # waves in the radius of a smooth shape
EMPTY_SHARE = 0.4  # probability that a kind of region is absent from a map: most slices of a body show none
NUCLEUS_RADIUS = (5.0, 12.0)  # pixels
MAX_COVERAGE = 0.3  # largest share of the tissue that nuclei cover
MIN_GAP = 1.5  # smallest distance between nuclei in pixels

Array = npt.NDArray[np.float64]


def sample_body_regions(
    count: int, height: int, width: int, kinds: int, generator: torch.Generator
) -> torch.Tensor:
    """Return maps of smooth regions in an ellipse like a head: ``(count, H, W)`` uint8.

    Codes are 0 outside, 1 body, 2 and up regions. Each kind of region is present independently, at most once.
    Later kinds cover earlier ones.

    >>> sample_body_regions(2, 32, 32, 1, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 32, 32])
    """

    def draw(low: float, high: float) -> torch.Tensor:
        return torch.empty(count, 1, 1).uniform_(low, high, generator=generator)

    rows = torch.linspace(-1, 1, height).view(1, -1, 1)
    columns = torch.linspace(-1, 1, width).view(1, 1, -1)
    top, left = draw(-0.1, 0.1), draw(-0.1, 0.1)
    tall, wide = draw(0.6, 0.9), draw(0.45, 0.75)
    body = _wavy_ellipse(rows - top, columns - left, tall, wide, 0.04, generator)
    maps = body.to(torch.uint8)
    for kind in range(2, 2 + kinds):
        angle, offset = draw(0, 2 * math.pi), draw(0, 0.6)
        present = draw(0, 1) >= EMPTY_SHARE
        size = draw(0.1, 0.35)
        region = _wavy_ellipse(
            rows - top - tall * offset * angle.sin(), columns - left - wide * offset * angle.cos(),
            size * draw(0.7, 1.3), size * draw(0.7, 1.3), 0.2, generator,
        )  # fmt: skip
        maps[region & body & present] = kind
    return maps


def _wavy_ellipse(
    y: torch.Tensor, x: torch.Tensor, tall: torch.Tensor, wide: torch.Tensor, swing: float,
    generator: torch.Generator,
) -> torch.Tensor:  # fmt: skip
    """Return the pixels of an ellipse whose radius varies by about a share ``swing``: ``(count, H, W)``
    bool.
    """
    y, x = y / tall, x / wide
    angle = torch.atan2(y, x)  # (count, H, W)
    radius = torch.ones_like(angle)
    for wave in range(2, 2 + WAVES_PER_SHAPE):
        amplitude, phase = (torch.empty(len(angle), 1, 1) for _ in range(2))
        amplitude.normal_(0, swing / wave**0.5, generator=generator)
        phase.uniform_(0, 2 * math.pi, generator=generator)
        radius = radius + amplitude * torch.cos(wave * angle + phase)
    return y.square() + x.square() < radius.clamp_min(0.2).square()


def sample_nuclei(height: int, width: int, generator: torch.Generator) -> npt.NDArray[np.int32]:
    """Return a map of ellipses that do not touch: ``(H, W)`` int32, numbered from 1, 0 between them.

    The covered share differs from map to map. An ellipse too near to an earlier one is dropped, and ellipses
    are cut off at the image border.
    """
    mean_area = math.pi * (sum(NUCLEUS_RADIUS) / 2) ** 2
    share = MAX_COVERAGE * (0.3 + 0.7 * torch.rand((), generator=generator).item())
    tries = math.ceil(3 * share * height * width / mean_area)  # many ellipses are dropped
    low = torch.tensor([0.0, 0.0, NUCLEUS_RADIUS[0], 0.6, 0.0])  # row, column, radius, axis ratio, angle
    high = torch.tensor([height, width, NUCLEUS_RADIUS[1], 1.0, math.pi])
    ellipses = torch.lerp(low, high, torch.rand(tries, 5, generator=generator)).double().numpy()
    labels = np.zeros((height, width), dtype=np.int32)
    number, covered = 0, 0
    for row, column, radius, ratio, angle in ellipses:
        reach = math.ceil(radius + MIN_GAP)
        window = (
            slice(max(int(row) - reach, 0), int(row) + reach + 2),
            slice(max(int(column) - reach, 0), int(column) + reach + 2),
        )
        labels_in_window = labels[window]
        y = np.arange(window[0].start, window[0].start + labels_in_window.shape[0])[:, None] - row
        x = np.arange(window[1].start, window[1].start + labels_in_window.shape[1])[None] - column
        along, across = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
        if labels_in_window[_inside_ellipse(along, across, radius + MIN_GAP, radius * ratio + MIN_GAP)].any():
            continue
        inside = _inside_ellipse(along, across, radius, radius * ratio)
        if inside.any():
            number, covered = number + 1, covered + int(inside.sum())
            labels_in_window[inside] = number
        if covered >= share * height * width:
            break
    return labels


def _inside_ellipse(along: Array, across: Array, long: float, short: float) -> npt.NDArray[np.bool_]:
    """Return the points within the half axes ``long`` and ``short``."""
    inside: npt.NDArray[np.bool_] = (along / long) ** 2 + (across / short) ** 2 <= 1
    return inside
