"""Label maps that no data were needed for: regions in a body, and nuclei.

A server that draws these learns nothing of any node's shapes, and pays for it in how well they fit. All
measures below are rough knowledge of anatomy and of tissue at 40x, none is taken from data.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

WAVES_PER_SHAPE = 4  # how often a smooth shape's radius swings around it
EMPTY_SHARE = 0.4  # share of maps without any region: most slices of a body show nothing
NUCLEUS_RADIUS = (5.0, 12.0)  # pixels, of a nucleus
MAX_COVERAGE = 0.3  # share of tissue that nuclei cover, at most
MIN_GAP = 1.5  # pixels between nuclei, at least

Array = npt.NDArray[np.float64]


def sample_body_regions(
    count: int, height: int, width: int, kinds: int, generator: torch.Generator
) -> torch.Tensor:
    """Smooth regions in an ellipse like a head: ``(count, H, W)`` uint8, 0 outside, 1 body, 2.. regions.

    Each kind is there by itself, once or not at all, and a later one lies over an earlier one.

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
        angle, away = draw(0, 2 * math.pi), draw(0, 0.6)
        here = draw(0, 1) >= EMPTY_SHARE
        size = draw(0.1, 0.35)
        region = _wavy_ellipse(
            rows - top - tall * away * angle.sin(), columns - left - wide * away * angle.cos(),
            size * draw(0.7, 1.3), size * draw(0.7, 1.3), 0.2, generator,
        )  # fmt: skip
        maps[region & body & here] = kind
    return maps


def _wavy_ellipse(
    y: torch.Tensor, x: torch.Tensor, tall: torch.Tensor, wide: torch.Tensor, swing: float,
    generator: torch.Generator,
) -> torch.Tensor:  # fmt: skip
    """Where an ellipse is whose radius swings by about a share ``swing``: ``(count, H, W)`` bool."""
    y, x = y / tall, x / wide
    angle = torch.atan2(y, x)  # (count, H, W)
    radius = torch.ones_like(angle)
    for wave in range(2, 2 + WAVES_PER_SHAPE):
        much, phase = (torch.empty(len(angle), 1, 1) for _ in range(2))
        much.normal_(0, swing / wave**0.5, generator=generator)
        phase.uniform_(0, 2 * math.pi, generator=generator)
        radius = radius + much * torch.cos(wave * angle + phase)
    return y.square() + x.square() < radius.clamp_min(0.2).square()


def sample_nuclei(height: int, width: int, generator: torch.Generator) -> npt.NDArray[np.int32]:
    """Many ellipses that do not touch: ``(H, W)``, numbered from 1, 0 between them.

    How much they cover differs from map to map. An ellipse that would come too near to one drawn before is
    left out, and those at the picture's end are cut off there.
    """
    mean_area = math.pi * (sum(NUCLEUS_RADIUS) / 2) ** 2
    share = MAX_COVERAGE * (0.3 + 0.7 * torch.rand((), generator=generator).item())
    tries = math.ceil(3 * share * height * width / mean_area)  # many find no room
    low = torch.tensor([0.0, 0.0, NUCLEUS_RADIUS[0], 0.6, 0.0])  # row, column, radius, how flat, angle
    high = torch.tensor([height, width, NUCLEUS_RADIUS[1], 1.0, math.pi])
    drawn = torch.lerp(low, high, torch.rand(tries, 5, generator=generator)).double().numpy()
    labels = np.zeros((height, width), dtype=np.int32)
    number, covered = 0, 0
    for row, column, radius, flat, angle in drawn:
        reach = math.ceil(radius + MIN_GAP)
        window = (
            slice(max(int(row) - reach, 0), int(row) + reach + 2),
            slice(max(int(column) - reach, 0), int(column) + reach + 2),
        )
        there = labels[window]
        y = np.arange(window[0].start, window[0].start + there.shape[0])[:, None] - row
        x = np.arange(window[1].start, window[1].start + there.shape[1])[None] - column
        along, across = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
        if there[_inside_ellipse(along, across, radius + MIN_GAP, radius * flat + MIN_GAP)].any():
            continue
        inside = _inside_ellipse(along, across, radius, radius * flat)
        if inside.any():
            number, covered = number + 1, covered + int(inside.sum())
            there[inside] = number
        if covered >= share * height * width:
            break
    return labels


def _inside_ellipse(along: Array, across: Array, long: float, short: float) -> npt.NDArray[np.bool_]:
    """Points within half axes ``long`` and ``short``."""
    inside: npt.NDArray[np.bool_] = (along / long) ** 2 + (across / short) ** 2 <= 1
    return inside
