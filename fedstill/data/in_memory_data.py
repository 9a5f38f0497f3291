"""Examples given as Python objects: arrays, PyTorch data sets and loaders, mappings, Hugging Face data sets.

Each example is a pair ``(input, target)`` or a mapping such as ``{"image": ..., "label": ...}``. The library
``datasets`` is not imported: its objects are recognized by their attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import data as torch_data

from fedstill.core.dataset import Column, DataSet, as_tensor, normalize
from fedstill.core.errors import DataError
from fedstill.core.name_normalization import (
    TEXT_DTYPE_KINDS,
    normalize_column,
    normalize_name,
    to_name,
    unknown_name_text,
)
from fedstill.data.config import MEAN, STD, DataConfig
from fedstill.data.images import has_pil_images, is_pil_image, to_array
from fedstill.data.partitioners import SplitConfig, SplitItems
from fedstill.data.raw_images import as_image_array, encode_labels
from fedstill.data.text_data import IDS, MASK, set_padding_to_zero
from fedstill.tasks import Targets, Task, TaskConfig


@dataclass(frozen=True, kw_only=True)
class InMemoryData(DataConfig):
    """Data of a run that are Python objects, which no file can name."""

    targets: ClassVar[tuple[Targets, ...]] = get_args(Targets)

    def read(self, task: TaskConfig) -> DataSet:
        """Refuse to read: the caller has the examples."""
        raise DataError("the data are objects of the Python program that started the run")


@dataclass(frozen=True, kw_only=True)
class InMemorySplit(SplitConfig):
    """Split of a run whose caller gives each node its examples."""

    about_template: ClassVar[str] = "as given"

    def divide(self, items: SplitItems, generator: np.random.Generator) -> npt.NDArray[np.int64]:
        """Refuse to split: the caller has done so."""
        raise DataError("the nodes' data are objects of the Python program that started the run")


INPUT_KEYS = ("image", "images", "img", "pixel_values", IDS, "inputs", "input", "x")
TARGET_KEYS = ("label", "labels", "mask", "masks", "annotation", "targets", "target", "y")
HF_INPUT_COLUMNS = ("image", "img", "pixel_values", IDS)
HF_TARGET_COLUMNS = ("label", "labels", "mask", "annotation")


# --- PyTorch data sets, loaders and mappings ----------------------------------------------------------------


def extract_inputs_and_targets(examples: Any, label: str) -> tuple[Any, Any]:
    """Return all inputs and all targets, as the given arrays or tensors, or as lists.

    Args:
        examples: a pair of inputs and targets; a mapping with both; or a sized, indexable data set of pairs
            or mappings. Of a ``DataLoader`` its data set is used.
        label: start of error messages.

    Raises:
        DataError: another form, or a loader that changes what its data set returns.
    """
    if isinstance(examples, Mapping):
        input_key, target_key = _find_keys(examples, label)
        if input_key == IDS and MASK in examples:
            return set_padding_to_zero(examples[IDS], examples[MASK], label), examples[target_key]
        return examples[input_key], examples[target_key]
    is_pair = isinstance(examples, tuple | list) and len(examples) == 2
    if is_pair and (isinstance(examples, tuple) or not all(map(_is_example, examples))):
        return examples[0], examples[1]
    examples = _loader_data_set(examples, label)
    iterable = isinstance(examples, torch_data.IterableDataset)
    if iterable or not hasattr(examples, "__len__") or not hasattr(examples, "__getitem__"):
        type_name = type(examples).__name__
        raise DataError(f"{label} is a {type_name} (expected (inputs, labels), or a data set with a length)")
    rows = [examples[index] for index in range(len(examples))]
    if rows and all(isinstance(example, Mapping) for example in rows):
        input_key, target_key = _find_keys(rows[0], label)
        for row, example in enumerate(rows):
            if input_key not in example or target_key not in example:
                keys = ", ".join(map(str, example))
                raise DataError(f"{label}: example {row} has {keys} (expected {input_key} and {target_key})")
        targets = [example[target_key] for example in rows]
        if input_key == IDS and all(MASK in example for example in rows):
            masks = [example[MASK] for example in rows]
            return set_padding_to_zero([example[IDS] for example in rows], masks, label), targets
        return [example[input_key] for example in rows], targets
    if not rows or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in rows):
        raise DataError(f"{label} has no examples, or examples that are not pairs (input, label)")
    return [pair[0] for pair in rows], [pair[1] for pair in rows]


def _find_keys(example: Mapping[Any, Any], label: str) -> tuple[str, str]:
    def find_key(role: str, names: Iterable[str]) -> str:
        present = [name for name in names if name in example]
        if len(present) != 1:
            keys = ", ".join(map(str, example)) or "nothing"
            problem = f"examples have {keys}, so their {role} are not clear"
            raise DataError(f"{label}: {problem} (expected one of {', '.join(names)})")
        return present[0]

    return find_key("inputs", INPUT_KEYS), find_key("targets", TARGET_KEYS)


def _is_example(value: Any) -> bool:
    """Return whether a value is one example, as a list of two can also hold all inputs and all targets."""
    if isinstance(value, Mapping):
        return True
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    return is_pair and (is_pil_image(value[0]) or getattr(value[0], "ndim", 0) > 0)


def _loader_data_set(examples: Any, label: str) -> Any:
    """Return the data set of a ``DataLoader`` that does not change it; other values unchanged."""
    if not isinstance(examples, torch_data.DataLoader):
        return examples
    data: Any = examples.dataset
    sampler = examples.sampler
    if isinstance(data, torch_data.IterableDataset):
        return data
    custom_part = ""
    if type(sampler) is torch_data.RandomSampler:
        if sampler.replacement or sampler.num_samples != len(data):
            custom_part = "sampler"
    elif type(sampler) is not torch_data.SequentialSampler:
        custom_part = "sampler"
    if type(examples.batch_sampler) not in (torch_data.BatchSampler, type(None)):
        custom_part = "batch_sampler"
    if examples.collate_fn not in (torch_data.default_collate, torch_data.default_convert):
        custom_part = "collate_fn"
    if custom_part:
        raise DataError(f"{label} is a DataLoader with a custom {custom_part} (expected its data set)")
    return data


def to_input_tensor(
    inputs: Any, label: str, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()
) -> torch.Tensor:
    """Return inputs as a tensor.

    PIL images become normalized pixels, in [-1, 1] without ``mean`` and ``std``.
    """
    if has_pil_images(inputs):
        return normalize_pixels(to_array(inputs, label), label, mean, std)
    return as_tensor(inputs, f"{label} inputs")


def to_target_tensor(targets: Any, label: str) -> torch.Tensor:
    """Return targets as a tensor; PIL images are masks, whose pixels are class indices."""
    if has_pil_images(targets):
        return torch.from_numpy(to_array(targets, f"{label} labels", numbers=True))
    return as_tensor(targets, f"{label} labels")


def normalize_pixels(
    pixels: npt.NDArray[Any], label: str, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()
) -> torch.Tensor:
    """Normalize pixels ``(N, H, W)`` or ``(N, H, W, C)``; without ``mean`` and ``std`` to [-1, 1]."""
    images = as_image_array(Path(label), {"images": pixels})
    channels = images.shape[1]
    return normalize(images, mean or (MEAN,) * channels, std or (STD,) * channels)


# --- Hugging Face data sets ---------------------------------------------------------------------------------


def is_hugging_face(value: Any) -> bool:
    """Return whether a value is a ``datasets.Dataset``, or has its interface."""
    return all(hasattr(value, name) for name in ("features", "column_names", "__len__", "__getitem__"))


def hugging_face_tensors(
    data: Any,
    label: str,
    task: Task,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    classes: Sequence[str] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of a ``datasets.Dataset``.

    Inputs are the image column, or ``input_ids`` of one length, with padding given by ``attention_mask``.
    Targets are the only ``ClassLabel`` column, or a column named label, labels, mask or annotation. Texts,
    and numbers with names in the features, are numbered like ``classes`` if these are given. Without ``mean``
    and ``std`` pixels become -1..1.

    Raises:
        DataError: a column is missing or ambiguous, or rows differ in shape.
    """
    if task.kind == "image" or task.form == "rows":
        raise DataError(f"{label} is a Hugging Face data set (expected tensors for task {task.name})")
    feature_types = {key: type(feature).__name__ for key, feature in data.features.items()}
    label_columns = {key for key, kind in feature_types.items() if kind == "ClassLabel"}
    target_column = _only_candidate_column(
        label, "targets", {key for key in feature_types if key in HF_TARGET_COLUMNS}, label_columns
    )
    image_columns = {key for key, kind in feature_types.items() if kind == "Image" and key != target_column}
    input_column = _only_candidate_column(
        label, "inputs", {key for key in feature_types if key in HF_INPUT_COLUMNS}, image_columns
    )
    if len(data) == 0:
        raise DataError(f"{label} has no rows (expected one or more)")
    rows = [data[index] for index in range(len(data))]
    inputs = to_array([row[input_column] for row in rows], f"{label}: {input_column!r}")
    labels = to_array([row[target_column] for row in rows], f"{label}: {target_column!r}", numbers=True)
    names = getattr(data.features[target_column], "names", None) or ()
    targets = as_tensor(renumber_labels(labels, label, classes, names), f"{label}: {target_column!r}")
    if task.form == "texts":
        masks = [row[MASK] for row in rows] if input_column == IDS and MASK in feature_types else None
        return set_padding_to_zero(inputs, masks, label), targets
    return normalize_pixels(inputs, label, mean, std), targets


def _only_candidate_column(label: str, role: str, *choices: set[str]) -> str:
    for names in reversed(choices):
        if len(names) == 1:
            return next(iter(names))
    expected = (
        "one column of images or input_ids"
        if role == "inputs"
        else f"one called {', '.join(HF_TARGET_COLUMNS)}"
    )
    advice = "see select_columns and rename_column"
    raise DataError(f"{label} has no unambiguous {role} (expected {expected}; {advice})")


def renumber_labels(
    labels: Column, source: str, classes: Sequence[str], source_names: Sequence[str] = ()
) -> npt.NDArray[Any]:
    """Return labels as indices into ``classes``.

    Texts are matched by name, numbers by their names in the source, or kept if the source has no names.

    Args:
        source: start of error messages.
        source_names: names of the source's numbers.

    Raises:
        DataError: labels are texts and classes have no names; a label is not a class; or only some source
            names are classes.

    >>> renumber_labels(np.array(["dog", "cat"]), "data[0]", ["cat", "dog"]).tolist()
    [1, 0]
    >>> renumber_labels(np.array([0, 1]), "data[0]", ["cat", "dog"], source_names=["dog", "cat"]).tolist()
    [1, 0]
    """
    if labels.dtype.kind in TEXT_DTYPE_KINDS:
        if not classes:
            first = ascii(to_name(labels.ravel()[0])) if labels.size else "none"
            problem = f"labels are texts such as {first}, and classes have no names"
            raise DataError(f"{source}: {problem} (expected numbers, or classes= a list of the names)")
        return encode_labels(normalize_column(labels).ravel().tolist(), source, classes)[0]
    plain_names = [normalize_name(name) for name in source_names]
    if not {*plain_names} & {*classes} or tuple(plain_names) == tuple(classes):
        return labels
    if missing := [name for name in plain_names if name not in classes]:
        raise DataError(f"{source}: has a class {unknown_name_text(missing[0], classes)}")
    # Other labels, such as -1 for unlabeled, are refused later.
    is_known = (labels >= 0) & (labels < len(plain_names))
    numbers = np.array([classes.index(name) for name in plain_names], dtype=np.int64)
    return np.where(is_known, numbers[np.where(is_known, labels, 0)], labels)


def require_same_class_order(parts: Mapping[str, Any]) -> None:
    """Check that all parts number their classes alike, if no list of classes is given.

    Args:
        parts: data by argument name; only Hugging Face data sets are checked.

    Raises:
        DataError: names the first two parts whose label names differ.
    """
    first_part, first_names = "", None
    for part, data in parts.items():
        if not is_hugging_face(data):
            continue
        class_features = [
            feature for feature in data.features.values() if type(feature).__name__ == "ClassLabel"
        ]
        feature_names = getattr(class_features[0], "names", None) if len(class_features) == 1 else None
        names = tuple(map(normalize_name, feature_names)) if feature_names else None
        if names is not None and first_names is not None and names != first_names:
            other = f"those of {first_part} {', '.join(first_names[:5])}"
            problem = f"class names are {', '.join(names[:5])}, and {other}"
            raise DataError(f"{part}: {problem} (expected one order, or classes= a list of the names)")
        first_part, first_names = (
            (part, names) if first_names is None and names is not None else (first_part, first_names)
        )
