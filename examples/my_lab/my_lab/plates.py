"""Images of plates from the csv file of a lab's machine: one line per plate, with label, site and pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from annotated_types import Gt

from fedstill.core.errors import DataError
from fedstill.data import ImageArrayData, Targets, find_file


@dataclass(frozen=True, kw_only=True)
class Plates(ImageArrayData):
    """Square gray images of plates, with label and site."""

    targets: ClassVar[tuple[Targets, ...]] = ("class",)
    note: ClassVar[str] = "plates as written by the lab's machine"

    file: str = "plates.csv"
    """Name of the file in data.root: a header, then one line per plate: label, site, pixels row by row."""

    white: Annotated[float, Gt(0)] = 255.0
    """Value of a white pixel; black is 0."""

    def arrays(self) -> Mapping[str, npt.ArrayLike]:
        """Return images (N, side, side) from 0 to 1, and names of labels (N,) and sites (N,)."""
        path = find_file(self, self.file)
        table = np.loadtxt(path, dtype=str, delimiter=",", skiprows=1, ndmin=2)  # (N, 2 + side * side)
        side = isqrt(table.shape[1] - 2)
        if side * side != table.shape[1] - 2:
            raise DataError(f"{path}: has {table.shape[1] - 2} pixels per plate (expected a square number)")
        pixels = table[:, 2:].astype(np.float32) / np.float32(self.white)
        return {"images": pixels.reshape(-1, side, side), "labels": table[:, 0], "site": table[:, 1]}
