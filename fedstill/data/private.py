"""The data of one owner, from where they are kept to tensors as a server declares.

Labels given as names count by name, so that a node may lack classes. What is marked as test data
in the source is left out.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import TensorData, check_labels
from fedstill.core.errors import ArgumentError, DataError, RunNeeded
from fedstill.core.imports import OWN, first_line
from fedstill.data import memory
from fedstill.data.config import MEAN, STD
from fedstill.data.groups import limit_groups as limit_groups
from fedstill.data.images import decoded
from fedstill.data.loaders import CLASSIFICATION
from fedstill.data.owner_inputs import groups_of, inputs_of, locate, own_function, times
from fedstill.data.packs import (
    MOST_CLASSES,
    Images,
    Raw,
    by_name,
    from_arrays,
    read_folder,
    read_npz,
    with_numbers,
)
from fedstill.data.private_config import SOURCES, PrivateConfig
from fedstill.data.spec import InputSpec
from fedstill.data.untold import of_arrays, other_than_classes
from fedstill.tasks import TaskConfig


def load(
    config: PrivateConfig,
    folder: Path,
    spec: InputSpec | None = None,
    task: TaskConfig | None = None,
    *,
    most: int = 0,
) -> tuple[TensorData, InputSpec]:
    """An owner's examples, as a server declares.

    Args:
        config: where they are.
        folder: from which paths count.
        spec: what the server declares; None takes shape and classes from the data themselves, and the usual
            normalisation.
        task: what the data are for, where no spec says so; None is images of classes.
        most: bytes that they may take where the spec makes them larger; 0 is no limit.

    Returns:
        Inputs ``(N, C, H, W)`` float32, or texts ``(N, L)`` int64, and the targets of the spec's task,
        ``(N,)`` int64 for classes, with groups if the owner names them, and their spec.

    Raises:
        ArgumentError: an option that cannot be followed.
        RunNeeded: no spec, and data that are no images of classes, or do not tell the task's spec.
        DataError: data that cannot be read or are of another spec.
        TooLarge: they would take more than that.
    """
    what = f"data {config.path!r}" if config.source in SOURCES else f"data {config.source!r}"
    if spec is None and task is not None and task.like != CLASSIFICATION.like:
        from fedstill.data.private_tasks import own_spec  # which imports this file

        spec = own_spec(config, folder, task, what)
    if config.source == "tensors":
        from fedstill.data.private_tasks import load_tensors  # which imports this file

        if spec is None:
            raise _run_needed(what, "tensors of a server's input spec")
        return load_tensors(config, locate(config, folder), spec, what), spec
    if spec is not None and spec.task.like != CLASSIFICATION.like:
        from fedstill.data.private_tasks import load_task  # which imports this file

        return load_task(config, folder, spec, what, most), spec
    if spec is None and config.source in SOURCES:
        told = other_than_classes(config, locate(config, folder))
        if told is not None:
            raise _run_needed(what, told)
    _check_classification(config)
    raw, named = _read(config, folder, spec)
    groups = groups_of(raw, config)
    if raw.test is not None:
        rows = np.flatnonzero(~raw.test)
        raw = Raw(raw.images[rows], raw.labels[rows], raw.classes)
        groups = None if groups is None else groups[torch.from_numpy(rows)]
    if spec is None:
        spec = _own_spec(raw, config.source, what, task or CLASSIFICATION)
    targets = torch.from_numpy(_class_numbers(raw, named, spec, what))
    memory.check_examples(len(raw.images), spec, most)
    data = TensorData(inputs_of(raw.images, config, spec, what), targets, groups)
    spec.make_task().check(data, what)
    return data, spec


def _run_needed(what: str, told: str) -> RunNeeded:
    return RunNeeded(f"{what}: {told}: name the run, which says what the task is (its own data must be here)")


def _check_classification(config: PrivateConfig) -> None:
    if config.source == "nifti":
        raise ArgumentError("data.source", "nifti", "another one, as classification needs labels")
    for name in ("channels", "vocabulary"):
        if value := getattr(config, name):
            shown = list(value) if isinstance(value, tuple) else value
            raise ArgumentError(f"data.{name}", shown, "empty for classification")


def _own_spec(raw: Raw, source: str, what: str, task: TaskConfig) -> InputSpec:
    """What data say of their own spec."""
    channels, height, width = raw.images.shape[1:]
    classes = raw.classes
    if source == "csv" and _whole(classes) and int(classes[-1]) < MOST_CLASSES:
        classes = tuple(map(str, range(int(classes[-1]) + 1)))  # numbers from 0, some of which do not occur
    if len(classes) < 2:
        raise DataError(f"{what}: one class does not tell which others there are: name the run, which does")
    return InputSpec(task, classes, (channels, height, width), (MEAN,) * channels, (STD,) * channels)


# --- classes ------------------------------------------------------------------------------------------


def _class_numbers(raw: Raw, named: bool, spec: InputSpec, what: str) -> npt.NDArray[np.int64]:
    """Labels as the spec numbers its classes: ``(N,)``."""
    used = [raw.classes[label] for label in np.unique(raw.labels)]
    if not named:
        numbers = list(range(len(raw.classes)))
    elif set(used) <= set(spec.classes):
        numbers = [spec.classes.index(name) if name in spec.classes else -1 for name in raw.classes]
    elif _whole(used) and not any(map(str.isdecimal, spec.classes)):
        numbers = [min(int(name), MOST_CLASSES) if name.isdecimal() else -1 for name in raw.classes]
    else:
        unknown = next(name for name in used if name not in spec.classes)
        raise DataError(f"{what}: has a class {unknown!r}: allowed are {', '.join(spec.classes)}")
    labels = np.array(numbers, dtype=np.int64)[raw.labels]
    check_labels(torch.from_numpy(labels), len(spec.classes), what)
    return labels


def _whole(names: Sequence[str]) -> bool:
    return all(name.isdecimal() and str(int(name)) == name for name in names)


# --- sources ------------------------------------------------------------------------------------------


def _read(config: PrivateConfig, folder: Path, spec: InputSpec | None) -> tuple[Raw, bool]:
    """What a source holds, and whether its labels are names."""
    path = locate(config, folder)
    if config.source not in SOURCES:
        return _called(config, path, folder, spec)
    if config.source == "folder":
        return read_folder(path), True
    if config.source == "csv":
        return _read_csv(config, path, spec), True
    return _numbered(read_npz(path, pixels=not config.normalised))


def _numbered(raw: Raw) -> tuple[Raw, bool]:
    """Classes that are called as they are numbered have no names of their own."""
    return raw, raw.classes != tuple(map(str, range(len(raw.classes))))


def _called(config: PrivateConfig, path: Path, folder: Path, spec: InputSpec | None) -> tuple[Raw, bool]:
    """What the owner's own function gives: a pair, a mapping of arrays as in an npz, or a torch data set."""
    function = own_function(config, folder)
    try:
        given = function(path)
        if isinstance(given, Mapping):
            arrays = {str(name): np.asarray(array) for name, array in given.items()}
        else:
            images, labels = given if isinstance(given, tuple) else _pairs(given)
            arrays = {"images": np.asarray(images), "labels": np.asarray(labels)}
    except OWN as error:
        told = f"the function fails, or gives no (images, labels): {first_line(error)}"
        raise DataError(f"data.source {config.source!r}: {told}") from error
    if spec is None and (kind := of_arrays(arrays)) is not None:
        raise _run_needed(f"data {config.source!r}", kind)
    raw = from_arrays(Path(config.source), with_numbers(arrays), pixels=not config.normalised)
    return (raw, True) if arrays["labels"].dtype.kind == "U" else _numbered(raw)


def _pairs(data: Any) -> tuple[Any, Any]:
    """A torch data set of (input, label), or :class:`TensorData`, as arrays."""
    if isinstance(data, TensorData):
        return data.inputs.numpy(), data.targets.numpy()
    examples = [data[index] for index in range(len(data))]
    images = np.stack([np.asarray(image) for image, _ in examples])
    return images, np.asarray([label if isinstance(label, str) else int(label) for _, label in examples])


def _read_csv(config: PrivateConfig, path: Path, spec: InputSpec | None) -> Raw:
    """A table with a header: a column of labels, and either a column of image files or pixels."""
    labels: list[str] = []
    files: list[str] = []
    pixels: list[npt.NDArray[np.float32]] = []
    groups: list[str] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            lines = csv.reader(stream)
            header = [name.strip() for name in next(lines, [])]
            label = _column(header, config.label, "data.label", path)
            image = _column(header, config.image, "data.image", path) if config.image else None
            group = _column(header, config.group, "data.group", path) if config.group else None
            rest = [column for column in range(len(header)) if column not in (label, group)]
            for line in lines:
                if not line:
                    continue  # an empty line, as at the end
                if len(line) != len(header):
                    raise DataError(
                        f"{path}: line {lines.line_num} has {len(line)} cells: allowed are {len(header)}"
                    )
                labels.append(line[label].strip())
                if group is not None:
                    groups.append(line[group].strip())
                if image is not None:
                    files.append(line[image].strip())
                else:
                    pixels.append(_numbers([line[column] for column in rest], path, lines.line_num))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a csv ({first_line(error)})") from error
    if not labels:
        raise DataError(f"{path}: there are no examples: allowed is one line or more below the header")
    numbers, classes = by_name(labels)
    images = _files(path, files) if config.image else _pixels(np.stack(pixels), config, path, spec)
    return Raw(images, numbers, classes, columns={config.group: np.array(groups)} if groups else {})


def _column(header: list[str], name: str, option: str, path: Path) -> int:
    if header.count(name) != 1:
        shown = ", ".join(header[:8]) + ", ..." * (len(header) > 8)
        raise ArgumentError(option, name, f"one column of {path}, which has {shown or 'none'}")
    return header.index(name)


def _numbers(row: list[str], path: Path, line: int) -> npt.NDArray[np.float32]:
    try:
        return np.array(row, dtype=np.float32)
    except ValueError as error:
        raise DataError(f"{path}: line {line}: {first_line(error)}: allowed are numbers") from error


def _pixels(
    table: npt.NDArray[np.float32], config: PrivateConfig, path: Path, spec: InputSpec | None
) -> Images:
    """Rows of pixels as images from 0 to 1, unless normalised: ``(N, C * H * W)`` to ``(N, C, H, W)``."""
    count = table.shape[1]
    shape = config.shape or (spec.shape if spec is not None else ())
    side = round(count**0.5)
    if not shape or (not config.shape and np.prod(shape) != count):
        shape = (1, side, side)
    if np.prod(shape) != count or count == 0:
        shown = list(config.shape) if config.shape else []
        raise ArgumentError(
            "data.shape", shown, f"channels, height and width of the {count} pixels in {path}"
        )
    if not config.normalised:
        bad = np.flatnonzero(~((table >= 0) & (table <= config.white)).all(axis=1))
        if len(bad):
            raise DataError(
                f"{path}: {len(bad)} examples hold NaN or values outside 0..{config.white:g} (data.white), "
                f"the first is example {bad[0]}"
            )
        if config.white == 255 and 0 < table.max() <= 1:
            raise DataError(
                f"{path}: no value is above 1, and data.white is 255: allowed is data.white = 1.0"
            )
        table = table / np.float32(config.white)
    return table.reshape(-1, *shape)


def _files(path: Path, names: list[str]) -> Images:
    """The image files that a csv names, of one size: ``(N, C, H, W)``."""
    images: list[Images] = []
    for name in names:
        image = decoded(path.parent / name, f"{path}: image {name!r}")
        if images and image.shape != images[0].shape:
            raise DataError(
                f"{path}: image {name!r} is {times(image.shape)}, but {names[0]!r} is "
                f"{times(images[0].shape)}: allowed is one size for all"
            )
        images.append(image)
    return np.stack(images)
