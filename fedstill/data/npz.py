"""Arrays of an ``.npz``.

Nothing here reads a pickle: every file is opened with ``allow_pickle=False``, and an array of objects is an
error.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from fedstill.core.dataset import Column
from fedstill.core.errors import DataError
from fedstill.core.imports import first_line
from fedstill.data.raw import need

# What numpy and zipfile raise for a file that is damaged, of another format, or holds a pickle.
UNREADABLE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)

MEDMNIST = ("train", "test", "val")  # parts of its files, as "split" numbers them


def read_npz(path: Path) -> dict[str, Column]:
    """All arrays of an ``.npz``, by name.

    The files of MedMNIST, known by ``train_images``, become ``images``, ``labels`` and ``split``.

    Raises:
        DataError: a file that cannot be read or holds Python objects.
    """
    arrays: dict[str, Column] = {}
    what = str(path)
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DataError(f"{path}: holds a single array: allowed is an .npz with named arrays")
            for name in file.files:
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
    return _medmnist(path, arrays) if "train_images" in arrays else arrays


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
