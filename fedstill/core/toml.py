"""TOML as a table, or one clear line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from fedstill.core.errors import FedstillError

if sys.version_info >= (3, 11):
    import tomllib
else:  # the standard library reads TOML from 3.11 on
    import tomli as tomllib

Table = dict[str, Any]


def parse(text: str, source: str = "the text") -> Table:
    """TOML as a table.

    Args:
        source: what an error calls this text.

    Raises:
        FedstillError: the text is not TOML.

    >>> parse("seed = 1\\n[split]\\nnodes = 8")
    {'seed': 1, 'split': {'nodes': 8}}
    """
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # too long a number, too deep a list
        raise FedstillError(f"{source} is not TOML: {error}") from error


def texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a table, with the dotted name of its place.

    >>> list(texts({"data": {"name": "a"}, "track": ["b"]}))
    [('data.name', 'a'), ('track', 'b')]
    """
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from texts(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts(inner, path)
