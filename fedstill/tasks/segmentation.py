"""Segmentation: one class per pixel, such as tumors on MRI, with region overlap and outline distance as
metrics.

The formulas are in FedIOD's appendix (Dice, sensitivity, specificity; the distance is Eq. 13). Their values
for empty predictions or targets:

===========  ==========  ================  =====================  ====================
metric       both empty  only truth empty  only prediction empty  truth is whole image
===========  ==========  ================  =====================  ====================
dice         1           0                 0                      as defined
sensitivity  NaN         NaN               0                      as defined
specificity  1           as defined        1                      NaN
hd95         NaN         infinity          infinity               as defined
===========  ==========  ================  =====================  ====================

:class:`MapTask` is the base of all tasks with one class per pixel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from annotated_types import Interval

from fedstill.core.dataset import CaseIndex, TensorData
from fedstill.core.errors import ArgumentError
from fedstill.tasks.classification import SoftmaxTask
from fedstill.tasks.label_maps import body_mask, sample_body_regions
from fedstill.tasks.task import Metric, TaskConfig, case_indices, mean_by_group

Mask = npt.NDArray[np.bool_]  # (H, W)
HAUSDORFF_QUANTILE = 0.95  # quantile of the distances, in place of their maximum

DICE_SMOOTHING = 1.0  # pixels; keeps the soft Dice and its gradient finite for images without a class
ClassWeights = tuple[Annotated[float, Interval(gt=0, lt=1e6), "above 0"], ...]


# --- metrics ---------------------------------------------------------------------------------------------


class Overlap(NamedTuple):
    """Pixel counts of N images, or of N cases with the pixels of their images added."""

    both: torch.Tensor  # (N,) float64: pixels in the prediction and in the truth
    predicted: torch.Tensor  # (N,) pixels in the prediction
    true: torch.Tensor  # (N,) pixels in the truth
    total: torch.Tensor  # (N,) all pixels

    def sum_by_case(self, case: torch.Tensor, count: int) -> Overlap:
        """Return the counts of ``count`` cases; ``case`` (N,) int64 is the case of each image, from 0."""
        return Overlap(*(torch.zeros(count, dtype=part.dtype).index_add(0, case, part) for part in self))


def count_overlap(prediction: torch.Tensor, truth: torch.Tensor) -> Overlap:
    """Return the pixel counts of masks ``(N, ...)`` bool, image by image.

    >>> dice(count_overlap(torch.tensor([[True, True, False]]), torch.tensor([[True, False, False]]))).item()
    0.666...
    """
    prediction, truth = prediction.flatten(1).cpu(), truth.flatten(1).cpu()
    counts = ((prediction & truth).sum(1), prediction.sum(1), truth.sum(1))
    pixels = torch.full((len(truth),), truth.shape[1])
    return Overlap(*(count.double() for count in (*counts, pixels)))


def dice(pixels: Overlap) -> torch.Tensor:
    """Return ``2 |both| / (|predicted| + |true|)``, ``(N,)`` in 0..1; 1 if both masks are empty."""
    total = pixels.predicted + pixels.true
    return torch.where(total > 0, 2 * pixels.both / total, torch.ones_like(total))


def sensitivity(pixels: Overlap) -> torch.Tensor:
    """Return ``|both| / |true|``, ``(N,)`` in 0..1; NaN if the true mask is empty."""
    return pixels.both / pixels.true  # 0 / 0 is NaN


def specificity(pixels: Overlap) -> torch.Tensor:
    """Return the share of pixels outside the true mask that are also outside the prediction, ``(N,)`` in
    0..1.

    It is NaN if the true mask is the whole image.
    """
    negative = pixels.total - pixels.predicted - pixels.true + pixels.both
    return negative / (pixels.total - pixels.true)


def hd95(prediction: Mask, truth: Mask) -> float:
    """Return the 95% quantile of the distances between two outlines in pixels, FedIOD Eq. 13 with the
    quantile for sup.

    The outline of a mask ``(H, W)`` is its pixels next to a pixel outside it or at the image border. The
    larger of both directions counts, as in MONAI. NaN if both masks are empty, infinity if one is.

    >>> a, b = np.zeros((4, 8), dtype=bool), np.zeros((4, 8), dtype=bool)
    >>> a[1, 1] = b[1, 6] = True
    >>> hd95(a, b)
    5.0
    """
    if not (prediction.any() and truth.any()):
        return float("inf") if prediction.any() or truth.any() else float("nan")
    first, second = np.argwhere(_boundary(prediction)), np.argwhere(_boundary(truth))  # (pixels, 2)
    return max(_directed_hd95(first, second), _directed_hd95(second, first))


def _boundary(mask: Mask) -> Mask:
    """Return the pixels of a mask that touch a pixel outside it, or the image border, with one of four
    sides.
    """
    from scipy.ndimage import binary_erosion

    edge: Mask = mask & ~binary_erosion(mask)
    return edge


def _directed_hd95(edge: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> float:
    """Return the 95% quantile of the distances from the pixels of one outline to the nearest pixel of the
    other.
    """
    from scipy.spatial import KDTree

    # Outlines have few pixels: a tree is faster than a distance transform of the image.
    hd95_of_slices, _ = KDTree(other, leafsize=32).query(edge)
    return float(np.quantile(hd95_of_slices, HAUSDORFF_QUANTILE))


def hd95_of_slices(predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the HD95 of each pair of masks ``(N, H, W)`` in pixels, ``(N,)``.

    It is the diagonal for an empty prediction, and NaN for an empty true mask.
    """
    pairs = zip(predicted.numpy(), true.numpy(), strict=True)
    values = torch.tensor([hd95(mask, truth) if truth.any() else math.nan for mask, truth in pairs])
    return values.double().clamp_max(math.hypot(*true.shape[1:]))  # NaN stays


def _mean_over_cases(classes: Sequence[torch.Tensor]) -> float:
    """Return the mean over classes, then cases, of values ``(cases,)`` per class, without NaN."""
    return torch.stack(list(classes)).nanmean(0).nanmean().item()


# --- task ------------------------------------------------------------------------------------------------


def soft_dice_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return one minus the soft Dice of each image, averaged over all classes except the first: ``(B,)``.

    ``1 - (2 sum p y + 1) / (sum p + sum y + 1)``, where the sums run over the pixels of one class. The added
    pixel keeps it defined for images without that class.

    Args:
        outputs: logits, ``(B, C, H, W)``.
        targets: classes, ``(B, H, W)``.
    """
    p = outputs.softmax(1)[:, 1:].flatten(2)  # (B, C - 1, H * W)
    classes = torch.arange(1, outputs.shape[1], device=outputs.device).view(1, -1, 1)
    y = targets.flatten(1).unsqueeze(1).eq(classes).to(p.dtype)
    shares = (2 * (p * y).sum(2) + DICE_SMOOTHING) / (p.sum(2) + y.sum(2) + DICE_SMOOTHING)
    return 1 - shares.mean(1)


class MapTask(SoftmaxTask):
    """Base of tasks with one class per pixel: outputs are logits ``(B, C, H, W)``, targets ``(B, H, W)``
    int64.

    Class 0 is the background.

    Args:
        classes: C, 2 or more.
        class_weights: weight of each class in the cross-entropy. None: all 1.
        dice: weight of the soft Dice loss, added to the cross-entropy.

    Raises:
        ArgumentError: fewer than 2 classes, or another number of class weights than classes.
    """

    kind = "map"

    def __init__(self, classes: int, class_weights: Sequence[float] | None = None, dice: float = 0.0) -> None:
        super().__init__(classes)
        if classes < 2:
            raise ArgumentError("classes", classes, "2 or more: the background and at least one class")
        if class_weights is not None and len(class_weights) != classes:
            raise ArgumentError(
                "task.class_weights", list(class_weights), f"one for each of {classes} classes"
            )
        self.class_weights = None if class_weights is None else torch.tensor(class_weights)
        self.dice = dice

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """Return cross-entropy per pixel plus :attr:`dice` times :func:`soft_dice_loss`, for each of G
        models: ``(G,)``.

        The weight of a pixel depends on its class only, not on the rest of the image or batch.

        Args:
            outputs: logits, ``(G, B, C, H, W)``.
            targets: classes, ``(G, B, H, W)``.
            smoothing: label smoothing, from 0 to 1.
        """
        logits, truth = outputs.flatten(0, 1), targets.flatten(0, 1)
        if self.class_weights is not None:  # moved once: a CUDA graph cannot capture copies from the CPU
            self.class_weights = self.class_weights.to(logits.device, logits.dtype)
        pixel_losses = F.cross_entropy(
            logits, truth, self.class_weights, reduction="none", label_smoothing=smoothing
        )
        losses = pixel_losses.flatten(1).mean(1)  # (G * B,)
        if self.dice:
            losses = losses + self.dice * soft_dice_loss(logits, truth)
        return losses.view(len(outputs), -1).mean(1)

    def counts(self, data: TensorData) -> torch.Tensor:
        """Return the number of examples of each class, ``(C,)`` float64: each image adds its shares of
        pixels.

        With float32 a single image could change a large sum by more than its share.
        """
        return torch.stack(
            [data.targets.eq(c).flatten(1).double().mean(1).sum() for c in range(self.classes)]
        )

    def encode_maps(self, maps: torch.Tensor) -> torch.Tensor:
        """Return maps ``(..., H, W)`` with one channel per code, ``(..., condition_channels, H, W)``: 1 or
        -1.
        """
        codes = torch.arange(self.condition_channels, device=maps.device).view(-1, 1, 1)
        return maps.unsqueeze(-3).eq(codes).float().mul(2).sub(1)


class Segmentation(MapTask):
    """Segmentation with one class per pixel, evaluated by region and outline: FedIOD's Table 2.

    Outputs are logits ``(B, C, H, W)``, targets classes ``(B, H, W)`` int64 with 0 for the background.

    Args:
        classes: C, the background included, 2 or more.
        class_weights: weight of each class in the cross-entropy. None: all 1.
        dice: weight of the soft Dice loss, added to the cross-entropy.
        outline: True if label maps for generators separate the body from its surroundings
            (:meth:`label_maps`).

    Example:
        >>> task = Segmentation(2)
        >>> task.output_shape((1, 64, 64)), task.condition_channels
        ((2, 64, 64), 3)
    """

    name = "segmentation"
    metrics = (
        Metric("dice", "Dice"),
        Metric("sensitivity", "Sens."),
        Metric("specificity", "Spec."),
        Metric("hd95", "HD95", unit="px", better="lower"),
    )

    def __init__(
        self,
        classes: int,
        class_weights: Sequence[float] | None = None,
        dice: float = 1.0,
        outline: bool = True,
    ) -> None:
        super().__init__(classes, class_weights, dice)
        self.outline = outline
        self.condition_channels = classes + 1 if outline else classes

    # --- evaluation ---

    def compute_metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> Mapping[str, float]:
        """Return Dice, sensitivity and specificity in percent and HD95 in pixels, averaged over classes, then
        cases.

        For Dice, sensitivity and specificity the pixels of all slices of a case are added first;
        :mod:`fedstill.tasks.segmentation` lists their values for empty masks. HD95 is computed for each slice
        with a true region and averaged over the slices of a case. It is the slice's diagonal if the
        prediction is empty. A case without a value is left out, and a metric without any case is NaN. Without
        cases each example is its own case.
        """
        case, count = case_indices(len(targets), cases)
        regions = self._regions(outputs, targets)
        pixels = [count_overlap(*region).sum_by_case(case, count) for region in regions]
        distances = [mean_by_group(hd95_of_slices(*region), case, count) for region in regions]
        return {
            "dice": 100.0 * _mean_over_cases([dice(counts) for counts in pixels]),
            "sensitivity": 100.0 * _mean_over_cases([sensitivity(counts) for counts in pixels]),
            "specificity": 100.0 * _mean_over_cases([specificity(counts) for counts in pixels]),
            "hd95": _mean_over_cases(distances),
        }

    def case_scores(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> torch.Tensor:
        """Return the Dice of each present case in percent, in the order of the cases: ``(cases,)``
        float64.
        """
        case, count = case_indices(len(targets), cases)
        regions = self._regions(outputs, targets)
        pixels = [count_overlap(*region).sum_by_case(case, count) for region in regions]
        return 100.0 * torch.stack([dice(counts) for counts in pixels]).mean(0)

    def _regions(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the predicted and true masks ``(N, H, W)`` of each class except the background."""
        # torch's argmax over classes is ten times slower.
        predicted, targets = outputs.max(1).indices.cpu(), targets.cpu()
        return [(predicted == c, targets == c) for c in range(1, self.classes)]

    # --- inputs generated from label maps ---

    def label_maps(self, data: TensorData) -> torch.Tensor:
        """Return codes ``(N, H, W)`` uint8: 0 outside the body, 1 body, 2 and up the classes 1 and up. They
        are private.

        Without :attr:`outline` the codes are the classes. A pixel of a class counts as body, even outside the
        outline.
        """
        if not self.outline:
            return data.targets.to(torch.uint8)
        codes = torch.where(data.targets > 0, data.targets + 1, body_mask(data.inputs))
        return codes.to(torch.uint8)

    def targets_from_maps(self, maps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the classes ``(B, H, W)`` int64 of codes, without the outline of the body."""
        return maps.long().sub(1).clamp_min(0) if self.outline else maps.long()

    def sample_maps(self, count: int, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        """Return random codes ``(count, H, W)`` uint8 of smooth regions in an ellipse like a head."""
        codes = sample_body_regions(count, height, width, self.classes - 1, generator)
        return codes if self.outline else codes.clamp_min(1).sub(1)


@dataclass(frozen=True, kw_only=True)
class SegmentationConfig(TaskConfig):
    """Segmentation of images, one class per pixel.

    Example:
        >>> SegmentationConfig(class_weights=(1.0, 4.0)).make(["background", "tumor"]).classes
        2
    """

    task_class = Segmentation

    class_weights: ClassWeights | None = None
    """Weight of each class in the cross-entropy. None: all 1."""

    dice: Annotated[float, Interval(ge=0, lt=1e6), "0 or more"] = 1.0
    """Weight of the soft Dice loss, added to the cross-entropy."""

    outline: bool = True
    """Label maps for generators have the outline of the imaged body as an additional class."""
