"""Objects as classes of pixels, and back: background, the inside of an object, its contour.

A network that says a class for each pixel tells objects that touch apart by the contour between them (Chen
et al. 2016): what is inside falls into pieces, one an object, and each grows back into its contour.

How well objects are told apart: object-level Dice, AJI, panoptic quality.

Objects come as maps ``(H, W)`` of whole numbers: 0 is background, pixels of one number are one object (in
one piece or not), and which numbers they are does not matter, if none is huge. Everything
follows from how many pixels each true and each predicted object have in common, so that is counted once
(:func:`count_overlaps`). All three figures are from 0 to 1, with 1 where there is no object and none is
found, and 0 where only one side has any.

Objects that touch, each by itself: nuclei under the microscope, judged by whole pictures that patches are
put back into.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fedstill.core.dataset import CaseIndex, TensorData
from fedstill.core.errors import ArgumentError
from fedstill.tasks import segmentation
from fedstill.tasks.config import TaskConfig
from fedstill.tasks.map_task import MapTask
from fedstill.tasks.synthetic_maps import sample_nuclei
from fedstill.tasks.task import Metric

Labels = npt.NDArray[np.integer]  # (H, W), 0 where there is no object
Objects = npt.NDArray[np.int32]  # (H, W), 0 where there is none
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
BACKGROUND, INSIDE, CONTOUR = 0, 1, 2
# Pixels of contour on each side of where two objects touch. With 1, what a network that is not sharp thinks
# inside runs together: MoNuSeg's true classes blurred by 2 pixels give an AJI of 0.75 with 1, 0.96 with 2.
CONTOUR_WIDTH = 2
THRESHOLD = 0.5  # a probability above which a pixel is inside, or of an object at all
MATCH_JACCARD = 0.5  # a Jaccard index above which a predicted object is the true one; no two can be above it
CLASS_WEIGHTS = (1.0, 1.0, 2.0)  # of background, inside and contour, which is thin and tells objects apart
MIN_OBJECT_PIXELS = 20  # pixels


# --- objects and pixel classes ---


def classes_from_objects(instances: Labels) -> npt.NDArray[np.uint8]:
    """Class of each pixel of a map of objects: ``(H, W)`` to ``(H, W)``.

    The contour is the two outermost pixels of an object, but not where the picture ends. An object that this
    would leave nothing inside has a thinner contour, or none.

    >>> classes_from_objects(np.array([[0, 3, 3, 3, 3, 3, 5, 5]]))[0].tolist()
    [0, 2, 2, 1, 2, 2, 2, 1]
    """
    core = instances
    for _ in range(CONTOUR_WIDTH):
        peeled = np.where(_touches_other_label(core), 0, core)
        lost = np.bincount(peeled.ravel(), minlength=int(core.max(initial=0)) + 1) == 0
        core = np.where(lost[core], core, peeled)
    classes = np.where(core > 0, INSIDE, CONTOUR)
    return np.where(instances > 0, classes, BACKGROUND).astype(np.uint8)


def _touches_other_label(labels: Labels) -> npt.NDArray[np.bool_]:
    """Pixels with one of their four neighbors of another number."""
    from scipy import ndimage

    around = {"footprint": ndimage.generate_binary_structure(2, 1), "mode": "nearest"}
    beside: npt.NDArray[np.bool_] = ndimage.maximum_filter(labels, **around) != ndimage.minimum_filter(
        labels, **around
    )
    return beside


def objects_from_probs(probabilities: npt.NDArray[np.floating], smallest: int) -> npt.NDArray[np.int32]:
    """The objects that a network sees in probabilities ``(3, H, W)``: ``(H, W)``, numbered from 1 as first
    read.

    Pixels inside with more than one half are joined with their eight neighbors, each piece is an object and
    grows, a pixel at a time, into what is not background with more than one half; where two meet, the later
    number takes the pixel. It grows twice as far as a true contour is thick. Objects of fewer pixels than
    ``smallest``, once grown, are taken for noise.
    """
    from scipy import ndimage

    inside = probabilities[INSIDE] > THRESHOLD
    pieces, count = ndimage.label(inside, structure=np.ones((3, 3)), output=np.int32)
    grown = grow_objects(pieces, inside | (probabilities[BACKGROUND] < 1 - THRESHOLD), 2 * CONTOUR_WIDTH)
    keep = np.bincount(grown.ravel(), minlength=count + 1) >= smallest
    keep[0] = False
    numbers = np.where(keep, np.cumsum(keep), 0).astype(np.int32)
    kept: npt.NDArray[np.int32] = numbers[grown]
    return kept


def grow_objects(
    objects: npt.NDArray[np.int32], where: npt.NDArray[np.bool_], steps: int
) -> npt.NDArray[np.int32]:
    """Objects ``(H, W)`` grown by ``steps`` pixels in four directions, over free pixels of ``where`` only."""
    from scipy import ndimage

    around = ndimage.generate_binary_structure(2, 1)
    for _ in range(steps):
        largest = ndimage.maximum_filter(objects, footprint=around, mode="nearest")
        objects = np.where(where & (objects == 0), largest, objects)
    return objects


def objects_from_classes(classes: Labels) -> npt.NDArray[np.int32]:
    """The objects of a map of classes ``(H, W)``, where nothing tells which they truly are.

    As :func:`objects_from_probs` with each class certain, and none too small.
    """
    certain = np.stack([classes == kind for kind in (BACKGROUND, INSIDE, CONTOUR)]).astype(np.float32)
    return objects_from_probs(certain, 0)


# --- object metrics ---


class ObjectOverlaps(NamedTuple):
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


def count_overlaps(prediction: Labels, truth: Labels) -> ObjectOverlaps:
    """Count the pixels that objects of two maps ``(H, W)`` have in common.

    >>> count_overlaps(np.array([[1, 1, 0]]), np.array([[7, 0, 7]])).both.tolist()
    [1]
    """
    true, i = _renumber_objects(truth)  # (n + 1,), (H * W,)
    predicted, j = _renumber_objects(prediction)
    common = (i > 0) & (j > 0)
    # A number for each pair, as there may be many objects but only few pairs of them touch.
    pairs, both = np.unique((i[common] - 1) * len(predicted) + j[common] - 1, return_counts=True)
    i, j = np.divmod(pairs, len(predicted))
    return ObjectOverlaps(true[1:], predicted[1:], i, j, both)


def _renumber_objects(labels: Labels) -> tuple[Counts, Counts]:
    """Pixels of the background and of each object, and each pixel's object from 1 up, 0 for background."""
    flat = labels.ravel().astype(np.int64)
    pixels = np.bincount(flat)  # numbers are near consecutive, so this is faster than sorting
    present = pixels > 0
    present[:1] = True
    return pixels[present], (np.cumsum(present) - 1)[flat]


def object_dice(objects: ObjectOverlaps) -> float:
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


def aji(objects: ObjectOverlaps) -> float:
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


def panoptic_quality(objects: ObjectOverlaps) -> float:
    """``sum of Jaccard of the hits / (hits + half the misses + half the false alarms)``.

    Kirillov et al. 2019, of one class. A hit is a pair with a Jaccard index above 0.5.
    """
    hits = objects.jaccard[objects.jaccard > MATCH_JACCARD]
    total = (len(objects.true) + len(objects.predicted)) / 2  # = hits + half of what is not a hit
    return float(hits.sum() / total) if total else 1.0


# --- whole images from patches ---


def stitch_patches(outputs: torch.Tensor, cases: CaseIndex) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Whole pictures from patches with places ``(N, C, h, w)``, one case after another; where they overlap
    they are averaged.

    Average probabilities, not logits: a patch that is sure does not outweigh one that is not. What sticks out
    of a picture at its right or lower end is cut off.

    Yields:
        ``(C, height, width)``, 0 where no patch is, and where patches are, ``(height, width)`` bool.

    >>> cases = CaseIndex(torch.tensor([0, 0]), ("a",), ("",), torch.tensor([[0, 0], [0, 1]]), ((1, 3),))
    >>> patches = torch.tensor([[1.0, 1.0], [3.0, 3.0]]).view(2, 1, 1, 2)
    >>> [picture.tolist() for picture, _ in stitch_patches(patches, cases)]
    [[[[1.0, 2.0, 3.0]]]]
    """
    places = [] if cases.corners is None else cases.corners.tolist()
    for case in cases.present_ids():
        height, width = cases.sizes[case]
        total = outputs.new_zeros(outputs.shape[1], height, width)
        count = outputs.new_zeros(height, width)
        for n in torch.nonzero(cases.case_ids == case).flatten().tolist():
            top, left = places[n]
            patch = outputs[n, :, : height - top, : width - left]
            bottom, right = top + patch.shape[1], left + patch.shape[2]
            total[:, top:bottom, left:right] += patch
            count[top:bottom, left:right] += 1
        yield total / count.clamp_min(1), count > 0


# --- the task ---


class Instances(MapTask):
    """Background, inside or contour a pixel, put together to objects: FedIOD's Tables 3 and 4.

    Args:
        classes: 3.
    """

    name = "instances"
    min_classes = 3
    data_task = "instances"
    metrics = (
        Metric("dice", "Dice"),
        Metric("object_dice", "Obj-Dice"),
        Metric("aji", "AJI"),
        Metric("pq", "PQ"),
        Metric("hd95", "HD95", unit="px", better="lower"),
    )
    condition_channels = 3

    def __init__(self, classes: int = 3) -> None:
        if classes != 3:
            raise ArgumentError("classes", classes, "3: background, inside and contour")
        super().__init__(classes, CLASS_WEIGHTS)

    # --- evaluation ---

    def compute_metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> Mapping[str, float]:
        """Means over whole pictures: Dice, object-level Dice, AJI and PQ in percent, HD95 in pixels.

        Dice and HD95 are of all objects together, the others see :mod:`fedstill.tasks.instances`.
        Patches are first put together to the pictures of their cases, and only what patches cover is judged.
        Without places each example is a picture. A picture without true and predicted objects counts as
        perfect, and has no HD95; one with only one of the two has its diagonal for it.
        """
        pictures = [_image_metrics(*pair) for pair in self._pictures(outputs, targets, cases)]
        each = torch.tensor(pictures, dtype=torch.float64)  # (pictures, figures)
        means = each.nanmean(0).tolist()
        return {metric.key: value for metric, value in zip(self.metrics, means, strict=True)}

    def case_scores(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> torch.Tensor:
        """Dice in percent of each picture, by number of its case: ``(pictures,)`` float64."""
        dice = [_foreground_dice(*pair) for pair in self._pictures(outputs, targets, cases)]
        return torch.tensor(dice, dtype=torch.float64)

    def display_map(self, probabilities: torch.Tensor) -> torch.Tensor:
        """The objects in a picture of probabilities ``(3, H, W)``: ``(H, W)`` int32, 0 where none is."""
        return torch.from_numpy(objects_from_probs(probabilities.cpu().numpy(), MIN_OBJECT_PIXELS))

    def _pictures(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None
    ) -> Iterator[tuple[Objects, Objects]]:
        """The predicted and the true objects of each picture."""
        probabilities = outputs.float().softmax(1)
        if cases is None or cases.corners is None:
            for p, truth in zip(probabilities.cpu().numpy(), targets.cpu().numpy(), strict=True):
                yield objects_from_probs(p, MIN_OBJECT_PIXELS), objects_from_classes(truth)
            return
        known = self._known(targets, cases)
        for picture, there in stitch_patches(probabilities, cases):
            covered, found = there.cpu().numpy(), objects_from_probs(picture.cpu().numpy(), MIN_OBJECT_PIXELS)
            yield np.where(covered, found, 0), np.where(covered, next(known), 0)

    def _known(self, targets: torch.Tensor, cases: CaseIndex) -> Iterator[Objects]:
        """The true objects of each picture; where cases do not tell them, what the targets show."""
        if cases.instances:
            yield from (cases.instances[case] for case in cases.present_ids())
            return
        classes = F.one_hot(targets, self.classes).movedim(-1, 1).float()  # (N, C, h, w)
        for picture, covered in stitch_patches(classes, cases):
            yield objects_from_classes(np.where(covered.cpu(), picture.argmax(0).cpu(), 0))

    # --- inputs made to order ---

    def label_maps(self, data: TensorData) -> torch.Tensor:
        """The classes ``(N, H, W)`` uint8; private."""
        return data.targets.to(torch.uint8)

    def targets_from_maps(self, maps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The classes ``(B, H, W)`` int64."""
        return maps.long()

    def sample_maps(self, count: int, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        """Classes ``(count, H, W)`` uint8 of ellipses that do not touch; of no data."""
        drawn = [classes_from_objects(sample_nuclei(height, width, generator)) for _ in range(count)]
        return (
            torch.from_numpy(np.stack(drawn)) if drawn else torch.zeros(0, height, width, dtype=torch.uint8)
        )


def _foreground_dice(found: Objects, there: Objects) -> float:
    """Dice in percent of all objects together."""
    masks = (torch.from_numpy(objects_ > 0).unsqueeze(0) for objects_ in (found, there))
    return 100.0 * segmentation.dice(segmentation.count_overlap(*masks)).item()


def _image_metrics(found: Objects, there: Objects) -> tuple[float, ...]:
    """A picture's figures, in the task's order."""
    match = count_overlaps(found, there)
    far = segmentation.hd95(found > 0, there > 0)
    return (
        _foreground_dice(found, there),
        100.0 * object_dice(match),
        100.0 * aji(match),
        100.0 * panoptic_quality(match),
        math.hypot(*there.shape) if math.isinf(far) else far,
    )


@dataclass(frozen=True, kw_only=True)
class InstancesConfig(TaskConfig):
    """Objects that touch, as nuclei, each by itself."""

    task_class = Instances
