"""Plates of a lab, as its reader writes them: a csv with a line a plate, which has label, site and pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from annotated_types import Gt

from fedstill.core.errors import DataError
from fedstill.data import ArrayData, Targets, find_file


@dataclass(frozen=True, kw_only=True)
class Plates(ArrayData):
    """Square gray images of plates, with what grew on them and where they were read."""

    targets: ClassVar[tuple[Targets, ...]] = ("class",)
    note: ClassVar[str] = "plates as the lab's reader wrote them"

    file: str = "plates.csv"
    """The table, in data.root: a header, then a line a plate: label, site, pixels row by row."""

    white: Annotated[float, Gt(0)] = 255.0
    """The value of white; black is 0."""

    def arrays(self) -> Mapping[str, npt.ArrayLike]:
        """All plates: images (N, side, side) from 0 to 1, labels (N,) and sites (N,) as they are called."""
        place = find_file(self, self.file)
        table = np.loadtxt(place, dtype=str, delimiter=",", skiprows=1, ndmin=2)  # (N, 2 + side * side)
        side = isqrt(table.shape[1] - 2)
        if side * side != table.shape[1] - 2:
            raise DataError(f"{place}: has {table.shape[1] - 2} pixels a plate (expected a square number)")
        pixels = table[:, 2:].astype(np.float32) / np.float32(self.white)
        return {"images": pixels.reshape(-1, side, side), "labels": table[:, 0], "site": table[:, 1]}
