"""Resizing and patches, against slow references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstill.data.images import places, resized, resized_maps


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
