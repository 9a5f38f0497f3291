"""Masks of classes: values as class indices, and what the classes are called."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.errors import DataError
from fedstill.data.rasters import resized_maps

MOST = 255  # classes of a mask: larger numbers are objects


def joined_masks(
    maps: Sequence[npt.NDArray[np.int64]], what: str, size: int, whose: Sequence[str], *, gaps: bool = False
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Masks of one size, ``(N, H, W)``, and the names of their classes.

    Args:
        maps: N masks.
        what: they are, the first words of an error.
        size: height and width wanted; 0: all have one size already.
        whose: the file of each, N.
        gaps: as :func:`mask_classes` takes it.

    Raises:
        DataError: they are no masks of classes.
    """
    values = np.unique(np.concatenate([np.unique(mask) for mask in maps]))
    odd = None if gaps else stray(values)
    if odd is not None:
        first = next(file for mask, file in zip(maps, whose, strict=True) if (mask == odd).any())
        raise DataError(f"{first}: has value {odd}, and all masks together {_gap(values)}")
    if not size:
        return mask_classes(np.stack(maps), what, (), values, gaps=gaps)
    parts = [mask_classes(mask, what, (), values, gaps=gaps) for mask in maps]
    small = [resized_maps(torch.from_numpy(mask)[None], size, size)[0].numpy() for mask, _ in parts]
    return np.stack(small), parts[0][1]


def mask_classes(
    masks: npt.NDArray[np.generic],
    what: str,
    names: tuple[str, ...],
    values: npt.NDArray[np.generic] | None = None,
    *,
    gaps: bool = False,
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Masks as class indices, and the classes' names; 255 beside nothing but 0 is class 1.

    Args:
        masks: whole numbers of any shape.
        what: they are, the first words of an error.
        names: of the classes; empty: background, foreground, or numbers where there are more.
        values: those that occur in all masks, if these are only some.
        gaps: whether numbers of classes without names may be missing, as where a node has not every class of
            a federation; elsewhere one stray pixel would make classes that do not exist.

    Raises:
        DataError: not whole numbers, outside the classes, or with gaps between them.

    >>> masks, classes = mask_classes(np.array([[0, 255]]), "mine", ())
    >>> masks.tolist(), classes
    ([[0, 1]], ('background', 'foreground'))
    """
    if masks.dtype.kind not in "biu":
        raise DataError(f"{what}: are {masks.dtype}: allowed are whole numbers, the class of each pixel")
    values = np.unique(masks) if values is None else values
    odd = None if names or gaps else stray(values)
    if odd is not None:
        row = int(np.flatnonzero((masks == odd).reshape(len(masks), -1).any(1))[0])
        raise DataError(f"{what}: example {row} has value {odd}, and all masks together {_gap(values)}")
    least, most = int(values.min()), int(values.max())
    if most == MOST and set(values.tolist()) <= {0, MOST}:
        masks, most = masks == MOST, 1
    if least < 0 or most >= (len(names) or MOST):
        allowed = f"0 to {(len(names) or MOST) - 1}"
        raise DataError(
            f"{what}: have values from {least} to {most}: allowed are {allowed}, the class of a pixel"
        )
    if not names:
        count = max(most + 1, 2)
        names = ("background", "foreground") if count == 2 else ("background", *map(str, range(1, count)))
    return masks.astype(np.int64), names


def stray(values: npt.NDArray[np.generic]) -> int | None:
    """The first value of masks beyond a gap; None: 0..n without gaps, 0 and 255, or negative ones.

    >>> stray(np.array([0, 1, 7])), stray(np.array([1, 2])), stray(np.array([0, 255]))
    (7, None, None)
    """
    present = set(values.tolist()) | {0}  # no mask need show background
    if present <= {0, MOST} or min(present) < 0:
        return None
    return next((value for value in sorted(present) if value and value - 1 not in present), None)


def _gap(values: npt.NDArray[np.generic]) -> str:
    known = [str(value) for value in values.tolist()]
    listed = ", ".join(known[:8]) + (" ..." if len(known) > 8 else "")
    return f"have {listed}: allowed are 0..n without gaps, or 0 and {MOST}"
