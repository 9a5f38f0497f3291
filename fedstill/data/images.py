"""Images and masks as arrays.

Arrays of images are resized, cut into patches, turned gray, and masks become class indices. Images of the
library PIL become upright arrays, in gray or color, on white where they are transparent. Image files are
listed and decoded, one by one or as a stack.
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
from fedstill.core.text_format import format_shape, more_suffix
from fedstill.data.stratified_sampling import Ints

Bytes = npt.NDArray[np.uint8]
Pixels = npt.NDArray[Any]  # (N, C, H, W), uint8 in 0..255 or float32
BATCH = 64  # images resized at once


# --- arrays of images -----------------------------------------------------------------------------------


def resize_images(images: Pixels, height: int, width: int) -> npt.NDArray[np.float32]:
    """Resize images ``(N, C, H, W)`` by area averaging.

    Bytes become floats, 255 becoming 1. Enlarging repeats pixels.

    >>> resize_images(np.array([[[[0, 1], [2, 3]]]], dtype=np.float32), 1, 1).item()
    1.5
    """
    scale = np.float32(255 if images.dtype == np.uint8 else 1)
    resized = np.empty((*images.shape[:2], height, width), dtype=np.float32)
    for start in range(0, len(images), BATCH):
        batch = torch.from_numpy(images[start : start + BATCH].astype(np.float32, order="C") / scale)
        resized[start : start + BATCH] = F.interpolate(batch, (height, width), mode="area").numpy()
    return resized


def resize_class_maps(maps: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize class maps ``(N, H, W)``: each pixel becomes the class with the largest area in it.

    Among equal areas the highest class wins, so a pixel that is half tumor is tumor.

    >>> resize_class_maps(torch.tensor([[[0, 1, 0, 0], [0, 1, 0, 2]]]), 1, 2).tolist()
    [[[1, 0]]]
    """
    if tuple(maps.shape[1:]) == (height, width):
        return maps
    classes = int(maps.max()) + 1
    resized = []
    for batch in torch.split(maps, BATCH):
        shares = F.interpolate(
            F.one_hot(batch, classes).permute(0, 3, 1, 2).float(), (height, width), mode="area"
        )
        # Rounded, so that equal areas stay equal in any order of summation; flipped: the highest class wins.
        resized.append(classes - 1 - (shares.flip(1) * 2**12).round().argmax(1))
    return torch.cat(resized)


def resize_instances(instances: npt.NDArray[np.int32], height: int, width: int) -> npt.NDArray[np.int32]:
    """Resize an instance map ``(H, W)`` by nearest neighbor, as instance numbers cannot be averaged.

    >>> resize_instances(np.array([[1, 1, 0, 2]], dtype=np.int32), 1, 2).tolist()
    [[1, 2]]
    """
    rows = ((np.arange(height) + 0.5) * instances.shape[0] / height).astype(np.int64)
    columns = ((np.arange(width) + 0.5) * instances.shape[1] / width).astype(np.int64)
    return np.ascontiguousarray(instances[rows[:, None], columns])


LUMA = (0.299, 0.587, 0.114)  # gray from red, green and blue (ITU-R BT.601)


def to_gray(pixels: torch.Tensor) -> torch.Tensor:
    """Return gray images ``(B, 1, H, W)`` of ``(B, C, H, W)``: luminance of three channels, else the mean."""
    channels = pixels.shape[1]
    weights = LUMA if channels == 3 else (1 / channels,) * channels
    return (pixels * torch.tensor(weights).view(-1, 1, 1)).sum(1, keepdim=True)


def patch_corners(height: int, width: int, patch: int) -> list[tuple[int, int]]:
    """Return the upper left corners ``(row, column)`` of the fewest square patches that cover an image.

    Patches are evenly spaced, and listed row by row.

    >>> patch_corners(256, 320, 256)
    [(0, 0), (0, 64)]
    >>> patch_corners(4, 9, 4)
    [(0, 0), (0, 2), (0, 5)]
    """
    return [(top, left) for top in _patch_offsets(height, patch) for left in _patch_offsets(width, patch)]


def _patch_offsets(side: int, patch: int) -> list[int]:
    count = -(-side // patch)
    return [index * (side - patch) // max(count - 1, 1) for index in range(count)]


def pad_to_patch(image: npt.NDArray[Any], patch: int) -> npt.NDArray[Any]:
    """Pad an image ``(..., H, W)`` by reflection, at the bottom and right, to at least one patch per side.

    >>> pad_to_patch(np.array([[1, 2, 3]]), 4).tolist()
    [[1, 2, 3, 3], [1, 2, 3, 3], [1, 2, 3, 3], [1, 2, 3, 3]]
    """
    height, width = image.shape[-2:]
    padding = [(0, 0)] * (image.ndim - 2) + [(0, max(patch - height, 0)), (0, max(patch - width, 0))]
    return np.pad(image, padding, mode="symmetric") if max(padding) > (0, 0) else image


# --- masks ----------------------------------------------------------------------------------------------

MASK_MAX = 255  # largest class of a mask: larger numbers are instances


def encode_masks(
    masks: Sequence[npt.NDArray[np.generic]] | npt.NDArray[np.generic],
    source: str,
    names: tuple[str, ...] = (),
    *,
    gaps: bool = False,
    size: int = 0,
    files: Sequence[str] = (),
) -> tuple[Ints, tuple[str, ...]]:
    """Return masks as class indices ``(N, H, W)``, and the class names.

    In masks of 0 and 255 only, 255 is class 1.

    Args:
        masks: N masks ``(H, W)`` of whole numbers.
        source: start of error messages.
        names: class names; empty: background and foreground, or numbers if there are more classes.
        gaps: allow missing class numbers if classes have no names, as a node may lack a class. Otherwise gaps
            are refused, since one stray pixel would create classes that do not exist.
        size: wanted height and width, by majority; 0: all masks have one size already.
        files: file of each mask, for errors.

    Raises:
        DataError: masks are not whole numbers, are outside the classes, or have gaps between classes.

    >>> labels, classes = encode_masks(np.array([[[0, 255]]]), "mine")
    >>> labels.tolist(), classes
    ([[[0, 1]]], ('background', 'foreground'))
    """
    wrong_dtype = next((mask.dtype for mask in masks if mask.dtype.kind not in "biu"), None)
    if wrong_dtype is not None:
        raise DataError(f"{source}: are {wrong_dtype} (expected whole numbers, the class of each pixel)")
    values = np.unique(np.concatenate([np.unique(mask) for mask in masks])).tolist()
    gap_value = None if names or gaps else _first_value_after_gap(values)
    if gap_value is not None:
        row = next(row for row, mask in enumerate(masks) if (mask == gap_value).any())
        position = f"{files[row]}: has" if files else f"{source}: example {row} has"
        shown_values = ", ".join(map(str, values[:8])) + (" ..." if len(values) > 8 else "")
        problem = f"{position} value {gap_value}, and all masks together have {shown_values}"
        raise DataError(f"{problem} (expected 0..n without gaps, or 0 and {MASK_MAX})")
    lowest, highest = values[0], values[-1]
    is_binary = set(values) <= {0, MASK_MAX} and highest == MASK_MAX
    highest = 1 if is_binary else highest
    if lowest < 0 or highest >= (len(names) or MASK_MAX):
        expected = f"0 to {(len(names) or MASK_MAX) - 1}, the class of a pixel"
        raise DataError(f"{source}: have values from {lowest} to {highest} (expected {expected})")
    if not names:
        names = (
            ("background", "foreground") if highest < 2 else ("background", *map(str, range(1, highest + 1)))
        )
    labels = [(mask == MASK_MAX if is_binary else mask).astype(np.int64) for mask in masks]
    if size:
        labels = [resize_class_maps(torch.from_numpy(mask)[None], size, size)[0].numpy() for mask in labels]
    return np.stack(labels), names


def _first_value_after_gap(values: Sequence[int]) -> int | None:
    present = {*values, 0}  # masks may lack background
    if present <= {0, MASK_MAX} or min(present) < 0:
        return None
    return next((value for value in sorted(present) if value and value - 1 not in present), None)


# --- PIL images -----------------------------------------------------------------------------------------

_GRAY_MODES = ("1", "L", "LA", "La")
_ALPHA_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
EXIF_ORIENTATION = 0x0112  # EXIF tag
_TRANSPOSITIONS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # EXIF orientation to PIL transposition


def is_pil_image(value: Any) -> bool:
    """Return whether a value is a PIL image."""
    return hasattr(value, "convert") and hasattr(value, "getbands")


def has_pil_images(values: Any) -> bool:
    """Return whether a value is a list that holds PIL images."""
    return isinstance(values, list | tuple) and any(map(is_pil_image, values))


def read_pil_pixels(image: Any, source: str) -> Bytes:
    """Return the pixels of a PIL image, upright: gray ``(H, W)`` or color ``(H, W, 3)`` uint8.

    Transparent pixels are blended with white by their alpha, as viewers show them.

    Raises:
        DataError: the image does not have 8 bits per channel.
    """
    if image.mode.startswith(("I", "F")):
        advice = "divide by the largest possible value and store floats from 0 to 1 in an .npz"
        raise DataError(f"{source}: is an image of mode {image.mode} (expected 8 bits a channel; {advice})")
    image = make_upright(image)
    mode = "L" if image.mode in _GRAY_MODES else "RGB"
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        from PIL import Image

        transparent = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", transparent.size, "white"), transparent)
    return np.asarray(image.convert(mode))


def read_pil_numbers(image: Any, source: str) -> npt.NDArray[np.int32]:
    """Return the class or instance numbers of a PIL image, upright: ``(H, W)`` int32.

    Palettes are ignored.

    Raises:
        DataError: the image has colors or floats.
    """
    if image.mode not in ("1", "L", "P", "I", "I;16", "I;16B"):
        raise DataError(f"{source}: is an image of mode {image.mode} (expected one number a pixel)")
    return np.asarray(make_upright(image)).astype(np.int32)


def exif_orientation(image: Any) -> int:
    """Return the EXIF orientation, 1 to 8; 1 (upright) if the file has none that can be read.

    PIL itself rotates TIFF files.
    """
    if image.format == "TIFF" or (
        image.format == "PNG" and "exif" not in image.info
    ):  # looking would decode it
        return 1
    try:
        orientation = image.getexif().get(EXIF_ORIENTATION, 1)
    except (OSError, ValueError, SyntaxError, KeyError, TypeError, AttributeError, struct.error):
        return 1
    return orientation if orientation in _TRANSPOSITIONS else 1


def make_upright(image: Any) -> Any:
    """Rotate a photograph as its EXIF orientation says."""
    orientation = exif_orientation(image)
    return image.transpose(_TRANSPOSITIONS[orientation]) if orientation in _TRANSPOSITIONS else image


def to_array(values: Any, source: str, *, numbers: bool = False) -> npt.NDArray[Any]:
    """Return an array of array-like values, or of a list of arrays or PIL images of equal size.

    Args:
        values: anything numpy accepts, or a list with PIL images.
        source: start of error messages.
        numbers: if True, images hold class or instance numbers, ``(N, H, W)``; else pixels, gray ``(N, H,
            W)``, or color ``(N, H, W, 3)`` if any image has color.

    Raises:
        DataError: images differ in size or have an unsupported mode.
    """
    if not isinstance(values, list | tuple) or not values:
        return np.asarray(values)
    if not has_pil_images(values):
        try:
            return np.stack([np.asarray(value) for value in values])
        except ValueError as error:
            raise DataError(f"{source}: examples differ in shape (expected one for all)") from error
    convert = read_pil_numbers if numbers else read_pil_pixels
    arrays: list[npt.NDArray[Any]] = [
        convert(image, f"{source}: image {row}") if is_pil_image(image) else np.asarray(image)
        for row, image in enumerate(values)
    ]
    max_ndim = max(array.ndim for array in arrays)
    arrays = [
        np.repeat(array[..., None], 3, axis=2) if array.ndim == 2 < max_ndim else array for array in arrays
    ]
    for row, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            sizes = f"is {format_shape(array.shape[:2])}, but image 0 is {format_shape(arrays[0].shape[:2])}"
            raise DataError(f"{source}: image {row} {sizes} (height, width) (expected one size for all)")
    return np.stack(arrays)


def to_arrays(arrays: Mapping[Any, Any], source: str) -> dict[str, npt.NDArray[Any]]:
    """Return arrays named as in an ``.npz``, each converted by :func:`to_array`."""
    number_arrays = ("masks", "instances")
    return {
        str(name): to_array(values, f"{source}: {name}", numbers=name in number_arrays)
        for name, values in arrays.items()
    }


# --- image files ----------------------------------------------------------------------------------------

IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}
)
UNSUPPORTED_SUFFIXES = frozenset(
    {".heic", ".heif", ".avif", ".jp2", ".svg", ".psd", ".dcm", ".dng", ".cr2", ".nef"}
)
RESIZE_HINT = "; data.size makes one size, at a node data.fit, of new data --fit"


class UnreadableImage(DataError):
    """A file cannot be read as an image: it has another format, is damaged, or is far too large."""


class UnequalSizes(DataError):
    """Images differ in size, and no option resizes them."""


def decode_image(source: Path | io.BytesIO, label: str) -> Bytes:
    """Decode one image file to ``(1, H, W)`` or ``(3, H, W)`` uint8.

    Raises:
        DataError: it cannot be read or does not have 8-bit channels; the message starts with ``label``.
    """
    with _open_image(source, label) as image:
        pixels = read_pil_pixels(image, label)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def read_instance_map(source: Path | io.BytesIO, label: str) -> npt.NDArray[np.int32]:
    """Read a gray image of up to 16 bits that holds class or instance numbers: ``(H, W)`` int32."""
    with _open_image(source, label) as image:
        return read_pil_numbers(image, label)


def read_orientation(source: Path, label: str) -> int:
    """Return the EXIF orientation of an image file, 1 to 8; 1 is upright."""
    with _open_image(source, label) as image:
        return exif_orientation(image)


def read_image_size(source: Path, label: str) -> tuple[int, int]:
    """Return height and width of an image file."""
    with _open_image(source, label) as image:
        height, width = image.height, image.width
        return (width, height) if exif_orientation(image) > 4 else (height, width)


@contextmanager
def _open_image(source: Path | io.BytesIO, label: str) -> Iterator[Any]:
    from PIL import Image

    try:
        with Image.open(source) as image:
            yield image
    except DataError:
        raise
    # Pillow raises SyntaxError for a damaged PNG.
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UnreadableImage(f"{label}: cannot be read as an image ({reason})") from error


def read_image_stack(files: Iterable[tuple[Path, str]], size: int = 0, channels: int = 0) -> npt.NDArray[Any]:
    """Read image files into one array ``(N, C, H, W)``.

    Args:
        files: path and label (start of error messages) of each.
        size: height and width to which images are averaged; 0: keep their size.
        channels: number of channels to which each image is converted on its own, so that no image affects
            another; 0: all become color if some are.

    Raises:
        UnreadableImage: names the first file that cannot be read, and counts the others.
        UnequalSizes: names a file whose size differs from the first.
    """
    images: list[npt.NDArray[Any]] = []
    unreadable: list[str] = []  # only messages, as the exceptions keep image data alive
    first = ""
    for file, label in files:
        try:
            image: npt.NDArray[Any] = decode_image(file, label)
        except UnreadableImage as error:
            unreadable.append(str(error))
            continue
        if size:
            image = resize_images(image[None], size, size)[0]
        if channels == 1 < len(image):
            image = to_gray(torch.from_numpy(_to_unit_floats(image)[None]))[0].numpy().clip(0, 1)
        elif len(image) == 1 < channels:
            image = np.broadcast_to(image, (channels, *image.shape[1:]))
        first = first or label
        if images and image.shape[1:] != images[0].shape[1:]:
            sizes = f"{format_shape(image.shape[1:])}, but {first} is {format_shape(images[0].shape[1:])}"
            raise UnequalSizes(
                f"{label}: is {sizes} (height, width) (expected one size for all{RESIZE_HINT})"
            )
        images.append(image)
    if unreadable:
        raise UnreadableImage(f"{unreadable[0]}{more_suffix(len(unreadable))}")
    if len({image.dtype for image in images}) > 1:
        images = [_to_unit_floats(image) for image in images]
    max_channels = max(len(image) for image in images)
    return np.stack([np.broadcast_to(image, (max_channels, *image.shape[1:])) for image in images])


def _to_unit_floats(image: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return bytes as floats in [0, 1], bit-identical to :func:`resize_images` and ``normalized``."""
    return image.astype(np.float32) / np.float32(255) if image.dtype == np.uint8 else image


def list_images(folder: Path, *, recursive: bool = False) -> list[Path]:
    """Return the image files of a folder, sorted by path; none if the folder does not exist.

    Hidden files and folders are skipped.

    Args:
        recursive: include all subfolders.

    Raises:
        DataError: a file has an unsupported image format, or is a broken link to an image.
    """
    folders = [folder, *(_list_subfolders(folder) if recursive else ())] if folder.is_dir() else []
    candidates = [
        file for directory in folders for file in directory.iterdir() if not file.name.startswith(".")
    ]
    broken_links = sorted(
        file for file in candidates if file.suffix.lower() in IMAGE_SUFFIXES and not file.exists()
    )
    if broken_links:  # such as git-annex files that were not fetched
        raise DataError(
            f"{broken_links[0]}: is a broken link{more_suffix(len(broken_links))} (expected images)"
        )
    files = sorted(file for file in candidates if file.is_file())
    unsupported = [file for file in files if file.suffix.lower() in UNSUPPORTED_SUFFIXES]
    if unsupported:
        problem = f"has an unsupported image format{more_suffix(len(unsupported))}"
        raise DataError(f"{unsupported[0]}: {problem} (expected {', '.join(sorted(IMAGE_SUFFIXES))})")
    return [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]


def list_images_recursively(folder: Path) -> list[Path]:
    """Return the image files of a folder and its subfolders, sorted by path.

    Raises:
        DataError: there are none.
    """
    if not (files := list_images(folder, recursive=True)):
        raise DataError(f"{folder}: holds no image ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return files


def _list_subfolders(folder: Path) -> list[Path]:
    """Return all subfolders, through links too, each once; hidden ones are skipped.

    Raises:
        DataError: a folder cannot be read, or links to a folder that contains it, which would mix up classes.
    """
    visited, pending, subfolders = set[Path](), [folder], list[Path]()
    while pending:
        current = pending.pop()
        try:
            children = [
                child for child in sorted(current.iterdir()) if child.is_dir() and child.name[0] != "."
            ]
        except OSError as error:
            raise DataError(f"{current}: cannot be read ({error.strerror})") from error
        for child in children:
            if folder.resolve().is_relative_to(child.resolve()):
                raise DataError(f"{child}: is a link to a folder that contains it")
            if child.resolve() not in visited:
                visited.add(child.resolve())
                subfolders.append(child)
                pending.append(child)
    return subfolders
