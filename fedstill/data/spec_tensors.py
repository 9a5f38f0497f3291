"""An owner's images, labels and groups as tensors in the spec that a server declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedstill.core.dataset import DataSet, TensorData, normalised
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.names import count_of, plain, unknown_name
from fedstill.core.text_format import times
from fedstill.data.images import resized
from fedstill.data.input_spec import InputSpec
from fedstill.data.node_data_config import PrivateConfig
from fedstill.data.public import conform
from fedstill.data.raw import MOST_CLASSES, Images, Raw, whole_numbers
from fedstill.data.stratified_sampling import Ints, numbered, require_units
from fedstill.data.text_data import Labelled


def labels_in(raw: Raw | Labelled, spec: InputSpec, what: str) -> Ints:
    """Classes, maps or findings as the spec numbers its classes; findings that are not known are -1."""
    kind, classes = spec.task.makes.kind, spec.classes
    if kind == "image" or raw.classes == classes:
        return raw.labels
    numbered_classes = {*classes} == {*map(str, range(len(classes)))}  # in any order: numbers are names, too
    if not raw.named and not (kind == "class" and numbered_classes):
        found = len(raw.classes)
        if kind != "class" and (found > len(classes) or (kind == "labels" and found < len(classes))):
            told = f"has {found} classes without names: allowed are {len(classes)}: {', '.join(classes)}"
            raise DataError(f"{what}: {told}")
        return raw.labels
    used = [raw.classes[label] for label in np.unique(raw.labels)] if kind == "class" else list(raw.classes)
    if set(used) <= set(classes):
        numbers = [classes.index(each) if each in classes else -1 for each in raw.classes]
    elif kind == "class" and whole_numbers(used) and all(count_of(each) is None for each in classes):
        counts = [count_of(each) for each in raw.classes]
        numbers = [-1 if count is None else min(count, MOST_CLASSES) for count in counts]
    else:
        unknown = next(each for each in used if each not in classes)
        raise DataError(f"{what}: has a class {unknown_name(unknown, classes)}")
    if kind == "labels":
        labels: Ints = np.full((len(raw.labels), len(classes)), -1, dtype=np.int64)
        labels[:, numbers] = raw.labels
        return labels
    return np.array(numbers, dtype=np.int64)[raw.labels]


def groups_of(columns: Mapping[str, Any], config: PrivateConfig) -> torch.Tensor | None:
    """Whose each example is, ``(N,)`` int64, if the owner names a column that says so."""
    if not config.group:
        return None
    group = plain(config.group)
    if group not in columns:
        known = ", ".join(columns) or "none"
        raise ArgumentError("data.group", config.group, f"a column with one value an example: {known}")
    require_units(group, columns[group], "data.group")
    return numbered(columns[group].tolist())


def inputs_in(images: Images, fit: bool, spec: InputSpec, what: str) -> torch.Tensor:
    """Images normalised as the spec declares, ``(N, C, H, W)`` float32.

    Those of another form only where they may be made to ``fit``: averaged to its size, as by a run's
    ``data.size``, and grey for colour or colour for grey.
    """
    found = tuple(images.shape[1:])
    if found != spec.shape and not fit:
        shapes = f"{times(found)} (channels, height, width): allowed is {times(spec.shape)}"
        raise DataError(f"{what}: images are {shapes}; data.fit = true, or --fit, brings images into it")
    if found[1:] != spec.shape[1:]:
        images = resized(images, *spec.shape[1:])
    if found[0] == spec.shape[0]:
        return normalised(images, spec.mean, spec.std)
    black, white = (0.0,) * found[0], (1.0,) * found[0]
    as_pixels = TensorData(normalised(images, black, white), torch.zeros(len(images)))
    like = TensorData(torch.zeros(1, *spec.shape), torch.zeros(1))
    source = DataSet(what, as_pixels, as_pixels, spec.classes, black, white)
    return conform(
        as_pixels.inputs, source, DataSet("the server", like, like, spec.classes, spec.mean, spec.std)
    )
