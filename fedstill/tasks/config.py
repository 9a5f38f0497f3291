"""Which task, and its options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from fedstill.core.choices import check_choices
from fedstill.core.errors import ArgumentError

TaskName = Literal["classification", "text", "multi-label", "segmentation", "instances", "reconstruction"]


@dataclass(frozen=True)
class TaskConfig:
    """What is learned. An option of another task than the one named must be left at none."""

    name: TaskName = "classification"
    """classification: one label an image. text: one label a text. multi-label: any number of findings an
    image. segmentation: one class a pixel. instances: objects that touch, as nuclei, each by itself.
    reconstruction: images from too few measurements."""

    class_weights: tuple[float, ...] | None = None
    """segmentation, instances: weight of each class in the cross-entropy; none: all 1 (segmentation), or 1, 1
    and 2 for background, inside and contour (instances)."""

    dice: float | None = None
    """segmentation: weight of the Dice loss beside the cross-entropy; none: 1."""

    outline: bool | None = None
    """segmentation: what inputs are generated from also tells the outline of the imaged body, as one more
    class; none: yes."""

    smallest: int | None = None
    """instances: objects of fewer pixels are taken for noise; none: 20."""

    acceleration: int | None = None
    """reconstruction: one of so many lines of k-space is measured; none: 4."""

    centre: float | None = None
    """reconstruction: the share of lines in the middle of k-space that are always measured; none: 0.08."""

    def __post_init__(self) -> None:
        check_choices(self, "task")
        own = {
            "segmentation": ("class_weights", "dice", "outline"),
            "instances": ("class_weights", "smallest"),
            "reconstruction": ("acceleration", "centre"),
        }.get(self.name, ())
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("name", *own) and value is not None:
                raise ArgumentError(
                    f"task.{field.name}", value, f"none, as task {self.name} has no such option"
                )
        if self.class_weights is not None and not all(0 < weight < 1e6 for weight in self.class_weights):
            raise ArgumentError("task.class_weights", list(self.class_weights), "each above 0")
        if self.dice is not None and not 0 <= self.dice < 1e6:
            raise ArgumentError("task.dice", self.dice, "0 or more")
        if self.smallest is not None and self.smallest < 0:
            raise ArgumentError("task.smallest", self.smallest, "0 or more")
        if self.acceleration is not None and self.acceleration < 2:
            raise ArgumentError("task.acceleration", self.acceleration, "2 or more")
        if self.centre is not None and not 0 <= self.centre < 1:
            raise ArgumentError("task.centre", self.centre, "from 0 to below 1")
