"""PNG images as ``data:`` URLs, for pages that load nothing, and outlines of regions to draw over images."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from PIL import Image

Bytes = npt.NDArray[np.uint8]

MAX_PIXELS = 64  # longer side of an inlined image; keeps a page of images under 2 MB
OUTLINE_PIXELS = 768  # longer side of an outline image; smooth on any screen
LINE_WIDTH, RIM_WIDTH = 5, 9  # pixels of an outline, without and with its rim
# Colors (RGBA) by code: nothing, rim, truth alone, prediction alone, both.
OUTLINE_COLORS = np.array(
    [(0, 0, 0, 0), (0, 0, 0, 128), (255, 144, 0, 255), (32, 128, 255, 255), (255, 255, 255, 255)], np.uint8
)


def image_url(image: Bytes, max_pixels: int = MAX_PIXELS) -> str:
    """Return an image as a ``data:`` URL of a PNG.

    Args:
        image: gray or RGB, ``(1 or 3, H, W)`` uint8.
        max_pixels: longest side; larger images are reduced by averaging square blocks.
    """
    pixels = np.ascontiguousarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
    png = Image.fromarray(pixels)
    block = math.ceil(max(png.size) / max_pixels)
    # A side shorter than a block (a very long, thin image) still keeps one row of pixels.
    block_width, block_height = min(block, png.width), min(block, png.height)
    box = (0, 0, png.width // block_width * block_width, png.height // block_height * block_height)
    return _to_url(png.crop(box).reduce((block_width, block_height)))


def indexed_image_url(image: Bytes, colors: Bytes) -> str:
    """Return an image of color indices as a ``data:`` URL.

    Args:
        image: color indices, ``(H, W)``.
        colors: palette of up to 256 colors, ``(N, 3)`` RGB or ``(N, 4)`` RGBA.
    """
    png = Image.fromarray(image)
    png.putpalette(colors.tobytes(), "RGB" if colors.shape[1] == 3 else "RGBA")
    return _to_url(png)


def outline_codes(truth: npt.NDArray[Any], prediction: npt.NDArray[Any] | None = None) -> Bytes:
    """Return the outlines of regions as indices into :data:`OUTLINE_COLORS`, enlarged k times.

    Outlines run between pixels of different regions. The border of the map has no outline, because a region
    may continue beyond it.

    Args:
        truth: labels of regions, ``(H, W)`` integers.
        prediction: predicted labels, ``(H, W)``; None to outline the truth alone.

    Returns:
        Codes ``(k H, k W)``.
    """
    from scipy.ndimage import maximum_filter

    true_edges, predicted_edges = _edges(truth), _edges(truth if prediction is None else prediction)
    codes: Bytes = maximum_filter(true_edges | predicted_edges, RIM_WIDTH).astype(np.uint8)
    if prediction is None:
        parts: tuple[npt.NDArray[np.bool_], ...] = (true_edges,)
    else:
        parts = (
            true_edges & ~predicted_edges,
            predicted_edges & ~true_edges,
            true_edges & predicted_edges,
        )
    for code, part in enumerate(parts, start=2):
        codes[maximum_filter(part, LINE_WIDTH)] = code
    return codes


def _edges(regions: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    enlarged = np.kron(regions, np.ones((math.ceil(OUTLINE_PIXELS / max(regions.shape)),) * 2, regions.dtype))
    edges = np.zeros(enlarged.shape, bool)
    edges[1:] |= enlarged[1:] != enlarged[:-1]
    edges[:, 1:] |= enlarged[:, 1:] != enlarged[:, :-1]
    return edges


def image_tag(url: str, alt: str) -> Markup:
    """Return an HTML image with its alternative text."""
    return Markup('<img src="{}" alt="{}">').format(url, alt)


def _to_url(png: Image.Image) -> str:
    out = io.BytesIO()
    png.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")
