"""Objects as classes of pixels, and back: background, the inside of an object, its contour.

A network that says a class for each pixel tells objects that touch apart by the contour between them (Chen
et al. 2016): what is inside falls into pieces, one an object, and each grows back into its contour.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BACKGROUND, INSIDE, CONTOUR = 0, 1, 2

Labels = npt.NDArray[np.integer]  # (H, W), 0 where there is no object

# Pixels of contour on each side of where two objects touch. With 1, what a network that is not sharp thinks
# inside runs together: MoNuSeg's true classes blurred by 2 pixels give an AJI of 0.75 with 1, 0.96 with 2.
THICK = 2
SURE = 0.5  # a probability above which a pixel is inside, or of an object at all


def three_classes(instances: Labels) -> npt.NDArray[np.uint8]:
    """Class of each pixel of a map of objects: ``(H, W)`` to ``(H, W)``.

    The contour is the two outermost pixels of an object, but not where the picture ends. An object that this
    would leave nothing inside has a thinner contour, or none.

    >>> three_classes(np.array([[0, 3, 3, 3, 3, 3, 5, 5]]))[0].tolist()
    [0, 2, 2, 1, 2, 2, 2, 1]
    """
    core = instances
    for _ in range(THICK):
        peeled = np.where(_beside(core), 0, core)
        lost = np.bincount(peeled.ravel(), minlength=int(core.max(initial=0)) + 1) == 0
        core = np.where(lost[core], core, peeled)
    classes = np.where(core > 0, INSIDE, CONTOUR)
    return np.where(instances > 0, classes, BACKGROUND).astype(np.uint8)


def _beside(labels: Labels) -> npt.NDArray[np.bool_]:
    """Pixels with one of their four neighbours of another number."""
    from scipy import ndimage

    around = {"footprint": ndimage.generate_binary_structure(2, 1), "mode": "nearest"}
    beside: npt.NDArray[np.bool_] = ndimage.maximum_filter(labels, **around) != ndimage.minimum_filter(
        labels, **around
    )
    return beside


def separate(probabilities: npt.NDArray[np.floating], smallest: int) -> npt.NDArray[np.int32]:
    """The objects that a network sees in probabilities ``(3, H, W)``: ``(H, W)``, numbered from 1 as first
    read.

    Pixels inside with more than one half are joined with their eight neighbours, each piece is an object and
    grows, a pixel at a time, into what is not background with more than one half; where two meet, the later
    number takes the pixel. It grows twice as far as a true contour is thick. Objects of fewer pixels than
    ``smallest``, once grown, are taken for noise.
    """
    from scipy import ndimage

    inside = probabilities[INSIDE] > SURE
    pieces, count = ndimage.label(inside, structure=np.ones((3, 3)), output=np.int32)
    grown = grow(pieces, inside | (probabilities[BACKGROUND] < 1 - SURE), 2 * THICK)
    keep = np.bincount(grown.ravel(), minlength=count + 1) >= smallest
    keep[0] = False
    numbers = np.where(keep, np.cumsum(keep), 0).astype(np.int32)
    kept: npt.NDArray[np.int32] = numbers[grown]
    return kept


def grow(objects: npt.NDArray[np.int32], where: npt.NDArray[np.bool_], steps: int) -> npt.NDArray[np.int32]:
    """Objects ``(H, W)`` grown by ``steps`` pixels in four directions, over free pixels of ``where`` only."""
    from scipy import ndimage

    around = ndimage.generate_binary_structure(2, 1)
    for _ in range(steps):
        largest = ndimage.maximum_filter(objects, footprint=around, mode="nearest")
        objects = np.where(where & (objects == 0), largest, objects)
    return objects


def objects_of(classes: Labels) -> npt.NDArray[np.int32]:
    """The objects of a map of classes ``(H, W)``, where nothing tells which they truly are.

    As :func:`separate` with each class certain, and none too small.
    """
    certain = np.stack([classes == kind for kind in (BACKGROUND, INSIDE, CONTOUR)]).astype(np.float32)
    return separate(certain, 0)
