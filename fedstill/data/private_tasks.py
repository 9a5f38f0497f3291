"""One owner's data for other tasks than classification, as a server declares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, DataError, RunNeeded
from fedstill.core.imports import OWN, first_line
from fedstill.data import memory
from fedstill.data.config import MEAN, STD
from fedstill.data.findings import read_findings
from fedstill.data.folders import in_one_size, map_files
from fedstill.data.groups import numbered
from fedstill.data.nifti import read_volumes
from fedstill.data.own import from_arrays, read_pictures
from fedstill.data.owner_inputs import check_range, groups_of, inputs_of, locate, own_function
from fedstill.data.packs import Raw, arrays_of
from fedstill.data.preparation import PATIENT, taught, with_channels
from fedstill.data.private_config import SOURCES, PrivateConfig
from fedstill.data.spec import InputSpec
from fedstill.data.tables import read_csv
from fedstill.tasks import TaskConfig


def load_task(config: PrivateConfig, folder: Path, spec: InputSpec, what: str, most: int = 0) -> TensorData:
    """An owner's examples, as a server declares, without those for testing.

    Args:
        config: where they are.
        folder: from which paths count.
        spec: what the server declares; its task says what is read.
        what: the data are, the first words of an error.
        most: bytes that they may take where the spec makes them larger; 0 is no limit.

    Raises:
        ArgumentError: an option that cannot be followed.
        DataError: data that cannot be read or are of another spec.
        TooLarge: they would take more than that.
    """
    task = spec.task
    if config.vocabulary and task.like != "text":
        raise ArgumentError("data.vocabulary", config.vocabulary, f"empty for task {task.called}")
    if task.like == "text":
        data = _texts(config, folder, spec, what, most)
    elif task.like == "instances":
        data = _pictures(config, folder, spec, what, most)
    else:
        data = _images(config, folder, spec, what, most)
    spec.make_task().check(data, what)
    return data


def own_spec(config: PrivateConfig, folder: Path, task: TaskConfig, what: str) -> InputSpec:
    """The spec that an owner's own images have for a task, with the usual normalisation.

    Args:
        config: where they are.
        folder: from which paths count.
        task: which is not classification.
        what: the data are, the first words of an error.

    Raises:
        RunNeeded: what only a server can say is missing: the length and vocabulary of texts, the size of
            patches, or to which images are to be fitted; all findings there are; how tensors were made.
        DataError: data that cannot be read.
    """
    known = task.like in ("segmentation", "reconstruction") or (
        task.like == "multi-label" and config.source == "npz"
    )
    if not known or config.fit or config.source == "tensors":
        told = (
            f"its input spec for task {task.called} is the run's to say, and the run's own data are not here"
        )
        raise RunNeeded(f"{what}: {told}")
    least = ("",) * task.makes.least
    raw, _ = _read(
        config, folder, InputSpec(task, least, (1, 8, 8), (MEAN,), (STD,))
    )  # whose size is not used
    images = with_channels(raw.images[:1], config.channels)
    channels, height, width = images.shape[1:]
    return InputSpec(task, raw.classes, (channels, height, width), (MEAN,) * channels, (STD,) * channels)


def load_tensors(config: PrivateConfig, path: Path, spec: InputSpec, what: str) -> TensorData:
    """Inputs and targets that are in the server's spec already, taken as they are.

    Raises:
        DataError: the file is none, or holds something else.
    """
    try:
        tensors = load_file(path)
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
        raise DataError(
            f"{what}: {config.group} is of shape {tuple(groups.shape)}: allowed is one an example"
        )
    task = spec.make_task()
    task.check(data, what)
    if not task.tokens:
        check_range(task.pictured(data), spec, what)
    return data


def _images(config: PrivateConfig, folder: Path, spec: InputSpec, what: str, most: int) -> TensorData:
    raw, named = _read(config, folder, spec, most)
    memory.check_examples(len(raw.images), spec, most)
    labels = _labels(raw, named, spec, what)
    groups = groups_of(raw, config)
    rows = np.arange(len(raw.images)) if raw.test is None else np.flatnonzero(~raw.test)
    images = with_channels(raw.images[rows], config.channels)
    if len(rows) == 0:
        raise DataError(f"{what}: all examples are for testing: allowed is one or more to train on")
    inputs = inputs_of(images, config, spec, what)
    groups = None if groups is None else groups[torch.from_numpy(rows)]
    return TensorData(*taught(inputs, torch.from_numpy(labels[rows]), spec.task), groups)


def _read(config: PrivateConfig, folder: Path, spec: InputSpec, most: int = 0) -> tuple[Raw, bool]:
    """What a source holds, and whether its classes are named."""
    path, task = locate(config, folder), spec.task.like
    masks = task == "segmentation"
    size = spec.shape[1] if config.fit and spec.shape[1] == spec.shape[2] else 0
    if config.source == "npz":
        arrays = arrays_of(path)
        raw = from_arrays(path, arrays, task, pixels=not config.normalised, gaps=True)
        return raw, "classes" in arrays
    if config.source not in SOURCES:
        given = _called(config, path, folder)
        raw = from_arrays(Path(config.source), given, task, pixels=not config.normalised, gaps=True)
        return raw, "classes" in given
    if config.source == "csv" and task == "multi-label":
        return _findings(config, path, spec, size, most), True
    if config.source == "csv" or task == "multi-label":
        allowed = "npz or csv" if task == "multi-label" else "npz, folder or nifti"
        raise ArgumentError("data.source", config.source, f"{allowed} for task {task}")
    if config.source == "folder":
        memory.check_examples(len(map_files(path, masks=masks).images), spec, most if size else 0)
        return in_one_size(path, masks=masks, size=size, gaps=True), False
    return read_volumes(path, masks=masks, size=size, slices=config.slices, gaps=True), False


def _findings(config: PrivateConfig, path: Path, spec: InputSpec, size: int, most: int) -> Raw:
    table = read_csv(path)
    memory.check_examples(max(map(len, table.values())), spec, most)
    listed = config.label if config.label in table else ""
    others = (config.group,) if config.group else ()
    image = config.image or "image"
    return read_findings(path, image=image, listed=listed, others=others, classes=spec.classes, size=size)


def _called(config: PrivateConfig, path: Path, folder: Path) -> dict[str, npt.NDArray[np.generic]]:
    """What the owner's own function gives: arrays by name."""
    function = own_function(config, folder)
    try:
        given = function(path)
        if not isinstance(given, Mapping):
            raise TypeError("it gives no mapping of arrays by name")
        return {str(name): np.asarray(array) for name, array in given.items()}
    except OWN as error:
        raise DataError(f"data.source {config.source!r}: the function fails: {first_line(error)}") from error


def _labels(raw: Raw, named: bool, spec: InputSpec, what: str) -> npt.NDArray[np.int64]:
    """Masks or findings as the spec numbers its classes; findings that the owner does not know are -1."""
    if spec.task.like == "reconstruction" or raw.classes == spec.classes:
        return raw.labels
    if named:
        unknown = next((name for name in raw.classes if name not in spec.classes), None)
        if unknown is not None:
            raise DataError(f"{what}: has a class {unknown!r}: allowed are {', '.join(spec.classes)}")
        places = [spec.classes.index(name) for name in raw.classes]
        if spec.task.like == "segmentation":
            return np.array(places, dtype=np.int64)[raw.labels]
        labels = np.full((len(raw.labels), len(spec.classes)), -1, dtype=np.int64)
        labels[:, places] = raw.labels
        return labels
    found = len(raw.classes)
    if found > len(spec.classes) or (spec.task.like == "multi-label" and found < len(spec.classes)):
        allowed = f"{len(spec.classes)}: {', '.join(spec.classes)}"
        raise DataError(f"{what}: has {found} classes without names: allowed are {allowed}")
    return raw.labels


def _pictures(config: PrivateConfig, folder: Path, spec: InputSpec, what: str, most: int) -> TensorData:
    """Patches of the spec's size that cover an owner's pictures."""
    from fedstill.data import nuclei

    if config.source not in ("npz", "folder"):
        raise ArgumentError("data.source", config.source, "npz or folder for task instances")
    for name in ("channels", "normalised", "fit"):
        if value := getattr(config, name):
            shown = list(value) if isinstance(value, tuple) else value
            raise ArgumentError(f"data.{name}", shown, "not for task instances: leave it out")
    channels, height, width = spec.shape
    if (channels, height) != (3, width):
        raise DataError(f"{what}: the server declares {spec.shape}: allowed are square patches in colour")
    pictures = [one for one in read_pictures(locate(config, folder)) if not one.test]
    if not pictures:
        raise DataError(f"{what}: all pictures are for testing: allowed is one or more to train on")
    sides = [one.instances.shape for one in pictures]
    memory.check_examples(sum(-(-tall // height) * -(-wide // height) for tall, wide in sides), spec, most)
    cases = nuclei.cases_of(pictures, height)
    data = nuclei.cut(pictures, cases, np.arange(len(cases.of)), height)
    # Patches of one picture overlap, and so are protected together or not at all.
    known, _ = nuclei.whose(pictures)
    if config.group not in ("", nuclei.SLIDE, known):
        allowed = f"empty ({known!r}) or {nuclei.SLIDE!r} for task instances here"
        raise ArgumentError("data.group", config.group, allowed)
    patient = (config.group or known) == PATIENT
    names = [("patient", one.patient) if patient and one.patient else ("slide", one.name) for one in pictures]
    groups = numbered(names[case] for case in cases.of.tolist())
    return TensorData(data.inputs, data.targets, groups)


def _texts(config: PrivateConfig, folder: Path, spec: InputSpec, what: str, most: int) -> TensorData:
    from fedstill.data import text
    from fedstill.data.words import HASH

    if config.source != "csv":
        raise ArgumentError("data.source", config.source, "csv for task text: columns text and label")
    source = text.read_table(locate(config, folder))
    memory.check_examples(len(source.texts), spec, most)
    how = config.vocabulary or HASH
    words = spec.vocabulary - 1 if how == HASH else None
    ids, vocabulary, _ = text.code(source.texts, length=spec.shape[0], words=words, vocabulary=how)
    if vocabulary != spec.vocabulary:
        told = f"{how!r} gives {vocabulary} ids: allowed are {spec.vocabulary}, as the server has"
        raise DataError(f"{what}: {told}")
    unknown = next((name for name in source.classes if name not in spec.classes), None)
    labels = source.labels
    if unknown is None:
        labels = np.array([spec.classes.index(name) for name in source.classes], dtype=np.int64)[labels]
    elif not unknown.isdecimal() or len(source.classes) > len(spec.classes):
        raise DataError(f"{what}: has a class {unknown!r}: allowed are {', '.join(spec.classes)}")
    groups = groups_of(Raw(ids, labels, source.classes, columns=source.columns), config)
    rows = np.arange(len(labels)) if source.test is None else np.flatnonzero(~source.test)
    chosen = torch.from_numpy(rows)
    groups = None if groups is None else groups[chosen]
    return TensorData(torch.from_numpy(ids)[chosen], torch.from_numpy(labels)[chosen], groups)
