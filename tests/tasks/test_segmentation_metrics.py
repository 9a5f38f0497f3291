"""Pixel figures and outline distances: hand-worked masks, a slow reading of Eq. 13, and MONAI."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.tasks.segmentation import dice, hd95, overlap, sensitivity, specificity

Mask = npt.NDArray[np.bool_]


def box(top: int, bottom: int, left: int, right: int) -> Mask:
    """Of 8 x 12 pixels, rows top..bottom and columns left..right, ends not included."""
    mask = np.zeros((8, 12), dtype=bool)
    mask[top:bottom, left:right] = True
    return mask


def blobs(seed: int, share: float = 0.5) -> Mask:
    """Blocks of 3 x 3, some filled."""
    filled = np.random.default_rng(seed).random((6, 6)) < share
    return np.kron(filled, np.ones((3, 3), dtype=bool)).astype(bool)


NONE, ALL = box(0, 0, 0, 0), box(0, 8, 0, 12)


def metrics(prediction: Mask, truth: Mask) -> list[float]:
    pixels = overlap(torch.from_numpy(prediction)[None], torch.from_numpy(truth)[None])
    return [metric(pixels).item() for metric in (dice, sensitivity, specificity)]


@pytest.mark.parametrize(
    ("prediction", "truth", "expected"),
    [
        (NONE, NONE, [1, math.nan, 1]),
        (NONE, box(0, 2, 0, 2), [0, 0, 1]),
        (box(0, 2, 0, 2), NONE, [0, math.nan, 92 / 96]),
        (ALL, ALL, [1, 1, math.nan]),
        (NONE, ALL, [0, 0, math.nan]),
    ],
)
def test_empty_and_full_masks(prediction: Mask, truth: Mask, expected: list[float]) -> None:
    assert metrics(prediction, truth) == pytest.approx(expected, nan_ok=True)


def test_pooling_adds_pixels_before_it_divides() -> None:
    prediction = torch.tensor([[True, True], [True, False], [False, False]])
    truth = torch.tensor([[True, False], [True, True], [True, True]])
    pooled = overlap(prediction, truth).pooled(torch.tensor([0, 0, 1]), 3)
    # case 0: 2 in common of 3 and 3; case 1: nothing found of 2; case 2 has no picture
    torch.testing.assert_close(dice(pooled), torch.tensor([4 / 6, 0.0, 1.0]).double())
    torch.testing.assert_close(
        sensitivity(pooled), torch.tensor([2 / 3, 0.0, math.nan]).double(), equal_nan=True
    )


@pytest.mark.parametrize("seed", range(4))
def test_dice_is_monais(seed: int) -> None:
    metrics = pytest.importorskip("monai.metrics")
    prediction, truth = (torch.from_numpy(blobs(seed + k))[None, None].float() for k in (0, 50))
    theirs = metrics.DiceMetric(include_background=True)(prediction, truth)
    torch.testing.assert_close(dice(overlap(prediction > 0, truth > 0)).float(), theirs.flatten())


# --- HD95 ------------------------------------------------------------------------------------------


def slow_hd95(prediction: Mask, truth: Mask) -> float:
    def edge(mask: Mask) -> list[tuple[int, int]]:
        def inside(row: int, column: int) -> bool:
            return 0 <= row < mask.shape[0] and 0 <= column < mask.shape[1] and bool(mask[row, column])

        around = ((0, 1), (1, 0), (0, -1), (-1, 0))
        return [(r, c) for r, c in np.argwhere(mask) if not all(inside(r + a, c + b) for a, b in around)]

    a, b = edge(prediction), edge(truth)
    there = np.quantile([min(math.dist(p, q) for q in b) for p in a], 0.95)
    back = np.quantile([min(math.dist(p, q) for q in a) for p in b], 0.95)
    return float(max(there, back))


def test_hd95_of_a_box_and_one_grown_by_two_columns() -> None:
    # Outlines of 5 x 4 and 5 x 6 pixels, from the left. From the larger one's right side (5 of 18 pixels)
    # the nearest pixel is 2 away, so the 95% quantile is 2; the quantile of few pixels is interpolated.
    assert hd95(box(1, 6, 0, 6), box(1, 6, 0, 4)) == 2


def test_hd95_does_not_see_one_far_pixel_of_many_but_both_directions() -> None:
    large = np.zeros((64, 64), dtype=bool)
    large[4:40, 4:40] = True  # an outline of 140 pixels
    spot = large.copy()
    spot[60, 60] = True
    assert hd95(spot, large) == 0  # 1 of 141 is far
    only = np.zeros_like(large)
    only[4, 4] = True
    assert hd95(only, large) == hd95(large, only) > 30  # near for the spot, far for most of the outline


def test_hd95_of_empty_masks() -> None:
    some = box(0, 2, 0, 2)
    assert math.isnan(hd95(NONE, NONE))
    assert hd95(NONE, some) == hd95(some, NONE) == math.inf
    assert hd95(some, some) == 0


@given(st.integers(0, 10_000))
def test_hd95_equals_the_slow_definition_and_is_symmetric(seed: int) -> None:
    prediction, truth = blobs(seed, 0.2), blobs(seed + 1, 0.3)
    if prediction.any() and truth.any():
        assert hd95(prediction, truth) == pytest.approx(slow_hd95(prediction, truth))
        assert hd95(truth, prediction) == hd95(prediction, truth)
