"""How well objects are told apart: object-level Dice, AJI, panoptic quality.

Objects come as maps ``(H, W)`` of whole numbers: 0 is background, pixels of one number are one object (in
one piece or not), and which numbers they are does not matter, if none is huge. Everything
follows from how many pixels each true and each predicted object have in common, so that is counted once
(:func:`match`). All three figures are from 0 to 1, with 1 where there is no object and none is found, and 0
where only one side has any.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.integer]  # (H, W)
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SAME = 0.5  # a Jaccard index above which a predicted object is the true one; no two can be above it


class Match(NamedTuple):
    """What n true and m predicted objects have in common. Pairs without a common pixel are left out."""

    true: Counts  # (n,) pixels of each true object
    predicted: Counts  # (m,)
    i: Counts  # (P,) which true object
    j: Counts  # (P,) and which predicted one
    both: Counts  # (P,) have so many pixels in common, 1 or more

    @property
    def union(self) -> Counts:
        """Pixels of either object of each pair, ``(P,)``."""
        return self.true[self.i] + self.predicted[self.j] - self.both

    @property
    def jaccard(self) -> Floats:
        """Of each pair, ``(P,)``, above 0."""
        return self.both / self.union


def match(prediction: Labels, truth: Labels) -> Match:
    """Count the pixels that objects of two maps ``(H, W)`` have in common.

    >>> match(np.array([[1, 1, 0]]), np.array([[7, 0, 7]])).both.tolist()
    [1]
    """
    true, i = _consecutive(truth)  # (n + 1,), (H * W,)
    predicted, j = _consecutive(prediction)
    common = (i > 0) & (j > 0)
    # A number for each pair, as there may be many objects but only few pairs of them touch.
    pairs, both = np.unique((i[common] - 1) * len(predicted) + j[common] - 1, return_counts=True)
    i, j = np.divmod(pairs, len(predicted))
    return Match(true[1:], predicted[1:], i, j, both)


def _consecutive(labels: Labels) -> tuple[Counts, Counts]:
    """Pixels of the background and of each object, and each pixel's object from 1 up, 0 for background."""
    flat = labels.ravel().astype(np.int64)
    pixels = np.bincount(flat)  # numbers are near consecutive, so this is faster than sorting
    present = pixels > 0
    present[:1] = True
    return pixels[present], (np.cumsum(present) - 1)[flat]


def object_dice(objects: Match) -> float:
    """Dice of each object with the one of the other side that covers most of it, weighted by its size.

    Mean of both directions, from true objects and from predicted ones (Sirinukunwattana et al. 2017, the
    GlaS challenge, as used by Chen et al. 2016). An object that none covers has Dice 0; where two cover it
    equally, the one with the higher Dice counts.
    """
    if not (len(objects.true) and len(objects.predicted)):
        return float(len(objects.true) == len(objects.predicted))
    dice = 2 * objects.both / (objects.true[objects.i] + objects.predicted[objects.j])  # (P,)

    def one_way(of: Counts, pixels: Counts) -> float:
        order = np.lexsort((dice, objects.both, of))
        # The last pair of each object's run is its best.
        best = order[np.append(of[order][1:] != of[order][:-1], True)] if len(order) else order
        return float((pixels[of[best]] * dice[best]).sum() / pixels.sum())

    return (one_way(objects.i, objects.true) + one_way(objects.j, objects.predicted)) / 2


def aji(objects: Match) -> float:
    """Aggregated Jaccard index, FedIOD Eq. 12: Kumar et al. 2017 with each prediction assigned at most once.

    The paper's "sorted and nonrepeated" is read so: pairs are taken from the highest Jaccard index down,
    and each takes both of its objects out (ties: the earlier true, then the earlier predicted object). What
    is left over on either side is of the union only. In Kumar et al. one prediction may serve several.
    """
    both, union = 0, 0
    true, predicted = objects.true.copy(), objects.predicted.copy()  # pixels of what is not yet taken
    for pair in np.lexsort((objects.j, objects.i, -objects.jaccard)):
        i, j = objects.i[pair], objects.j[pair]
        if true[i] and predicted[j]:
            both += int(objects.both[pair])
            union += int(true[i] + predicted[j] - objects.both[pair])
            true[i] = predicted[j] = 0
    union += int(true.sum() + predicted.sum())
    return both / union if union else 1.0


def panoptic_quality(objects: Match) -> float:
    """``sum of Jaccard of the hits / (hits + half the misses + half the false alarms)``.

    Kirillov et al. 2019, of one class. A hit is a pair with a Jaccard index above 0.5.
    """
    hits = objects.jaccard[objects.jaccard > SAME]
    total = (len(objects.true) + len(objects.predicted)) / 2  # = hits + half of what is not a hit
    return float(hits.sum() / total) if total else 1.0
