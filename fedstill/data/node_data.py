"""How an owner's data are kept: the table ``data`` of ``node.toml``.

An owner's images, labels and groups as tensors in the spec that a server declares.

Brings what one owner has into the spec that a server declares, a reader a form of data.

What is marked as test data in the source is left out.

The data of one owner, from where they are kept to tensors as a server declares.

Labels given as names count by name, so that a node may lack classes.
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

from fedstill.core.dataset import Column, DataSet, TensorData, check_pixels, normalized
from fedstill.core.errors import ArgumentError, DataError, RunNeeded
from fedstill.core.names import class_names, count_of, plain, unknown_name
from fedstill.core.registry import OWN, find, first_line, is_path
from fedstill.core.table_schema import NO_SCHEMA, Schema
from fedstill.core.text_format import times
from fedstill.data import text
from fedstill.data.config import DATA, MEAN, STD, DataConfig
from fedstill.data.images import UnequalSizes, UnreadableImage, resize_images, to_arrays
from fedstill.data.input_spec import InputSpec, require_memory_for_examples
from fedstill.data.loading import CLASSIFICATION, PATIENT, ArrayData, make_task_tensors, select_channels
from fedstill.data.object_images import (
    SLIDE,
    cut_patches,
    group_by_patient,
    make_patch_cases,
    read_instance_images,
)
from fedstill.data.public import conform_images
from fedstill.data.python_data import extract_inputs_and_targets
from fedstill.data.raw import MAX_CLASSES, Images, RawImages, are_whole_numbers, raw_images_from_arrays
from fedstill.data.stratified_sampling import Ints, hash_groups, require_unit_names
from fedstill.data.table_files import CsvColumns
from fedstill.data.tables import check_features, read_rows, read_schema
from fedstill.data.text import LabeledTexts
from fedstill.data.user_data import FORMATS, read_raw_images
from fedstill.tasks import TASKS, TaskConfig

SOURCES = ("npz", "folder", "csv", "parquet", "nifti", "tensors")


@dataclass(frozen=True)
class NodeDataConfig:
    """Where a node's own examples are, and in what form."""

    source: str = "npz"
    """npz: a file with arrays images and labels, or masks, or instances; folder: images by class, one folder
    a class, or a folder images beside a folder masks; nifti: a folder of volumes; csv: a table of pixels,
    image files, findings, texts, or the columns that the run's schema has; parquet: these columns, too;
    tensors: a .safetensors file of inputs and targets just as the server declares them; or
    package.module:function, your own, called with the path below, which gives images and labels, or arrays by
    name as an npz has them; or a data set of your own, by name or package.module:Class, whose folder (root)
    is the path below."""

    path: str = "data.npz"
    """The file or folder, from the folder of this file."""

    fit: bool = False
    """Bring images of another size or number of channels into the server's form; else they are refused."""

    label: str = "label"
    """csv: the column of labels, which are names of classes or their numbers from 0; of findings, the column
    that lists them divided by "|", without which each finding has a column of its own."""

    image: str = ""
    """csv: the column of image files, from the folder of the csv; if empty, "image" where there is one, else
    all other columns are pixels from 0 to 255."""

    group: str = ""
    """Whose each example is (a patient, say), for privacy.group_size: a column of the csv, or an array of the
    npz with one number or name an example, "patient" of nifti; if empty, none. Patches of a picture (task
    instances) always have that picture's patient, or "slide": the picture itself."""

    channels: tuple[int, ...] = ()
    """npz, folder and nifti for maps, images or findings: which channels, from 0; if empty, all."""

    slices: int = 0
    """nifti: at most so many axial slices of each volume, evenly spread; 0: all."""

    schema: str = ""
    """Rows of a table: the schema file that a run must have, from the folder of this file. A run of any other
    schema is refused before your data are looked at, and without a run your rows are checked against it. If
    empty, any run's will do: then a server that proposes one range after another learns, by what your node
    refuses, the least and the largest value of each column."""

    classes: tuple[str, ...] = ()
    """The classes, labels or channels that a run must have, by name and in its order; of tables the schema
    says them. A run of others is refused before your data are looked at. If empty, any run's will do: then a
    server that proposes one list after another learns, by what your node refuses, which classes your examples
    have."""

    vocabulary: str = ""
    """Texts: how words become ids, as data.vocabulary of the run; if empty, by hashing."""

    def __post_init__(self) -> None:
        # The package's own data sets are no owner's, and partly a run's test data.
        if self.source not in SOURCES and (self.source in DATA.own or self.source not in DATA):
            raise ArgumentError(
                "data.source", self.source, f"{', '.join(SOURCES)} or package.module:function"
            )
        if self.schema and self.source in ("npz", "folder", "nifti"):
            raise ArgumentError("data.schema", self.schema, f"empty, as source {self.source} holds no rows")
        try:
            object.__setattr__(self, "classes", class_names(self.classes, "data.classes"))
        except DataError as error:
            raise ArgumentError("data.classes", list(self.classes), "different names") from error
        if self.schema and self.classes:
            raise ArgumentError("data.classes", list(self.classes), "empty, as data.schema says them")
        if self.slices < 0 or (self.slices and self.source != "nifti"):
            raise ArgumentError("data.slices", self.slices, "0, or a whole number from 1 up for source nifti")
        if self.channels and self.source == "csv":
            raise ArgumentError("data.channels", list(self.channels), "empty, as source csv has all channels")


def map_labels_to_spec(raw: RawImages | LabeledTexts, spec: InputSpec, what: str) -> Ints:
    """Classes, maps or findings as the spec numbers its classes; findings that are not known are -1."""
    kind, classes = spec.task.task_class.kind, spec.classes
    if kind == "image" or raw.classes == classes:
        return raw.labels
    numbered_classes = {*classes} == {*map(str, range(len(classes)))}  # in any order: numbers are names, too
    if not raw.has_class_names and not (kind == "class" and numbered_classes):
        found = len(raw.classes)
        if kind != "class" and (found > len(classes) or (kind == "labels" and found < len(classes))):
            told = f"has {found} classes without names: allowed are {len(classes)}: {', '.join(classes)}"
            raise DataError(f"{what}: {told}")
        return raw.labels
    used = [raw.classes[label] for label in np.unique(raw.labels)] if kind == "class" else list(raw.classes)
    if set(used) <= set(classes):
        numbers = [classes.index(each) if each in classes else -1 for each in raw.classes]
    elif kind == "class" and are_whole_numbers(used) and all(count_of(each) is None for each in classes):
        counts = [count_of(each) for each in raw.classes]
        numbers = [-1 if count is None else min(count, MAX_CLASSES) for count in counts]
    else:
        unknown = next(each for each in used if each not in classes)
        raise DataError(f"{what}: has a class {unknown_name(unknown, classes)}")
    if kind == "labels":
        labels: Ints = np.full((len(raw.labels), len(classes)), -1, dtype=np.int64)
        labels[:, numbers] = raw.labels
        return labels
    return np.array(numbers, dtype=np.int64)[raw.labels]


def read_groups(columns: Mapping[str, Any], config: NodeDataConfig) -> torch.Tensor | None:
    """Whose each example is, ``(N,)`` int64, if the owner names a column that says so."""
    if not config.group:
        return None
    group = plain(config.group)
    if group not in columns:
        known = ", ".join(columns) or "none"
        raise ArgumentError("data.group", config.group, f"a column with one value an example: {known}")
    require_unit_names(group, columns[group], "data.group")
    return hash_groups(columns[group].tolist())


def map_images_to_spec(images: Images, fit: bool, spec: InputSpec, what: str) -> torch.Tensor:
    """Images normalized as the spec declares, ``(N, C, H, W)`` float32.

    Those of another form only where they may be made to ``fit``: averaged to its size, as by a run's
    ``data.size``, and gray for color or color for gray.
    """
    found = tuple(images.shape[1:])
    if found != spec.shape and not fit:
        shapes = f"{times(found)} (channels, height, width): allowed is {times(spec.shape)}"
        raise DataError(f"{what}: images are {shapes}; data.fit = true, or --fit, brings images into it")
    if found[1:] != spec.shape[1:]:
        images = resize_images(images, *spec.shape[1:])
    if found[0] == spec.shape[0]:
        return normalized(images, spec.mean, spec.std)
    black, white = (0.0,) * found[0], (1.0,) * found[0]
    as_pixels = TensorData(normalized(images, black, white), torch.zeros(len(images)))
    like = TensorData(torch.zeros(1, *spec.shape), torch.zeros(1))
    source = DataSet(what, as_pixels, as_pixels, spec.classes, black, white)
    return conform_images(
        as_pixels.inputs, source, DataSet("the server", like, like, spec.classes, spec.mean, spec.std)
    )


def load_images(
    raw: RawImages, config: NodeDataConfig, spec: InputSpec, what: str, most: int = 0
) -> TensorData:
    """An owner's images of any kind of target, once they are read."""
    require_memory_for_examples(len(raw.images), spec, most)
    rows, groups = _training_rows(raw.columns, raw.split, len(raw.labels), config, what)
    raw = replace(raw, images=select_channels(raw.images[rows], config.channels), labels=raw.labels[rows])
    labels = torch.from_numpy(map_labels_to_spec(raw, spec, what))
    inputs, targets = make_task_tensors(
        map_images_to_spec(raw.images, config.fit, spec, what), labels, spec.task
    )
    return TensorData(inputs, targets, groups)


def _training_rows(
    columns: Mapping[str, Any], test: Column | None, count: int, config: NodeDataConfig, what: str
) -> tuple[Ints, torch.Tensor | None]:
    """The rows that are not for testing, and whose each of them is."""
    groups = read_groups(columns, config)
    rows = np.arange(count) if test is None else np.flatnonzero(test == 0)
    if len(rows) == 0:
        raise DataError(f"{what}: all examples are for testing (expected one or more to train on)")
    return rows, None if groups is None else groups[torch.from_numpy(rows)]


def load_tensors(config: NodeDataConfig, path: Path, spec: InputSpec, what: str) -> TensorData:
    """Tensors of the spec's own form."""
    try:
        # Copied to where tensors of one's own begin: a file's begin anywhere, and some processors add up
        # in another order there, so that a node's figures would hang on where its data lie.
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise DataError(f"{what}: cannot be read as safetensors ({first_line(error)})") from error
    wanted = {"inputs", "targets", *([config.group] if config.group else [])}
    if set(tensors) != wanted:
        found = ", ".join(sorted(tensors)) or "nothing"
        raise DataError(f"{what}: holds {found} (expected just {', '.join(sorted(wanted))})")
    groups = None
    if config.group:
        require_unit_names(config.group, tensors[config.group].numpy(), what)
        groups = hash_groups(tensors[config.group].tolist())
    inputs = tensors["inputs"]
    if spec.vocabulary:  # ids that the run's model has not are unknown words: refused, they would be told
        inputs = inputs.where(inputs < spec.vocabulary, text.UNKNOWN)
    data = TensorData(inputs, tensors["targets"], groups)
    if tuple(data.inputs.shape[1:]) != spec.shape:
        found = str(tuple(data.inputs.shape[1:]))
        raise DataError(f"{what}: inputs are of shape {found} (expected {spec.shape})")
    if groups is not None and groups.shape != data.inputs.shape[:1]:
        form = tuple(groups.shape)
        raise DataError(f"{what}: {config.group} is of shape {form} (expected one an example)")
    task = spec.make_task()
    task.check(data, what)
    if spec.schema:
        check_features(data.inputs, spec.schema, what)
    return data


def load_instance_images(
    config: NodeDataConfig, path: Path, spec: InputSpec, what: str, most: int
) -> TensorData:
    """Patches of the spec's size that cover an owner's pictures."""
    channels, height, width = spec.shape
    if (channels, height) != (3, width):
        raise DataError(f"{what}: the server declares {spec.shape} (expected square patches in color)")
    pictures = [one for one in read_instance_images(path) if not one.split]
    if not pictures:
        raise DataError(f"{what}: all pictures are for testing (expected one or more to train on)")
    sides = [one.instances.shape for one in pictures]
    require_memory_for_examples(
        sum(-(-tall // height) * -(-wide // height) for tall, wide in sides), spec, most
    )
    cases = make_patch_cases(pictures, height)
    data = cut_patches(pictures, cases, np.arange(len(cases.case_ids)), height)
    # Patches of one picture overlap, and so are protected together or not at all.
    known, _ = group_by_patient(pictures)
    if config.group not in ("", SLIDE, known):
        allowed = f"empty ({known!r}) or {SLIDE!r} for task instances here"
        raise ArgumentError("data.group", config.group, allowed)
    patient = (config.group or known) == PATIENT
    if patient:
        require_unit_names(PATIENT, np.array([one.patient for one in pictures if one.patient]), what)
    names = [("patient", one.patient) if patient and one.patient else ("slide", one.name) for one in pictures]
    groups = hash_groups(names[case] for case in cases.case_ids.tolist())
    return TensorData(data.inputs, data.targets, groups)


def load_rows(config: NodeDataConfig, path: Path, spec: InputSpec, what: str, most: int) -> TensorData:
    """An owner's rows of a table, checked against the server's schema."""
    table = read_rows(path, spec.schema)
    require_memory_for_examples(len(table.data), spec, most)
    rows, groups = _training_rows(table.columns, table.split, len(table.data), config, what)
    return replace(table.data.subset(torch.from_numpy(rows)), groups=groups)


def load_texts(config: NodeDataConfig, path: Path, spec: InputSpec, what: str, most: int) -> TensorData:
    """An owner's texts, with the ids that the server's words have."""
    source = text.read_labeled_texts(path)
    require_memory_for_examples(len(source.texts), spec, most)
    ids = text.encode_for_vocabulary(source.texts, spec.shape[0], spec.vocabulary, config.vocabulary, what)
    rows, groups = _training_rows(source.columns, source.split, len(source.labels), config, what)
    labels = torch.from_numpy(map_labels_to_spec(source, spec, what))
    chosen = torch.from_numpy(rows)
    return TensorData(ids[chosen], labels[chosen], groups)


TASK_BY_TARGET = {"category": "tabular", "number": "regression", "time until an event": "survival"}  # tasks


def load_node_data(
    config: NodeDataConfig,
    folder: Path,
    spec: InputSpec | None = None,
    task: TaskConfig | None = None,
    *,
    most: int = 0,
) -> tuple[TensorData, InputSpec]:
    """An owner's examples, as a server declares, without those for testing, and their spec.

    Args:
        folder: from which paths count.
        spec: what the server declares; None takes shape and classes from the owner's schema where one is
            named, else from the data themselves, and the usual normalization.
        task: what the data are for, where no spec says so; None is what the owner's schema teaches, without
            one images of classes.
        most: bytes that they may take where the spec makes them larger; 0 is no limit.

    Raises:
        ArgumentError: an option that cannot be followed.
        RunNeeded: neither spec nor task, and data that are no images of classes; or no spec, and data that
            only a run can tell the spec of.
        DataError: data that cannot be read or are of another spec.
        TooLarge: they would take more than that.
    """
    rows = task is None or task.task_class.form == "rows"
    if spec is None and rows and (own := read_node_schema(config, folder)):
        spec = InputSpec.from_schema(task or TASKS[TASK_BY_TARGET[own.teaches]](), own)
    if spec is not None or task is not None:
        return _load(config, folder, spec, task or CLASSIFICATION, most)
    find_path(config, folder)
    try:
        return _load(config, folder, None, CLASSIFICATION, most)
    except (RunNeeded, UnreadableImage):
        raise
    except (ArgumentError, DataError) as error:
        told = "if they are no images of classes, name the run, which says what the task is"
        here = "its own data must be here, or of tables its schema; or name that in data.schema"
        raise RunNeeded(f"{error}; {told} ({here})") from error


def _load(
    config: NodeDataConfig, folder: Path, spec: InputSpec | None, task: TaskConfig, most: int
) -> tuple[TensorData, InputSpec]:
    what = f"data {config.path!r}" if config.source in SOURCES else f"data {config.source!r}"
    asked = task if spec is None else spec.task
    if spec is None:
        _require_known_spec(config, asked, what)
    if config.source != "tensors":
        _check_options(config, asked)
    path = find_path(config, folder)
    if spec is None:
        raw, spec = _read_with_spec(config, path, folder, asked, what)
        data = load_images(raw, config, spec, what)
    elif config.source == "tensors":
        data = load_tensors(config, path, spec, what)
    elif asked.targets == "texts":
        data = load_texts(config, path, spec, what, most)
    elif asked.task_class.form == "rows":
        data = load_rows(config, path, spec, what, most)
    elif asked.targets == "instances":
        data = load_instance_images(config, path, spec, what, most)
    else:
        raw = _read_raw(config, path, folder, asked, spec, most)
        data = load_images(raw, config, spec, what, most)
    spec.make_task().check(data, what)
    return data, spec


def check_pixel_range(config: NodeDataConfig, data: TensorData, spec: InputSpec) -> None:
    """Refuse (DataError) tensors of images that are no pixels under the spec's normalization.

    For the owner, and not as a run begins: a server that declared one normalization after another would learn
    the least and the largest value, by which of them were refused.
    """
    if config.source == "tensors" and spec.task.task_class.form == "images":
        check_pixels(spec.make_task().real_images(data), spec.mean, spec.std, f"data {config.path!r}")


def read_node_schema(config: NodeDataConfig, folder: Path) -> Schema:
    """The only schema that an owner lets a run have; without columns: any.

    Raises:
        ArgumentError, DataError: there is no such file, or it describes none.
    """
    return read_schema(folder / Path(config.schema).expanduser()) if config.schema else NO_SCHEMA


def find_path(config: NodeDataConfig, folder: Path) -> Path:
    """The file or folder that a configuration means.

    Raises:
        ArgumentError: the owner's own function cannot be imported.
        DataError: there is no such file or folder.
    """
    path = folder / Path(config.path).expanduser()
    if config.source not in SOURCES:  # what the path means is the function's own business
        _find_function(config, folder)
    elif config.source in ("folder", "nifti"):
        if not path.is_dir():
            raise DataError(f"data.path {config.path!r}: there is no folder {path}")
    elif not path.is_file():
        raise DataError(f"data.path {config.path!r}: there is no file {path}")
    return path


# --- what can be followed -----------------------------------------------------------------------------


def _check_options(config: NodeDataConfig, task: TaskConfig) -> None:
    targets = task.targets
    serving = FORMATS[targets]
    of_files = targets == "instances" or task.task_class.form in ("texts", "rows")
    if config.source not in serving and (config.source in SOURCES or of_files):
        told = {"texts": ": columns text and label", "rows": ": the columns of the run's schema"}
        columns = told.get(task.task_class.form, "")
        allowed = f"{', '.join(serving[:-1])} or {serving[-1]}" if len(serving) > 1 else serving[0]
        raise ArgumentError("data.source", config.source, f"{allowed} for task {task.called}{columns}")
    rows = task.task_class.form == "rows"
    idle = {
        "channels": targets in ("class", "instances") or rows,
        "fit": targets == "instances" or rows,
        "vocabulary": targets != "texts",
    }
    for name, unused in idle.items():
        if unused and (value := getattr(config, name)):
            shown = list(value) if isinstance(value, tuple) else value
            none = "false" if value is True else "empty"
            raise ArgumentError(f"data.{name}", shown, f"{none} for task {task.called}: leave it out")


def _require_known_spec(config: NodeDataConfig, task: TaskConfig, what: str) -> None:
    """Refuse (RunNeeded) to go without a run where only a run can say what the data should be."""
    told = task.targets in ("class", "map", "image") or (task.targets == "labels" and config.source == "npz")
    if not told or config.source == "tensors" or (config.fit and task.targets != "class"):
        told_of = f"its input spec for task {task.called} is the run's to say"
        raise RunNeeded(f"{what}: {told_of}, and the run's own data are not here")


def _read_with_spec(
    config: NodeDataConfig, path: Path, folder: Path, task: TaskConfig, what: str
) -> tuple[RawImages, InputSpec]:
    try:
        raw = _read_raw(config, path, folder, task)
    except UnequalSizes as error:
        if not config.fit:
            raise
        told = "its images have several sizes, which fit brings to a run's: name the run"
        raise RunNeeded(f"{what}: {told}") from error
    classes = raw.classes
    if task.targets == "class":
        raw.require_contiguous_labels(what)
        if len(classes) < 2:
            told = "one class does not tell which others there are: name the run, which does"
            raise RunNeeded(f"{what}: {told}")
    channels, height, width = select_channels(raw.images[:1], config.channels).shape[1:]
    return raw, InputSpec(task, classes, (channels, height, width), (MEAN,) * channels, (STD,) * channels)


# --- images -------------------------------------------------------------------------------------------


def _read_raw(
    config: NodeDataConfig,
    path: Path,
    folder: Path,
    task: TaskConfig,
    spec: InputSpec | None = None,
    most: int = 0,
) -> RawImages:
    if config.source not in SOURCES:
        arrays = _call_function(config, path, folder)
        return raw_images_from_arrays(Path(config.source), arrays, task.targets, gaps=True)
    fitted = spec is not None and config.fit and spec.shape[1] == spec.shape[2]
    # Image by image: by what all have together one picture more would change every other one's last digits.
    own = spec is not None and config.fit and not config.channels and spec.shape[0] in (1, 3)
    return read_raw_images(
        path,
        config.source,
        task.targets,
        size=spec.shape[1] if spec is not None and fitted else 0,
        slices=config.slices,
        gaps=True,
        columns=CsvColumns(config.label, config.image, config.group),
        classes=spec.classes if spec is not None else (),
        shape=spec.shape if spec is not None else (),
        channels=spec.shape[0] if spec is not None and own else 0,
        **({} if spec is None else {"on_count": partial(require_memory_for_examples, spec=spec, most=most)}),
    )


def _call_function(config: NodeDataConfig, path: Path, folder: Path) -> dict[str, Any]:
    """What the owner's own function gives: a pair, a mapping of arrays as in an npz, or a torch data set."""
    function = _find_function(config, folder)
    try:
        given = function(path)
        if not isinstance(given, Mapping):
            images, labels = given if isinstance(given, tuple) else _unzip_examples(given)
            given = {"images": images, "labels": labels}
        return to_arrays(given, "its data")
    except DataError as error:
        raise DataError(f"data.source {config.source!r}: {error}") from error
    except OWN as error:
        told = f"the function fails, or gives no (images, labels): {first_line(error)}"
        raise DataError(f"data.source {config.source!r}: {told}") from error


def _unzip_examples(data: Any) -> tuple[Any, Any]:
    if isinstance(data, TensorData):
        return data.inputs.numpy(), data.targets.numpy()
    images, labels = extract_inputs_and_targets(data, "its data")
    return images, [label if isinstance(label, str) else int(label) for label in labels]


def _find_function(config: NodeDataConfig, folder: Path) -> Any:
    """What gives an owner's own data from a path: a function, or a class of :class:`ArrayData`."""
    named = not is_path(config.source)
    found: Any = DATA[config.source] if named else find(config.source, folder, "data.source")
    if not isinstance(found, type) or not issubclass(found, DataConfig):
        return found
    if not issubclass(found, ArrayData):
        raise ArgumentError("data.source", config.source, "a data set that is arrays, below ArrayData")
    kind = found
    return lambda path: kind(root=str(path)).arrays()
