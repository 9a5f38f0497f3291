"""Masks of classes: values as class indices, and what the classes are called."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.errors import DataError
from fedstill.data.rasters import resized_maps
from fedstill.data.units import Ints

MOST = 255  # classes of a mask: larger numbers are objects


def mask_classes(
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

    >>> labels, classes = mask_classes(np.array([[[0, 255]]]), "mine")
    >>> labels.tolist(), classes
    ([[[0, 1]]], ('background', 'foreground'))
    """
    odd = next((mask.dtype for mask in masks if mask.dtype.kind not in "biu"), None)
    if odd is not None:
        raise DataError(f"{what}: are {odd}: allowed are whole numbers, the class of each pixel")
    values = np.unique(np.concatenate([np.unique(mask) for mask in masks])).tolist()
    stray = None if names or gaps else _stray(values)
    if stray is not None:
        row = next(row for row, mask in enumerate(masks) if (mask == stray).any())
        where = f"{files[row]}: has" if files else f"{what}: example {row} has"
        shown = ", ".join(map(str, values[:8])) + (" ..." if len(values) > 8 else "")
        allowed = f"allowed are 0..n without gaps, or 0 and {MOST}"
        raise DataError(f"{where} value {stray}, and all masks together have {shown}: {allowed}")
    least, most = values[0], values[-1]
    white = set(values) <= {0, MOST} and most == MOST
    most = 1 if white else most
    if least < 0 or most >= (len(names) or MOST):
        allowed = f"0 to {(len(names) or MOST) - 1}, the class of a pixel"
        raise DataError(f"{what}: have values from {least} to {most}: allowed are {allowed}")
    if not names:
        names = ("background", "foreground") if most < 2 else ("background", *map(str, range(1, most + 1)))
    labels = [(mask == MOST if white else mask).astype(np.int64) for mask in masks]
    if size:
        labels = [resized_maps(torch.from_numpy(mask)[None], size, size)[0].numpy() for mask in labels]
    return np.stack(labels), names


def _stray(values: Sequence[int]) -> int | None:
    present = {*values, 0}  # no mask need show background
    if present <= {0, MOST} or min(present) < 0:
        return None
    return next((value for value in sorted(present) if value and value - 1 not in present), None)
