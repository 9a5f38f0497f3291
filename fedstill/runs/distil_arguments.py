"""Type checks of the arguments of :func:`fedstill.distil`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from os import PathLike
from typing import Any

import torch

from fedstill.core.compute import EngineConfig
from fedstill.core.errors import ArgumentError
from fedstill.core.table_schema import TableSchema
from fedstill.federation.link_config import LinkConfig
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import PrivacyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.tasks import TaskConfig


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse an argument of an invalid type.

    Args:
        given: arguments by name; arguments without a check are ignored.

    Raises:
        ArgumentError: naming the first invalid argument, its value and the expected type.

    >>> check_arguments({"seed": "x"})
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ArgumentError: invalid seed = 'x' (expected an integer from 0 up)
    """
    for name, value in given.items():
        if name in CHECKS:
            expected, fits = CHECKS[name]
            if not fits(value):
                raise ArgumentError(name, _plain_value_or_class_name(value), expected)


def _plain_value_or_class_name(value: object) -> object:
    """Return plain values unchanged, and other objects by the name of their class."""
    items = value if isinstance(value, list | tuple) else [value]
    plain = all(each is None or isinstance(each, str | int | float | dict) for each in items)
    return value if plain else type(value).__name__


def _is_integer(value: object, minimum: int = 0) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= minimum


def _as_sequence(value: object) -> Sequence[object] | None:
    """Return a list, tuple or other sequence; None for other values."""
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else None


def _is_list(value: object) -> bool:
    return _as_sequence(value) is not None


def _is_list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        items = _as_sequence(value)
        return items is not None and all(map(fits, items))

    return check


def _is_none_or(kind: type) -> Callable[[object], bool]:
    return lambda value: value is None or isinstance(value, kind)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real)


def _is_class_count_or_list(value: object) -> bool:
    return _is_integer(value, 1) or bool(_as_sequence(value))


def _is_list_over_nodes(value: object) -> bool:
    """Return whether a value is a sequence over nodes, and not one node's pair of tensors."""
    items = _as_sequence(value)
    return items is not None and not (items and all(isinstance(each, torch.Tensor) for each in items))


NUMBERS = "a tuple of numbers, one for each channel"
CHECKS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "data": ("a list with the examples of each node", _is_list_over_nodes),
    "models": ("a list with the model of each node", _is_list),
    "classes": ("the number of classes, >= 1, or a list of their names", _is_class_count_or_list),
    "task": ("the name of a task, or its config", lambda value: isinstance(value, str | TaskConfig)),
    "local": ("a fedstill.LocalConfig", _is_none_or(LocalConfig)),
    "engine": ("a fedstill.EngineConfig", _is_none_or(EngineConfig)),
    "names": ("a list of names", _is_list_of(_is_name)),
    "policies": (
        "a list of fedstill.PolicyConfig, one for each node",
        _is_list_of(lambda each: isinstance(each, PolicyConfig)),
    ),
    "privacies": (
        "a list of mechanisms such as fedstill.DPSGD(...), one for each node",
        _is_list_of(lambda each: isinstance(each, PrivacyConfig)),
    ),
    "mean": (NUMBERS, _is_list_of(_is_number)),
    "std": (NUMBERS, _is_list_of(_is_number)),
    "seed": ("an integer from 0 up", _is_integer),
    "vocabulary": ("an integer from 0 up", _is_integer),
    "schema": (
        "a fedstill.TableSchema, or the path of a file",
        lambda value: value is None or isinstance(value, str | PathLike | TableSchema),
    ),
    "perceptual": ("the path of a file", lambda value: isinstance(value, str | PathLike)),
    "every": ("an integer from 0 up, or None", lambda value: value is None or _is_integer(value)),
    "link": ("a fedstill.LinkConfig", _is_none_or(LinkConfig)),
    "track": ("a list of trackers", _is_list),
    "progress": ("True or False", lambda value: isinstance(value, bool)),
}
