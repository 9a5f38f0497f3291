"""What examples take of a node's memory, before any is read."""

from __future__ import annotations

import math

from fedstill.core.errors import TooLarge
from fedstill.data.spec import InputSpec

COPIES = 3  # of a node's data while they are read: as they come, as they are brought into spec, and joined


def of_example(spec: InputSpec) -> int:
    """Bytes of one input with its target, in a spec.

    >>> from fedstill.tasks.classification import ClassificationConfig
    >>> of_example(InputSpec(ClassificationConfig(), ("a", "b"), (1, 8, 8), (0.5,), (0.5,)))
    264
    """
    task = spec.make_task()
    target = {"class": 1, "labels": task.classes, "map": math.prod(spec.shape[1:])}
    inputs = math.prod(spec.shape) * (8 if task.tokens else 4)
    return inputs + (8 * target[task.kind] if task.kind in target else inputs)


def fits(what: str, need: float, most: int) -> None:
    """Refuse (TooLarge) what would take more bytes than are allowed; 0 is no limit."""
    if most and need > most:
        raise TooLarge(what, need, most)


def check_examples(count: int, spec: InputSpec, most: int) -> None:
    """Refuse (TooLarge) to bring so many examples into a spec, if they took more bytes than are allowed."""
    sizes = " x ".join(map(str, spec.shape))
    fits(f"its data as inputs of {sizes} with {len(spec.classes)} classes", _data(count, spec), most)


def _data(count: int, spec: InputSpec) -> int:
    return COPIES * count * of_example(spec)
