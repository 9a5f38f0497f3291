"""The data of one owner, from where they are kept to tensors as a server declares.

Labels given as names count by name, so that a node may lack classes. What is marked as test data in the
source is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, DataError, RunNeeded
from fedstill.core.table_schema import NO_SCHEMA, Schema
from fedstill.core.user_functions import OWN, find, first_line, is_path
from fedstill.data import text_data
from fedstill.data.array_data import ArrayData
from fedstill.data.config import DATA, MEAN, STD, DataConfig
from fedstill.data.csv_tables import Columns
from fedstill.data.input_spec import InputSpec, check_examples
from fedstill.data.instance_images import SLIDE, cases_of, cut, read_pictures, whose
from fedstill.data.loader import CLASSIFICATION
from fedstill.data.node_data_config import SOURCES, PrivateConfig
from fedstill.data.preparation import PATIENT, taught, with_channels
from fedstill.data.raw import MOST_CLASSES, Raw, from_arrays, whole_numbers
from fedstill.data.spec_tensors import check_range, groups_of, inputs_in, labels_in
from fedstill.data.stratified_sampling import Ints, numbered
from fedstill.data.tables import check_rows, read_rows, read_schema
from fedstill.data.text_data import HASH
from fedstill.data.user_data import SERVING, read
from fedstill.tasks import TASKS, TaskConfig

OF_SCHEMA = {"category": "tabular", "number": "regression", "time until an event": "survival"}  # tasks


def load(
    config: PrivateConfig,
    folder: Path,
    spec: InputSpec | None = None,
    task: TaskConfig | None = None,
    *,
    most: int = 0,
) -> tuple[TensorData, InputSpec]:
    """An owner's examples, as a server declares, without those for testing, and their spec.

    Args:
        config: where they are.
        folder: from which paths count.
        spec: what the server declares; None takes shape and classes from the owner's schema where one is
            named, else from the data themselves, and the usual normalisation.
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
    rows = task is None or task.makes.form == "rows"
    if spec is None and rows and (own := own_schema(config, folder)):
        spec = InputSpec.of_schema(task or TASKS[OF_SCHEMA[own.teaches]](), own)
    if spec is not None or task is not None:
        return _loaded(config, folder, spec, task or CLASSIFICATION, most)
    locate(config, folder)
    try:
        return _loaded(config, folder, None, CLASSIFICATION, most)
    except RunNeeded:
        raise
    except (ArgumentError, DataError) as error:
        told = "if they are no images of classes, name the run, which says what the task is"
        here = "its own data must be here, or of tables its schema; or name that in data.schema"
        raise RunNeeded(f"{error}; {told} ({here})") from error


def _loaded(
    config: PrivateConfig, folder: Path, spec: InputSpec | None, task: TaskConfig, most: int
) -> tuple[TensorData, InputSpec]:
    what = f"data {config.path!r}" if config.source in SOURCES else f"data {config.source!r}"
    asked = task if spec is None else spec.task
    if spec is None:
        _check_told(config, asked, what)
    if config.source != "tensors":
        _check_options(config, asked)
    path = locate(config, folder)
    if spec is None:
        raw, spec = _with_own_spec(config, path, folder, asked, what)
        data = _images(raw, config, spec, what)
    elif config.source == "tensors":
        data = _tensors(config, path, spec, what)
    elif asked.targets == "texts":
        data = _texts(config, path, spec, what, most)
    elif asked.makes.form == "rows":
        data = _rows(config, path, spec, what, most)
    elif asked.targets == "instances":
        data = _pictures(config, path, spec, what, most)
    else:
        data = _images(_read(config, path, folder, asked, spec, most), config, spec, what, most)
    spec.make_task().check(data, what)
    return data, spec


def own_schema(config: PrivateConfig, folder: Path) -> Schema:
    """The only schema that an owner lets a run have; without columns: any.

    Raises:
        ArgumentError, DataError: there is no such file, or it describes none.
    """
    return read_schema(folder / Path(config.schema).expanduser()) if config.schema else NO_SCHEMA


def locate(config: PrivateConfig, folder: Path) -> Path:
    """The file or folder that a configuration means.

    Raises:
        ArgumentError: the owner's own function cannot be imported.
        DataError: there is no such file or folder.
    """
    path = folder / Path(config.path).expanduser()
    if config.source not in SOURCES:  # what the path means is the function's own business
        _function(config, folder)
    elif config.source in ("folder", "nifti"):
        if not path.is_dir():
            raise DataError(f"data.path {config.path!r}: there is no folder {path}")
    elif not path.is_file():
        raise DataError(f"data.path {config.path!r}: there is no file {path}")
    return path


# --- what can be followed -----------------------------------------------------------------------------


def _check_options(config: PrivateConfig, task: TaskConfig) -> None:
    targets = task.targets
    serving = SERVING[targets]
    of_files = targets == "instances" or task.makes.form in ("texts", "rows")
    if config.source not in serving and (config.source in SOURCES or of_files):
        told = {"texts": ": columns text and label", "rows": ": the columns of the run's schema"}
        columns = told.get(task.makes.form, "")
        allowed = f"{', '.join(serving[:-1])} or {serving[-1]}" if len(serving) > 1 else serving[0]
        raise ArgumentError("data.source", config.source, f"{allowed} for task {task.called}{columns}")
    rows = task.makes.form == "rows"
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


def _check_told(config: PrivateConfig, task: TaskConfig, what: str) -> None:
    """Refuse (RunNeeded) to go without a run where only a run can say what the data should be."""
    told = task.targets in ("class", "map", "image") or (task.targets == "labels" and config.source == "npz")
    if not told or config.source == "tensors" or (config.fit and task.targets != "class"):
        told_of = f"its input spec for task {task.called} is the run's to say"
        raise RunNeeded(f"{what}: {told_of}, and the run's own data are not here")


def _with_own_spec(
    config: PrivateConfig, path: Path, folder: Path, task: TaskConfig, what: str
) -> tuple[Raw, InputSpec]:
    raw = _read(config, path, folder, task)
    classes = raw.classes
    if task.targets == "class":
        if config.source == "csv" and whole_numbers(classes) and int(classes[-1]) < MOST_CLASSES:
            classes = tuple(map(str, range(int(classes[-1]) + 1)))  # from 0, some of which do not occur
        if len(classes) < 2:
            told = "one class does not tell which others there are: name the run, which does"
            raise RunNeeded(f"{what}: {told}")
    channels, height, width = with_channels(raw.images[:1], config.channels).shape[1:]
    return raw, InputSpec(task, classes, (channels, height, width), (MEAN,) * channels, (STD,) * channels)


# --- images -------------------------------------------------------------------------------------------


def _read(
    config: PrivateConfig,
    path: Path,
    folder: Path,
    task: TaskConfig,
    spec: InputSpec | None = None,
    most: int = 0,
) -> Raw:
    if config.source not in SOURCES:
        arrays = _called(config, path, folder)
        return from_arrays(Path(config.source), arrays, task.targets, gaps=True)
    fitted = spec is not None and config.fit and spec.shape[1] == spec.shape[2]
    return read(
        path,
        config.source,
        task.targets,
        size=spec.shape[1] if spec is not None and fitted else 0,
        slices=config.slices,
        gaps=True,
        columns=Columns(config.label, config.image, config.group),
        classes=spec.classes if spec is not None else (),
        shape=spec.shape if spec is not None else (),
        **({} if spec is None else {"counted": partial(check_examples, spec=spec, most=most)}),
    )


def _called(config: PrivateConfig, path: Path, folder: Path) -> dict[str, Any]:
    """What the owner's own function gives: a pair, a mapping of arrays as in an npz, or a torch data set."""
    function = _function(config, folder)
    try:
        given = function(path)
        if not isinstance(given, Mapping):
            images, labels = given if isinstance(given, tuple) else _pairs(given)
            given = {"images": images, "labels": labels}
        return {str(name): np.asarray(array) for name, array in given.items()}
    except OWN as error:
        told = f"the function fails, or gives no (images, labels): {first_line(error)}"
        raise DataError(f"data.source {config.source!r}: {told}") from error


def _pairs(data: Any) -> tuple[Any, Any]:
    if isinstance(data, TensorData):
        return data.inputs.numpy(), data.targets.numpy()
    examples = [data[index] for index in range(len(data))]
    images = np.stack([np.asarray(image) for image, _ in examples])
    return images, np.asarray([label if isinstance(label, str) else int(label) for _, label in examples])


def _function(config: PrivateConfig, folder: Path) -> Any:
    """What gives an owner's own data from a path: a function, or a class of :class:`ArrayData`."""
    named = not is_path(config.source)
    found: Any = DATA[config.source] if named else find(config.source, folder, "data.source")
    if not isinstance(found, type) or not issubclass(found, DataConfig):
        return found
    if not issubclass(found, ArrayData):
        raise ArgumentError("data.source", config.source, "a data set that is arrays, below ArrayData")
    kind = found
    return lambda path: kind(root=str(path)).arrays()


def _images(raw: Raw, config: PrivateConfig, spec: InputSpec, what: str, most: int = 0) -> TensorData:
    check_examples(len(raw.images), spec, most)
    rows, groups = _training(raw, config, what)
    raw = replace(raw, images=with_channels(raw.images[rows], config.channels), labels=raw.labels[rows])
    labels = torch.from_numpy(labels_in(raw, spec, what))
    inputs, targets = taught(inputs_in(raw.images, config.fit, spec, what), labels, spec.task)
    return TensorData(inputs, targets, groups)


def _training(
    source: Raw | text_data.Labelled, config: PrivateConfig, what: str
) -> tuple[Ints, torch.Tensor | None]:
    """The rows that are not for testing, and whose each of them is."""
    groups = groups_of(source.columns, config)
    count = len(source.labels)
    rows = np.arange(count) if source.test is None else np.flatnonzero(source.test == 0)
    if len(rows) == 0:
        raise DataError(f"{what}: all examples are for testing: allowed is one or more to train on")
    return rows, None if groups is None else groups[torch.from_numpy(rows)]


# --- tensors, pictures, texts -------------------------------------------------------------------------


def _tensors(config: PrivateConfig, path: Path, spec: InputSpec, what: str) -> TensorData:
    try:
        # Copied to where tensors of one's own begin: a file's begin anywhere, and some processors add up
        # in another order there, so that a node's figures would hang on where its data lie.
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise DataError(f"{what}: cannot be read as safetensors ({first_line(error)})") from error
    wanted = {"inputs", "targets", *([config.group] if config.group else [])}
    if set(tensors) != wanted:
        found = ", ".join(sorted(tensors)) or "nothing"
        raise DataError(f"{what}: holds {found}: allowed are just {', '.join(sorted(wanted))}")
    groups = numbered(tensors[config.group].tolist()) if config.group else None
    data = TensorData(tensors["inputs"], tensors["targets"], groups)
    if tuple(data.inputs.shape[1:]) != spec.shape:
        found = str(tuple(data.inputs.shape[1:]))
        raise DataError(f"{what}: inputs are of shape {found}: allowed is {spec.shape}")
    if groups is not None and groups.shape != data.inputs.shape[:1]:
        form = tuple(groups.shape)
        raise DataError(f"{what}: {config.group} is of shape {form}: allowed is one an example")
    task = spec.make_task()
    task.check(data, what)
    if spec.schema:
        check_rows(data.inputs, spec.schema, what)
    if task.form == "images":
        check_range(task.pictured(data), spec, what)
    return data


def _pictures(config: PrivateConfig, path: Path, spec: InputSpec, what: str, most: int) -> TensorData:
    """Patches of the spec's size that cover an owner's pictures."""
    channels, height, width = spec.shape
    if (channels, height) != (3, width):
        raise DataError(f"{what}: the server declares {spec.shape}: allowed are square patches in colour")
    pictures = [one for one in read_pictures(path) if not one.test]
    if not pictures:
        raise DataError(f"{what}: all pictures are for testing: allowed is one or more to train on")
    sides = [one.instances.shape for one in pictures]
    check_examples(sum(-(-tall // height) * -(-wide // height) for tall, wide in sides), spec, most)
    cases = cases_of(pictures, height)
    data = cut(pictures, cases, np.arange(len(cases.of)), height)
    # Patches of one picture overlap, and so are protected together or not at all.
    known, _ = whose(pictures)
    if config.group not in ("", SLIDE, known):
        allowed = f"empty ({known!r}) or {SLIDE!r} for task instances here"
        raise ArgumentError("data.group", config.group, allowed)
    patient = (config.group or known) == PATIENT
    names = [("patient", one.patient) if patient and one.patient else ("slide", one.name) for one in pictures]
    groups = numbered(names[case] for case in cases.of.tolist())
    return TensorData(data.inputs, data.targets, groups)


def _rows(config: PrivateConfig, path: Path, spec: InputSpec, what: str, most: int) -> TensorData:
    """An owner's rows of a table, checked against the server's schema."""
    table = read_rows(path, spec.schema)
    check_examples(len(table.data), spec, most)
    groups = groups_of(table.columns, config)
    data = replace(table.data, groups=groups)
    if table.test is None:
        return data
    rows = np.flatnonzero(~table.test)
    if len(rows) == 0:
        raise DataError(f"{what}: all examples are for testing: allowed is one or more to train on")
    return data.subset(torch.from_numpy(rows))


def _texts(config: PrivateConfig, path: Path, spec: InputSpec, what: str, most: int) -> TensorData:
    """An owner's texts, with the ids that the server's words have."""
    source = text_data.read_table(path)
    check_examples(len(source.texts), spec, most)
    how = config.vocabulary or HASH
    words = spec.vocabulary - 1 if how == HASH else None
    ids, vocabulary, _ = text_data.code(source.texts, length=spec.shape[0], words=words, vocabulary=how)
    if vocabulary != spec.vocabulary:
        told = f"{how!r} gives {vocabulary} ids: allowed are {spec.vocabulary}, as the server has"
        raise DataError(f"{what}: {told}")
    rows, groups = _training(source, config, what)
    labels = torch.from_numpy(labels_in(source, spec, what))
    chosen = torch.from_numpy(rows)
    return TensorData(torch.from_numpy(ids)[chosen], labels[chosen], groups)
