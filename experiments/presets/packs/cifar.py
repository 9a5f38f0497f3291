"""CIFAR-10 and CIFAR-100 as JPEG copies, from their packs."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedstill.core.dataset import Column
from fedstill.data import ImageArrayData, Targets, find_file
from fedstill.data.images import Bytes, decode_image
from fedstill.data.raw_images import read_npz, require_array

SIDE = 32  # pixels per side of an image
ROWS, COLUMNS = 30, 20  # tiles of a mosaic, all of one class
TRAIN = 500  # first tiles of a mosaic; the other 100 are test images


@dataclass(frozen=True, kw_only=True)
class CIFAR10(ImageArrayData):
    """CIFAR-10: 32 x 32 color images of 10 classes, each a JPEG stream."""

    targets: ClassVar[tuple[Targets, ...]] = ("class",)
    title: ClassVar[str] = "cifar10"
    note: ClassVar[str] = "JPEG copy of CIFAR-10 (lossy), official split"

    def arrays(self) -> Mapping[str, npt.ArrayLike]:
        """Return all images."""
        path = find_file(self, "cifar10_jpeg.npz")
        arrays = read_npz(path)
        labels = {name: require_array(path, arrays, name) for name in ("labels", "split", "classes")}
        return {"images": np.stack(list(_images(path, arrays))), **labels}


@dataclass(frozen=True, kw_only=True)
class CIFAR100(ImageArrayData):
    """CIFAR-100: 32 x 32 color images of 100 classes, one mosaic of 600 images per class."""

    targets: ClassVar[tuple[Targets, ...]] = ("class",)
    title: ClassVar[str] = "cifar100"
    note: ClassVar[str] = (
        "JPEG copy of CIFAR-100 (lossy), a fixed split of 500 and 100 a class, not the official one"
    )

    def arrays(self) -> Mapping[str, npt.ArrayLike]:
        """Return all images by class."""
        path = find_file(self, "cifar100_mosaic.npz")
        arrays = read_npz(path)
        classes, tiles = require_array(path, arrays, "classes"), ROWS * COLUMNS
        mosaics = np.stack(list(_images(path, arrays)))  # (classes, 3, rows * 32, columns * 32)
        grid = mosaics.reshape(len(classes), 3, ROWS, SIDE, COLUMNS, SIDE).transpose(0, 2, 4, 1, 3, 5)
        return {
            "images": grid.reshape(-1, 3, SIDE, SIDE),
            "labels": np.repeat(np.arange(len(classes)), tiles),
            "split": np.tile(np.arange(tiles) >= TRAIN, len(classes)),
            "classes": classes,
        }


def _images(path: Path, arrays: Mapping[str, Column]) -> Iterator[Bytes]:
    joined = require_array(path, arrays, "jpeg").tobytes()
    for number, (start, end) in enumerate(pairwise(require_array(path, arrays, "offsets").tolist())):
        yield decode_image(io.BytesIO(joined[start:end]), f"{path}: JPEG stream {number}")
