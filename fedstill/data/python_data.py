"""Examples as people have them in Python, as inputs and targets: torch's data sets and loaders, mappings.

Each example is a pair, or a mapping such as ``{"image": ..., "label": ...}``.

Data sets of the library ``datasets`` (Hugging Face), read by what it documents: features and rows.

Nothing of it is imported here: whoever gives such an object has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import data as torch_data

from fedstill.core.dataset import Column, as_tensor, normalized
from fedstill.core.errors import DataError
from fedstill.core.names import TEXTS, name_of, named_column, plain, unknown_name
from fedstill.data.config import MEAN, STD
from fedstill.data.images import has_pil_images, is_pil_image, to_array
from fedstill.data.raw import as_image_array, encode_labels
from fedstill.data.text import IDS, MASK, set_padding_to_zero
from fedstill.tasks import Task

INPUT_KEYS = ("image", "images", "img", "pixel_values", IDS, "inputs", "input", "x")
TARGET_KEYS = ("label", "labels", "mask", "masks", "annotation", "targets", "target", "y")


def extract_inputs_and_targets(examples: Any, what: str) -> tuple[Any, Any]:
    """The inputs and the targets of all examples, as arrays or tensors that were given, or as lists.

    Args:
        examples: a tuple or list of both; a mapping of both, by name; or examples one by one, in whatever has
            a length and items: pairs, or mappings. Of a ``DataLoader`` its data set counts.
        what: they are, the first words of an error.

    Raises:
        DataError: another form, or a loader that changes what its data set gives.
    """
    if isinstance(examples, Mapping):
        source, target = _find_keys(examples, what)
        if source == IDS and MASK in examples:
            return set_padding_to_zero(examples[IDS], examples[MASK], what), examples[target]
        return examples[source], examples[target]
    two = isinstance(examples, tuple | list) and len(examples) == 2
    if two and (isinstance(examples, tuple) or not all(map(_is_example, examples))):
        return examples[0], examples[1]
    examples = _loader_data_set(examples, what)
    iterable = isinstance(examples, torch_data.IterableDataset)
    if iterable or not hasattr(examples, "__len__") or not hasattr(examples, "__getitem__"):
        found = type(examples).__name__
        raise DataError(f"{what} is a {found} (expected (inputs, labels), or a data set with a length)")
    each = [examples[index] for index in range(len(examples))]
    if each and all(isinstance(example, Mapping) for example in each):
        source, target = _find_keys(each[0], what)
        for row, example in enumerate(each):
            if source not in example or target not in example:
                keys = ", ".join(map(str, example))
                raise DataError(f"{what}: example {row} has {keys} (expected {source} and {target})")
        targets = [example[target] for example in each]
        if source == IDS and all(MASK in example for example in each):
            masks = [example[MASK] for example in each]
            return set_padding_to_zero([example[IDS] for example in each], masks, what), targets
        return [example[source] for example in each], targets
    if not each or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in each):
        raise DataError(f"{what} has no examples, or not pairs of input and label")
    return [pair[0] for pair in each], [pair[1] for pair in each]


def to_input_tensor(
    inputs: Any, what: str, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()
) -> torch.Tensor:
    """Inputs as they are, but images of PIL, whose pixels are normalized: to -1..1 without mean and std."""
    if has_pil_images(inputs):
        return normalize_pixels(to_array(inputs, what), what, mean, std)
    return as_tensor(inputs, f"{what} inputs")


def to_target_tensor(targets: Any, what: str) -> torch.Tensor:
    """Targets as they are, but images of PIL, which are masks: the number of the class at each pixel."""
    if has_pil_images(targets):
        return torch.from_numpy(to_array(targets, f"{what} labels", numbers=True))
    return as_tensor(targets, f"{what} labels")


def _is_example(value: Any) -> bool:
    """Return whether a value is one example: a list of two may also hold all inputs and all targets."""
    if isinstance(value, Mapping):
        return True
    pair = isinstance(value, tuple | list) and len(value) == 2
    return pair and (is_pil_image(value[0]) or getattr(value[0], "ndim", 0) > 0)


def _find_keys(example: Mapping[Any, Any], what: str) -> tuple[str, str]:
    def one(role: str, names: Iterable[str]) -> str:
        found = [name for name in names if name in example]
        if len(found) != 1:
            keys = ", ".join(map(str, example)) or "nothing"
            allowed = f"allowed is one of {', '.join(names)}"
            raise DataError(f"{what}: examples have {keys}, and so no one name of {role}: {allowed}")
        return found[0]

    return one("inputs", INPUT_KEYS), one("targets", TARGET_KEYS)


def _loader_data_set(examples: Any, what: str) -> Any:
    """The data set of a loader that gives its examples as they are; anything else as it is."""
    if not isinstance(examples, torch_data.DataLoader):
        return examples
    data: Any = examples.dataset
    sampler = examples.sampler
    if isinstance(data, torch_data.IterableDataset):
        return data
    own = ""
    if type(sampler) is torch_data.RandomSampler:
        if sampler.replacement or sampler.num_samples != len(data):
            own = "sampler"
    elif type(sampler) is not torch_data.SequentialSampler:
        own = "sampler"
    if type(examples.batch_sampler) not in (torch_data.BatchSampler, type(None)):
        own = "batch_sampler"
    if examples.collate_fn not in (torch_data.default_collate, torch_data.default_convert):
        own = "collate_fn"
    if own:
        raise DataError(f"{what} is a DataLoader with a {own} of its own (expected its data set)")
    return data


HF_INPUT_COLUMNS = ("image", "img", "pixel_values", IDS)
HF_TARGET_COLUMNS = ("label", "labels", "mask", "annotation")


def is_hugging_face(given: Any) -> bool:
    """Whether an object is a ``datasets.Dataset``, or has what such a one has."""
    return all(hasattr(given, name) for name in ("features", "column_names", "__len__", "__getitem__"))


def hugging_face_tensors(
    data: Any,
    what: str,
    task: Task,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    classes: Sequence[str] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one part, a ``datasets.Dataset``.

    Inputs are the column of images, or ``input_ids`` of one length, whose padding an ``attention_mask`` says;
    targets the one column of class labels, or one that is called label, labels, mask or annotation. Labels
    that are texts, or numbers with names in the features, are numbered as ``classes`` are, if there are any.
    Without mean and std pixels become -1..1.
    A DataError tells what is missing, or in what rows differ.
    """
    if task.kind == "image" or task.form == "rows":
        raise DataError(f"{what} is a Hugging Face data set: allowed for task {task.name} are tensors")
    kinds = {key: type(feature).__name__ for key, feature in data.features.items()}
    labels = {key for key, kind in kinds.items() if kind == "ClassLabel"}
    target = _find_column(what, "targets", {key for key in kinds if key in HF_TARGET_COLUMNS}, labels)
    images = {key for key, kind in kinds.items() if kind == "Image" and key != target}
    source = _find_column(what, "inputs", {key for key in kinds if key in HF_INPUT_COLUMNS}, images)
    if len(data) == 0:
        raise DataError(f"{what} has no rows (expected one or more)")
    rows = [data[index] for index in range(len(data))]
    inputs = to_array([row[source] for row in rows], f"{what}: {source!r}")
    given = to_array([row[target] for row in rows], f"{what}: {target!r}", numbers=True)
    names = getattr(data.features[target], "names", None) or ()
    targets = as_tensor(renumber_labels(given, what, classes, names), f"{what}: {target!r}")
    if task.form == "texts":
        masks = [row[MASK] for row in rows] if source == IDS and MASK in kinds else None
        return set_padding_to_zero(inputs, masks, what), targets
    return normalize_pixels(inputs, what, mean, std), targets


def normalize_pixels(
    pixels: npt.NDArray[Any], what: str, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()
) -> torch.Tensor:
    """Pixels ``(N, H, W)`` or ``(N, H, W, C)`` as a network takes them; without mean and std from -1 to 1."""
    images = as_image_array(Path(what), {"images": pixels})
    channels = images.shape[1]
    return normalized(images, mean or (MEAN,) * channels, std or (STD,) * channels)


def renumber_labels(
    labels: Column, what: str, classes: Sequence[str], names: Sequence[str] = ()
) -> npt.NDArray[Any]:
    """Labels as numbers of ``classes``: texts by name; numbers by what the source calls them, or as they are.

    Args:
        names: what the source calls its numbers.

    Raises:
        DataError: a text, and classes without names; or one that is no class; or names of which the classes
            have some and not all.

    >>> renumber_labels(np.array(["dog", "cat"]), "data[0]", ["cat", "dog"]).tolist()
    [1, 0]
    >>> renumber_labels(np.array([0, 1]), "data[0]", ["cat", "dog"], names=["dog", "cat"]).tolist()
    [1, 0]
    """
    if labels.dtype.kind in TEXTS:
        if not classes:
            first = ascii(name_of(labels.ravel()[0])) if labels.size else "none"
            told = f"labels are texts, as {first}, and classes have no names"
            raise DataError(f"{what}: {told} (expected numbers, or classes= a list of the names)")
        return encode_labels(named_column(labels).ravel().tolist(), what, classes)[0]
    known = [plain(each) for each in names]
    if not {*known} & {*classes} or tuple(known) == tuple(classes):
        return labels
    if unknown := [each for each in known if each not in classes]:
        raise DataError(f"{what}: has a class {unknown_name(unknown[0], classes)}")
    within = (labels >= 0) & (labels < len(known))  # others, as -1 for unlabeled, are refused later
    numbers = np.array([classes.index(each) for each in known], dtype=np.int64)
    return np.where(within, numbers[np.where(within, labels, 0)], labels)


def require_same_class_order(parts: Mapping[str, Any]) -> None:
    """Refuse parts that number their classes differently, where no list of classes says how.

    Args:
        parts: what was given, by the argument's name; only Hugging Face data sets count.

    Raises:
        DataError: naming the first two of them whose label names differ.
    """
    first, known = "", None
    for what, data in parts.items():
        if not is_hugging_face(data):
            continue
        kinds = [each for each in data.features.values() if type(each).__name__ == "ClassLabel"]
        named = getattr(kinds[0], "names", None) if len(kinds) == 1 else None
        names = tuple(map(plain, named)) if named else None
        if names is not None and known is not None and names != known:
            told = f"labels are called {', '.join(names[:5])}, and those of {first} {', '.join(known[:5])}"
            raise DataError(f"{what}: {told} (expected one order, or classes= a list of the names)")
        first, known = (what, names) if known is None and names is not None else (first, known)


def _find_column(what: str, role: str, *choices: set[str]) -> str:
    for names in reversed(choices):
        if len(names) == 1:
            return next(iter(names))
    allowed = (
        "one column of images or input_ids"
        if role == "inputs"
        else f"one called {', '.join(HF_TARGET_COLUMNS)}"
    )
    raise DataError(f"{what} does not tell its {role} (expected {allowed} (select_columns, rename_column))")
