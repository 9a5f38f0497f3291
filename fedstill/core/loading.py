"""Frozen dataclasses from the JSON of a run's folder: checked once, trusted from then on.

Keys that a class does not know are left out, as a file may tell more than one reader wants. Whatever else is
not as the class says is one line that names the file and the place in it.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fedstill.core.errors import RunFolderError

C = TypeVar("C")


def load(kind: type[C], record: Mapping[str, Any], path: Path) -> C:
    """A dataclass from a JSON object.

    A field that the record lacks has its default. NaN and infinity, which are no figures, are None where a
    field may be that.

    Args:
        kind: a dataclass of texts, numbers, truth values, tuples, mappings from texts, and such dataclasses.
        record: of the file.
        path: of the file, for errors.

    Raises:
        RunFolderError: a value of another type, or none where there is no default.

    >>> Point = dataclasses.make_dataclass("Point", [("x", float), ("names", tuple[str, ...], ())])
    >>> load(Point, {"x": 1, "names": ["a"], "more": None}, Path("point.json"))
    Point(x=1.0, names=('a',))
    """
    made: C = _value(kind, record, path, "")
    return made


def _value(kind: Any, value: Any, path: Path, at: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        unknown = value is None or (isinstance(value, float) and not math.isfinite(value))
        (kind,) = (each for each in inner if each is not NoneType)
        return None if unknown else _value(kind, value, path, at)
    if kind is Any:
        return value
    if origin is Literal and value in inner:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _record(kind, value, path, at)
    if origin is tuple and isinstance(value, list | tuple) and (inner[-1] is ... or len(inner) == len(value)):
        kinds = [inner[0]] * len(value) if inner[-1] is ... else inner
        return tuple(
            _value(each, part, path, f"{at}[{place}]")
            for place, (each, part) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is Mapping and isinstance(value, Mapping):
        return {key: _value(inner[1], part, path, _join(at, key)) for key, part in value.items()}
    if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if (kind in (int, bool) and type(value) is kind) or (kind is str and isinstance(value, str)):
        return value
    raise RunFolderError(f"{path}: {at or 'all of it'} is {_short(value)}: allowed is {_called(kind)}")


def _record(kind: Any, value: Mapping[str, Any], path: Path, at: str) -> Any:
    found = {}
    for name, (inner, needed) in _fields(kind).items():
        if name in value:
            found[name] = _value(inner, value[name], path, _join(at, name))
        elif needed:
            raise RunFolderError(f"{path}: {_join(at, name)} is missing")
    return kind(**found)


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The type of each field, and whether it has no default."""
    hints, missing = get_type_hints(kind), dataclasses.MISSING
    return {
        field.name: (hints[field.name], field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(kind)
        if field.init
    }


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _short(value: Any) -> str:
    told = repr(value)
    return told if len(told) <= 60 else f"{told[:60]}..."


def _called(kind: Any) -> str:
    names = {str: "a text", int: "a whole number", float: "a finite number", bool: "true or false"}
    origin = get_origin(kind)
    if origin is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return names.get(kind) or ("a list" if origin is tuple else "an object")
