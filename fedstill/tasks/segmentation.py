"""Which pixels show what is looked for: tumours on MRI, say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval

from fedstill.core.dataset import Cases, TensorData
from fedstill.tasks import segmentation_metrics
from fedstill.tasks.body_mask import outline
from fedstill.tasks.cases import case_of, mean_by
from fedstill.tasks.config import TaskConfig
from fedstill.tasks.figure import Figure
from fedstill.tasks.map_task import MapTask, Weights
from fedstill.tasks.synthetic_maps import regions


class Segmentation(MapTask):
    """A class a pixel of images, judged by region and outline: FedIOD's Table 2.

    Args:
        classes: C, with the background first.
        class_weights: of each class in the cross-entropy; None: all 1.
        dice: weight of the soft Dice loss beside the cross-entropy.
        outline: whether maps for generators tell the body apart from what is around it, see :meth:`maps`.
    """

    name = "segmentation"
    figures = (
        Figure("dice", "Dice"),
        Figure("sensitivity", "Sens."),
        Figure("specificity", "Spec."),
        Figure("hd95", "HD95", unit="px", better="lower"),
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
        self.conditions = classes + 1 if outline else classes

    # --- evaluation ---

    def metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: Cases | None = None
    ) -> Mapping[str, float]:
        """Dice, sensitivity and specificity in percent, HD95 in pixels: means over cases (patients), then
        classes.

        A case's pixels are taken together over all its slices for the first three; for what is said where one
        of the two is empty see :mod:`fedstill.tasks.segmentation_metrics`. HD95 is of each slice that truly
        shows something, a mean over a case; where nothing is predicted there it is the slice's diagonal. A
        figure that a case does not have leaves the case out; one that none has is NaN. Without cases each
        example is one.
        """
        of, count = case_of(len(targets), cases)
        regions = self._regions(outputs, targets)
        pixels = [segmentation_metrics.overlap(*region).pooled(of, count) for region in regions]
        far = [mean_by(distances(*region), of, count) for region in regions]
        return {
            "dice": 100.0 * _mean([segmentation_metrics.dice(each) for each in pixels]),
            "sensitivity": 100.0 * _mean([segmentation_metrics.sensitivity(each) for each in pixels]),
            "specificity": 100.0 * _mean([segmentation_metrics.specificity(each) for each in pixels]),
            "hd95": _mean(far),
        }

    def scores(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: Cases | None = None
    ) -> torch.Tensor:
        """Dice in percent of each case that there is an example of, by number: ``(cases,)`` float64."""
        of, count = case_of(len(targets), cases)
        pixels = [
            segmentation_metrics.overlap(*region).pooled(of, count)
            for region in self._regions(outputs, targets)
        ]
        return 100.0 * torch.stack([segmentation_metrics.dice(each) for each in pixels]).mean(0)

    def _regions(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Predicted and true masks ``(N, H, W)`` of each class but the background."""
        # torch's argmax over classes takes ten times as long.
        predicted, targets = outputs.max(1).indices.cpu(), targets.cpu()
        return [(predicted == c, targets == c) for c in range(1, self.classes)]

    # --- inputs made to order ---

    def maps(self, data: TensorData) -> torch.Tensor:
        """Codes ``(N, H, W)`` uint8: 0 outside the body, 1 the body, 2.. the classes 1..; private.

        Without :attr:`outline` they are the classes. What is looked for is of the body, wherever the
        outline runs.
        """
        if not self.outline:
            return data.targets.to(torch.uint8)
        codes = torch.where(data.targets > 0, data.targets + 1, outline(data.inputs))
        return codes.to(torch.uint8)

    def labels(self, maps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Classes ``(B, H, W)`` int64 of codes: without the outline of the body."""
        return maps.long().sub(1).clamp_min(0) if self.outline else maps.long()

    def draw_maps(self, count: int, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        """Codes ``(count, H, W)`` uint8 of smooth regions in a head-like ellipse; of no data."""
        drawn = regions(count, height, width, self.classes - 1, generator)
        return drawn if self.outline else drawn.clamp_min(1).sub(1)


@dataclass(frozen=True, kw_only=True)
class SegmentationConfig(TaskConfig):
    """One class a pixel."""

    makes = Segmentation

    class_weights: Weights | None = None
    """Weight of each class in the cross-entropy; none: all 1."""

    dice: Annotated[float, Interval(ge=0, lt=1e6), "0 or more"] = 1.0
    """Weight of the Dice loss beside the cross-entropy."""

    outline: bool = True
    """What inputs are generated from also tells the outline of the imaged body, as one more class."""


def distances(predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """HD95 of each pair of masks ``(N, H, W)``, ``(N,)`` pixels; nothing predicted: the diagonal, nothing
    true: NaN."""
    pairs = zip(predicted.numpy(), true.numpy(), strict=True)
    far = torch.tensor(
        [segmentation_metrics.hd95(told, truth) if truth.any() else math.nan for told, truth in pairs]
    )
    return far.double().clamp_max(math.hypot(*true.shape[1:]))  # NaN stays


def _mean(classes: Sequence[torch.Tensor]) -> float:
    """Of values ``(cases,)`` of each class: over classes first, then cases; what is NaN is left out."""
    return torch.stack(list(classes)).nanmean(0).nanmean().item()
