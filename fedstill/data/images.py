"""Images and masks as arrays: of one size from those of another, in patches that cover them, gray from
colors, values as classes.

Images of the library PIL as arrays: upright, in gray or color, on white where they are transparent.

Image files: which lie in a folder, one decoded and upright, and several as one array.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fedstill.core.errors import DataError
from fedstill.core.registry import first_line
from fedstill.core.text_format import more_such, times
from fedstill.data.stratified_sampling import Ints

Pixels = npt.NDArray[Any]  # (N, C, H, W), uint8 in 0..255 or float32
BATCH = 64  # images at once


def resize_images(images: Pixels, height: int, width: int) -> npt.NDArray[np.float32]:
    """Images ``(N, C, H, W)`` of another size, each pixel the mean of the area that it covers: a box average.

    Bytes become floats, 255 becoming 1; where the size is larger pixels are repeated.

    >>> resize_images(np.array([[[[0, 1], [2, 3]]]], dtype=np.float32), 1, 1).item()
    1.5
    """
    scale = np.float32(255 if images.dtype == np.uint8 else 1)
    out = np.empty((*images.shape[:2], height, width), dtype=np.float32)
    for start in range(0, len(images), BATCH):
        part = torch.from_numpy(images[start : start + BATCH].astype(np.float32, order="C") / scale)
        out[start : start + BATCH] = F.interpolate(part, (height, width), mode="area").numpy()
    return out


def resize_class_maps(maps: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Maps ``(N, H, W)`` of another size: each pixel is the class that most of its area has, of equals the
    highest.

    So a pixel half of which is tumor is tumor.

    >>> resize_class_maps(torch.tensor([[[0, 1, 0, 0], [0, 1, 0, 2]]]), 1, 2).tolist()
    [[[1, 0]]]
    """
    if tuple(maps.shape[1:]) == (height, width):
        return maps
    classes = int(maps.max()) + 1
    parts = []
    for part in torch.split(maps, BATCH):
        shares = F.interpolate(
            F.one_hot(part, classes).permute(0, 3, 1, 2).float(), (height, width), mode="area"
        )
        # Rounded, so that halves are equal however their sums are added; the highest class is the first here.
        parts.append(classes - 1 - (shares.flip(1) * 2**12).round().argmax(1))
    return torch.cat(parts)


def resize_instances(instances: npt.NDArray[np.int32], height: int, width: int) -> npt.NDArray[np.int32]:
    """An instance map of another size: numbers cannot be averaged, so each pixel takes the nearest one's.

    >>> resize_instances(np.array([[1, 1, 0, 2]], dtype=np.int32), 1, 2).tolist()
    [[1, 2]]
    """
    rows = ((np.arange(height) + 0.5) * instances.shape[0] / height).astype(np.int64)
    columns = ((np.arange(width) + 0.5) * instances.shape[1] / width).astype(np.int64)
    return np.ascontiguousarray(instances[rows[:, None], columns])


def patch_corners(height: int, width: int, patch: int) -> list[tuple[int, int]]:
    """Upper left corners of the fewest square patches that cover a picture, evenly spread, by rows.

    >>> patch_corners(256, 320, 256)
    [(0, 0), (0, 64)]
    >>> patch_corners(4, 9, 4)
    [(0, 0), (0, 2), (0, 5)]
    """
    return [(top, left) for top in _patch_offsets(height, patch) for left in _patch_offsets(width, patch)]


def _patch_offsets(side: int, patch: int) -> list[int]:
    count = -(-side // patch)
    return [index * (side - patch) // max(count - 1, 1) for index in range(count)]


def pad_to_patch(picture: npt.NDArray[Any], patch: int) -> npt.NDArray[Any]:
    """A picture ``(..., H, W)`` continued by reflection, downwards and to the right, up to one patch a side.

    >>> pad_to_patch(np.array([[1, 2, 3]]), 4).tolist()
    [[1, 2, 3, 3], [1, 2, 3, 3], [1, 2, 3, 3], [1, 2, 3, 3]]
    """
    height, width = picture.shape[-2:]
    more = [(0, 0)] * (picture.ndim - 2) + [(0, max(patch - height, 0)), (0, max(patch - width, 0))]
    return np.pad(picture, more, mode="symmetric") if max(more) > (0, 0) else picture


MASK_MAX = 255  # classes of a mask: larger numbers are objects


def encode_masks(
    masks: Sequence[npt.NDArray[np.generic]] | npt.NDArray[np.generic],
    what: str,
    names: tuple[str, ...] = (),
    *,
    gaps: bool = False,
    size: int = 0,
    files: Sequence[str] = (),
) -> tuple[Ints, tuple[str, ...]]:
    """Masks as class indices ``(N, H, W)``, and the classes' names; 255 beside nothing but 0 is class 1.

    Args:
        masks: N of whole numbers, ``(H, W)`` each.
        what: they are, the first words of an error.
        names: of the classes; empty: background, foreground, or numbers where there are more.
        gaps: whether numbers of classes without names may be missing, as where a node has not every class;
            elsewhere one stray pixel would make classes that do not exist.
        size: height and width wanted, by majority; 0: all have one size already.
        files: of each mask, for an error.

    Raises:
        DataError: not whole numbers, outside the classes, or with gaps between them.

    >>> labels, classes = encode_masks(np.array([[[0, 255]]]), "mine")
    >>> labels.tolist(), classes
    ([[[0, 1]]], ('background', 'foreground'))
    """
    odd = next((mask.dtype for mask in masks if mask.dtype.kind not in "biu"), None)
    if odd is not None:
        raise DataError(f"{what}: are {odd} (expected whole numbers, the class of each pixel)")
    values = np.unique(np.concatenate([np.unique(mask) for mask in masks])).tolist()
    stray = None if names or gaps else _first_value_after_gap(values)
    if stray is not None:
        row = next(row for row, mask in enumerate(masks) if (mask == stray).any())
        where = f"{files[row]}: has" if files else f"{what}: example {row} has"
        shown = ", ".join(map(str, values[:8])) + (" ..." if len(values) > 8 else "")
        allowed = f"allowed are 0..n without gaps, or 0 and {MASK_MAX}"
        raise DataError(f"{where} value {stray}, and all masks together have {shown}: {allowed}")
    least, most = values[0], values[-1]
    white = set(values) <= {0, MASK_MAX} and most == MASK_MAX
    most = 1 if white else most
    if least < 0 or most >= (len(names) or MASK_MAX):
        allowed = f"0 to {(len(names) or MASK_MAX) - 1}, the class of a pixel"
        raise DataError(f"{what}: have values from {least} to {most} (expected {allowed})")
    if not names:
        names = ("background", "foreground") if most < 2 else ("background", *map(str, range(1, most + 1)))
    labels = [(mask == MASK_MAX if white else mask).astype(np.int64) for mask in masks]
    if size:
        labels = [resize_class_maps(torch.from_numpy(mask)[None], size, size)[0].numpy() for mask in labels]
    return np.stack(labels), names


def _first_value_after_gap(values: Sequence[int]) -> int | None:
    present = {*values, 0}  # no mask need show background
    if present <= {0, MASK_MAX} or min(present) < 0:
        return None
    return next((value for value in sorted(present) if value and value - 1 not in present), None)


LUMA = (0.299, 0.587, 0.114)  # gray from red, green and blue (ITU-R BT.601)


def to_gray(pixels: torch.Tensor) -> torch.Tensor:
    """``(B, C, H, W)`` to ``(B, 1, H, W)``: by luminance, or the mean of other than three channels."""
    channels = pixels.shape[1]
    weights = LUMA if channels == 3 else (1 / channels,) * channels
    return (pixels * torch.tensor(weights).view(-1, 1, 1)).sum(1, keepdim=True)


Bytes = npt.NDArray[np.uint8]

_GRAY_MODES = ("1", "L", "LA", "La")
_ALPHA_MODES = ("LA", "La", "PA", "RGBA", "RGBa")


def is_pil_image(value: Any) -> bool:
    """Return whether a value is a PIL image."""
    return hasattr(value, "convert") and hasattr(value, "getbands")


def has_pil_images(values: Any) -> bool:
    """Return whether a value is a list that holds PIL images."""
    return isinstance(values, list | tuple) and any(map(is_pil_image, values))


def read_pil_pixels(image: Any, what: str) -> Bytes:
    """An image of PIL, upright, in gray ``(H, W)`` or color ``(H, W, 3)``: a DataError if not of 8 bits each.

    Transparent pixels are drawn on white, in proportion to their alpha: what a file keeps below them is not
    what anyone sees.
    """
    if image.mode.startswith(("I", "F")):
        way = "divide by the largest possible value and give floats from 0 to 1 in an .npz"
        raise DataError(f"{what}: is an image of mode {image.mode} (expected 8 bits a channel; {way})")
    image = make_upright(image)
    mode = "L" if image.mode in _GRAY_MODES else "RGB"
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        from PIL import Image

        over = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
    return np.asarray(image.convert(mode))


def read_pil_numbers(image: Any, what: str) -> npt.NDArray[np.int32]:
    """An image of PIL, upright, whose values are numbers of objects or classes: ``(H, W)``.

    A palette only colors them; a DataError refuses colors and floats.
    """
    if image.mode not in ("1", "L", "P", "I", "I;16", "I;16B"):
        raise DataError(f"{what}: is an image of mode {image.mode} (expected one number a pixel)")
    return np.asarray(make_upright(image)).astype(np.int32)


def to_array(values: Any, what: str, *, numbers: bool = False) -> npt.NDArray[Any]:
    """An array, from what numpy makes one of, or from a list of arrays or of images of PIL, of one size each.

    Args:
        what: the values are, the first words of an error.
        numbers: whether images hold numbers of classes or objects, ``(N, H, W)``; else they are pixels in
            gray ``(N, H, W)``, or in color ``(N, H, W, 3)`` where one or more are.

    Raises:
        DataError: images of several sizes, or of a mode that is not read.
    """
    if not isinstance(values, list | tuple) or not values:
        return np.asarray(values)
    if not has_pil_images(values):
        try:
            return np.stack([np.asarray(value) for value in values])
        except ValueError as error:
            raise DataError(f"{what}: examples differ in shape (expected one for all)") from error
    read = read_pil_numbers if numbers else read_pil_pixels
    arrays: list[npt.NDArray[Any]] = [
        read(image, f"{what}: image {row}") if is_pil_image(image) else np.asarray(image)
        for row, image in enumerate(values)
    ]
    color = max(array.ndim for array in arrays)
    arrays = [
        np.repeat(array[..., None], 3, axis=2) if array.ndim == 2 < color else array for array in arrays
    ]
    for row, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            sizes = f"is {times(array.shape[:2])}, but image 0 is {times(arrays[0].shape[:2])}"
            raise DataError(f"{what}: image {row} {sizes} (height, width) (expected one size for all)")
    return np.stack(arrays)


def to_arrays(given: Mapping[Any, Any], what: str) -> dict[str, npt.NDArray[Any]]:
    """Arrays by name as an ``.npz`` has them, each as :func:`to_array` makes it."""
    numbers = ("masks", "instances")
    return {
        str(name): to_array(values, f"{what}: {name}", numbers=name in numbers)
        for name, values in given.items()
    }


EXIF_ORIENTATION = 0x0112  # the EXIF tag
_TRANSPOSITIONS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # of EXIF's orientations: PIL's transpositions


def exif_orientation(image: Any) -> int:
    """Return the EXIF orientation, 1 to 8; 1, upright, where a file has none that can be read.

    PIL turns a TIFF itself.
    """
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):  # it would be decoded
        return 1
    try:
        found = image.getexif().get(EXIF_ORIENTATION, 1)
    except (OSError, ValueError, SyntaxError, KeyError, TypeError, AttributeError, struct.error):
        return 1
    return found if found in _TRANSPOSITIONS else 1


def make_upright(image: Any) -> Any:
    """A photograph as its camera was held, which the file may say next to the pixels (EXIF)."""
    turn = exif_orientation(image)
    return image.transpose(_TRANSPOSITIONS[turn]) if turn in _TRANSPOSITIONS else image


IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}
)
UNSUPPORTED_SUFFIXES = frozenset(
    {".heic", ".heif", ".avif", ".jp2", ".svg", ".psd", ".dcm", ".dng", ".cr2", ".nef"}
)


class UnreadableImage(DataError):
    """A file is no image that can be read, whatever it is for: another thing, damaged, or far too large."""


class UnequalSizes(DataError):
    """Images have several sizes, where nothing brings them to one."""


def decode_image(source: Path | io.BytesIO, what: str) -> Bytes:
    """One image as (1, H, W) or (3, H, W); a DataError, begun by ``what``, if it has no 8-bit channels."""
    with _open_image(source, what) as image:
        pixels = read_pil_pixels(image, what)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def read_instance_map(source: Path | io.BytesIO, what: str) -> npt.NDArray[np.int32]:
    """A gray image of up to 16 bits, whose values are numbers of objects or classes: ``(H, W)``."""
    with _open_image(source, what) as image:
        return read_pil_numbers(image, what)


def read_orientation(source: Path, what: str) -> int:
    """How the camera of an image file was held, 1 to 8 as EXIF counts, of which 1 is upright."""
    with _open_image(source, what) as image:
        return exif_orientation(image)


@contextmanager
def _open_image(source: Path | io.BytesIO, what: str) -> Iterator[Any]:
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


def read_image_size(source: Path, what: str) -> tuple[int, int]:
    """Height and width of an image file."""
    with _open_image(source, what) as image:
        height, width = image.height, image.width
        return (width, height) if exif_orientation(image) > 4 else (height, width)


RESIZE_HINT = "; data.size makes one size, at a node data.fit, of new data --fit"


def read_image_stack(files: Iterable[tuple[Path, str]], size: int = 0, channels: int = 0) -> npt.NDArray[Any]:
    """Image files, each with what it is for errors, of one form: ``(N, C, H, W)``; averaged to a ``size``.

    Each is brought to so many ``channels`` by itself, so that what becomes of one hangs on no other. With 0
    all get colors where some are gray and some have them. A DataError names the first that cannot be read
    and counts the others, or names one of another size than the first.
    """
    images: list[npt.NDArray[Any]] = []
    unreadable: list[str] = []  # texts alone: an error holds its half of a picture
    first = ""
    for file, what in files:
        try:
            image: npt.NDArray[Any] = decode_image(file, what)
        except UnreadableImage as error:
            unreadable.append(str(error))
            continue
        if size:
            image = resize_images(image[None], size, size)[0]
        if channels == 1 < len(image):
            image = to_gray(torch.from_numpy(_to_unit_floats(image)[None]))[0].numpy().clip(0, 1)
        elif len(image) == 1 < channels:
            image = np.broadcast_to(image, (channels, *image.shape[1:]))
        first = first or what
        if images and image.shape[1:] != images[0].shape[1:]:
            sizes = f"{times(image.shape[1:])}, but {first} is {times(images[0].shape[1:])}"
            raise UnequalSizes(f"{what}: is {sizes} (height, width) (expected one size for all{RESIZE_HINT})")
        images.append(image)
    if unreadable:
        raise UnreadableImage(f"{unreadable[0]}{more_such(len(unreadable))}")
    if len({image.dtype for image in images}) > 1:
        images = [_to_unit_floats(image) for image in images]
    most = max(len(image) for image in images)
    return np.stack([np.broadcast_to(image, (most, *image.shape[1:])) for image in images])


def _to_unit_floats(image: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Bytes as floats from 0 to 1, in the same bits as :func:`resize_images` and ``normalized`` make of them."""
    return image.astype(np.float32) / np.float32(255) if image.dtype == np.uint8 else image


def list_images(folder: Path, *, below: bool = False) -> list[Path]:
    """The images in a folder itself, or in those below it, too, by path; none where there is no such folder.

    Hidden ones are passed over, as those of a notebook's checkpoints are.

    Raises:
        DataError: an image of a form that is not read is among them, or a link to an image that is not there.
    """
    places = [folder, *(_list_subfolders(folder) if below else ())] if folder.is_dir() else []
    seen = [file for place in places for file in place.iterdir() if not file.name.startswith(".")]
    empty = sorted(file for file in seen if file.suffix.lower() in IMAGE_SUFFIXES and not file.exists())
    if empty:  # as in a git-annex whose content was not fetched: passed over, images would be missing
        raise DataError(f"{empty[0]}: is a link to nothing{more_such(len(empty))} (expected images)")
    files = sorted(file for file in seen if file.is_file())
    unread = [file for file in files if file.suffix.lower() in UNSUPPORTED_SUFFIXES]
    if unread:
        told = f"is an image that is not read{more_such(len(unread))}"
        raise DataError(f"{unread[0]}: {told} (expected {', '.join(sorted(IMAGE_SUFFIXES))})")
    return [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]


def _list_subfolders(folder: Path) -> list[Path]:
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
                raise DataError(f"{each}: is a link to a folder that holds it (expected others)")
            if each.resolve() not in met:
                met.add(each.resolve())
                found.append(each)
                places.append(each)
    return found


def list_images_recursively(folder: Path) -> list[Path]:
    """The images of a folder and of all folders in it, by path; a DataError if there are none."""
    if not (files := list_images(folder, below=True)):
        raise DataError(f"{folder}: holds no image ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return files
