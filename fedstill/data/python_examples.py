"""Examples as people have them in Python, as inputs and targets: torch's data sets and loaders, mappings.

Each example is a pair, or a mapping such as ``{"image": ..., "label": ...}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import data as torch_data

from fedstill.core.arrays import as_tensor
from fedstill.core.errors import DataError
from fedstill.data.hugging_face import scaled
from fedstill.data.pil_images import array_of, holds_images, is_image
from fedstill.data.token_padding import IDS, MASK, zero_padded

INPUTS = ("image", "images", "img", "pixel_values", IDS, "inputs", "input", "x")
TARGETS = ("label", "labels", "mask", "masks", "annotation", "targets", "target", "y")


def inputs_and_targets(examples: Any, what: str) -> tuple[Any, Any]:
    """The inputs and the targets of all examples, as arrays or tensors that were given, or as lists.

    Args:
        examples: a tuple or list of both; a mapping of both, by name; or examples one by one, in whatever has
            a length and items: pairs, or mappings. Of a ``DataLoader`` its data set counts.
        what: they are, the first words of an error.

    Raises:
        DataError: another form, or a loader that changes what its data set gives.
    """
    if isinstance(examples, Mapping):
        source, target = _names(examples, what)
        if source == IDS and MASK in examples:
            return zero_padded(examples[IDS], examples[MASK], what), examples[target]
        return examples[source], examples[target]
    two = isinstance(examples, tuple | list) and len(examples) == 2
    if two and (isinstance(examples, tuple) or not all(map(_is_example, examples))):
        return examples[0], examples[1]
    examples = _data_set(examples, what)
    iterable = isinstance(examples, torch_data.IterableDataset)
    if iterable or not hasattr(examples, "__len__") or not hasattr(examples, "__getitem__"):
        found = type(examples).__name__
        raise DataError(f"{what} is a {found}: allowed is (inputs, labels), or a data set with a length")
    each = [examples[index] for index in range(len(examples))]
    if each and all(isinstance(example, Mapping) for example in each):
        source, target = _names(each[0], what)
        for row, example in enumerate(each):
            if source not in example or target not in example:
                keys = ", ".join(map(str, example))
                raise DataError(f"{what}: example {row} has {keys}: allowed are {source} and {target}")
        targets = [example[target] for example in each]
        if source == IDS and all(MASK in example for example in each):
            masks = [example[MASK] for example in each]
            return zero_padded([example[IDS] for example in each], masks, what), targets
        return [example[source] for example in each], targets
    if not each or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in each):
        raise DataError(f"{what} has no examples, or not pairs of input and label")
    return [pair[0] for pair in each], [pair[1] for pair in each]


def input_tensor(
    inputs: Any, what: str, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()
) -> torch.Tensor:
    """Inputs as they are, but images of PIL, whose pixels are normalised: to -1..1 without mean and std."""
    if holds_images(inputs):
        return scaled(array_of(inputs, what), what, mean, std)
    return as_tensor(inputs, f"{what} inputs")


def target_tensor(targets: Any, what: str) -> torch.Tensor:
    """Targets as they are, but images of PIL, which are masks: the number of the class at each pixel."""
    if holds_images(targets):
        return torch.from_numpy(array_of(targets, f"{what} labels", numbers=True))
    return as_tensor(targets, f"{what} labels")


def _is_example(value: Any) -> bool:
    """Return whether a value is one example: a list of two may also hold all inputs and all targets."""
    if isinstance(value, Mapping):
        return True
    pair = isinstance(value, tuple | list) and len(value) == 2
    return pair and (is_image(value[0]) or getattr(value[0], "ndim", 0) > 0)


def _names(example: Mapping[Any, Any], what: str) -> tuple[str, str]:
    def one(role: str, names: Iterable[str]) -> str:
        found = [name for name in names if name in example]
        if len(found) != 1:
            keys = ", ".join(map(str, example)) or "nothing"
            allowed = f"allowed is one of {', '.join(names)}"
            raise DataError(f"{what}: examples have {keys}, and so no one name of {role}: {allowed}")
        return found[0]

    return one("inputs", INPUTS), one("targets", TARGETS)


def _data_set(examples: Any, what: str) -> Any:
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
        raise DataError(f"{what} is a DataLoader with a {own} of its own: allowed is its data set")
    return data
