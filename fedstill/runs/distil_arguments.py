"""Checks the plain arguments of :func:`fedstill.distil`: what each may be, before anything is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from os import PathLike
from typing import Any

import torch

from fedstill.core.compute import EngineConfig
from fedstill.core.errors import ArgumentError
from fedstill.core.table_schema import Schema
from fedstill.federation.link_config import LinkConfig
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import PrivacyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.tasks import TaskConfig


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse an argument that is not of its kind.

    Args:
        given: all arguments by name; others than those that are checked here may be among them.

    Raises:
        ArgumentError: naming the first, its value and what is expected.

    >>> check_arguments({"seed": "x"})
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ArgumentError: invalid seed = 'x' (expected a whole number from 0 up)
    """
    for name, value in given.items():
        if name in CHECKS:
            expected, fits = CHECKS[name]
            if not fits(value):
                raise ArgumentError(name, _shown(value), expected)


def _shown(value: object) -> object:
    """Plain values as they are, others by their class, as their text is long."""
    parts = value if isinstance(value, list | tuple) else [value]
    plain = all(each is None or isinstance(each, str | int | float | dict) for each in parts)
    return value if plain else type(value).__name__


def _whole(value: object, least: int = 0) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def _parts(value: object) -> Sequence[object] | None:
    """The parts of a list, a tuple and the like; None: it is none."""
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else None


def _list(value: object) -> bool:
    return _parts(value) is not None


def _list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        parts = _parts(value)
        return parts is not None and all(map(fits, parts))

    return check


def _optional(kind: type) -> Callable[[object], bool]:
    return lambda value: value is None or isinstance(value, kind)


def _named(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real)


def _classes(value: object) -> bool:
    return _whole(value, 1) or bool(_parts(value))


def _many_nodes(value: object) -> bool:
    """Not one node's own pair of tensors."""
    parts = _parts(value)
    return parts is not None and not (parts and all(isinstance(each, torch.Tensor) for each in parts))


NUMBERS = "a tuple of numbers, one for each channel"
CHECKS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "data": ("a list, one node's examples each", _many_nodes),
    "models": ("a list, one node's model each", _list),
    "classes": ("how many there are, 1 or more, or a list of their names", _classes),
    "task": ("a task's name, or its config", lambda value: isinstance(value, str | TaskConfig)),
    "local": ("a fedstill.LocalConfig", _optional(LocalConfig)),
    "engine": ("a fedstill.EngineConfig", _optional(EngineConfig)),
    "names": ("a list of names", _list_of(_named)),
    "policies": (
        "a list of fedstill.PolicyConfig, one for each node",
        _list_of(lambda each: isinstance(each, PolicyConfig)),
    ),
    "privacies": (
        "a list of mechanisms such as fedstill.DPSGD(...), one for each node",
        _list_of(lambda each: isinstance(each, PrivacyConfig)),
    ),
    "mean": (NUMBERS, _list_of(_number)),
    "std": (NUMBERS, _list_of(_number)),
    "seed": ("a whole number from 0 up", _whole),
    "vocabulary": ("a whole number from 0 up", _whole),
    "schema": (
        "a fedstill.Schema, or a file's path",
        lambda value: value is None or isinstance(value, str | PathLike | Schema),
    ),
    "perceptual": ("a file's path", lambda value: isinstance(value, str | PathLike)),
    "every": ("a whole number from 0 up, or None", lambda value: value is None or _whole(value)),
    "link": ("a fedstill.LinkConfig", _optional(LinkConfig)),
    "track": ("a list of trackers", _list),
    "progress": ("True or False", lambda value: isinstance(value, bool)),
}
