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

Which pixels show what is looked for: tumors on MRI, say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Interval

from fedstill.core.dataset import CaseIndex, TensorData
from fedstill.tasks.body_mask import body_mask
from fedstill.tasks.config import TaskConfig
from fedstill.tasks.map_task import ClassWeights, MapTask
from fedstill.tasks.synthetic_maps import sample_body_regions
from fedstill.tasks.task import Metric, case_indices, mean_by_group

Mask = npt.NDArray[np.bool_]  # (H, W)
HAUSDORFF_QUANTILE = 0.95  # quantile of the distances that counts as the largest


# --- metrics ---


class Overlap(NamedTuple):
    """Numbers of pixels: of N pictures, or of N cases with their pictures taken together."""

    both: torch.Tensor  # (N,) float64: in the prediction and in the truth
    predicted: torch.Tensor  # (N,)
    true: torch.Tensor  # (N,)
    all: torch.Tensor  # (N,)

    def pooled(self, of: torch.Tensor, cases: int) -> Overlap:
        """Of whole cases: ``of`` (N,) int64 names the case of each picture, from 0 to below ``cases``."""
        return Overlap(*(torch.zeros(cases, dtype=part.dtype).index_add(0, of, part) for part in self))


def count_overlap(prediction: torch.Tensor, truth: torch.Tensor) -> Overlap:
    """Count pixels of masks ``(N, ...)`` bool, each picture by itself.

    >>> dice(count_overlap(torch.tensor([[True, True, False]]), torch.tensor([[True, False, False]]))).item()
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
    first, second = np.argwhere(_boundary(prediction)), np.argwhere(_boundary(truth))  # (pixels, 2)
    return max(_directed_distance(first, second), _directed_distance(second, first))


def _boundary(mask: Mask) -> Mask:
    """Pixels of a mask with one of their four neighbors, or the picture's end, outside of it."""
    from scipy.ndimage import binary_erosion

    edge: Mask = mask & ~binary_erosion(mask)
    return edge


def _directed_distance(edge: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> float:
    """The 95% quantile of how far the pixels of one outline are from the nearest of the other."""
    from scipy.spatial import KDTree

    # Outlines are few pixels of a picture: a tree of them is quicker than a distance for every pixel.
    hd95_of_slices, _ = KDTree(other, leafsize=32).query(edge)
    return float(np.quantile(hd95_of_slices, HAUSDORFF_QUANTILE))


def hd95_of_slices(predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """HD95 of each pair of masks ``(N, H, W)``, ``(N,)`` pixels; nothing predicted: the diagonal, nothing
    true: NaN."""
    pairs = zip(predicted.numpy(), true.numpy(), strict=True)
    far = torch.tensor([hd95(told, truth) if truth.any() else math.nan for told, truth in pairs])
    return far.double().clamp_max(math.hypot(*true.shape[1:]))  # NaN stays


def _mean_over_cases(classes: Sequence[torch.Tensor]) -> float:
    """Of values ``(cases,)`` of each class: over classes first, then cases; what is NaN is left out."""
    return torch.stack(list(classes)).nanmean(0).nanmean().item()


# --- the task ---


class Segmentation(MapTask):
    """A class a pixel of images, judged by region and outline: FedIOD's Table 2.

    Args:
        classes: C, with the background first.
        class_weights: of each class in the cross-entropy; None: all 1.
        dice: weight of the soft Dice loss beside the cross-entropy.
        body_mask: whether maps for generators tell the body apart from what is around it, see :meth:`maps`.
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
        """Dice, sensitivity and specificity in percent, HD95 in pixels: means over cases (patients), then
        classes.

        A case's pixels are taken together over all its slices for the first three; for what is said where one
        of the two is empty see :mod:`fedstill.tasks.segmentation`. HD95 is of each slice that truly
        shows something, a mean over a case; where nothing is predicted there it is the slice's diagonal. A
        figure that a case does not have leaves the case out; one that none has is NaN. Without cases each
        example is one.
        """
        of, count = case_indices(len(targets), cases)
        regions = self._regions(outputs, targets)
        pixels = [count_overlap(*region).pooled(of, count) for region in regions]
        far = [mean_by_group(hd95_of_slices(*region), of, count) for region in regions]
        return {
            "dice": 100.0 * _mean_over_cases([dice(each) for each in pixels]),
            "sensitivity": 100.0 * _mean_over_cases([sensitivity(each) for each in pixels]),
            "specificity": 100.0 * _mean_over_cases([specificity(each) for each in pixels]),
            "hd95": _mean_over_cases(far),
        }

    def case_scores(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: CaseIndex | None = None
    ) -> torch.Tensor:
        """Dice in percent of each case that there is an example of, by number: ``(cases,)`` float64."""
        of, count = case_indices(len(targets), cases)
        pixels = [count_overlap(*region).pooled(of, count) for region in self._regions(outputs, targets)]
        return 100.0 * torch.stack([dice(each) for each in pixels]).mean(0)

    def _regions(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Predicted and true masks ``(N, H, W)`` of each class but the background."""
        # torch's argmax over classes takes ten times as long.
        predicted, targets = outputs.max(1).indices.cpu(), targets.cpu()
        return [(predicted == c, targets == c) for c in range(1, self.classes)]

    # --- inputs made to order ---

    def label_maps(self, data: TensorData) -> torch.Tensor:
        """Codes ``(N, H, W)`` uint8: 0 outside the body, 1 the body, 2.. the classes 1..; private.

        Without :attr:`body_mask` they are the classes. What is looked for is of the body, wherever the
        outline runs.
        """
        if not self.outline:
            return data.targets.to(torch.uint8)
        codes = torch.where(data.targets > 0, data.targets + 1, body_mask(data.inputs))
        return codes.to(torch.uint8)

    def targets_from_maps(self, maps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Classes ``(B, H, W)`` int64 of codes: without the outline of the body."""
        return maps.long().sub(1).clamp_min(0) if self.outline else maps.long()

    def sample_maps(self, count: int, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        """Codes ``(count, H, W)`` uint8 of smooth regions in a head-like ellipse; of no data."""
        drawn = sample_body_regions(count, height, width, self.classes - 1, generator)
        return drawn if self.outline else drawn.clamp_min(1).sub(1)


@dataclass(frozen=True, kw_only=True)
class SegmentationConfig(TaskConfig):
    """One class a pixel."""

    task_class = Segmentation

    class_weights: ClassWeights | None = None
    """Weight of each class in the cross-entropy; none: all 1."""

    dice: Annotated[float, Interval(ge=0, lt=1e6), "0 or more"] = 1.0
    """Weight of the Dice loss beside the cross-entropy."""

    outline: bool = True
    """What inputs are generated from also tells the outline of the imaged body, as one more class."""
