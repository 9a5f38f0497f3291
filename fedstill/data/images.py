"""Image files, one at a time, to arrays."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstill.core.errors import DataError
from fedstill.core.imports import first_line
from fedstill.core.words import times
from fedstill.data.rasters import resized

Bytes = npt.NDArray[np.uint8]

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".pgm", ".ppm"})


def decoded(source: Path | io.BytesIO, what: str) -> Bytes:
    """One image as (1, H, W) or (3, H, W); a DataError, begun by ``what``, if it has no 8-bit channels."""
    with _opened(source, what) as image:
        pixels = pixels_of(image, what)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def pixels_of(image: Any, what: str) -> Bytes:
    """A picture of PIL in grey, ``(H, W)``, or colour, ``(H, W, 3)``: a DataError if not of 8 bits each."""
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{what}: is an image of mode {image.mode}: allowed are 8 bits a channel")
    return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))


def instance_map(source: Path | io.BytesIO, what: str) -> npt.NDArray[np.int32]:
    """A grey image of up to 16 bits, whose values are numbers of objects or classes: ``(H, W)``."""
    with _opened(source, what) as image:
        if image.mode not in ("1", "L", "P", "I", "I;16", "I;16B"):
            raise DataError(f"{what}: is an image of mode {image.mode}: allowed is one number a pixel")
        return np.asarray(image).astype(np.int32)


@contextmanager
def _opened(source: Path | io.BytesIO, what: str) -> Iterator[Any]:
    from PIL import Image

    try:
        with Image.open(source) as image:
            yield image
    except DataError:
        raise
    # Pillow raises SyntaxError for a damaged PNG.
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"{what}: cannot be read as an image ({first_line(error)})") from error


def size_of(source: Path, what: str) -> tuple[int, int]:
    """Height and width of an image file."""
    with _opened(source, what) as image:
        return image.height, image.width


def stacked(files: Iterable[tuple[Path, str]], size: int = 0, way_out: str = "") -> npt.NDArray[Any]:
    """Image files, each with what it is for errors, of one form: ``(N, C, H, W)``; averaged to a ``size``.

    A DataError names one that cannot be read, or is of another form than the first, and the ``way_out``.
    """
    images: list[npt.NDArray[Any]] = []
    first = ""
    for file, what in files:
        image: npt.NDArray[Any] = decoded(file, what)
        if size:
            image = resized(image[None], size, size)[0]
        first = first or what
        if images and image.shape != images[0].shape:
            sizes = f"{times(image.shape)}, but {first} is {times(images[0].shape)}"
            raise DataError(f"{what}: is {sizes}: allowed is one form for all{way_out}")
        images.append(image)
    return np.stack(images)


def image_files(folder: Path) -> list[Path]:
    """The images that lie in a folder itself, by name; none where there is no such folder."""
    if not folder.is_dir():
        return []
    files = (f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and not f.name.startswith("."))
    return sorted(f for f in files if f.is_file())
