"""Pictures as PNG in ``data:`` addresses, for pages that load nothing; and outlines to lie over them."""

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

MAX_PIXELS = 64  # the longer side of an inlined picture: keeps a page of pictures under 2 MB
OUTLINE_PIXELS = 768  # pixels of the longer side of outlines, so that they are smooth on any screen
LINE_WIDTH, RIM_WIDTH = 5, 9  # pixels of these that a line is wide, and with its rim
# Of outlines: nothing, the rim, the truth alone, the prediction alone, both.
OUTLINE_COLORS = np.array(
    [(0, 0, 0, 0), (0, 0, 0, 128), (255, 144, 0, 255), (32, 128, 255, 255), (255, 255, 255, 255)], np.uint8
)


def image_url(image: Bytes, most: int = MAX_PIXELS) -> str:
    """One image as a PNG in a ``data:`` address, for ``<img src>``.

    ``image`` is (1 or 3, H, W): gray or color. A picture with a side above ``most`` pixels is made smaller
    by averaging square blocks.
    """
    pixels = np.ascontiguousarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
    made = Image.fromarray(pixels)
    block = math.ceil(max(made.size) / most)
    # A side shorter than a block (a very long, thin picture) still keeps one row of pixels.
    across, along = min(block, made.width), min(block, made.height)
    whole = (0, 0, made.width // across * across, made.height // along * along)
    return _address(made.crop(whole).reduce((across, along)))


def indexed_image_url(image: Bytes, colors: Bytes) -> str:
    """A picture whose bytes (H, W) are numbers of colors (up to 256, 3 or 4), as a ``data:`` address."""
    made = Image.fromarray(image)
    made.putpalette(colors.tobytes(), "RGB" if colors.shape[1] == 3 else "RGBA")
    return _address(made)


def outline_codes(truth: npt.NDArray[Any], made: npt.NDArray[Any] | None = None) -> Bytes:
    """Outlines of regions, ``(H, W)`` whole numbers, as numbers of :data:`OUTLINE_COLORS`, enlarged: ``(k H, k W)``.

    Lines run between pixels of different regions; none at the map's own edge, as nobody knows whether a
    region ends there.
    """
    from scipy.ndimage import maximum_filter

    own, other = _edges(truth), _edges(truth if made is None else made)
    wide = own | other
    codes: Bytes = maximum_filter(wide, RIM_WIDTH).astype(np.uint8)
    parts = (own & ~other, other & ~own, own & other) if made is not None else (own,)
    for code, part in enumerate(parts, start=2):
        codes[maximum_filter(part, LINE_WIDTH)] = code
    return codes


def _edges(regions: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    large = np.kron(regions, np.ones((math.ceil(OUTLINE_PIXELS / max(regions.shape)),) * 2, regions.dtype))
    edges = np.zeros(large.shape, bool)
    edges[1:] |= large[1:] != large[:-1]
    edges[:, 1:] |= large[:, 1:] != large[:, :-1]
    return edges


def image_tag(address: str, label: str) -> Markup:
    """A picture of a page, with what it shows in words."""
    return Markup('<img src="{}" alt="{}">').format(address, label)


def _address(made: Image.Image) -> str:
    out = io.BytesIO()
    made.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")
