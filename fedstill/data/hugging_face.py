"""Data sets of the library ``datasets`` (Hugging Face), read by what it documents: features and rows.

Nothing of it is imported here: whoever gives such an object has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import normalised
from fedstill.core.errors import DataError
from fedstill.data.config import MEAN, STD
from fedstill.data.pil_images import array_of
from fedstill.data.raw import image_array
from fedstill.tasks import Task

INPUTS = ("image", "img", "pixel_values", "input_ids")
TARGETS = ("label", "labels", "mask", "annotation")


def is_data_set(given: Any) -> bool:
    """Whether an object is a ``datasets.Dataset``, or has what such a one has."""
    return all(hasattr(given, name) for name in ("features", "column_names", "__len__", "__getitem__"))


def tensors(
    data: Any, what: str, task: Task, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one part, a ``datasets.Dataset``.

    Inputs are the column of images, or ``input_ids`` of one length; targets the one column of class labels,
    or one that is called label, labels, mask or annotation. Without mean and std pixels become -1..1. A
    DataError tells what is missing, or in what rows differ.
    """
    if task.kind == "image" or task.form == "rows":
        raise DataError(f"{what} is a Hugging Face data set: allowed for task {task.name} are tensors")
    kinds = {name: type(feature).__name__ for name, feature in data.features.items()}
    labels = {name for name, kind in kinds.items() if kind == "ClassLabel"}
    target = _one(what, "targets", {name for name in kinds if name in TARGETS}, labels)
    images = {name for name, kind in kinds.items() if kind == "Image" and name != target}
    source = _one(what, "inputs", {name for name in kinds if name in INPUTS}, images)
    if len(data) == 0:
        raise DataError(f"{what} has no rows: allowed is one or more")
    rows = [data[index] for index in range(len(data))]
    inputs = array_of([row[source] for row in rows], f"{what}: {source!r}")
    targets = array_of([row[target] for row in rows], f"{what}: {target!r}", numbers=True)
    if task.form == "texts":
        return torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(targets)
    return scaled(inputs, what, mean, std), torch.from_numpy(targets.astype(np.int64))


def scaled(
    pixels: npt.NDArray[Any], what: str, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()
) -> torch.Tensor:
    """Pixels ``(N, H, W)`` or ``(N, H, W, C)`` as a network takes them; without mean and std from -1 to 1."""
    images = image_array(Path(what), {"images": pixels})
    channels = images.shape[1]
    return normalised(images, mean or (MEAN,) * channels, std or (STD,) * channels)


def _one(what: str, role: str, *choices: set[str]) -> str:
    for names in reversed(choices):
        if len(names) == 1:
            return next(iter(names))
    allowed = "one column of images or input_ids" if role == "inputs" else f"one called {', '.join(TARGETS)}"
    raise DataError(f"{what} does not tell its {role}: allowed is {allowed} (select_columns, rename_column)")
