"""Images and maps of one size from those of another, and pictures cut into patches that cover them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

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
