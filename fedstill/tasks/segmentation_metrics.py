"""How far a predicted region covers the true one, and how far apart their outlines are.

Formulas of FedIOD's appendix (Dice, sensitivity, specificity; the distance is Eq. 13). What each says where
the prediction or the truth is empty:

=============  ============  =============  ================  =============================
figure         both empty    only truth is  only prediction   truth is the whole picture
=============  ============  =============  ================  =============================
dice           1             0              0                 as defined
sensitivity    NaN           NaN            0                 as defined
specificity    1             as defined     1                 NaN
hd95           NaN           infinity       infinity          as defined
=============  ============  =============  ================  =============================
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Mask = npt.NDArray[np.bool_]  # (H, W)

FAR = 0.95  # quantile of the distances that counts as the largest


class Overlap(NamedTuple):
    """Numbers of pixels: of N pictures, or of N cases with their pictures taken together."""

    both: torch.Tensor  # (N,) float64: in the prediction and in the truth
    predicted: torch.Tensor  # (N,)
    true: torch.Tensor  # (N,)
    all: torch.Tensor  # (N,)

    def pooled(self, of: torch.Tensor, cases: int) -> Overlap:
        """Of whole cases: ``of`` (N,) int64 names the case of each picture, from 0 to below ``cases``."""
        return Overlap(*(torch.zeros(cases, dtype=part.dtype).index_add(0, of, part) for part in self))


def overlap(prediction: torch.Tensor, truth: torch.Tensor) -> Overlap:
    """Count pixels of masks ``(N, ...)`` bool, each picture by itself.

    >>> dice(overlap(torch.tensor([[True, True, False]]), torch.tensor([[True, False, False]]))).item()
    0.666...
    """
    prediction, truth = prediction.flatten(1).cpu(), truth.flatten(1).cpu()
    counts = ((prediction & truth).sum(1), prediction.sum(1), truth.sum(1))
    pixels = torch.full((len(truth),), truth.shape[1])
    return Overlap(*(count.double() for count in (*counts, pixels)))


def dice(pixels: Overlap) -> torch.Tensor:
    """``2 |both| / (|predicted| + |true|)``, ``(N,)`` in 0..1; 1 if nothing is there and nothing found."""
    total = pixels.predicted + pixels.true
    return torch.where(total > 0, 2 * pixels.both / total, torch.ones_like(total))


def sensitivity(pixels: Overlap) -> torch.Tensor:
    """``|both| / |true|``, ``(N,)`` in 0..1: the share of the true region that is found; NaN if none."""
    return pixels.both / pixels.true  # 0 / 0 is NaN


def specificity(pixels: Overlap) -> torch.Tensor:
    """The share of what is not true that is left out, ``(N,)`` in 0..1; NaN if all is true."""
    return (pixels.all - pixels.predicted - pixels.true + pixels.both) / (pixels.all - pixels.true)


def hd95(prediction: Mask, truth: Mask) -> float:
    """95% quantile of the distances between two outlines, in pixels: FedIOD Eq. 13 with the quantile for sup.

    An outline is the pixels of a mask ``(H, W)`` beside one that is not of it, or at the picture's edge; the
    larger of both directions counts, as in MONAI. NaN if both masks are empty, infinity if one is.

    >>> a, b = np.zeros((4, 8), dtype=bool), np.zeros((4, 8), dtype=bool)
    >>> a[1, 1] = b[1, 6] = True
    >>> hd95(a, b)
    5.0
    """
    found, there = bool(prediction.any()), bool(truth.any())
    if not (found and there):
        return float("inf") if found or there else float("nan")
    first, second = np.argwhere(_edge(prediction)), np.argwhere(_edge(truth))  # (pixels, 2)
    return max(_far(first, second), _far(second, first))


def _edge(mask: Mask) -> Mask:
    """Pixels of a mask with one of their four neighbours, or the picture's end, outside of it."""
    from scipy.ndimage import binary_erosion

    edge: Mask = mask & ~binary_erosion(mask)
    return edge


def _far(edge: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> float:
    """The 95% quantile of how far the pixels of one outline are from the nearest of the other."""
    from scipy.spatial import KDTree

    # Outlines are few pixels of a picture: a tree of them is quicker than a distance for every pixel.
    distances, _ = KDTree(other, leafsize=32).query(edge)
    return float(np.quantile(distances, FAR))
