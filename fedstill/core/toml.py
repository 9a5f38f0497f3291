"""TOML files as tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError

if sys.version_info >= (3, 11):
    import tomllib
else:  # tomllib is in the standard library since 3.11
    import tomli as tomllib

Table = dict[str, Any]
BOM = "\ufeff"  # prefix that Windows editors write


def read(path: Path) -> Table:
    """Read a TOML file, with or without byte order prefix (BOM).

    Raises:
        FedstillError: the file cannot be read, or is not UTF-8 text or TOML.
    """
    return parse(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Read a text file, without its byte order prefix (BOM).

    Raises:
        FedstillError: the file cannot be read, or is not UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise FedstillError(f"cannot read {str(path)!r}: {reason}") from error


def parse(text: str, source: str = "the text") -> Table:
    """Parse TOML.

    Args:
        text: the TOML text.
        source: description of the text, for errors.

    Raises:
        FedstillError: the text is not TOML.

    >>> parse("seed = 1\\n[split]\\nnodes = 8")
    {'seed': 1, 'split': {'nodes': 8}}
    """
    try:
        return tomllib.loads(text.removeprefix(BOM))
    except (ValueError, RecursionError) as error:  # for example too deep a list
        raise FedstillError(f"{source} is not TOML: {error}") from error


def iterate_strings(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in a table, with its dotted name.

    >>> list(iterate_strings({"data": {"name": "a"}, "track": ["b"]}))
    [('data.name', 'a'), ('track', 'b')]
    """
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from iterate_strings(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from iterate_strings(inner, path)
