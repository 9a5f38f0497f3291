"""Readers: from a file or a folder to plain arrays, before anything is divided or normalised.

Nothing here reads a pickle: every ``.npz`` is opened with ``allow_pickle=False``, and an array of
objects is an error.
"""

from __future__ import annotations

import io
import os
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import Column, check_labels
from fedstill.core.errors import DataError
from fedstill.data.images import SUFFIXES, Bytes, decoded, image_files, one_line

Images = npt.NDArray[Any]  # (N, C, H, W), uint8 or float32 in [0, 1]

# What numpy and zipfile raise for a file that is damaged, of another format, or holds a pickle.
UNREADABLE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)

MOST_CLASSES = 65_536  # without names; a larger label is a patient's number, not a class

SIDE = 32  # CIFAR images are 32 x 32
ROWS, COLUMNS = 30, 20  # tiles of a mosaic, all of one class
MOSAIC_TRAIN = 500  # of its tiles, these come first; the other 100 are for testing


@dataclass(frozen=True, eq=False)
class Raw:
    """What a source holds, as it is."""

    images: Images  # (N, C, H, W)
    labels: npt.NDArray[np.int64]  # (N,); findings (N, C) of -1, 0 and 1; maps (N, H, W)
    classes: tuple[str, ...]
    test: npt.NDArray[np.bool_] | None = None  # (N,), None where the source has no split
    columns: Mapping[str, Column] = field(default_factory=dict)  # (N,) each


def read_npz(path: Path, *, pixels: bool = True) -> Raw:
    """Read images and labels from one ``.npz``.

    Three forms are known by their keys. ``images`` and ``labels``: arrays, images (N, H, W),
    (N, H, W, C) or (N, C, H, W) with at most 4 channels, uint8 or floats in [0, 1]. ``jpeg``,
    ``offsets`` and ``labels``: stream i is ``jpeg[offsets[i]:offsets[i + 1]]``, 32 x 32 RGB.
    ``jpeg``, ``offsets`` and ``classes``: one mosaic of 600 tiles a class, the last 100 for testing.
    JPEG is decoded once and kept in the cache folder.

    All may have ``split`` (0 train, 1 test) and ``classes`` (names; without them there are as many
    as the largest label says). Any further (N,) arrays become columns.

    Args:
        path: of the file.
        pixels: whether floats must lie in [0, 1]; without it they are taken as they are.

    Raises:
        DataError: a file that cannot be read, keys that are missing or of another form, values
            outside what is allowed.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "two.npz"
    ...     np.savez(path, images=np.zeros((2, 8, 4), dtype=np.uint8), labels=[0, 1], site=["a", "b"])
    ...     raw = read_npz(path)
    >>> raw.images.shape, raw.classes, raw.columns["site"].tolist()
    ((2, 1, 8, 4), ('0', '1'), ['a', 'b'])
    """
    arrays = _arrays(path, jpeg=False)
    if "offsets" not in arrays:
        return from_arrays(path, arrays, pixels=pixels)
    return _streams(path, arrays) if "labels" in arrays else _mosaics(path, arrays)


def read_folder(path: Path) -> Raw:
    """Read a folder of images by class.

    Either ``train/<class>/*`` with ``test/<class>/*``, or ``<class>/*``. Classes are the names
    of the folders, in sorted order; files that end in no image suffix are passed over. All
    images have one size, and all are grey (1 channel) or all in colour (3; alpha is dropped).

    Raises:
        DataError: no classes, an empty class, a test class that is not in train, an image that
            cannot be read or has another size or kind than the first; the line names the file.
    """
    if (path / "train").is_dir() and (path / "test").is_dir():
        classes = _class_names(path / "train")
        unknown = sorted(set(_class_names(path / "test")) - set(classes))
        if unknown:
            raise DataError(f"{path / 'test' / unknown[0]}: has no folder of that name in {path / 'train'}")
        parts = [(path / "train", False), (path / "test", True)]
    else:
        classes = _class_names(path)
        parts = [(path, False)]

    images: list[Bytes] = []
    labels: list[int] = []
    test: list[bool] = []
    first: Path | None = None
    for part, is_test in parts:
        for label, name in enumerate(classes):
            files = image_files(part / name)
            if not files and not is_test:
                raise DataError(f"{part / name}: holds no image ({', '.join(sorted(SUFFIXES))})")
            for file in files:
                image = decoded(file, str(file))  # (C, H, W)
                first = first or file
                if images and image.shape != images[0].shape:
                    raise DataError(
                        f"{file}: is {_size(image)}, but {first} is {_size(images[0])}: "
                        "allowed is one size for all"
                    )
                images.append(image)
                labels.append(label)
                test.append(is_test)
    return Raw(
        np.stack(images),
        np.array(labels, dtype=np.int64),
        classes,
        np.array(test) if len(parts) == 2 else None,
    )


def _arrays(path: Path, jpeg: bool) -> dict[str, Column]:
    """The array ``jpeg`` of an .npz, or all others: a large array is read only to be decoded."""
    arrays: dict[str, Column] = {}
    what = str(path)
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DataError(f"{path}: holds a single array: allowed is an .npz with named arrays")
            for name in file.files:
                if (name == "jpeg") == jpeg:
                    what = f"{path}: array {name!r}"
                    arrays[name] = np.asarray(file[name])
    except DataError:
        raise
    except UNREADABLE as error:
        # numpy takes a file that it does not know for a pickle.
        unknown = "Python objects or an unknown format; pickle is never read"
        raise DataError(
            f"{what} cannot be read ({unknown if 'pickle' in str(error) else one_line(error)})"
        ) from error
    return arrays


def from_arrays(path: Path, arrays: Mapping[str, Column], *, pixels: bool = True) -> Raw:
    """Arrays as an ``.npz`` of the form ``images`` and ``labels`` has them, checked.

    Args:
        path: where they come from, for errors.
        arrays: by name.
        pixels: whether floats must lie in [0, 1].

    Raises:
        DataError: as :func:`read_npz`.
    """
    images = image_array(path, arrays, pixels=pixels)
    return _described(path, images, need(path, arrays, "labels"), arrays)


def with_numbers(arrays: Mapping[str, Column]) -> dict[str, Column]:
    """Arrays whose labels are numbers: where they are names, these become the classes.

    >>> found = with_numbers({"labels": np.array(["dog", "cat", "dog"])})
    >>> found["labels"].tolist(), found["classes"].tolist()
    ([1, 0, 1], ['cat', 'dog'])
    """
    if "labels" not in arrays or arrays["labels"].dtype.kind != "U" or arrays["labels"].ndim != 1:
        return dict(arrays)
    labels, classes = by_name([str(name) for name in arrays["labels"]])
    return {**arrays, "labels": labels, "classes": np.array(classes)}


def by_name(names: Sequence[str]) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Labels given as texts: their numbers, and the classes in order, numbers as numbers."""
    classes = sorted(set(names), key=lambda name: (int(name) if name.isdecimal() else -1, name))
    place = {name: number for number, name in enumerate(classes)}
    return np.array([place[name] for name in names], dtype=np.int64), tuple(classes)


def image_array(path: Path, arrays: Mapping[str, Column], *, pixels: bool = True) -> Images:
    """The array ``images`` as ``(N, C, H, W)``, uint8 or float32.

    Raises:
        DataError: it is missing or of another form, or has NaN or, with ``pixels``, values outside 0..1.
    """
    images = _channels_first(path, need(path, arrays, "images"))
    if images.dtype.kind == "f" and pixels:
        bad = np.flatnonzero(~((images >= 0) & (images <= 1)).all(axis=(1, 2, 3)))  # NaN is bad too
        if len(bad):
            raise DataError(
                f"{path}: {len(bad)} images hold NaN or values outside 0..1, the first is image {bad[0]}"
            )
    if images.dtype.kind == "f":
        images = images.astype(np.float32)
    return images


def _streams(path: Path, arrays: Mapping[str, Column]) -> Raw:
    shape = (arrays["labels"].size, 3, SIDE, SIDE)

    def decode() -> Bytes:
        images = np.empty(shape, dtype=np.uint8)
        for i, image in enumerate(_jpegs(path, arrays["offsets"], shape[0], SIDE, SIDE)):
            images[i] = image
        return images

    return _described(path, _cached(path, decode, shape), arrays["labels"], arrays)


def _mosaics(path: Path, arrays: Mapping[str, Column]) -> Raw:
    classes, tiles = need(path, arrays, "classes").size, ROWS * COLUMNS
    shape = (classes * tiles, 3, SIDE, SIDE)

    def decode() -> Bytes:
        images = np.empty((classes, tiles, 3, SIDE, SIDE), dtype=np.uint8)
        for label, mosaic in enumerate(_jpegs(path, arrays["offsets"], classes, ROWS * SIDE, COLUMNS * SIDE)):
            grid = mosaic.reshape(3, ROWS, SIDE, COLUMNS, SIDE).transpose(1, 3, 0, 2, 4)
            images[label] = grid.reshape(tiles, 3, SIDE, SIDE)
        return images.reshape(shape)

    labels = np.repeat(np.arange(classes), tiles)
    test = np.tile(np.arange(tiles) >= MOSAIC_TRAIN, classes)
    return _described(path, _cached(path, decode, shape), labels, {**arrays, "split": test})


def _jpegs(path: Path, offsets: Column, count: int, height: int, width: int) -> Iterator[Bytes]:
    """The JPEG streams of a file, one after another, each (3, height, width)."""
    if offsets.shape != (count + 1,) or offsets.dtype.kind not in "iu":
        raise DataError(
            f"{path}: offsets are {offsets.dtype} of shape {offsets.shape}: "
            f"allowed are {count + 1} whole numbers for {count} JPEG streams"
        )
    joined = need(path, _arrays(path, jpeg=True), "jpeg").tobytes()
    for i in range(count):
        what = f"{path}: JPEG stream {i}"
        image = decoded(io.BytesIO(joined[int(offsets[i]) : int(offsets[i + 1])]), what)
        if image.shape != (3, height, width):
            raise DataError(f"{what} is {_size(image)}: allowed is {height} x {width} colour")
        yield image


def _described(path: Path, images: Images, labels: Column, arrays: Mapping[str, Column]) -> Raw:
    """Check what all forms share: labels, split, class names, columns."""
    if labels.ndim != 1 or labels.dtype.kind not in "biu":
        raise DataError(
            f"{path}: labels are {labels.dtype} of shape {labels.shape}: "
            "allowed is one whole number per image"
        )
    count = len(labels)
    if count != len(images) or count == 0:
        raise DataError(
            f"{path}: {len(images)} images and {count} labels: allowed is one label each, and one or more"
        )
    labels = labels.astype(np.int64)
    if "classes" in arrays:
        names = arrays["classes"]
        if names.ndim != 1 or names.dtype.kind != "U":
            raise DataError(
                f"{path}: classes are {names.dtype} of shape {names.shape}: allowed is one text per class"
            )
        classes = tuple(str(name) for name in names)
    else:
        largest = max(int(labels.max()), 0)
        if largest >= MOST_CLASSES:
            raise DataError(
                f"{path}: label {largest} with no array 'classes': allowed is below {MOST_CLASSES}"
            )
        classes = tuple(str(label) for label in range(largest + 1))
    check_labels(torch.from_numpy(labels), len(classes), str(path))

    test = None
    if "split" in arrays:
        part = arrays["split"]
        if part.shape != (count,) or not np.isin(part, (0, 1)).all():
            raise DataError(f"{path}: split is not 0 (train) or 1 (test) for each of the {count} images")
        test = part == 1
    known = {"images", "labels", "split", "classes", "offsets"}
    columns = {name: a for name, a in arrays.items() if name not in known and a.shape == (count,)}
    return Raw(images, labels, classes, test, columns)


def _channels_first(path: Path, images: Images) -> Images:
    """(N, H, W), (N, H, W, C) or (N, C, H, W) as (N, C, H, W), without a copy."""
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise DataError(f"{path}: images are {images.dtype}: allowed is uint8, or floats in [0, 1]")
    if images.ndim == 3:
        return images[:, None]
    last = images.ndim == 4 and 1 <= images.shape[3] <= 4
    first = images.ndim == 4 and 1 <= images.shape[1] <= 4
    if last == first:  # neither, or it cannot be told
        raise DataError(
            f"{path}: images are of shape {images.shape}: allowed is (N, H, W), (N, H, W, C) or (N, C, H, W) "
            "with 1 to 4 channels, and H and W above 4"
        )
    return images.transpose(0, 3, 1, 2) if last else images


def arrays_of(path: Path) -> dict[str, Column]:
    """All arrays of an ``.npz``.

    Raises:
        DataError: it cannot be read, or holds Python objects.
    """
    return {**_arrays(path, jpeg=False), **_arrays(path, jpeg=True)}


def need(path: Path, arrays: Mapping[str, Column], name: str) -> Column:
    """One of them.

    Raises:
        DataError: there is none of that name.
    """
    if name not in arrays:
        raise DataError(f"{path}: has no array {name!r}, only {', '.join(sorted(arrays)) or 'nothing'}")
    return arrays[name]


def _class_names(folder: Path) -> tuple[str, ...]:
    names = tuple(sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")))
    if not names:
        raise DataError(f"{folder}: has no folders: allowed is one folder of images per class")
    if {"images", "masks"} <= set(names):
        raise DataError(
            f"{folder}: this looks like images and masks: task segmentation (or instances) reads these, and "
            "task classification one folder of images per class"
        )
    return names


def _size(image: Bytes) -> str:
    return f"{image.shape[1]} x {image.shape[2]} {'grey' if image.shape[0] == 1 else 'colour'}"


def cache_folder() -> Path:
    """Where decoded images are kept: FEDSTILL_CACHE, else fedstill in XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("FEDSTILL_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedstill"


def _cached(source: Path, decode: Callable[[], Bytes], shape: tuple[int, ...]) -> Bytes:
    """``decode()``, kept on disk under the source's name, size and time of change.

    A cache that cannot be read or has another shape is made again. A folder that cannot be
    written costs a warning and the next decoding, not the run.
    """
    stat = source.stat()
    entry = cache_folder() / f"{source.stem}-{stat.st_size}-{stat.st_mtime_ns}.npz"
    try:
        images = need(entry, _arrays(entry, jpeg=False), "images")  # reading checks zip's CRC
        if images.shape == shape and images.dtype == np.uint8:
            return images
    except DataError:
        pass  # not there, or broken
    images = decode()
    try:
        _write(entry, images)
    except OSError as error:
        text = f"decoded images are not kept in {entry.parent}: {one_line(error)}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return images


def _write(entry: Path, images: Bytes) -> None:
    """Write in full beside the entry, then rename: a reader meets all of it or none."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=entry.parent, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, images=images)
        os.replace(name, entry)
    finally:
        Path(name).unlink(missing_ok=True)  # still there only if it was not finished
