"""Data given by a path: where the file or folder is, which format it has, and how to read it for a task.

A node's data are read by :func:`read_raw_images` too, in a format that its owner names.
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
from fedstill.core.table_schema import TableSchema
from fedstill.data import instance_images, table_data, text_data
from fedstill.data.config import DATA, DataConfig, Limit, Side
from fedstill.data.image_folders import read_class_folders, read_map_folder
from fedstill.data.instance_images import InstanceImage, read_instance_images
from fedstill.data.loading import prepare_images
from fedstill.data.nifti import contains_nifti_files, read_volumes
from fedstill.data.raw_images import RawImages, raw_images_from_arrays, read_npz
from fedstill.data.table_files import CsvColumns, read_class_csv, read_finding_csv, tabular_hint
from fedstill.tasks import Targets, TaskConfig

# Formats that can hold each kind of targets.
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
# Options that each kind of targets has, in addition to those of all data.
_OPTIONS_BY_TARGETS: Mapping[Targets, tuple[str, ...]] = MappingProxyType(
    {
        "class": ("size", "label", "image"),
        "labels": ("size", "sites", "label", "image"),
        "map": ("size", "channels", "sites", "slices"),
        "image": ("size", "channels", "sites", "slices"),
        "instances": ("sites", "patch", "scale", "stain_shift"),
        "texts": ("length", "words", "vocabulary"),
        "rows": ("schema",),
        "values": ("schema",),
        "times": ("schema",),
    }
)


# --- finding ------------------------------------------------------------------------------------------------


def find_data_path(config: DataConfig, task: str, targets: Targets) -> Path:
    """Return the folder or file of a path in a data configuration.

    Raises:
        ArgumentError: the name is neither a known data set nor a path.
        DataError: there is no such file or folder, or its format does not support the task.
    """
    name = config.registered_name
    candidates = [Path(name).expanduser(), *(root / name for root in data_folders(config))]
    paths = list(dict.fromkeys(candidates))  # an absolute path is the same for every folder
    path = next((path for path in paths if path.exists()), None)
    if path is None and Path(name).suffix == "" and len(Path(name).parts) == 1:
        expected = f"one of {DATA.choices_text} to a file or folder; not found: {format_paths(paths)}"
        raise ArgumentError("data.name", name, expected)
    if path is None:
        raise DataError(f"data {name!r}: not found: {format_paths(paths)}; check the path, or set data.root")
    suffixes = tuple(f".{form}" for form in FORMATS[targets] if form not in ("folder", "nifti"))
    is_known = bool(table_data.table_ending(path)) if ".parquet" in suffixes else path.suffix in suffixes
    if path.is_file() and targets != "texts" and not is_known:
        formats = " or ".join((*suffixes, *(() if targets == "labels" else ("a folder",))))
        is_table = targets == "class" and path.suffix == ".parquet"
        hint = f"; {tabular_hint()}" if is_table else ""
        raise DataError(f"{path}: unsupported format for task {task} (expected {formats}{hint})")
    return path


def find_file(config: DataConfig, file: str) -> Path:
    """Return the path of a named data set's file.

    Raises:
        DataError: no data folder has it.
    """
    roots = data_folders(config)
    for root in roots:
        if (root / file).is_file():
            return root / file
    raise DataError(
        f"data {config.registered_name!r}: {file} not found in {format_paths(roots)}; put it there, "
        "or set data.root to its folder (docs/tasks.md has the sources of such files)"
    )


def data_folders(config: DataConfig) -> list[Path]:
    """Return the folders in which data files are searched, in order."""
    return [Path(config.root).expanduser()] if config.root else default_folders()


def default_folders() -> list[Path]:
    """Return the folders searched without data.root: ``./data`` and those in ``FEDSTILL_DATA``."""
    listed = os.environ.get("FEDSTILL_DATA", "").split(os.pathsep)
    return [Path("data"), *(Path(folder).expanduser() for folder in listed if folder)]


def format_paths(paths: Sequence[Path]) -> str:
    """Return paths joined with "or", for messages."""
    return " or ".join(map(str, paths))


def detect_format(path: Path, targets: Targets) -> str:
    """Return the format of a file or folder: npz, csv, folder or nifti.

    Raises:
        DataError: a folder is given for findings.
    """
    if not path.is_dir():
        return path.suffix.removeprefix(".")
    if targets == "labels":
        raise DataError(f"{path}: is a folder (expected an .npz or a csv for findings)")
    return "nifti" if "nifti" in FORMATS[targets] and contains_nifti_files(path) else "folder"


# --- reading ------------------------------------------------------------------------------------------------


def read_raw_images(
    path: Path,
    file_format: str,
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
    """Read a file or folder of images with classes, findings or masks, or of images alone.

    Args:
        file_format: npz, folder, csv or nifti.
        targets: class, labels, map or image.
        size: height and width to which image files are averaged; 0: as they are.
        slices: maximum number of slices per NIfTI volume; 0: all.
        gaps: see :func:`fedstill.data.images.encode_masks`.
        columns: roles of the columns of a csv.
        classes: wanted findings of a csv; empty: all.
        shape: of the pixels of a csv, if it fits their number.
        channels: of image files, see :func:`fedstill.data.images.read_image_stack`.
        on_count: called with the number of images before they are read, if it is known.

    Raises:
        DataError: it cannot be read, or is not in a supported form.
    """
    if file_format == "npz":
        return raw_images_from_arrays(path, read_npz(path), targets, gaps=gaps)
    if targets == "labels":
        return read_finding_csv(path, columns, classes, size, channels, on_count)
    if file_format == "csv":
        return read_class_csv(path, columns or CsvColumns(), shape, size, channels, on_count)
    masks = targets == "map"
    if file_format == "nifti":
        return read_volumes(path, masks=masks, size=size, slices=slices, gaps=gaps, on_count=on_count)
    if targets == "class":
        return read_class_folders(path, size=size, channels=channels, on_count=on_count)
    return read_map_folder(path, masks=masks, size=size, channels=channels, gaps=gaps, on_count=on_count)


@dataclass(frozen=True, kw_only=True)
class UserFiles(instance_images.InstanceImageData, text_data.TextData):
    """Data given by a path.

    An .npz with images and labels or masks; a folder of images by class, of images and masks, or of NIfTI
    volumes; a csv of image files with classes or findings, or of texts; table rows in a csv or Parquet file,
    or a folder of these.

    Example::

        data = load(UserFiles(name="scans.npz", size=64))
    """

    targets: ClassVar[tuple[Targets, ...]] = get_args(Targets)

    name: str
    """The path, relative to the working directory or data.root."""

    size: Side = 0
    """Images: height and width to which all are averaged, masks by majority; 0: as they are."""

    label: str = ""
    """A csv of images: column of classes, by default label; or of findings separated by "|", without which
    each finding has its own column.
    """

    image: str = ""
    """A csv of images: column of image files, relative to the folder of the csv, by default image."""

    channels: tuple[int, ...] = ()
    """Maps and images: channels to use; empty: all, for reconstruction the first."""

    slices: Limit = 0
    """NIfTI volumes: maximum number of axial slices of each, evenly spaced; 0: all."""

    schema: str = ""
    """Tables: the file that describes the columns (docs/data.md); empty: schema.toml in the folder, or next
    to the file.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name:
            raise ArgumentError("data.name", self.name, f"one of {DATA.choices_text}")

    def read(self, task: TaskConfig) -> DataSet:
        """Return the data at the path for a task."""
        targets = task.targets
        self._check_options(targets, task.registered_name)
        if targets == "texts":
            return text_data.prepare_texts(
                self.labeled_texts(), self, Path(self.name).name.partition(".")[0], ""
            )
        path = find_data_path(self, task.registered_name, targets)
        name = path.resolve().name if path.is_dir() else path.stem
        if task.task_class.form == "rows":
            return table_data.prepare_table(self.read_rows(path), self, task, name, "")
        if targets == "instances":
            return instance_images.prepare_instance_images(self.images(), self, name, "", "site")
        file_format = detect_format(path, targets)
        if file_format != "csv":
            for option in ("label", "image"):
                if value := getattr(self, option):
                    raise ArgumentError(f"data.{option}", value, "empty, as only a csv has such columns")
        columns = CsvColumns(self.label or ("label" if targets == "class" else ""), self.image)
        raw = read_raw_images(path, file_format, targets, size=self.size, slices=self.slices, columns=columns)
        return prepare_images(raw, self, task, name, "", self.size, self.channels, self.sites)

    def read_schema(self, path: Path) -> TableSchema:
        """Read the schema of a table, whose file may be missing."""
        folder = path if path.is_dir() else path.parent
        return table_data.read_schema(
            Path(self.schema).expanduser() if self.schema else folder / table_data.SCHEMA_FILE
        )

    def read_rows(self, path: Path) -> table_data.EncodedRows:
        """Read the rows of a table, or of a folder of tables."""
        schema = self.read_schema(path)
        return (
            table_data.read_table_folder(path, schema)
            if path.is_dir()
            else table_data.read_rows(path, schema)
        )

    def images(self) -> Sequence[InstanceImage]:
        """Read images with instances."""
        return read_instance_images(find_data_path(self, "instances", "instances"))

    def labeled_texts(self) -> text_data.LabeledTexts:
        """Read texts with labels from a table."""
        return text_data.read_labeled_texts(find_data_path(self, "text", "texts"))

    def _check_options(self, targets: Targets, task_name: str) -> None:
        supported = {option.name for option in fields(DataConfig)} | {"name", *_OPTIONS_BY_TARGETS[targets]}
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name not in supported and value != option.default:
                value_shown = list(value) if isinstance(value, tuple) else value
                default = "empty" if option.default in ((), "") else str(option.default).lower()
                expected = f"{default}, as data {self.name!r} have no such option for task {task_name}"
                raise ArgumentError(f"data.{option.name}", value_shown, expected)
