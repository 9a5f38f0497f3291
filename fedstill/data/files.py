"""Data of one's own from a path: what is in a file or folder follows from the task that it is read for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, get_args

from fedstill.core.dataset import DataSet
from fedstill.core.errors import ArgumentError
from fedstill.data import nuclei, text
from fedstill.data.config import DATA, DataConfig, Limit, Side
from fedstill.data.formats import form_of, read
from fedstill.data.located import located
from fedstill.data.pictures import Picture, read_pictures
from fedstill.data.preparation import of_images
from fedstill.tasks import Targets, TaskConfig

# By what is read: the options that it has beside those of all data.
_OPTIONS: Mapping[Targets, tuple[str, ...]] = MappingProxyType(
    {
        "class": (),
        "labels": ("size", "sites"),
        "map": ("size", "channels", "sites", "slices"),
        "image": ("size", "channels", "sites", "slices"),
        "instances": ("sites", "patch", "scale"),
        "texts": ("length", "words", "vocabulary"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Files(nuclei.PictureData, text.TextData):
    """Data of one's own, by their path: an .npz with images and labels or masks, a folder of images by class,
    of images and masks, or of NIfTI volumes, or a csv of findings or texts."""

    targets: ClassVar[tuple[Targets, ...]] = get_args(Targets)

    name: str
    """The path, from this folder or from data.root."""

    size: Side = 0
    """Findings, maps and images: height and width that images are averaged down to, masks by majority; 0: as
    they are."""

    channels: tuple[int, ...] = ()
    """Maps and images: which channels; empty: all, and for reconstruction the first."""

    slices: Limit = 0
    """NIfTI volumes: at most so many axial slices of each, evenly spread; 0: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name:
            raise ArgumentError("data.name", self.name, f"one of {DATA.allowed}")

    def read(self, task: TaskConfig) -> DataSet:
        """What the path holds for a task."""
        targets = task.targets
        self._check_options(targets, task.called)
        if targets == "texts":
            return text.data_set(self.labelled(), self, Path(self.name).name.partition(".")[0], "")
        place = located(self, task.called, targets)
        name = place.resolve().name if place.is_dir() else place.stem
        if targets == "instances":
            return nuclei.data_set(self.pictures(), self, name, "", "site")
        raw = read(place, form_of(place, targets), targets, size=self.size, slices=self.slices)
        return of_images(raw, self, task, name, "", self.size, self.channels, self.sites)

    def pictures(self) -> Sequence[Picture]:
        """Pictures with objects."""
        return read_pictures(located(self, "instances", "instances"))

    def labelled(self) -> text.Labelled:
        """Texts with labels, from a table."""
        return text.read_table(located(self, "text", "texts"))

    def _check_options(self, targets: Targets, task: str) -> None:
        known = {part.name for part in fields(DataConfig)} | {"name", *_OPTIONS[targets]}
        for part in fields(self):
            value = getattr(self, part.name)
            if part.name not in known and value != part.default:
                shown = list(value) if isinstance(value, tuple) else value
                default = "empty" if part.default in ((), "") else str(part.default).lower()
                told = f"{default}, as data {self.name!r} have no such option for task {task}"
                raise ArgumentError(f"data.{part.name}", shown, told)
