"""Resizing and patches, against slow references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.data.rasters import grown, nearest, places, resized, resized_maps


def test_images_are_box_averaged() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 12, 8), dtype=np.uint8)
    boxes = images.reshape(2, 3, 4, 3, 4, 2).mean((3, 5)) / 255
    assert resized(images, 4, 4) == pytest.approx(boxes, abs=1e-6)
    floats = (images / 255).astype(np.float32)
    assert resized(floats, 4, 4) == pytest.approx(boxes, abs=1e-6)


@given(st.integers(0, 10**6), st.integers(2, 4))
def test_a_mask_takes_the_class_of_most_of_its_area(seed: int, classes: int) -> None:
    maps = np.random.default_rng(seed).integers(0, classes, (2, 6, 4))
    small = resized_maps(torch.from_numpy(maps), 3, 2).numpy()
    for n, row, column in np.ndindex(2, 3, 2):
        box = maps[n, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten()
        counts = np.bincount(box, minlength=classes)
        assert small[n, row, column] == max(k for k in range(classes) if counts[k] == counts.max())


def test_a_half_of_tumour_is_tumour() -> None:
    assert resized_maps(torch.tensor([[[0, 1], [0, 1]]]), 1, 1).item() == 1
    assert resized_maps(torch.tensor([[[0, 1], [0, 0]]]), 1, 1).item() == 0
    odd = torch.tensor([[[1, 1, 1], [1, 0, 0], [0, 0, 0]]])  # 4 of 9
    assert resized_maps(odd, 1, 1).item() == 0


def test_objects_keep_their_numbers() -> None:
    big = np.kron(np.array([[0, 700], [2, 3]]), np.ones((4, 4))).astype(np.int32)
    assert nearest(big, 4, 4).tolist() == np.kron([[0, 700], [2, 3]], np.ones((2, 2))).tolist()
    assert nearest(big, 8, 8).tolist() == big.tolist()


@given(st.integers(4, 60), st.integers(4, 60), st.integers(1, 4))
def test_patches_cover_a_picture_and_stay_inside(height: int, width: int, patch: int) -> None:
    covered = np.zeros((height, width), dtype=int)
    corners = places(height, width, patch)
    for top, left in corners:
        assert 0 <= top <= height - patch
        assert 0 <= left <= width - patch
        covered[top : top + patch, left : left + patch] += 1
    assert covered.min() >= 1
    assert len(corners) == -(-height // patch) * -(-width // patch)  # no fewer could


def test_a_picture_of_256_x_320_needs_two_patches() -> None:
    assert places(256, 320, 256) == [(0, 0), (0, 64)]
    assert len(places(1000, 1000, 256)) == 16


def test_small_pictures_are_continued_by_reflection() -> None:
    assert grown(np.array([[1, 2], [3, 4]]), 3).tolist() == [[1, 2, 2], [3, 4, 4], [3, 4, 4]]
    assert grown(np.zeros((3, 5, 2)), 4).shape == (3, 5, 4)
    assert grown(np.zeros((7, 9)), 4).shape == (7, 9)
