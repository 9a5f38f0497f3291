"""Tables in tables as values by dotted name, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstill.core.config_tables import as_table
from fedstill.core.errors import ArgumentError


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a table of tables, by dotted name.

    >>> flat({"seed": 1, "split": {"nodes": 8}})
    {'seed': 1, 'split.nodes': 8}
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        value = as_table(value)
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": each for name, each in flat(value).items()}
        else:
            found[key] = value
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted name as a table of tables.

    Raises:
        ArgumentError: a name, and another below it.

    >>> nested({"seed": 1, "split.nodes": 8})
    {'seed': 1, 'split': {'nodes': 8}}
    """
    table: dict[str, Any] = {}
    for name, value in values.items():
        *above, last = name.split(".")
        if wider := next((other for other in values if name.startswith(f"{other}.")), None):
            raise ArgumentError(wider, values[wider], f"none beside {name}, which lies in it")
        place = table
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return table
