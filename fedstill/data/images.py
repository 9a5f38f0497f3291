"""Images and masks as arrays: of one size from those of another, in patches that cover them, grey from
colours, values as classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fedstill.core.errors import DataError
from fedstill.data.stratified_sampling import Ints

Pixels = npt.NDArray[Any]  # (N, C, H, W), uint8 in 0..255 or float32
BLOCK = 64  # images at once


def resized(images: Pixels, height: int, width: int) -> npt.NDArray[np.float32]:
    """Images ``(N, C, H, W)`` of another size, each pixel the mean of the area that it covers: a box average.

    Bytes become floats, 255 becoming 1; where the size is larger pixels are repeated.

    >>> resized(np.array([[[[0, 1], [2, 3]]]], dtype=np.float32), 1, 1).item()
    1.5
    """
    scale = np.float32(255 if images.dtype == np.uint8 else 1)
    out = np.empty((*images.shape[:2], height, width), dtype=np.float32)
    for start in range(0, len(images), BLOCK):
        part = torch.from_numpy(images[start : start + BLOCK].astype(np.float32, order="C") / scale)
        out[start : start + BLOCK] = F.interpolate(part, (height, width), mode="area").numpy()
    return out


def resized_maps(maps: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Maps ``(N, H, W)`` of another size: each pixel is the class that most of its area has, of equals the
    highest.

    So a pixel half of which is tumour is tumour.

    >>> resized_maps(torch.tensor([[[0, 1, 0, 0], [0, 1, 0, 2]]]), 1, 2).tolist()
    [[[1, 0]]]
    """
    if tuple(maps.shape[1:]) == (height, width):
        return maps
    classes = int(maps.max()) + 1
    parts = []
    for part in torch.split(maps, BLOCK):
        shares = F.interpolate(
            F.one_hot(part, classes).permute(0, 3, 1, 2).float(), (height, width), mode="area"
        )
        # Rounded, so that halves are equal however their sums are added; the highest class is the first here.
        parts.append(classes - 1 - (shares.flip(1) * 2**12).round().argmax(1))
    return torch.cat(parts)


def nearest(instances: npt.NDArray[np.int32], height: int, width: int) -> npt.NDArray[np.int32]:
    """An instance map of another size: numbers cannot be averaged, so each pixel takes the nearest one's.

    >>> nearest(np.array([[1, 1, 0, 2]], dtype=np.int32), 1, 2).tolist()
    [[1, 2]]
    """
    rows = ((np.arange(height) + 0.5) * instances.shape[0] / height).astype(np.int64)
    columns = ((np.arange(width) + 0.5) * instances.shape[1] / width).astype(np.int64)
    return np.ascontiguousarray(instances[rows[:, None], columns])


def places(height: int, width: int, patch: int) -> list[tuple[int, int]]:
    """Upper left corners of the fewest square patches that cover a picture, evenly spread, by rows.

    >>> places(256, 320, 256)
    [(0, 0), (0, 64)]
    >>> places(4, 9, 4)
    [(0, 0), (0, 2), (0, 5)]
    """
    return [(top, left) for top in _starts(height, patch) for left in _starts(width, patch)]


def _starts(side: int, patch: int) -> list[int]:
    count = -(-side // patch)
    return [index * (side - patch) // max(count - 1, 1) for index in range(count)]


def grown(picture: npt.NDArray[Any], patch: int) -> npt.NDArray[Any]:
    """A picture ``(..., H, W)`` continued by reflection, downwards and to the right, up to one patch a side.

    >>> grown(np.array([[1, 2, 3]]), 4).tolist()
    [[1, 2, 3, 3], [1, 2, 3, 3], [1, 2, 3, 3], [1, 2, 3, 3]]
    """
    height, width = picture.shape[-2:]
    more = [(0, 0)] * (picture.ndim - 2) + [(0, max(patch - height, 0)), (0, max(patch - width, 0))]
    return np.pad(picture, more, mode="symmetric") if max(more) > (0, 0) else picture


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


LUMA = (0.299, 0.587, 0.114)  # grey from red, green and blue (ITU-R BT.601)


def grey(pixels: torch.Tensor) -> torch.Tensor:
    """``(B, C, H, W)`` to ``(B, 1, H, W)``: by luminance, or the mean of other than three channels."""
    channels = pixels.shape[1]
    weights = LUMA if channels == 3 else (1 / channels,) * channels
    return (pixels * torch.tensor(weights).view(-1, 1, 1)).sum(1, keepdim=True)
