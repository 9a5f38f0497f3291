"""Instance segmentation: objects that may touch, such as nuclei under the microscope.

A network classifies each pixel as background, inside or contour, so touching objects are separated by their
contour (Chen et al. 2016). Connected inside pixels form an object, which then grows back into its contour.
Metrics are computed on whole images, into which overlapping patches are stitched.

Objects are integer maps ``(H, W)``: 0 is background, pixels with one number are one object, in one piece or
not. The numbers are arbitrary but should not be huge. Object-level Dice, AJI and panoptic quality follow from
the number of pixels that each true and each predicted object have in common, which :func:`count_overlaps`
counts once. They lie in 0..1, with 1 if neither side has an object and 0 if only one side has any.
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
from fedstill.tasks.label_maps import sample_nuclei
from fedstill.tasks.segmentation import MapTask
from fedstill.tasks.task import Metric, TaskConfig

Labels = npt.NDArray[np.integer]  # (H, W), 0 where there is no object
Objects = npt.NDArray[np.int32]  # (H, W), 0 where there is none
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
BACKGROUND, INSIDE, CONTOUR = 0, 1, 2
# Contour pixels on each side of the border between touching objects. With 1, blurred predictions merge
# objects: MoNuSeg's true classes blurred by 2 pixels give an AJI of 0.75 with 1, 0.96 with 2.
CONTOUR_WIDTH = 2
THRESHOLD = 0.5  # probability above which a pixel is inside, or part of an object
MATCH_JACCARD = 0.5  # above this Jaccard index objects match; at most one pair can
CLASS_WEIGHTS = (1.0, 1.0, 2.0)  # of background, inside and contour, which is thin but separates objects
MIN_OBJECT_PIXELS = 20  # pixels


# --- objects and pixel classes ---------------------------------------------------------------------------


def classes_from_objects(instances: Labels) -> npt.NDArray[np.uint8]:
    """Return the class of each pixel of an object map: ``(H, W)`` to ``(H, W)`` uint8.

    The contour is the outermost two pixels of an object, except at the image border. Objects that would have
    no inside left get a thinner contour, or none.

    >>> classes_from_objects(np.array([[0, 3, 3, 3, 3, 3, 5, 5]]))[0].tolist()
    [0, 2, 2, 1, 2, 2, 2, 1]
    """
    core = instances
    for _ in range(CONTOUR_WIDTH):
        eroded = np.where(_touches_other_label(core), 0, core)
        vanished = np.bincount(eroded.ravel(), minlength=int(core.max(initial=0)) + 1) == 0
        core = np.where(vanished[core], core, eroded)
    classes = np.where(core > 0, INSIDE, CONTOUR)
    return np.where(instances > 0, classes, BACKGROUND).astype(np.uint8)


def _touches_other_label(labels: Labels) -> npt.NDArray[np.bool_]:
    """Return the pixels with a different label among their four neighbors."""
    from scipy import ndimage

    options = {"footprint": ndimage.generate_binary_structure(2, 1), "mode": "nearest"}
    largest, smallest = ndimage.maximum_filter(labels, **options), ndimage.minimum_filter(labels, **options)
    differs: npt.NDArray[np.bool_] = largest != smallest
    return differs


def objects_from_probs(probabilities: npt.NDArray[np.floating], smallest: int) -> npt.NDArray[np.int32]:
    """Return the objects in class probabilities ``(3, H, W)``: ``(H, W)``, numbered from 1 in reading order.

    Inside pixels with a probability above 1/2 are connected with their eight neighbors into objects. Objects
    grow pixel by pixel into foreground pixels, up to twice the contour width. Where two meet, the higher
    number takes the pixel. Grown objects with fewer pixels than ``smallest`` are noise and dropped.
    """
    from scipy import ndimage

    inside = probabilities[INSIDE] > THRESHOLD
    pieces, count = ndimage.label(inside, structure=np.ones((3, 3)), output=np.int32)
    grown = grow_objects(pieces, inside | (probabilities[BACKGROUND] < 1 - THRESHOLD), 2 * CONTOUR_WIDTH)
    keep = np.bincount(grown.ravel(), minlength=count + 1) >= smallest
    keep[0] = False
    numbers = np.where(keep, np.cumsum(keep), 0).astype(np.int32)
    objects: npt.NDArray[np.int32] = numbers[grown]
    return objects


def grow_objects(
    objects: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_], steps: int
) -> npt.NDArray[np.int32]:
    """Return objects ``(H, W)`` grown by ``steps`` pixels in four directions into free pixels of ``mask``."""
    from scipy import ndimage

    footprint = ndimage.generate_binary_structure(2, 1)
    for _ in range(steps):
        largest = ndimage.maximum_filter(objects, footprint=footprint, mode="nearest")
        objects = np.where(mask & (objects == 0), largest, objects)
    return objects


def objects_from_classes(classes: Labels) -> npt.NDArray[np.int32]:
    """Return the objects of a class map ``(H, W)``: :func:`objects_from_probs` with certain classes, and no
    minimum size.
    """
    certain = np.stack([classes == kind for kind in (BACKGROUND, INSIDE, CONTOUR)]).astype(np.float32)
    return objects_from_probs(certain, 0)


# --- object metrics --------------------------------------------------------------------------------------


class ObjectOverlaps(NamedTuple):
    """Sizes of n true and m predicted objects, and the P pairs of them with common pixels."""

    true_sizes: Counts  # (n,) pixels of each true object
    predicted_sizes: Counts  # (m,) pixels of each predicted object
    i: Counts  # (P,) index of the true object of each pair
    j: Counts  # (P,) index of the predicted object of each pair
    common: Counts  # (P,) pixels in common, 1 or more

    @property
    def union(self) -> Counts:
        """Pixels of either object of each pair, ``(P,)``."""
        return self.true_sizes[self.i] + self.predicted_sizes[self.j] - self.common

    @property
    def jaccard(self) -> Floats:
        """Jaccard index of each pair, ``(P,)``, above 0."""
        return self.common / self.union


def count_overlaps(prediction: Labels, truth: Labels) -> ObjectOverlaps:
    """Return the sizes of the objects in two maps ``(H, W)`` and the pixels that they have in common.

    >>> count_overlaps(np.array([[1, 1, 0]]), np.array([[7, 0, 7]])).common.tolist()
    [1]
    """
    true, i = _renumber_objects(truth)  # (n + 1,), (H * W,)
    predicted, j = _renumber_objects(prediction)
    foreground = (i > 0) & (j > 0)
    # One number per pair, because few of the possible pairs overlap.
    pairs, common = np.unique((i[foreground] - 1) * len(predicted) + j[foreground] - 1, return_counts=True)
    i, j = np.divmod(pairs, len(predicted))
    return ObjectOverlaps(true[1:], predicted[1:], i, j, common)


def _renumber_objects(labels: Labels) -> tuple[Counts, Counts]:
    """Return the pixels of the background and of each object, and the flat map with objects numbered from
    1.
    """
    flat = labels.ravel().astype(np.int64)
    pixels = np.bincount(flat)  # numbers are nearly consecutive, so this is faster than sorting
    present = pixels > 0
    present[:1] = True
    return pixels[present], (np.cumsum(present) - 1)[flat]


def object_dice(overlaps: ObjectOverlaps) -> float:
    """Return the object-level Dice: of each object with its best match on the other side, weighted by size.

    It is the mean of both directions, from true and from predicted objects (Sirinukunwattana et al. 2017, the
    GlaS challenge, as used by Chen et al. 2016). The best match has the most common pixels, and with ties the
    higher Dice. An object without a match has Dice 0.
    """
    if not (len(overlaps.true_sizes) and len(overlaps.predicted_sizes)):
        return float(len(overlaps.true_sizes) == len(overlaps.predicted_sizes))
    sizes = overlaps.true_sizes[overlaps.i] + overlaps.predicted_sizes[overlaps.j]
    dice = 2 * overlaps.common / sizes  # (P,)

    def one_way(index: Counts, sizes: Counts) -> float:
        order = np.lexsort((dice, overlaps.common, index))
        # The last pair of each object is its best match.
        best = order[np.append(index[order][1:] != index[order][:-1], True)] if len(order) else order
        return float((sizes[index[best]] * dice[best]).sum() / sizes.sum())

    true, predicted = overlaps.true_sizes, overlaps.predicted_sizes
    return (one_way(overlaps.i, true) + one_way(overlaps.j, predicted)) / 2


def aji(overlaps: ObjectOverlaps) -> float:
    """Return the aggregated Jaccard index, FedIOD Eq. 12.

    It follows Kumar et al. 2017 with at most one match per prediction. The paper's "sorted and nonrepeated"
    is implemented as follows. Pairs are taken in descending order of their Jaccard index, ties in order of
    the true, then of the predicted object. Each pair removes both of its objects. Objects without a partner
    add to the union only. In Kumar et al. a prediction may match several objects.
    """
    intersection, union = 0, 0
    true, predicted = overlaps.true_sizes.copy(), overlaps.predicted_sizes.copy()  # 0 once matched
    for pair in np.lexsort((overlaps.j, overlaps.i, -overlaps.jaccard)):
        i, j = overlaps.i[pair], overlaps.j[pair]
        if true[i] and predicted[j]:
            intersection += int(overlaps.common[pair])
            union += int(true[i] + predicted[j] - overlaps.common[pair])
            true[i] = predicted[j] = 0
    union += int(true.sum() + predicted.sum())
    return intersection / union if union else 1.0


def panoptic_quality(overlaps: ObjectOverlaps) -> float:
    """Return the panoptic quality of one class (Kirillov et al. 2019).

    It is ``sum of the hits' Jaccard indices / (hits + misses / 2 + false alarms / 2)``. A hit is a pair with
    a Jaccard index above 0.5.
    """
    hits = overlaps.jaccard[overlaps.jaccard > MATCH_JACCARD]
    total = (len(overlaps.true_sizes) + len(overlaps.predicted_sizes)) / 2  # = hits + half of the others
    return float(hits.sum() / total) if total else 1.0


# --- whole images from patches ---------------------------------------------------------------------------


def stitch_patches(outputs: torch.Tensor, cases: CaseIndex) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the whole image of each case, stitched from patches ``(N, C, h, w)`` with corners; overlaps are
    averaged.

    Average probabilities rather than logits, or a certain patch outweighs an uncertain one. Parts of patches
    beyond the right or lower image border are cut off.

    Yields:
        ``(C, height, width)``, 0 without a patch, and the covered pixels, ``(height, width)`` bool.

    >>> cases = CaseIndex(torch.tensor([0, 0]), ("a",), ("",), torch.tensor([[0, 0], [0, 1]]), ((1, 3),))
    >>> patches = torch.tensor([[1.0, 1.0], [3.0, 3.0]]).view(2, 1, 1, 2)
    >>> [image.tolist() for image, _ in stitch_patches(patches, cases)]
    [[[[1.0, 2.0, 3.0]]]]
    """
    corners = [] if cases.corners is None else cases.corners.tolist()
    for case in cases.present_ids():
        height, width = cases.sizes[case]
        total = outputs.new_zeros(outputs.shape[1], height, width)
        count = outputs.new_zeros(height, width)
        for n in torch.nonzero(cases.case_ids == case).flatten().tolist():
            top, left = corners[n]
            patch = outputs[n, :, : height - top, : width - left]
            bottom, right = top + patch.shape[1], left + patch.shape[2]
            total[:, top:bottom, left:right] += patch
            count[top:bottom, left:right] += 1
        yield total / count.clamp_min(1), count > 0


# --- task ------------------------------------------------------------------------------------------------


class Instances(MapTask):
    """Segmentation of separate objects by pixel classes background, inside and contour: FedIOD's Tables 3 and
    4.

    Outputs are logits ``(B, 3, H, W)``, targets classes ``(B, H, W)`` int64.

    Args:
        classes: number of pixel classes, 3.

    Raises:
        ArgumentError: ``classes`` is not 3.
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
        """Return means over whole images: Dice, object-level Dice, AJI and PQ in percent, HD95 in pixels.

        Dice and HD95 are computed on the union of all objects. Patches are first stitched to the images of
        their cases, and only covered pixels are evaluated. Without patch positions each example is an image.
        An image without true and predicted objects has perfect scores and no HD95. If only one side has
        objects, HD95 is the image diagonal.
        """
        metrics = [_image_metrics(*pair) for pair in self._object_pairs(outputs, targets, cases)]
        means = torch.tensor(metrics, dtype=torch.float64).nanmean(0).tolist()  # (images, metrics)
        return {metric.key: value for metric, value in zip(self.metrics, means, strict=True)}

    def case_scores(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> torch.Tensor:
        """Return the Dice of each image in percent, in the order of its case: ``(images,)`` float64."""
        dice = [_foreground_dice(*pair) for pair in self._object_pairs(outputs, targets, cases)]
        return torch.tensor(dice, dtype=torch.float64)

    def display_map(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Return the objects in probabilities ``(3, H, W)``: ``(H, W)`` int32, 0 for background."""
        return torch.from_numpy(objects_from_probs(probabilities.cpu().numpy(), MIN_OBJECT_PIXELS))

    def _object_pairs(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None
    ) -> Iterator[tuple[Objects, Objects]]:
        """Yield the predicted and the true objects of each image."""
        probabilities = outputs.float().softmax(1)
        if cases is None or cases.corners is None:
            for p, truth in zip(probabilities.cpu().numpy(), targets.cpu().numpy(), strict=True):
                yield objects_from_probs(p, MIN_OBJECT_PIXELS), objects_from_classes(truth)
            return
        true = self._true_objects(targets, cases)
        for image, mask in stitch_patches(probabilities, cases):
            covered, objects = mask.cpu().numpy(), objects_from_probs(image.cpu().numpy(), MIN_OBJECT_PIXELS)
            yield np.where(covered, objects, 0), np.where(covered, next(true), 0)

    def _true_objects(self, targets: torch.Tensor, cases: CaseIndex) -> Iterator[Objects]:
        """Yield the true objects of each image, from the targets if the cases have none."""
        if cases.instances:
            yield from (cases.instances[case] for case in cases.present_ids())
            return
        classes = F.one_hot(targets, self.classes).movedim(-1, 1).float()  # (N, C, h, w)
        for image, covered in stitch_patches(classes, cases):
            yield objects_from_classes(np.where(covered.cpu(), image.argmax(0).cpu(), 0))

    # --- inputs generated from label maps ---

    def label_maps(self, data: TensorData) -> torch.Tensor:
        """Return the classes ``(N, H, W)`` uint8. They are private."""
        return data.targets.to(torch.uint8)

    def targets_from_maps(self, maps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the classes ``(B, H, W)`` int64."""
        return maps.long()

    def sample_maps(self, count: int, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        """Return random classes ``(count, H, W)`` uint8 of ellipses that do not touch."""
        maps = [classes_from_objects(sample_nuclei(height, width, generator)) for _ in range(count)]
        return torch.from_numpy(np.stack(maps)) if maps else torch.zeros(0, height, width, dtype=torch.uint8)


def _foreground_dice(predicted: Objects, true: Objects) -> float:
    """Return the Dice in percent of the union of all objects."""
    masks = (torch.from_numpy(objects > 0).unsqueeze(0) for objects in (predicted, true))
    return 100.0 * segmentation.dice(segmentation.count_overlap(*masks)).item()


def _image_metrics(predicted: Objects, true: Objects) -> tuple[float, ...]:
    """Return the metrics of one image, in the task's order."""
    overlaps = count_overlaps(predicted, true)
    distance = segmentation.hd95(predicted > 0, true > 0)
    return (
        _foreground_dice(predicted, true),
        100.0 * object_dice(overlaps),
        100.0 * aji(overlaps),
        100.0 * panoptic_quality(overlaps),
        math.hypot(*true.shape) if math.isinf(distance) else distance,
    )


@dataclass(frozen=True, kw_only=True)
class InstancesConfig(TaskConfig):
    """Instance segmentation of objects that may touch, such as nuclei.

    Example:
        >>> InstancesConfig().make(3).metrics[1].title
        'Obj-Dice'
    """

    task_class = Instances
