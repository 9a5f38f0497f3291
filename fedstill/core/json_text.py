"""Writes JSON that every program reads: what is no finite number is null, as JSON has no word for it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(told: Any, *, indent: int | None = 2) -> str:
    """A value of figures, texts, lists and mappings as JSON, without a last line end; None for no indent is
    one line, as short as it can be.

    >>> json_text({"epsilon": float("inf"), "rounds": (1, 2)}, indent=None)
    '{"epsilon":null,"rounds":[1,2]}'
    """
    separators = (",", ":") if indent is None else None
    return json.dumps(finite(told), indent=indent, separators=separators, allow_nan=False)


def finite(told: Any) -> Any:
    """The same value with None for NaN and infinity, and lists for tuples."""
    if isinstance(told, float):
        return told if math.isfinite(told) else None
    if isinstance(told, Mapping):
        return {name: finite(value) for name, value in told.items()}
    if isinstance(told, list | tuple):
        return [finite(value) for value in told]
    return told
