"""Options that are one of a few words are checked, also from Python, where no reader of TOML does it."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from fedstill.core.errors import ArgumentError
from fedstill.core.registry import Registry


def check_choices(config: Any, prefix: str) -> None:
    """Refuse a value that a field's ``Literal`` does not list.

    Args:
        config: a dataclass.
        prefix: what its fields are called under, for the error.

    Raises:
        ArgumentError: naming field, value and choices.
    """
    kind: Any = type(config)
    for name, choices in _choices(kind):
        value = getattr(config, name)
        if value not in choices:
            raise ArgumentError(f"{prefix}.{name}", value, f"one of {', '.join(map(str, choices))}")


def check_named(config: Any, prefix: str) -> None:
    """Refuse a name that nothing has, in a field of type ``Annotated[str, a registry]``.

    What has the name is imported. So this is for whoever chooses it: a node that a server sends such a name
    neither needs what it means nor imports it.

    Args:
        config: a dataclass.
        prefix: what its fields are called under, for the error.

    Raises:
        ArgumentError: nothing has the name, or it cannot be imported or is something else.
    """
    kind: Any = type(config)
    for name, registry in _named(kind):
        value = getattr(config, name)
        try:
            registry[value]
        except ArgumentError as error:
            raise ArgumentError(f"{prefix}.{name}", value, error.allowed) from error


@cache  # each instance asks, and hints are slow
def _choices(kind: type[Any]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    hints = get_type_hints(kind)
    return tuple(
        (field.name, get_args(hints[field.name]))
        for field in fields(kind)
        if get_origin(hints[field.name]) is Literal
    )


@cache
def _named(kind: type[Any]) -> tuple[tuple[str, Registry[Any]], ...]:
    hints = get_type_hints(kind, include_extras=True).items()
    named = [(name, get_args(hint)) for name, hint in hints if get_origin(hint) is Annotated]
    return tuple((name, part) for name, parts in named for part in parts if isinstance(part, Registry))
