"""The data of one node's owner: the table ``data`` of ``node.toml``, and loading it into a server's spec.

Data are read from files, or by the owner's function, and converted to tensors as the server's
:class:`fedstill.data.data_spec.DataSpec` declares. Examples marked as test or validation data are left out.
Labels given as names are matched by name, so a node may lack classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedstill.core.dataset import Column, DataSet, TensorData, check_pixels, normalize
from fedstill.core.errors import ArgumentError, DataError, UnknownInputFormatError
from fedstill.core.name_normalization import (
    normalize_class_names,
    normalize_name,
    parse_nonnegative_int,
    unknown_name_text,
)
from fedstill.core.registry import USER_CODE_ERRORS, first_line, import_object, is_object_path
from fedstill.core.table_schema import NO_SCHEMA, TableSchema
from fedstill.core.text_format import format_shape
from fedstill.data import text_data
from fedstill.data.config import DATA, MEAN, STD, DataConfig
from fedstill.data.data_spec import DataSpec, require_memory_for_examples
from fedstill.data.images import UnequalSizes, UnreadableImage, resize_images, to_arrays
from fedstill.data.in_memory_data import extract_inputs_and_targets
from fedstill.data.instance_images import (
    SLIDE,
    cut_patches,
    patch_case_index,
    read_instance_images,
    unit_and_owner_index,
)
from fedstill.data.loading import CLASSIFICATION, PATIENT, ImageArrayData, make_task_tensors, select_channels
from fedstill.data.public import conform_images
from fedstill.data.raw_images import MAX_CLASSES, Images, RawImages, are_whole_numbers, raw_images_from_arrays
from fedstill.data.stratified_sampling import Ints, hash_groups, require_unit_names
from fedstill.data.table_data import check_features, read_rows, read_schema
from fedstill.data.table_files import CsvColumns
from fedstill.data.text_data import LabeledTexts
from fedstill.data.user_data import FORMATS, read_raw_images
from fedstill.tasks import TASKS, TaskConfig

SOURCES = ("npz", "folder", "csv", "parquet", "nifti", "tensors")


@dataclass(frozen=True)
class NodeDataConfig:
    """Location and format of a node's examples."""

    source: str = "npz"
    """npz: a file with arrays images and labels, masks or instances; folder: images by class, one folder per
    class, or folders images and masks; nifti: a folder of volumes; csv: a table of pixels, image files,
    findings, texts, or the columns of the run's schema; parquet: these columns too; tensors: a
    .safetensors file of inputs and targets exactly as the server declares them; package.module:function:
    your function, which gets the path below and returns images and labels, or arrays named as in an npz;
    or a custom data set, by name or package.module:Class, whose folder (root) is the path below.
    """

    path: str = "data.npz"
    """File or folder, relative to the folder of this file."""

    fit: bool = False
    """Convert images of another size or number of channels to the server's form; otherwise they are
    refused.
    """

    label: str = "label"
    """csv: column of labels, which are class names or numbers from 0. Of findings: the column that lists
    them separated by "|"; without it, each finding has its own column.
    """

    image: str = ""
    """csv: column of image files, relative to the folder of the csv. If empty: "image" if there is one, else
    all other columns are pixels from 0 to 255.
    """

    group: str = ""
    """Owner of each example (such as the patient), for privacy.group_size: a column of the csv, an array of
    the npz with one number or name per example, or "patient" of nifti; empty: none. Patches of an image
    (task instances) are always grouped by patient, or by "slide" (the image).
    """

    channels: tuple[int, ...] = ()
    """npz, folder and nifti with maps, images or findings: channels to use, from 0; empty: all."""

    slices: int = 0
    """nifti: maximum number of axial slices per volume, evenly spaced; 0: all."""

    schema: str = ""
    """Table rows: schema file that a run must have, relative to the folder of this file. A run with another
    schema is refused before your data are read, and without a run your rows are checked against it. If
    empty, any schema is accepted: then a server that proposes one range after another learns from
    refusals the minimum and maximum of each column.
    """

    classes: tuple[str, ...] = ()
    """Classes, labels or channels that a run must have, by name and in this order; for tables the schema has
    them. A run with others is refused before your data are read. If empty, any classes are accepted: then
    a server that proposes one list after another learns from refusals which classes your examples have.
    """

    vocabulary: str = ""
    """Texts: how words become ids, like data.vocabulary of the run; empty: by hashing."""

    def __post_init__(self) -> None:
        # Built-in data sets are not private, and partly test data of runs.
        if self.source not in SOURCES and (self.source in DATA.builtin or self.source not in DATA):
            raise ArgumentError(
                "data.source", self.source, f"{', '.join(SOURCES)} or package.module:function"
            )
        if self.schema and self.source in ("npz", "folder", "nifti"):
            raise ArgumentError(
                "data.schema", self.schema, f"empty, as source {self.source} has no table rows"
            )
        try:
            object.__setattr__(self, "classes", normalize_class_names(self.classes, "data.classes"))
        except DataError as error:
            raise ArgumentError("data.classes", list(self.classes), "different names") from error
        if self.schema and self.classes:
            raise ArgumentError("data.classes", list(self.classes), "empty, as data.schema has them")
        if self.slices < 0 or (self.slices and self.source != "nifti"):
            raise ArgumentError("data.slices", self.slices, "0, or an integer from 1 up for source nifti")
        if self.channels and self.source == "csv":
            raise ArgumentError("data.channels", list(self.channels), "empty, as source csv has all channels")


TASK_BY_TARGET = {"category": "tabular", "number": "regression", "time until an event": "survival"}


# --- loading ------------------------------------------------------------------------------------------------


def load_node_data(
    config: NodeDataConfig,
    folder: Path,
    spec: DataSpec | None = None,
    task: TaskConfig | None = None,
    *,
    max_bytes: int = 0,
) -> tuple[TensorData, DataSpec]:
    """Load an owner's training examples in the form of the spec; return them and the spec.

    Args:
        folder: base of relative paths.
        spec: declared by the server. None: shape and classes from the owner's schema if there is one, else
            from the data, with the usual normalization.
        task: used if there is no spec. None: the task of the owner's schema; without one, image
            classification.
        max_bytes: memory that examples may take if the spec enlarges them; 0: no limit.

    Raises:
        ArgumentError: an option has no effect or an invalid value.
        UnknownInputFormatError: without spec and task, the data are not images of classes; or only a run can
            determine their spec.
        DataError: the data cannot be read or do not fit the spec.
        MemoryLimitExceeded: they need more memory than allowed.
    """
    may_be_rows = task is None or task.task_class.form == "rows"
    if spec is None and may_be_rows and (schema := read_node_schema(config, folder)):
        spec = DataSpec.from_schema(task or TASKS[TASK_BY_TARGET[schema.target_kind]](), schema)
    if spec is not None or task is not None:
        return _load_data_and_spec(config, folder, spec, task or CLASSIFICATION, max_bytes)
    find_path(config, folder)
    try:
        return _load_data_and_spec(config, folder, None, CLASSIFICATION, max_bytes)
    except (UnknownInputFormatError, UnreadableImage):
        raise
    except (ArgumentError, DataError) as error:
        advice = "if these are not images of classes, name the run, which determines the task"
        alternative = (
            "the run's data must be here, or its schema if they are tables, or data.schema must name one"
        )
        raise UnknownInputFormatError(f"{error}; {advice} ({alternative})") from error


def _load_data_and_spec(
    config: NodeDataConfig, folder: Path, spec: DataSpec | None, task: TaskConfig, max_bytes: int
) -> tuple[TensorData, DataSpec]:
    label = f"data {config.path!r}" if config.source in SOURCES else f"data {config.source!r}"
    run_task = task if spec is None else spec.task
    if spec is None:
        _require_known_spec(config, run_task, label)
    if config.source != "tensors":
        _check_options(config, run_task)
    path = find_path(config, folder)
    if spec is None:
        raw, spec = _read_with_spec(config, path, folder, run_task, label)
        data = load_images(raw, config, spec, label)
    elif config.source == "tensors":
        data = load_tensors(config, path, spec, label)
    elif run_task.targets == "texts":
        data = load_texts(config, path, spec, label, max_bytes)
    elif run_task.task_class.form == "rows":
        data = load_rows(config, path, spec, label, max_bytes)
    elif run_task.targets == "instances":
        data = load_instance_images(config, path, spec, label, max_bytes)
    else:
        raw = _read_raw(config, path, folder, run_task, spec, max_bytes)
        data = load_images(raw, config, spec, label, max_bytes)
    spec.make_task().check(data, label)
    return data, spec


def find_path(config: NodeDataConfig, folder: Path) -> Path:
    """Return the file or folder of a configuration.

    Raises:
        ArgumentError: the owner's function cannot be imported.
        DataError: there is no such file or folder.
    """
    path = folder / Path(config.path).expanduser()
    if config.source not in SOURCES:  # only the function interprets the path
        _find_function(config, folder)
    elif config.source in ("folder", "nifti"):
        if not path.is_dir():
            raise DataError(f"data.path {config.path!r}: folder not found: {path}")
    elif not path.is_file():
        raise DataError(f"data.path {config.path!r}: file not found: {path}")
    return path


def read_node_schema(config: NodeDataConfig, folder: Path) -> TableSchema:
    """Return the only schema that the owner accepts; without columns: any.

    Raises:
        ArgumentError: there is no such file.
        DataError: the file is not a schema.
    """
    return read_schema(folder / Path(config.schema).expanduser()) if config.schema else NO_SCHEMA


def check_pixel_range(config: NodeDataConfig, data: TensorData, spec: DataSpec) -> None:
    """Check that tensors of images are pixels under the spec's normalization.

    Only for the owner's own checks, not when a run starts: a server that declares one normalization after
    another would learn the minimum and maximum from refusals.

    Raises:
        DataError: a value is outside [0, 1] after inverse normalization.
    """
    if config.source == "tensors" and spec.task.task_class.form == "images":
        check_pixels(spec.make_task().real_images(data), spec.mean, spec.std, f"data {config.path!r}")


# --- options ------------------------------------------------------------------------------------------------


def _check_options(config: NodeDataConfig, task: TaskConfig) -> None:
    targets = task.targets
    formats = FORMATS[targets]
    needs_files = targets == "instances" or task.task_class.form in ("texts", "rows")
    if config.source not in formats and (config.source in SOURCES or needs_files):
        columns_by_form = {"texts": ": columns text and label", "rows": ": the columns of the run's schema"}
        columns = columns_by_form.get(task.task_class.form, "")
        expected = f"{', '.join(formats[:-1])} or {formats[-1]}" if len(formats) > 1 else formats[0]
        raise ArgumentError(
            "data.source", config.source, f"{expected} for task {task.registered_name}{columns}"
        )
    are_rows = task.task_class.form == "rows"
    has_no_effect = {
        "channels": targets in ("class", "instances") or are_rows,
        "fit": targets == "instances" or are_rows,
        "vocabulary": targets != "texts",
    }
    for name, unused in has_no_effect.items():
        if unused and (value := getattr(config, name)):
            shown = list(value) if isinstance(value, tuple) else value
            default = "false" if value is True else "empty"
            raise ArgumentError(
                f"data.{name}", shown, f"{default} for task {task.registered_name}: leave it out"
            )


def _require_known_spec(config: NodeDataConfig, task: TaskConfig, label: str) -> None:
    """Raise UnknownInputFormatError if only a run can determine the data spec."""
    is_known = task.targets in ("class", "map", "image") or (
        task.targets == "labels" and config.source == "npz"
    )
    if not is_known or config.source == "tensors" or (config.fit and task.targets != "class"):
        problem = f"only a run determines its data spec for task {task.registered_name}"
        raise UnknownInputFormatError(f"{label}: {problem}, and the run's data are not here")


def _read_with_spec(
    config: NodeDataConfig, path: Path, folder: Path, task: TaskConfig, label: str
) -> tuple[RawImages, DataSpec]:
    try:
        raw = _read_raw(config, path, folder, task)
    except UnequalSizes as error:
        if not config.fit:
            raise
        problem = "its images differ in size, and fit resizes to the size of a run: name the run"
        raise UnknownInputFormatError(f"{label}: {problem}") from error
    classes = raw.classes
    if task.targets == "class":
        raw.require_contiguous_labels(label)
        if len(classes) < 2:
            problem = "has only one class: name the run, which has all classes"
            raise UnknownInputFormatError(f"{label}: {problem}")
    channels, height, width = select_channels(raw.images[:1], config.channels).shape[1:]
    return raw, DataSpec(task, classes, (channels, height, width), (MEAN,) * channels, (STD,) * channels)


# --- by form of data ----------------------------------------------------------------------------------------


def load_images(
    raw: RawImages, config: NodeDataConfig, spec: DataSpec, label: str, max_bytes: int = 0
) -> TensorData:
    """Convert an owner's images, with any kind of target, to tensors."""
    require_memory_for_examples(len(raw.images), spec, max_bytes)
    rows, groups = _training_rows(raw.columns, raw.split, len(raw.labels), config, label)
    raw = replace(raw, images=select_channels(raw.images[rows], config.channels), labels=raw.labels[rows])
    labels = torch.from_numpy(map_labels_to_spec(raw, spec, label))
    inputs, targets = make_task_tensors(
        map_images_to_spec(raw.images, config.fit, spec, label), labels, spec.task
    )
    return TensorData(inputs, targets, groups)


def load_tensors(config: NodeDataConfig, path: Path, spec: DataSpec, label: str) -> TensorData:
    """Load tensors that already have the form of the spec."""
    try:
        # Copied to aligned memory: on some processors, sums depend on alignment, and so would metrics.
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise DataError(f"{label}: cannot be read as safetensors ({first_line(error)})") from error
    expected = {"inputs", "targets", *([config.group] if config.group else [])}
    if set(tensors) != expected:
        shown = ", ".join(sorted(tensors)) or "nothing"
        raise DataError(f"{label}: holds {shown} (expected just {', '.join(sorted(expected))})")
    groups = None
    if config.group:
        require_unit_names(config.group, tensors[config.group].numpy(), label)
        groups = hash_groups(tensors[config.group].tolist())
    inputs = tensors["inputs"]
    if spec.vocabulary:  # larger ids become unknown words, as refusing them would reveal them
        inputs = inputs.where(inputs < spec.vocabulary, text_data.UNKNOWN)
    data = TensorData(inputs, tensors["targets"], groups)
    if tuple(data.inputs.shape[1:]) != spec.shape:
        shown = str(tuple(data.inputs.shape[1:]))
        raise DataError(f"{label}: inputs are of shape {shown} (expected {spec.shape})")
    if groups is not None and groups.shape != data.inputs.shape[:1]:
        form = tuple(groups.shape)
        raise DataError(f"{label}: {config.group} is of shape {form} (expected one an example)")
    task = spec.make_task()
    task.check(data, label)
    if spec.schema:
        check_features(data.inputs, spec.schema, label)
    return data


def load_instance_images(
    config: NodeDataConfig, path: Path, spec: DataSpec, label: str, max_bytes: int
) -> TensorData:
    """Load an owner's images with instances, as patches of the spec's size."""
    channels, height, width = spec.shape
    if (channels, height) != (3, width):
        raise DataError(f"{label}: the server declares {spec.shape} (expected square patches in color)")
    images = [image for image in read_instance_images(path) if not image.split]
    if not images:
        raise DataError(f"{label}: all images are for testing (expected one or more to train on)")
    shapes = [image.instances.shape for image in images]
    require_memory_for_examples(
        sum(-(-rows // height) * -(-columns // height) for rows, columns in shapes), spec, max_bytes
    )
    cases = patch_case_index(images, height)
    data = cut_patches(images, cases, np.arange(len(cases.case_ids)), height)
    # Patches of one image overlap, so they can only be protected together.
    unit, _ = unit_and_owner_index(images)
    if config.group not in ("", SLIDE, unit):
        expected = f"empty ({unit!r}) or {SLIDE!r} for task instances here"
        raise ArgumentError("data.group", config.group, expected)
    by_patient = (config.group or unit) == PATIENT
    if by_patient:
        require_unit_names(PATIENT, np.array([image.patient for image in images if image.patient]), label)
    owners = [
        ("patient", image.patient) if by_patient and image.patient else ("slide", image.name)
        for image in images
    ]
    groups = hash_groups(owners[case] for case in cases.case_ids.tolist())
    return TensorData(data.inputs, data.targets, groups)


def load_rows(config: NodeDataConfig, path: Path, spec: DataSpec, label: str, max_bytes: int) -> TensorData:
    """Load an owner's table rows, checked against the server's schema."""
    table = read_rows(path, spec.schema)
    require_memory_for_examples(len(table.data), spec, max_bytes)
    rows, groups = _training_rows(table.columns, table.split, len(table.data), config, label)
    return replace(table.data.subset(torch.from_numpy(rows)), groups=groups)


def load_texts(config: NodeDataConfig, path: Path, spec: DataSpec, label: str, max_bytes: int) -> TensorData:
    """Load an owner's texts, as token ids of the server's vocabulary."""
    source = text_data.read_labeled_texts(path)
    require_memory_for_examples(len(source.texts), spec, max_bytes)
    ids = text_data.encode_texts_for_model(
        source.texts, spec.shape[0], spec.vocabulary, config.vocabulary, label
    )
    rows, groups = _training_rows(source.columns, source.split, len(source.labels), config, label)
    labels = torch.from_numpy(map_labels_to_spec(source, spec, label))
    selected = torch.from_numpy(rows)
    return TensorData(ids[selected], labels[selected], groups)


def _training_rows(
    columns: Mapping[str, Any], split: Column | None, count: int, config: NodeDataConfig, label: str
) -> tuple[Ints, torch.Tensor | None]:
    """Return the rows that are not for testing, and their groups."""
    groups = read_groups(columns, config)
    rows = np.arange(count) if split is None else np.flatnonzero(split == 0)
    if len(rows) == 0:
        raise DataError(f"{label}: all examples are for testing (expected one or more to train on)")
    return rows, None if groups is None else groups[torch.from_numpy(rows)]


def read_groups(columns: Mapping[str, Any], config: NodeDataConfig) -> torch.Tensor | None:
    """Return the group of each example, ``(N,)`` int64; None if the owner names no column."""
    if not config.group:
        return None
    column = normalize_name(config.group)
    if column not in columns:
        available = ", ".join(columns) or "none"
        raise ArgumentError("data.group", config.group, f"a column with one value an example: {available}")
    require_unit_names(column, columns[column], "data.group")
    return hash_groups(columns[column].tolist())


def map_labels_to_spec(raw: RawImages | LabeledTexts, spec: DataSpec, source: str) -> Ints:
    """Return classes, maps or findings with the class indices of the spec; unknown findings are -1."""
    kind, classes = spec.task.task_class.kind, spec.classes
    if kind == "image" or raw.classes == classes:
        return raw.labels
    # In any order, as numbers can be names too.
    numbered_classes = {*classes} == {*map(str, range(len(classes)))}
    if not raw.has_class_names and not (kind == "class" and numbered_classes):
        num_found = len(raw.classes)
        if kind != "class" and (num_found > len(classes) or (kind == "labels" and num_found < len(classes))):
            expected = f"{len(classes)}: {', '.join(classes)}"
            raise DataError(f"{source}: has {num_found} classes without names (expected {expected})")
        return raw.labels
    used_classes = (
        [raw.classes[label] for label in np.unique(raw.labels)] if kind == "class" else list(raw.classes)
    )
    if set(used_classes) <= set(classes):
        numbers = [classes.index(name) if name in classes else -1 for name in raw.classes]
    elif (
        kind == "class"
        and are_whole_numbers(used_classes)
        and all(parse_nonnegative_int(name) is None for name in classes)
    ):
        counts = [parse_nonnegative_int(name) for name in raw.classes]
        numbers = [-1 if count is None else min(count, MAX_CLASSES) for count in counts]
    else:
        unknown_class = next(name for name in used_classes if name not in classes)
        raise DataError(f"{source}: has a class {unknown_name_text(unknown_class, classes)}")
    if kind == "labels":
        labels: Ints = np.full((len(raw.labels), len(classes)), -1, dtype=np.int64)
        labels[:, numbers] = raw.labels
        return labels
    return np.array(numbers, dtype=np.int64)[raw.labels]


def map_images_to_spec(images: Images, fit: bool, spec: DataSpec, label: str) -> torch.Tensor:
    """Return images normalized as the spec declares, ``(N, C, H, W)`` float32.

    With ``fit``, images are averaged to its size (as by ``data.size`` of a run), and converted between gray
    and color.

    Raises:
        DataError: images have another form, and ``fit`` is False.
    """
    shape = tuple(images.shape[1:])
    if shape != spec.shape and not fit:
        hint = "data.fit = true, or --fit, converts images"
        problem = f"images are {format_shape(shape)} (channels, height, width)"
        raise DataError(f"{label}: {problem} (expected {format_shape(spec.shape)}; {hint})")
    if shape[1:] != spec.shape[1:]:
        images = resize_images(images, *spec.shape[1:])
    if shape[0] == spec.shape[0]:
        return normalize(images, spec.mean, spec.std)
    black, white = (0.0,) * shape[0], (1.0,) * shape[0]
    pixels = TensorData(normalize(images, black, white), torch.zeros(len(images)))
    target_examples = TensorData(torch.zeros(1, *spec.shape), torch.zeros(1))
    source = DataSet(label, pixels, pixels, spec.classes, black, white)
    return conform_images(
        pixels.inputs,
        source,
        DataSet("the server", target_examples, target_examples, spec.classes, spec.mean, spec.std),
    )


# --- reading images -----------------------------------------------------------------------------------------


def _read_raw(
    config: NodeDataConfig,
    path: Path,
    folder: Path,
    task: TaskConfig,
    spec: DataSpec | None = None,
    max_bytes: int = 0,
) -> RawImages:
    if config.source not in SOURCES:
        arrays = _call_function(config, path, folder)
        return raw_images_from_arrays(Path(config.source), arrays, task.targets, gaps=True)
    resize = spec is not None and config.fit and spec.shape[1] == spec.shape[2]
    # Convert images one by one, as otherwise an additional image would change the last digits of others.
    convert_channels = spec is not None and config.fit and not config.channels and spec.shape[0] in (1, 3)
    return read_raw_images(
        path,
        config.source,
        task.targets,
        size=spec.shape[1] if spec is not None and resize else 0,
        slices=config.slices,
        gaps=True,
        columns=CsvColumns(config.label, config.image, config.group),
        classes=spec.classes if spec is not None else (),
        shape=spec.shape if spec is not None else (),
        channels=spec.shape[0] if spec is not None and convert_channels else 0,
        **(
            {}
            if spec is None
            else {"on_count": partial(require_memory_for_examples, spec=spec, max_bytes=max_bytes)}
        ),
    )


def _call_function(config: NodeDataConfig, path: Path, folder: Path) -> dict[str, Any]:
    """Call the owner's function, and return its pair, mapping or PyTorch data set as arrays by name."""
    function = _find_function(config, folder)
    try:
        result = function(path)
        if not isinstance(result, Mapping):
            images, labels = result if isinstance(result, tuple) else _unzip_examples(result)
            result = {"images": images, "labels": labels}
        return to_arrays(result, "its data")
    except DataError as error:
        raise DataError(f"data.source {config.source!r}: {error}") from error
    except USER_CODE_ERRORS as error:
        problem = f"the function failed, or returned no (images, labels): {first_line(error)}"
        raise DataError(f"data.source {config.source!r}: {problem}") from error


def _unzip_examples(data: Any) -> tuple[Any, Any]:
    if isinstance(data, TensorData):
        return data.inputs.numpy(), data.targets.numpy()
    images, labels = extract_inputs_and_targets(data, "its data")
    return images, [label if isinstance(label, str) else int(label) for label in labels]


def _find_function(config: NodeDataConfig, folder: Path) -> Any:
    """Return the owner's function, or one that reads a class below :class:`ImageArrayData`."""
    is_registered = not is_object_path(config.source)
    value: Any = DATA[config.source] if is_registered else import_object(config.source, folder, "data.source")
    if not isinstance(value, type) or not issubclass(value, DataConfig):
        return value
    if not issubclass(value, ImageArrayData):
        raise ArgumentError("data.source", config.source, "a data set that derives from ImageArrayData")
    data_class = value
    return lambda path: data_class(root=str(path)).arrays()
