"""Images of the library PIL as arrays: upright, in grey or color, on white where they are transparent."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstill.core.errors import DataError
from fedstill.core.text_format import times

Bytes = npt.NDArray[np.uint8]

_GREY = ("1", "L", "LA", "La")
_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")


def is_image(value: Any) -> bool:
    """Return whether a value is a PIL image."""
    return hasattr(value, "convert") and hasattr(value, "getbands")


def holds_images(values: Any) -> bool:
    """Return whether a value is a list that holds PIL images."""
    return isinstance(values, list | tuple) and any(map(is_image, values))


def pixels_of(image: Any, what: str) -> Bytes:
    """An image of PIL, upright, in grey ``(H, W)`` or color ``(H, W, 3)``: a DataError if not of 8 bits each.

    Transparent pixels are drawn on white, in proportion to their alpha: what a file keeps below them is not
    what anyone sees.
    """
    if image.mode.startswith(("I", "F")):
        way = "divide by the largest possible value and give floats from 0 to 1 in an .npz"
        raise DataError(f"{what}: is an image of mode {image.mode}: allowed are 8 bits a channel; {way}")
    image = upright(image)
    mode = "L" if image.mode in _GREY else "RGB"
    if image.mode in _ALPHA or "transparency" in image.info:
        from PIL import Image

        over = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
    return np.asarray(image.convert(mode))


def numbers_of(image: Any, what: str) -> npt.NDArray[np.int32]:
    """An image of PIL, upright, whose values are numbers of objects or classes: ``(H, W)``.

    A palette only colors them; a DataError refuses colors and floats.
    """
    if image.mode not in ("1", "L", "P", "I", "I;16", "I;16B"):
        raise DataError(f"{what}: is an image of mode {image.mode}: allowed is one number a pixel")
    return np.asarray(upright(image)).astype(np.int32)


def array_of(values: Any, what: str, *, numbers: bool = False) -> npt.NDArray[Any]:
    """An array, from what numpy makes one of, or from a list of arrays or of images of PIL, of one size each.

    Args:
        what: the values are, the first words of an error.
        numbers: whether images hold numbers of classes or objects, ``(N, H, W)``; else they are pixels in
            grey ``(N, H, W)``, or in color ``(N, H, W, 3)`` where one or more are.

    Raises:
        DataError: images of several sizes, or of a mode that is not read.
    """
    if not isinstance(values, list | tuple) or not values:
        return np.asarray(values)
    if not holds_images(values):
        try:
            return np.stack([np.asarray(value) for value in values])
        except ValueError as error:
            raise DataError(f"{what}: examples differ in shape: allowed is one for all") from error
    read = numbers_of if numbers else pixels_of
    arrays: list[npt.NDArray[Any]] = [
        read(image, f"{what}: image {row}") if is_image(image) else np.asarray(image)
        for row, image in enumerate(values)
    ]
    color = max(array.ndim for array in arrays)
    arrays = [
        np.repeat(array[..., None], 3, axis=2) if array.ndim == 2 < color else array for array in arrays
    ]
    for row, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            sizes = f"is {times(array.shape[:2])}, but image 0 is {times(arrays[0].shape[:2])}"
            raise DataError(f"{what}: image {row} {sizes} (height, width): allowed is one size for all")
    return np.stack(arrays)


def arrays_of(given: Mapping[Any, Any], what: str) -> dict[str, npt.NDArray[Any]]:
    """Arrays by name as an ``.npz`` has them, each as :func:`array_of` makes it."""
    numbers = ("masks", "instances")
    return {
        str(name): array_of(values, f"{what}: {name}", numbers=name in numbers)
        for name, values in given.items()
    }


ORIENTATION = 0x0112  # the EXIF tag
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # of EXIF's orientations: PIL's transpositions


def turn_of(image: Any) -> int:
    """Return the EXIF orientation, 1 to 8; 1, upright, where a file has none that can be read.

    PIL turns a TIFF itself.
    """
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):  # it would be decoded
        return 1
    try:
        found = image.getexif().get(ORIENTATION, 1)
    except (OSError, ValueError, SyntaxError, KeyError, TypeError, AttributeError, struct.error):
        return 1
    return found if found in _TURNS else 1


def upright(image: Any) -> Any:
    """A photograph as its camera was held, which the file may say next to the pixels (EXIF)."""
    turn = turn_of(image)
    return image.transpose(_TURNS[turn]) if turn in _TURNS else image
