"""Arrays of an ``.npz``, with images that are kept as JPEG streams decoded once.

Nothing here reads a pickle: every file is opened with ``allow_pickle=False``, and an array of objects is an
error.
"""

from __future__ import annotations

import io
import os
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from fedstill.core.dataset import Column
from fedstill.core.errors import DataError
from fedstill.core.imports import first_line
from fedstill.core.words import times
from fedstill.data.images import Bytes, decoded
from fedstill.data.raw import need

# What numpy and zipfile raise for a file that is damaged, of another format, or holds a pickle.
UNREADABLE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)

MEDMNIST = ("train", "test", "val")  # parts of its files, as "split" numbers them

SIDE = 32  # CIFAR images are 32 x 32
ROWS, COLUMNS = 30, 20  # tiles of a mosaic, all of one class
MOSAIC_TRAIN = 500  # of its tiles, these come first; the other 100 are for testing


def read_npz(path: Path) -> dict[str, Column]:
    """All arrays of an ``.npz``, by name.

    Images may be JPEG streams, decoded once and kept in the cache folder: with ``jpeg``, ``offsets`` and
    ``labels``, stream i is ``jpeg[offsets[i]:offsets[i + 1]]``, 32 x 32 RGB; with ``jpeg``, ``offsets``
    and ``classes`` there is one mosaic of 600 tiles a class, the last 100 for testing.

    The files of MedMNIST, known by ``train_images``, become ``images``, ``labels`` and ``split``.

    Raises:
        DataError: a file that cannot be read or holds Python objects, streams of another form.
    """
    arrays = _arrays(path, jpeg=False)
    if "train_images" in arrays:
        return _medmnist(path, arrays)
    if "offsets" not in arrays:
        return arrays
    return _streams(path, arrays) if "labels" in arrays else _mosaics(path, arrays)


def _medmnist(path: Path, arrays: dict[str, Column]) -> dict[str, Column]:
    """The three parts of MedMNIST's files in one, of which ``split`` tells them apart."""
    images, labels = (
        np.concatenate([need(path, arrays, f"{part}_{name}") for part in MEDMNIST])
        for name in ("images", "labels")
    )
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    split = np.repeat(np.arange(len(MEDMNIST)), [len(arrays[f"{part}_images"]) for part in MEDMNIST])
    return {"images": images, "labels": labels, "split": split}


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
            f"{what} cannot be read ({unknown if 'pickle' in str(error) else first_line(error)})"
        ) from error
    return arrays


def _streams(path: Path, arrays: dict[str, Column]) -> dict[str, Column]:
    shape = (arrays["labels"].size, 3, SIDE, SIDE)

    def decode() -> Bytes:
        images = np.empty(shape, dtype=np.uint8)
        for i, image in enumerate(_jpegs(path, arrays["offsets"], shape[0], SIDE, SIDE)):
            images[i] = image
        return images

    return {**arrays, "images": _cached(path, decode, shape)}


def _mosaics(path: Path, arrays: dict[str, Column]) -> dict[str, Column]:
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
    return {**arrays, "images": _cached(path, decode, shape), "labels": labels, "split": test}


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
            raise DataError(f"{what} is {times(image.shape)}: allowed is 3 x {height} x {width}")
        yield image


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
        text = f"decoded images are not kept in {entry.parent}: {first_line(error)}"
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
