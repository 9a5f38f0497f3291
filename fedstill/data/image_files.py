"""Image files: which lie in a folder, one decoded and upright, and several as one array."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.errors import DataError
from fedstill.core.text_format import more_such, times
from fedstill.core.user_functions import first_line
from fedstill.data.images import grey, resized
from fedstill.data.pil_images import Bytes, numbers_of, pixels_of, turn_of

SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}
)
UNREAD = frozenset({".heic", ".heif", ".avif", ".jp2", ".svg", ".psd", ".dcm", ".dng", ".cr2", ".nef"})


class UnreadableImage(DataError):
    """A file is no image that can be read, whatever it is for: another thing, damaged, or far too large."""


class UnequalSizes(DataError):
    """Images have several sizes, where nothing brings them to one."""


def decoded(source: Path | io.BytesIO, what: str) -> Bytes:
    """One image as (1, H, W) or (3, H, W); a DataError, begun by ``what``, if it has no 8-bit channels."""
    with _opened(source, what) as image:
        pixels = pixels_of(image, what)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def instance_map(source: Path | io.BytesIO, what: str) -> npt.NDArray[np.int32]:
    """A grey image of up to 16 bits, whose values are numbers of objects or classes: ``(H, W)``."""
    with _opened(source, what) as image:
        return numbers_of(image, what)


def orientation(source: Path, what: str) -> int:
    """How the camera of an image file was held, 1 to 8 as EXIF counts, of which 1 is upright."""
    with _opened(source, what) as image:
        return turn_of(image)


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
        told = getattr(error, "strerror", None) or first_line(error)
        raise UnreadableImage(f"{what}: cannot be read as an image ({told})") from error


def size_of(source: Path, what: str) -> tuple[int, int]:
    """Height and width of an image file."""
    with _opened(source, what) as image:
        height, width = image.height, image.width
        return (width, height) if turn_of(image) > 4 else (height, width)


ONE_SIZE = "; data.size makes one size, at a node data.fit, of new data --fit"


def stacked(files: Iterable[tuple[Path, str]], size: int = 0, channels: int = 0) -> npt.NDArray[Any]:
    """Image files, each with what it is for errors, of one form: ``(N, C, H, W)``; averaged to a ``size``.

    Each is brought to so many ``channels`` by itself, so that what becomes of one hangs on no other. With 0
    all get colours where some are grey and some have them. A DataError names the first that cannot be read
    and counts the others, or names one of another size than the first.
    """
    images: list[npt.NDArray[Any]] = []
    unreadable: list[str] = []  # texts alone: an error holds its half of a picture
    first = ""
    for file, what in files:
        try:
            image: npt.NDArray[Any] = decoded(file, what)
        except UnreadableImage as error:
            unreadable.append(str(error))
            continue
        if size:
            image = resized(image[None], size, size)[0]
        if channels == 1 < len(image):
            image = grey(torch.from_numpy(_floats(image)[None]))[0].numpy().clip(0, 1)
        elif len(image) == 1 < channels:
            image = np.broadcast_to(image, (channels, *image.shape[1:]))
        first = first or what
        if images and image.shape[1:] != images[0].shape[1:]:
            sizes = f"{times(image.shape[1:])}, but {first} is {times(images[0].shape[1:])}"
            raise UnequalSizes(f"{what}: is {sizes} (height, width): allowed is one size for all{ONE_SIZE}")
        images.append(image)
    if unreadable:
        raise UnreadableImage(f"{unreadable[0]}{more_such(len(unreadable))}")
    if len({image.dtype for image in images}) > 1:
        images = [_floats(image) for image in images]
    most = max(len(image) for image in images)
    return np.stack([np.broadcast_to(image, (most, *image.shape[1:])) for image in images])


def _floats(image: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Bytes as floats from 0 to 1, in the same bits as :func:`resized` and ``normalised`` make of them."""
    return image.astype(np.float32) / np.float32(255) if image.dtype == np.uint8 else image


def image_files(folder: Path, *, below: bool = False) -> list[Path]:
    """The images in a folder itself, or in those below it, too, by path; none where there is no such folder.

    Hidden ones are passed over, as those of a notebook's checkpoints are.

    Raises:
        DataError: an image of a form that is not read is among them, or a link to an image that is not there.
    """
    places = [folder, *(_folders_below(folder) if below else ())] if folder.is_dir() else []
    seen = [file for place in places for file in place.iterdir() if not file.name.startswith(".")]
    empty = sorted(file for file in seen if file.suffix.lower() in SUFFIXES and not file.exists())
    if empty:  # as in a git-annex whose content was not fetched: passed over, images would be missing
        raise DataError(f"{empty[0]}: is a link to nothing{more_such(len(empty))}: allowed are images")
    files = sorted(file for file in seen if file.is_file())
    unread = [file for file in files if file.suffix.lower() in UNREAD]
    if unread:
        told = f"is an image that is not read{more_such(len(unread))}"
        raise DataError(f"{unread[0]}: {told}: allowed are {', '.join(sorted(SUFFIXES))}")
    return [file for file in files if file.suffix.lower() in SUFFIXES]


def _folders_below(folder: Path) -> list[Path]:
    """All folders in it, through links, too, each once; hidden ones are passed over.

    Raises:
        DataError: a folder that cannot be read, or a link to one that holds this one: with it other classes
            would be this one's.
    """
    met, places, found = set[Path](), [folder], list[Path]()
    while places:
        place = places.pop()
        try:
            within = [each for each in sorted(place.iterdir()) if each.is_dir() and each.name[0] != "."]
        except OSError as error:
            raise DataError(f"{place}: cannot be read ({error.strerror})") from error
        for each in within:
            if folder.resolve().is_relative_to(each.resolve()):
                raise DataError(f"{each}: is a link to a folder that holds it: allowed are others")
            if each.resolve() not in met:
                met.add(each.resolve())
                found.append(each)
                places.append(each)
    return found


def images_below(folder: Path) -> list[Path]:
    """The images of a folder and of all folders in it, by path; a DataError if there are none."""
    if not (files := image_files(folder, below=True)):
        raise DataError(f"{folder}: holds no image ({', '.join(sorted(SUFFIXES))})")
    return files
