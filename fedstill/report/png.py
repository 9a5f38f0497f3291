"""Pictures as PNG in ``data:`` addresses, for pages that load nothing."""

from __future__ import annotations

import base64
import io
import math

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedstill.core.errors import DataError

MOST_PIXELS = 64  # the longer side of an inlined picture: keeps a page of pictures under 2 MB


def picture(image: npt.NDArray[np.uint8], most: int = MOST_PIXELS) -> str:
    """One image as a PNG in a ``data:`` address, for ``<img src>``.

    ``image`` is (C, H, W), 8 bits, C 1 (grey) or 3 (colour). A picture with a side above ``most``
    pixels is made smaller by averaging square blocks. Raises DataError for another shape.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[0] not in (1, 3) or 0 in image.shape:
        raise DataError(f"image is {image.dtype} {image.shape}: allowed is uint8 (C, H, W) with C 1 or 3")
    pixels = np.ascontiguousarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
    made = Image.fromarray(pixels)
    block = math.ceil(max(made.size) / most)
    # A side shorter than a block (a very long, thin picture) still keeps one row of pixels.
    across, along = min(block, made.width), min(block, made.height)
    whole = (0, 0, made.width // across * across, made.height // along * along)
    return _address(made.crop(whole).reduce((across, along)))


def indexed(image: npt.NDArray[np.uint8], colours: npt.NDArray[np.uint8]) -> str:
    """A picture whose bytes (H, W) are numbers of colours (up to 256, 3), as a PNG in a ``data:`` address.

    Raises:
        DataError: another shape, or a number that no colour has.
    """
    if image.dtype != np.uint8 or image.ndim != 2 or 0 in image.shape:
        raise DataError(f"image is {image.dtype} {image.shape}: allowed is uint8 (H, W)")
    if int(image.max()) >= len(colours):
        raise DataError(f"image has colour {int(image.max())}: allowed is from 0 to {len(colours) - 1}")
    made = Image.fromarray(image)
    made.putpalette(colours.astype(np.uint8).tobytes())
    return _address(made)


def _address(made: Image.Image) -> str:
    out = io.BytesIO()
    made.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")
