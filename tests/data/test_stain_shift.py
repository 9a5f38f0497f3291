"""Stain shift of H&E images, against densities by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedstill.data.instance_images import InstanceImage, prepare_instance_images
from fedstill.data.stain_shift import HEMATOXYLIN_EOSIN, shift_stains, site_stains
from fedstill.data.user_data import UserFiles


def image_of(density: np.ndarray) -> np.ndarray:
    """Return one pixel with an optical density ``(3,)``."""
    return np.exp(-density).reshape(3, 1, 1)


@pytest.mark.parametrize("shift", [0.25, 0.5, 1.0])
def test_amounts_of_both_stains_are_rendered_with_the_new_colors(shift: float) -> None:
    """0.5 hematoxylin and 0.8 eosin become red and green by hand, mixed with the old colors by the shift."""
    old = 0.5 * HEMATOXYLIN_EOSIN[0] + 0.8 * HEMATOXYLIN_EOSIN[1]
    new = np.array([0.5 * 2.0, 0.8 * 0.5, 0.0])
    shifted = shift_stains(image_of(old), np.array([[2.0, 0.0, 0.0], [0.0, 0.5, 0.0]]), shift)
    np.testing.assert_allclose(-np.log(shifted).ravel(), (1 - shift) * old + shift * new, atol=1e-9)


def test_color_that_is_no_stain_stays() -> None:
    """The density orthogonal to both stains has no amount of either."""
    residual = np.cross(*HEMATOXYLIN_EOSIN)
    density = residual * np.sign(residual.sum()) + 0.9  # all densities positive
    amounts = density @ np.linalg.pinv(HEMATOXYLIN_EOSIN)
    shifted = shift_stains(image_of(density), np.zeros((2, 3)), 1.0)
    expected = density - amounts @ HEMATOXYLIN_EOSIN
    np.testing.assert_allclose(shifted.ravel(), np.exp(-expected).clip(max=1), atol=1e-9)


def test_bytes_stay_bytes_white_stays_white_and_no_shift_changes_nothing() -> None:
    draw = np.random.default_rng(0)
    image = draw.integers(0, 256, (3, 8, 8), dtype=np.uint8)
    image[:, 0] = 255
    shifted = shift_stains(image, site_stains("lab", 0), 1.0)
    assert shifted.dtype == np.uint8
    assert (shifted[:, 0] == 255).all()
    assert np.abs(shifted[:, 1:].astype(int) - image[:, 1:]).mean() > 5
    assert np.array_equal(shift_stains(image, site_stains("lab", 0), 0.0), image)


def test_sites_have_stains_of_their_own() -> None:
    """Two sites with equal pictures differ after the shift, in training and test pictures alike."""
    pixels = np.random.default_rng(0).integers(80, 200, (3, 8, 8), dtype=np.uint8)
    instances = np.zeros((8, 8), dtype=np.int32)
    pictures = [
        InstanceImage(pixels, instances, f"{site} {split}", site, split) for site in "ab" for split in (0, 1)
    ]
    found = {}
    for shift in (0.0, 0.5):
        config = UserFiles(name="mine", patch=8, stain_shift=shift)
        data = prepare_instance_images(pictures, config, "mine", "", "site")
        found[shift] = data.train.inputs, data.test.inputs
    (train, test), (plain, _) = found[0.5], found[0.0]
    assert np.array_equal(plain[0], plain[1])
    assert not np.array_equal(train[0], train[1])
    assert np.array_equal(train, test)
    stains = [site_stains("a", seed) for seed in (0, 0, 1)]
    assert np.array_equal(stains[0], stains[1])
    assert not np.array_equal(stains[0], stains[2])
