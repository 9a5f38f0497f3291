"""What pages and terminals share: values out of JSON, and numbers in words that people read.

A page and a terminal that write figures alike can never disagree.

Short texts of objects that hold tensors or long lists, for Python's prompt, notebooks and tracebacks.

Writes JSON that every program reads: what is no finite number is null, as JSON has no word for it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from fedstill.core.names import number_of

MISSING = "not measured"
LARGEST = 1e300  # what lies beyond, NaN and infinity too, is no figure to show


def number(record: object, *keys: str) -> float | None:
    """The finite number at a path of keys, or None: a report shows no NaN and no guess.

    >>> number({"seconds": {"total": 2}}, "seconds", "total")
    2.0
    >>> number({"accuracy": float("nan")}, "accuracy") is None, number({"bytes": None}, "bytes", "up") is None
    (True, True)
    """
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    if isinstance(record, bool) or not isinstance(record, (int, float)) or not -LARGEST < record < LARGEST:
        return None
    return float(record)


def listed(names: Sequence[str]) -> str:
    """Names in a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed([])
    ('a', 'a, b and c', '')
    """
    *before, last = names or ("",)
    return f"{', '.join(before)} and {last}" if before else last


def counted(count: float, one: str) -> str:
    """Number of things with a noun in singular or plural.

    >>> counted(1, "seed"), counted(1200, "CPU thread"), counted(0.5, "epoch"), counted(2, "query")
    ('1 seed', '1,200 CPU threads', '0.5 epochs', '2 queries')
    """
    return f"{count:,.12g} {one if count == 1 else plural(one)}"


def plural(noun: str) -> str:
    """Plural of a regular English noun.

    >>> plural("node"), plural("query")
    ('nodes', 'queries')
    """
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


def times(shape: Sequence[int]) -> str:
    """A shape in words.

    >>> times((3, 32, 32))
    '3 x 32 x 32'
    """
    return " x ".join(map(str, shape))


def shortened(text: str) -> str:
    """A text with its decimal numbers to four digits.

    >>> shortened("gaussian(2.0, rate=0.10921501706484642)")
    'gaussian(2, rate=0.1092)'
    """
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda found: f"{float(found[0]):.4g}", text)


def percent(value: float) -> str:
    """A percentage with one decimal.

    >>> percent(93.37)
    '93.4%'
    """
    return f"{value:.1f}%"


def human_bytes(count: int) -> str:
    """Bytes in decimal units (1 kB is 1000 bytes), to about three digits.

    >>> human_bytes(999), human_bytes(16384), human_bytes(786_000), human_bytes(999_500)
    ('999 B', '16.4 kB', '786 kB', '1.0 MB')
    """
    if count < 1000:
        return f"{count} B"
    value = float(count)
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 999.5:  # from here on it would print as 1000
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


def human_seconds(seconds: float) -> str:
    """A duration as a person says it.

    >>> human_seconds(0.01), human_seconds(42.34), human_seconds(192), human_seconds(7500)
    ('under 0.1 s', '42.3 s', '3 min 12 s', '2 h 5 min')
    """
    if seconds < 0.05:
        return "under 0.1 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest} min"


def cell(text: str) -> str:
    """A text of others as a cell of a csv that spreadsheets take for a text, and never for a formula.

    >>> cell("=HYPERLINK(A1)"), cell("-"), cell("-3.5"), cell("scan-1.png")
    ("'=HYPERLINK(A1)", '-', '-3.5', 'scan-1.png')
    """
    if text[:1] not in ("=", "+", "-", "@", "\t", "\r") or len(text) == 1:
        return text
    return text if number_of(text) is not None else f"'{text}"


def more_such(count: int) -> str:
    """What stands behind the first of some faults; empty, where there is no other.

    >>> more_such(3), more_such(1)
    (' (2 more such)', '')
    """
    return f" ({count - 1} more such)" if count > 1 else ""


def clip(value: object, longest: int = 300) -> str:
    """What others sent as one line that can be shown anywhere, and is not long.

    >>> clip("two\\nlines, \\x1b[31mred")
    'two lines, [31mred'
    >>> clip("0123456789", 8)
    '01234...'
    """
    text = str(value)
    start = text[: 4 * longest]
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in start).split())
    return line if len(line) <= longest and len(start) == len(text) else line[: longest - 3] + "..."


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
