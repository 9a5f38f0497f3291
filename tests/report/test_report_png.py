"""Inlined images: every pixel of small images, block means of large ones."""

from __future__ import annotations

import numpy as np
import pytest

from fedstill.report import images
from tests.support.result_files import decoded


@pytest.mark.parametrize("channels", [1, 3])
def test_image_url_keeps_every_pixel(channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (channels, 5, 8), dtype=np.uint8)
    assert np.array_equal(decoded(images.image_url(image)), image.transpose(1, 2, 0).squeeze())


def test_large_image_is_averaged_in_blocks() -> None:
    image = np.zeros((1, 128, 128), np.uint8)
    image[0, 0, 0] = 200  # one of the four pixels of the first block
    small = decoded(images.image_url(image))
    assert small.shape == (64, 64)
    assert small[0, 0] == 50
    assert small.sum() == 50


def test_long_thin_image_keeps_a_row() -> None:
    assert decoded(images.image_url(np.full((1, 1, 640), 9, np.uint8))).shape == (1, 64)
