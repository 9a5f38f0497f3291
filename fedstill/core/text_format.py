"""Format numbers, names and values for reports, terminals, reprs and JSON.

Reports and terminals share these functions, so that they cannot disagree.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from fedstill.core.name_normalization import parse_number

NOT_MEASURED = "not measured"
MAX_SHOWN = 1e300  # larger numbers, NaN and infinity are not shown


def finite_number_at_keys(record: object, *keys: str) -> float | None:
    """Return the finite number at a path of keys, or None. NaN and infinity are None, too.

    >>> finite_number_at_keys({"seconds": {"total": 2}}, "seconds", "total")
    2.0
    >>> finite_number_at_keys({"accuracy": float("nan")}, "accuracy") is None
    True
    >>> finite_number_at_keys({"bytes": None}, "bytes", "up") is None
    True
    """
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    if (
        isinstance(record, bool)
        or not isinstance(record, (int, float))
        or not -MAX_SHOWN < record < MAX_SHOWN
    ):
        return None
    return float(record)


def join_names(names: Sequence[str]) -> str:
    """Join names as in a sentence.

    >>> join_names(["a"]), join_names(["a", "b", "c"]), join_names([])
    ('a', 'a, b and c', '')
    """
    *before, last = names or ("",)
    return f"{', '.join(before)} and {last}" if before else last


def format_count(count: float, noun: str) -> str:
    """Format a number with a noun in singular or plural.

    >>> format_count(1, "seed"), format_count(1200, "CPU thread"), format_count(2, "query")
    ('1 seed', '1,200 CPU threads', '2 queries')
    """
    return f"{count:,.12g} {noun if count == 1 else pluralize(noun)}"


def pluralize(noun: str) -> str:
    """Return the plural of a regular English noun.

    >>> pluralize("node"), pluralize("query")
    ('nodes', 'queries')
    """
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


def format_shape(shape: Sequence[int]) -> str:
    """Format a shape.

    >>> format_shape((3, 32, 32))
    '3 x 32 x 32'
    """
    return " x ".join(map(str, shape))


def shorten_numbers(text: str) -> str:
    """Shorten the decimal numbers in a text to four digits.

    >>> shorten_numbers("gaussian(2.0, rate=0.10921501706484642)")
    'gaussian(2, rate=0.1092)'
    """
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda match: f"{float(match[0]):.4g}", text)


def format_number(value: float) -> str:
    """Format a number with all of its digits, as short as possible.

    >>> format_number(100.0), format_number(0.1), format_number(1234567.25)
    ('100', '0.1', '1234567.25')
    """
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def format_percent(value: float) -> str:
    """Format a percentage with one decimal.

    >>> format_percent(93.37)
    '93.4%'
    """
    return f"{value:.1f}%"


def format_bytes(count: int) -> str:
    """Format bytes in decimal units (1 kB is 1000 bytes), to about three digits.

    >>> format_bytes(999), format_bytes(16384), format_bytes(786_000), format_bytes(999_500)
    ('999 B', '16.4 kB', '786 kB', '1.0 MB')
    """
    if count < 1000:
        return f"{count} B"
    value = float(count)
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 999.5:  # larger values would print as 1000
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


def format_seconds(seconds: float) -> str:
    """Format a duration.

    >>> format_seconds(0.01), format_seconds(42.34), format_seconds(192), format_seconds(7500)
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


def csv_cell(text: str) -> str:
    """Return a text of another party as a CSV cell that no spreadsheet takes for a formula.

    >>> csv_cell("=HYPERLINK(A1)"), csv_cell("-"), csv_cell("-3.5"), csv_cell("scan-1.png")
    ("'=HYPERLINK(A1)", '-', '-3.5', 'scan-1.png')
    """
    if text[:1] not in ("=", "+", "-", "@", "\t", "\r") or len(text) == 1:
        return text
    return text if parse_number(text) is not None else f"'{text}"


def more_suffix(count: int) -> str:
    """Return the suffix that counts further findings; empty if there is one finding.

    >>> more_suffix(3), more_suffix(1)
    (' (2 more such)', '')
    """
    return f" ({count - 1} more such)" if count > 1 else ""


def to_printable_line(value: object, max_length: int | None = 300) -> str:
    """Return a value as one printable line of limited length; None: of any length.

    >>> to_printable_line("two\\nlines, \\x1b[31mred")
    'two lines, [31mred'
    >>> to_printable_line("0123456789", 8)
    '01234...'
    """
    text = str(value)
    max_length = len(text) if max_length is None else max_length
    start = text[: 4 * max_length]
    line = " ".join("".join(char if char.isprintable() else " " for char in start).split())
    return line if len(line) <= max_length and len(start) == len(text) else line[: max_length - 3] + "..."


MAX_ITEMS = 4  # longer lists are shown by their length
MAX_VALUE_LENGTH = 60  # characters of one value


def brief_repr(self: Any) -> str:
    """Return a short repr of a dataclass: shapes of tensors and lengths of lists instead of their values.

    A dataclass uses it by ``__repr__ = brief_repr`` in its body.
    """
    shown = (f"{field.name}={brief(getattr(self, field.name))}" for field in fields(self) if field.repr)
    return f"{type(self).__name__}({', '.join(shown)})"


def brief(value: Any) -> str:
    """Return a value in a few words: the shape of a tensor or array, the length of a long list.

    >>> brief(range(3)), brief((1, 2)), brief(tuple(range(50))), brief({"a": 1, "b": 2})
    ('range(0, 3)', '(1, 2)', '<tuple of 50>', '<a, b>')
    """
    if getattr(type(value), "__repr__", None) is brief_repr:
        return repr(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"<{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}>"
    if isinstance(value, Mapping):
        return to_printable_line(f"<{', '.join(map(str, value))}>", MAX_VALUE_LENGTH)
    if isinstance(value, tuple | list):
        if len(value) > MAX_ITEMS:
            return f"<{type(value).__name__} of {len(value)}>"
        items = ", ".join(map(brief, value))
        return f"({items}{',' if len(value) == 1 else ''})" if isinstance(value, tuple) else f"[{items}]"
    return to_printable_line(repr(value), MAX_VALUE_LENGTH)


def json_text(value: Any, *, indent: int | None = 2) -> str:
    """Return a value as JSON without NaN and infinity, which become null.

    Args:
        value: numbers, texts, lists and mappings.
        indent: None: one line, as short as possible.

    >>> json_text({"epsilon": float("inf"), "rounds": (1, 2)}, indent=None)
    '{"epsilon":null,"rounds":[1,2]}'
    """
    separators = (",", ":") if indent is None else None
    return json.dumps(replace_nonfinite(value), indent=indent, separators=separators, allow_nan=False)


def replace_nonfinite(value: Any) -> Any:
    """Return the value with None for NaN and infinity, and lists for tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: replace_nonfinite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    return value
