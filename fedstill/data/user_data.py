"""Data of one's own from a path: where it is, which form it has, and what it holds for the task.

A node's own data are read by :func:`read_raw_images` too, in a form that its owner names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, get_args

from fedstill.core.dataset import DataSet
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.table_schema import Schema
from fedstill.data import object_images, tables, text
from fedstill.data.config import DATA, DataConfig, Limit, Side
from fedstill.data.image_folders import read_class_folders, read_map_folder
from fedstill.data.loading import prepare_images
from fedstill.data.nifti import has_volumes, read_volumes
from fedstill.data.object_images import InstanceImage, read_instance_images
from fedstill.data.raw import RawImages, raw_images_from_arrays, read_npz
from fedstill.data.table_files import TABULAR_HINT, CsvColumns, read_class_csv, read_finding_csv
from fedstill.tasks import Targets, TaskConfig


def find_data(config: DataConfig, task: str, targets: Targets) -> Path:
    """The folder or file that a path in a configuration means, for a task.

    Raises:
        ArgumentError: neither a name that is known nor a path.
        DataError: no such file or folder, or a file of a kind that does not teach this.
    """
    name = config.called
    found = [Path(name).expanduser(), *(root / name for root in data_folders(config))]
    places = list(dict.fromkeys(found))  # an absolute path is the same in every folder
    place = next((place for place in places if place.exists()), None)
    if place is None and Path(name).suffix == "" and len(Path(name).parts) == 1:
        allowed = f"one of {DATA.allowed} to a file or a folder, and there is no {format_paths(places)}"
        raise ArgumentError("data.name", name, allowed)
    if place is None:
        raise DataError(
            f"data {name!r}: there is no {format_paths(places)}: look at the path, or set data.root"
        )
    suffixes = tuple(f".{form}" for form in FORMATS[targets] if form not in ("folder", "nifti"))
    known = bool(tables.table_ending(place)) if ".parquet" in suffixes else place.suffix in suffixes
    if place.is_file() and targets != "texts" and not known:
        kinds = " or ".join((*suffixes, *(() if targets == "labels" else ("a folder",))))
        tabular = targets == "class" and place.suffix == ".parquet"
        other = f"; {TABULAR_HINT}" if tabular else ""
        raise DataError(f"{place}: is no kind of file that task {task} reads (expected {kinds}{other})")
    return place


def find_file(config: DataConfig, file: str) -> Path:
    """Where the file of a data set with a name is; a DataError if it is nowhere."""
    roots = data_folders(config)
    for root in roots:
        if (root / file).is_file():
            return root / file
    raise DataError(
        f"data {config.called!r}: there is no {file} in {format_paths(roots)}: put it there, or name its folder in "
        "data.root; docs/tasks.md says what such files are made of"
    )


def data_folders(config: DataConfig) -> list[Path]:
    """The folders in which data files are looked for, in order."""
    return [Path(config.root).expanduser()] if config.root else default_folders()


def default_folders() -> list[Path]:
    """Those of them that no configuration names: ``./data`` and what ``FEDSTILL_DATA`` lists as PATH does."""
    named = os.environ.get("FEDSTILL_DATA", "").split(os.pathsep)
    return [Path("data"), *(Path(each).expanduser() for each in named if each)]


def format_paths(paths: Sequence[Path]) -> str:
    """Places, in words."""
    return " or ".join(map(str, paths))


# By what they teach: the forms that can hold it.
FORMATS: Mapping[Targets, tuple[str, ...]] = MappingProxyType(
    {
        "class": ("npz", "folder", "csv"),
        "labels": ("npz", "csv"),
        "map": ("npz", "folder", "nifti"),
        "image": ("npz", "folder", "nifti"),
        "instances": ("npz", "folder"),
        "texts": ("csv",),
        "rows": ("csv", "parquet"),
        "values": ("csv", "parquet"),
        "times": ("csv", "parquet"),
    }
)


def detect_format(place: Path, targets: Targets) -> str:
    """The form that a file or folder has: npz, csv, folder or nifti; no folder teaches findings."""
    if not place.is_dir():
        return place.suffix.removeprefix(".")
    if targets == "labels":
        raise DataError(f"{place}: is a folder: allowed for findings are an .npz or a csv")
    return "nifti" if "nifti" in FORMATS[targets] and has_volumes(place) else "folder"


def read_raw_images(
    place: Path,
    form: str,
    targets: Targets,
    *,
    size: int = 0,
    slices: int = 0,
    gaps: bool = False,
    columns: CsvColumns | None = None,
    classes: tuple[str, ...] = (),
    shape: tuple[int, ...] = (),
    channels: int = 0,
    on_count: Callable[[int], None] = lambda count: None,
) -> RawImages:
    """What a file or folder holds: images of classes, of findings, with masks, or alone.

    Args:
        form: one of those that can hold it: npz, folder, csv or nifti.
        targets: class, labels, map or image.
        size: height and width to which images in files of their own are averaged; 0: as they are.
        slices: of each NIfTI volume at most; 0: all.
        gaps: as :func:`fedstill.data.images.encode_masks` takes it.
        columns: what those of a csv mean.
        classes: the findings wanted of a csv; empty: all.
        shape: of a csv's pixels, if these are as many.
        channels: of images in files of their own, as :func:`fedstill.data.images.read_image_stack` takes them.
        on_count: called with the number of images before they are read, if that can be told.

    Raises:
        DataError: it cannot be read, or is not of a form that can be used.
    """
    if form == "npz":
        return raw_images_from_arrays(place, read_npz(place), targets, gaps=gaps)
    if targets == "labels":
        return read_finding_csv(place, columns, classes, size, channels, on_count)
    if form == "csv":
        return read_class_csv(place, columns or CsvColumns(), shape, size, channels, on_count)
    masks = targets == "map"
    if form == "nifti":
        return read_volumes(place, masks=masks, size=size, slices=slices, gaps=gaps, on_count=on_count)
    if targets == "class":
        return read_class_folders(place, size=size, channels=channels, on_count=on_count)
    return read_map_folder(place, masks=masks, size=size, channels=channels, gaps=gaps, on_count=on_count)


# By what is read: the options that it has beside those of all data.
_OPTIONS_BY_TARGETS: Mapping[Targets, tuple[str, ...]] = MappingProxyType(
    {
        "class": ("size", "label", "image"),
        "labels": ("size", "sites", "label", "image"),
        "map": ("size", "channels", "sites", "slices"),
        "image": ("size", "channels", "sites", "slices"),
        "instances": ("sites", "patch", "scale"),
        "texts": ("length", "words", "vocabulary"),
        "rows": ("schema",),
        "values": ("schema",),
        "times": ("schema",),
    }
)


@dataclass(frozen=True, kw_only=True)
class UserFiles(object_images.InstanceImageData, text.TextData):
    """Data of one's own, by their path: an .npz with images and labels or masks, a folder of images by class,
    of images and masks, or of NIfTI volumes; a csv of image files with classes or findings, or of texts; a
    table's rows in a csv or Parquet file, or a folder of these."""

    targets: ClassVar[tuple[Targets, ...]] = get_args(Targets)

    name: str
    """The path, from this folder or from data.root."""

    size: Side = 0
    """Images: height and width that all are averaged down to, masks by majority; 0: as they are."""

    label: str = ""
    """A csv of images: the column of classes, which is else called label; or of findings, divided by "|",
    without which each finding has a column of its own."""

    image: str = ""
    """A csv of images: the column of image files, from the folder of the csv, which is else called image."""

    channels: tuple[int, ...] = ()
    """Maps and images: which channels; empty: all, and for reconstruction the first."""

    slices: Limit = 0
    """NIfTI volumes: at most so many axial slices of each, evenly spread; 0: all."""

    schema: str = ""
    """Tables: the file that says which columns they have (docs/data.md); empty: schema.toml in the folder, or
    beside the file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name:
            raise ArgumentError("data.name", self.name, f"one of {DATA.allowed}")

    def read(self, task: TaskConfig) -> DataSet:
        """What the path holds for a task."""
        targets = task.targets
        self._check_options(targets, task.called)
        if targets == "texts":
            return text.prepare_texts(self.labeled_texts(), self, Path(self.name).name.partition(".")[0], "")
        place = find_data(self, task.called, targets)
        name = place.resolve().name if place.is_dir() else place.stem
        if task.task_class.form == "rows":
            return tables.prepare_table(self.rows(place), self, task, name, "")
        if targets == "instances":
            return object_images.prepare_instance_images(self.images(), self, name, "", "site")
        form = detect_format(place, targets)
        if form != "csv":
            for option in ("label", "image"):
                if value := getattr(self, option):
                    raise ArgumentError(f"data.{option}", value, "empty, as only a csv has columns of these")
        columns = CsvColumns(self.label or ("label" if targets == "class" else ""), self.image)
        raw = read_raw_images(place, form, targets, size=self.size, slices=self.slices, columns=columns)
        return prepare_images(raw, self, task, name, "", self.size, self.channels, self.sites)

    def columns(self, place: Path) -> Schema:
        """The schema of a table, which may be here without it."""
        folder = place if place.is_dir() else place.parent
        return tables.read_schema(
            Path(self.schema).expanduser() if self.schema else folder / tables.SCHEMA_FILE
        )

    def rows(self, place: Path) -> tables.TableRows:
        """Rows of a table, or of a folder of tables."""
        schema = self.columns(place)
        return tables.read_table_folder(place, schema) if place.is_dir() else tables.read_rows(place, schema)

    def images(self) -> Sequence[InstanceImage]:
        """Pictures with objects."""
        return read_instance_images(find_data(self, "instances", "instances"))

    def labeled_texts(self) -> text.LabeledTexts:
        """Texts with labels, from a table."""
        return text.read_labeled_texts(find_data(self, "text", "texts"))

    def _check_options(self, targets: Targets, task: str) -> None:
        known = {part.name for part in fields(DataConfig)} | {"name", *_OPTIONS_BY_TARGETS[targets]}
        for part in fields(self):
            value = getattr(self, part.name)
            if part.name not in known and value != part.default:
                shown = list(value) if isinstance(value, tuple) else value
                default = "empty" if part.default in ((), "") else str(part.default).lower()
                told = f"{default}, as data {self.name!r} have no such option for task {task}"
                raise ArgumentError(f"data.{part.name}", shown, told)
