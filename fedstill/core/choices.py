"""Options that are one of a few words are checked, also from Python, where no reader of TOML does it."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fedstill.core.errors import ArgumentError


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


@cache  # each instance asks, and hints are slow
def _choices(kind: type[Any]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    hints = get_type_hints(kind)
    return tuple(
        (field.name, get_args(hints[field.name]))
        for field in fields(kind)
        if get_origin(hints[field.name]) is Literal
    )
