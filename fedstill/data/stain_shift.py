"""Shift of the stains of H&E images: laboratories whose stains differ by a chosen amount.

Stains absorb light: the optical density ``-log(I)`` of a pixel is a sum of stains, each an amount times its
color vector. Amounts of hematoxylin and eosin are found by color deconvolution (Ruifrok, Johnston:
"Quantification of Histochemical Staining by Color Deconvolution", Analytical and Quantitative Cytology and
Histology 2001), and rendered again with the color vectors of a site.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedstill.core.seeds import derive
from fedstill.data.images import Pixels

Array = npt.NDArray[np.float64]
# Optical densities of hematoxylin and eosin in red, green and blue, with norm 1 (Ruifrok and Johnston).
HEMATOXYLIN_EOSIN: Array = np.array([[0.650, 0.704, 0.286], [0.072, 0.990, 0.105]])
COLOR_SPREAD = 0.25  # standard deviation of a site's color vectors, before their norm becomes 1
STRENGTH_SPREAD = 0.25  # standard deviation of the logarithm of a site's strength of each stain
MIN_DENSITY = 0.02  # stains absorb at least this much of each color


def site_stains(site: str, seed: int) -> Array:
    """Return the color vectors of a site's hematoxylin and eosin, times its strength of each: ``(2, 3)``.

    Args:
        site: name of the site; equal names give equal stains.
        seed: seed of the data.
    """
    generator = np.random.default_rng(derive(seed, "stains", site))
    colors = HEMATOXYLIN_EOSIN + COLOR_SPREAD * generator.standard_normal((2, 3))
    colors = colors.clip(min=MIN_DENSITY)
    strength = np.exp(STRENGTH_SPREAD * generator.standard_normal((2, 1)))
    stains: Array = strength * colors / np.linalg.norm(colors, axis=1, keepdims=True)
    return stains


def shift_stains(image: Pixels, stains: Array, shift: float) -> Pixels:
    """Return an image with its stains moved toward others; white pixels stay white.

    Args:
        image: ``(3, H, W)``, uint8 or floats in [0, 1].
        stains: optical densities of hematoxylin and eosin at shift 1, ``(2, 3)``.
        shift: 0 returns the image, 1 renders it with ``stains``, and values between mix both linearly.

    Returns:
        an image of the same type.

    >>> hematoxylin = np.exp(-HEMATOXYLIN_EOSIN[0]).reshape(3, 1, 1)  # one unit of it
    >>> shift_stains(hematoxylin, np.array([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), 1.0).round(2).ravel()
    array([0.14, 0.37, 1.  ])
    """
    if shift == 0:
        return image
    scale = 255.0 if image.dtype == np.uint8 else 1.0
    pixels = (image.astype(np.float64) / scale).clip(min=1 / 256)
    density = -np.log(pixels).reshape(3, -1).T  # (pixels, 3)
    amounts = density @ np.linalg.pinv(HEMATOXYLIN_EOSIN)  # (pixels, 2); the residual keeps its color
    density = density + shift * amounts @ (stains - HEMATOXYLIN_EOSIN)
    shifted = np.exp(-density).T.reshape(image.shape).clip(max=1.0) * scale
    rounded: Pixels = (shifted.round() if image.dtype == np.uint8 else shifted).astype(image.dtype)
    return rounded
