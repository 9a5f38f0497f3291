"""Short texts of objects that hold tensors or long lists, for Python's prompt, notebooks and tracebacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedstill.core.text_format import clip

MOST = 4  # items that are shown one by one
LONGEST = 60  # characters of one value


def brief_repr(self: Any) -> str:
    """The ``__repr__`` of a dataclass whose values are too long to show: shapes and numbers of items.

    A dataclass takes it by ``__repr__ = brief_repr`` in its body.
    """
    shown = (f"{field.name}={brief(getattr(self, field.name))}" for field in fields(self) if field.repr)
    return f"{type(self).__name__}({', '.join(shown)})"


def brief(value: Any) -> str:
    """A value in a few words: the shape of a tensor or an array, the length of what has many items.

    >>> brief(range(3)), brief((1, 2)), brief(tuple(range(50))), brief({"a": 1, "b": 2})
    ('range(0, 3)', '(1, 2)', '<tuple of 50>', '<a, b>')
    """
    if getattr(type(value), "__repr__", None) is brief_repr:
        return repr(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"<{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}>"
    if isinstance(value, Mapping):
        return clip(f"<{', '.join(map(str, value))}>", LONGEST)
    if isinstance(value, tuple | list):
        if len(value) > MOST:
            return f"<{type(value).__name__} of {len(value)}>"
        items = ", ".join(map(brief, value))
        return f"({items}{',' if len(value) == 1 else ''})" if isinstance(value, tuple) else f"[{items}]"
    return clip(repr(value), LONGEST)
