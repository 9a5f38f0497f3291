"""Pictures as PNG in ``data:`` addresses, for pages that load nothing."""

from __future__ import annotations

import base64
import math
import struct
import zlib

import numpy as np
import numpy.typing as npt

from fedstill.core.errors import DataError

MOST_PIXELS = 64  # the longer side of an inlined picture: keeps a page of pictures under 2 MB


def picture(image: npt.NDArray[np.uint8], most: int = MOST_PIXELS) -> str:
    """One image as a PNG in a ``data:`` address, for ``<img src>``.

    ``image`` is (C, H, W), 8 bits, C 1 (grey) or 3 (colour). A picture with a side above ``most``
    pixels is made smaller by averaging square blocks. Raises DataError for another shape.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[0] not in (1, 3) or 0 in image.shape:
        raise DataError(f"image is {image.dtype} {image.shape}: allowed is uint8 (C, H, W) with C 1 or 3")
    block = math.ceil(max(image.shape[1:]) / most)
    # A side shorter than a block (a very long, thin picture) still keeps one row of pixels.
    across, along = min(block, image.shape[2]), min(block, image.shape[1])
    height, width = image.shape[1] // along, image.shape[2] // across
    cut = image[:, : height * along, : width * across]
    blocks = cut.reshape(len(image), height, along, width, across)
    pixels = blocks.mean(axis=(2, 4)).round().astype(np.uint8).transpose(1, 2, 0)  # (H, W, C)

    return _address(pixels, 0 if len(image) == 1 else 2)  # PNG's colour types: grey, or red green blue


def indexed(image: npt.NDArray[np.uint8], colours: npt.NDArray[np.uint8]) -> str:
    """A picture whose bytes (H, W) are numbers of colours (up to 256, 3), as a PNG in a ``data:`` address.

    Raises:
        DataError: another shape, or a number that no colour has.
    """
    if image.dtype != np.uint8 or image.ndim != 2 or 0 in image.shape:
        raise DataError(f"image is {image.dtype} {image.shape}: allowed is uint8 (H, W)")
    if int(image.max()) >= len(colours):
        raise DataError(f"image has colour {int(image.max())}: allowed is from 0 to {len(colours) - 1}")
    return _address(image[:, :, None], 3, colours.astype(np.uint8).tobytes())


def _address(pixels: npt.NDArray[np.uint8], kind: int, palette: bytes = b"") -> str:
    """Pixels (H, W, C) as a PNG of a colour type."""

    def chunk(name: bytes, content: bytes) -> bytes:
        body = name + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: this row uses no filter
    png = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))
        + (chunk(b"PLTE", palette) if palette else b"")
        + chunk(b"IDAT", zlib.compress(rows, 9))
        + chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
