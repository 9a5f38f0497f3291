"""Objects that touch, each by itself: nuclei under the microscope, judged by whole pictures that patches are
put back into."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fedstill.core.dataset import Cases, TensorData
from fedstill.core.errors import ArgumentError
from fedstill.tasks import instance_metrics, segmentation_metrics
from fedstill.tasks.config import TaskConfig
from fedstill.tasks.figure import Figure
from fedstill.tasks.instance_classes import objects_of, separate, three_classes
from fedstill.tasks.map_task import MapTask
from fedstill.tasks.synthetic_maps import nuclei


def stitch(outputs: torch.Tensor, cases: Cases) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Whole pictures from patches with places ``(N, C, h, w)``, one case after another; where they overlap
    they are averaged.

    Average probabilities, not logits: a patch that is sure does not outweigh one that is not. What sticks out
    of a picture at its right or lower end is cut off.

    Yields:
        ``(C, height, width)``, 0 where no patch is, and where patches are, ``(height, width)`` bool.

    >>> cases = Cases(torch.tensor([0, 0]), ("a",), ("",), torch.tensor([[0, 0], [0, 1]]), ((1, 3),))
    >>> patches = torch.tensor([[1.0, 1.0], [3.0, 3.0]]).view(2, 1, 1, 2)
    >>> [picture.tolist() for picture, _ in stitch(patches, cases)]
    [[[[1.0, 2.0, 3.0]]]]
    """
    places = [] if cases.places is None else cases.places.tolist()
    for case in cases.present():
        height, width = cases.sizes[case]
        total = outputs.new_zeros(outputs.shape[1], height, width)
        count = outputs.new_zeros(height, width)
        for n in torch.nonzero(cases.of == case).flatten().tolist():
            top, left = places[n]
            patch = outputs[n, :, : height - top, : width - left]
            bottom, right = top + patch.shape[1], left + patch.shape[2]
            total[:, top:bottom, left:right] += patch
            count[top:bottom, left:right] += 1
        yield total / count.clamp_min(1), count > 0


Objects = npt.NDArray[np.int32]  # (H, W), 0 where there is none

WEIGHTS = (1.0, 1.0, 2.0)  # of background, inside and contour, which is thin and tells objects apart
SMALLEST = 20  # pixels


class Instances(MapTask):
    """Background, inside or contour a pixel, put together to objects: FedIOD's Tables 3 and 4.

    Args:
        classes: 3.
    """

    name = "instances"
    least = 3
    like = "instances"
    figures = (
        Figure("dice", "Dice"),
        Figure("object_dice", "Obj-Dice"),
        Figure("aji", "AJI"),
        Figure("pq", "PQ"),
        Figure("hd95", "HD95", unit="px", better="lower"),
    )
    conditions = 3

    def __init__(self, classes: int = 3) -> None:
        if classes != 3:
            raise ArgumentError("classes", classes, "3: background, inside and contour")
        super().__init__(classes, WEIGHTS)

    # --- evaluation ---

    def metrics(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: Cases | None = None
    ) -> Mapping[str, float]:
        """Means over whole pictures: Dice, object-level Dice, AJI and PQ in percent, HD95 in pixels.

        Dice and HD95 are of all objects together, the others see :mod:`fedstill.tasks.instance_metrics`.
        Patches are first put together to the pictures of their cases, and only what patches cover is judged.
        Without places each example is a picture. A picture without true and predicted objects counts as
        perfect, and has no HD95; one with only one of the two has its diagonal for it.
        """
        pictures = [_judged(*pair) for pair in self._pictures(outputs, targets, cases)]
        each = torch.tensor(pictures, dtype=torch.float64)  # (pictures, figures)
        means = each.nanmean(0).tolist()
        return {figure.key: value for figure, value in zip(self.figures, means, strict=True)}

    def scores(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: Cases | None = None
    ) -> torch.Tensor:
        """Dice in percent of each picture, by number of its case: ``(pictures,)`` float64."""
        dice = [_dice(*pair) for pair in self._pictures(outputs, targets, cases)]
        return torch.tensor(dice, dtype=torch.float64)

    def drawing(self, probabilities: torch.Tensor) -> torch.Tensor:
        """The objects in a picture of probabilities ``(3, H, W)``: ``(H, W)`` int32, 0 where none is."""
        return torch.from_numpy(separate(probabilities.cpu().numpy(), SMALLEST))

    def _pictures(
        self, outputs: torch.Tensor, targets: torch.Tensor, cases: Cases | None
    ) -> Iterator[tuple[Objects, Objects]]:
        """The predicted and the true objects of each picture."""
        probabilities = outputs.float().softmax(1)
        if cases is None or cases.places is None:
            for p, truth in zip(probabilities.cpu().numpy(), targets.cpu().numpy(), strict=True):
                yield separate(p, SMALLEST), objects_of(truth)
            return
        known = self._known(targets, cases)
        for picture, there in stitch(probabilities, cases):
            covered, found = there.cpu().numpy(), separate(picture.cpu().numpy(), SMALLEST)
            yield np.where(covered, found, 0), np.where(covered, next(known), 0)

    def _known(self, targets: torch.Tensor, cases: Cases) -> Iterator[Objects]:
        """The true objects of each picture; where cases do not tell them, what the targets show."""
        if cases.instances:
            yield from (cases.instances[case] for case in cases.present())
            return
        classes = F.one_hot(targets, self.classes).movedim(-1, 1).float()  # (N, C, h, w)
        for picture, covered in stitch(classes, cases):
            yield objects_of(np.where(covered.cpu(), picture.argmax(0).cpu(), 0))

    # --- inputs made to order ---

    def maps(self, data: TensorData) -> torch.Tensor:
        """The classes ``(N, H, W)`` uint8; private."""
        return data.targets.to(torch.uint8)

    def labels(self, maps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The classes ``(B, H, W)`` int64."""
        return maps.long()

    def draw_maps(self, count: int, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        """Classes ``(count, H, W)`` uint8 of ellipses that do not touch; of no data."""
        drawn = [three_classes(nuclei(height, width, generator)) for _ in range(count)]
        return (
            torch.from_numpy(np.stack(drawn)) if drawn else torch.zeros(0, height, width, dtype=torch.uint8)
        )


@dataclass(frozen=True, kw_only=True)
class InstancesConfig(TaskConfig):
    """Objects that touch, as nuclei, each by itself."""

    makes = Instances


def _dice(found: Objects, there: Objects) -> float:
    """Dice in percent of all objects together."""
    masks = (torch.from_numpy(objects_ > 0).unsqueeze(0) for objects_ in (found, there))
    return 100.0 * segmentation_metrics.dice(segmentation_metrics.overlap(*masks)).item()


def _judged(found: Objects, there: Objects) -> tuple[float, ...]:
    """A picture's figures, in the task's order."""
    match = instance_metrics.match(found, there)
    far = segmentation_metrics.hd95(found > 0, there > 0)
    return (
        _dice(found, there),
        100.0 * instance_metrics.object_dice(match),
        100.0 * instance_metrics.aji(match),
        100.0 * instance_metrics.panoptic_quality(match),
        math.hypot(*there.shape) if math.isinf(far) else far,
    )
