"""Frozen dataclasses whose types say what their fields may hold: ``lr: Annotated[float, Gt(0)]``.

The constraints are those of the library annotated-types. A text beside them says what is allowed in better
words: ``Annotated[int, Ge(0), "0 (no limit) or more"]``.

Tables in tables as values by dotted name, and back.

What options mean, read from where it is written: the texts below the fields of a dataclass.

So files that explain themselves, ``help()`` of a class and the site's reference cannot say different things.

Frozen dataclasses from tables (TOML, JSON) and back: strict, and each error one line that names the place.

No unknown keys, no silent conversions, except that a whole number is also a number. TOML has no null: where a
value may be none, it is written as the text ``"none"``.

What others have written, a run's files and the words of nodes, is loaded by the same types (:func:`load`).

A configuration as a TOML file that explains itself: every option with its value and its meaning.

The meanings are those of :mod:`fedstill.core.config_tables`, so that file and code cannot drift apart.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache, reduce
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fedstill.core.errors import ArgumentError, RunFolderError, UnknownName
from fedstill.core.options import allowed, meanings
from fedstill.core.registry import Registered


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


WIDTH = 100  # columns of a docstring


C = TypeVar("C")


def options(of: Any, prefix: str = "") -> dict[str, Any]:
    """Every single value of a configuration by its dotted name, with its type.

    Lists of tables (published figures) are left to files.

    Args:
        of: a dataclass, or its type. Of what is chosen by name a type knows only what all have, an instance
            the options of the one that was chosen.
        prefix: of all names.

    >>> Point = dataclasses.make_dataclass("Point", [("x", float), ("y", int, 2)])
    >>> options(Point, "at.")
    {'at.x': <class 'float'>, 'at.y': <class 'int'>}
    """
    known = isinstance(of, type)
    found: dict[str, Any] = {}
    for name, inner in _fields(of if known else type(of)).items():
        if _is_table(inner):
            if _is_chosen(inner):
                found[f"{prefix}{name}.{inner.key}"] = str
            found |= options(inner if known else getattr(of, name), f"{prefix}{name}.")
        elif not any(map(_is_table, get_args(inner))):
            found[prefix + name] = inner
    return found


def choices(of: Any, prefix: str = "") -> dict[str, type[Registered]]:
    """The parts of a configuration that are chosen by name: their base classes by the choosing key's dotted
    name."""
    found: dict[str, type[Registered]] = {}
    for name, inner in _fields(type(of)).items():
        if _is_table(inner):
            if _is_chosen(inner):
                found[f"{prefix}{name}.{inner.key}"] = inner
            found |= choices(getattr(of, name), f"{prefix}{name}.")
    return found


class _Missing:
    """What stands in an error where nothing was given."""

    def __repr__(self) -> str:
        return "missing"


def load(kind: type[C], record: Mapping[str, Any], path: Path) -> C:
    """A dataclass from the JSON of a file that may tell more than one reader wants.

    Keys that the class does not know are left out. NaN and infinity, which are no figures, are None where a
    field may be that.

    Args:
        kind: a dataclass of texts, numbers, truth values, tuples, mappings from texts, and such dataclasses.

    Raises:
        RunFolderError: a value of another type, or none where there is no default.

    >>> Point = dataclasses.make_dataclass("Point", [("x", float), ("names", tuple[str, ...], ())])
    >>> load(Point, {"x": 1, "names": ["a"], "more": None}, Path("point.json"))
    Point(x=1.0, names=('a',))
    """
    try:
        made: C = read_value(kind, record, "", told=True)
    except ArgumentError as error:
        value = repr(error.value)
        what = f"{error.name or 'all of it'} is {value if len(value) <= 60 else value[:60] + '...'}"
        missing = isinstance(error.value, _Missing)
        raise RunFolderError(f"{path}: {what}{'' if missing else f' (expected {error.allowed}'})") from error
    return made


def read_table(kind: type[C], table: Mapping[str, Any], prefix: str = "", told: bool = False) -> C:
    """A configuration of one type from a table.

    Args:
        kind: a dataclass; or the base of what is chosen by a key of the table.
        table: values by field; fields that are not named have their defaults.
        prefix: the dotted path of the table, for errors.
        told: as :func:`load`.

    Raises:
        UnknownName: a key that is no field, or a name that nothing has.
        ArgumentError: a value of the wrong type, or one that the configuration refuses.

    >>> read_table(dataclasses.make_dataclass("Point", [("x", float), ("y", int, 2)]), {"x": 1})
    Point(x=1.0, y=2)
    """
    base: Any = kind
    if _is_chosen(kind):
        kind = chosen(base, table, prefix)
        table = {key: value for key, value in table.items() if key != base.key or key in _fields(kind)}
    fields = _fields(kind)
    if told:
        table = {key: value for key, value in table.items() if key in fields}
    for key, value in table.items():
        if key not in fields and _is_chosen(base) and _is_anothers(base, key):
            raise _not_of(base, table.get(base.key) or base.registry.name_of(kind), prefix + key, value)
        if key not in fields:
            choosing = [base.key] if _is_chosen(base) else []
            raise UnknownName("key", f"{prefix}{key}", [prefix + name for name in (*choosing, *fields)])
    plain: Any = kind
    for part in dataclasses.fields(plain):
        if part.name not in table and part.default is part.default_factory is dataclasses.MISSING:
            raise ArgumentError(prefix + part.name, _Missing() if told else "", describe(fields[part.name]))
    values = {key: read_value(fields[key], value, prefix + key, told) for key, value in table.items()}
    try:
        return kind(**values)
    except ArgumentError as error:
        raise full_path(error, [prefix + name for name in fields]) from error


def chosen(base: type[Registered], table: Mapping[str, Any], prefix: str = "") -> Any:
    """The type that a table chooses among those below a base.

    Raises:
        UnknownName: none has that name.
        ArgumentError: the table names none and must, or one that cannot be imported.
    """
    path = f"{prefix}{base.key}"
    if base.key not in table and base.default is None:
        raise ArgumentError(path, "", f"one of {base.registry.allowed}")
    return base.registry[read_value(str, table.get(base.key, base.default), path)]


def layered(kind: Any, below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two tables of one configuration as one: where both have a value, the one above holds.

    Where the table above chooses another method, task or split, the one below keeps only such options as all
    of them have, or as that one has where options of one name mean the same in all (``alike``). A ``kind`` of
    None is no type that is known.
    """
    fields = {} if kind is None else _fields(kind)
    merged = dict(below)
    for key, value in above.items():
        old, inner = below.get(key), fields.get(key)
        if not isinstance(old, Mapping) or not isinstance(value, Mapping):
            merged[key] = value
            continue
        if inner is not None and _is_chosen(inner):
            was = old.get(inner.key, inner.default)
            now = value.get(inner.key, was)
            found = inner.registry[now] if isinstance(now, str) else None
            names = [inner.registry.canonical(name) for name in (now, was) if isinstance(name, str)]
            if now != was and len(set(names)) > 1:
                kept = _fields(found if inner.alike else inner)
                old = {name: old[name] for name in old if name in kept}
            inner = found
        merged[key] = layered(inner if inner is not None and _is_table(inner) else None, old, value)
    return merged


def full_path(error: ArgumentError, names: Iterable[str]) -> ArgumentError:
    """The same error with the whole one of these dotted names: a part does not know where it stands.

    >>> full_path(ArgumentError("local.lr", -1.0, "0 or more"), ["nodes.local.lr"])
    ArgumentError('nodes.local.lr is -1.0: allowed is 0 or more')
    """
    known = list(names)
    whole = [name for name in known if name.endswith(f".{error.name}")]
    if error.name in known or len(whole) != 1:
        return error
    return ArgumentError(whole[0], error.value, error.allowed)


def describe(kind: Any) -> str:
    """What a value of a type may be, in words.

    >>> describe(Literal["iid", "shards"] | None)
    "one of 'iid', 'shards' or 'none'"
    >>> describe(tuple[int, ...])
    'a list, each a whole number'
    """
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(describe(part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if get_origin(kind) is tuple:
        inner, *more = get_args(kind)
        if more == [...]:
            return f"a list, each {describe(inner)}"
        return f"a list of {', '.join(describe(part) for part in (inner, *more))}"
    if _is_table(kind):
        return "a table"
    words: Mapping[Any, str] = {
        bool: "true or false",
        float: "a number",
        int: "a whole number",
        str: "a text",
        NoneType: "'none'",
    }
    return words.get(kind, "a table")


def read_value(kind: Any, value: Any, path: str, told: bool = False) -> Any:
    """The value at a path as a value of the type that belongs there; ``told`` by others, as :func:`load`."""

    def wrong() -> ArgumentError:
        return ArgumentError(path, value, describe(kind))

    if _is_table(kind):
        if not isinstance(value, Mapping):
            raise wrong()
        return read_table(kind, value, f"{path}." if path else "", told=told)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        # None first: in `str | None` the text "none" means None.
        for part in sorted(parts, key=lambda part: part is not NoneType):
            try:
                return read_value(part, value, path, told)
            except ArgumentError:
                if part is not NoneType and (told or (_is_table(part) and isinstance(value, Mapping))):
                    raise  # of what can be meant: it says more
        raise wrong()
    if kind is Any:
        return value
    if origin is Mapping and isinstance(value, Mapping):
        within = f"{path}." if path else ""
        return {key: read_value(parts[1], part, f"{within}{key}", told) for key, part in value.items()}
    if origin is Literal:
        for choice in parts:
            if type(choice) is type(value) and choice == value:
                return choice
        raise wrong()
    if origin is tuple:
        endless = len(parts) == 2 and parts[1] is ...
        if not isinstance(value, (list, tuple)) or not (endless or len(value) == len(parts)):
            raise wrong()
        kinds = [parts[0]] * len(value) if endless else parts
        return tuple(
            read_value(part, item, f"{path}[{index}]", told)
            for index, (part, item) in enumerate(zip(kinds, value, strict=True))
        )
    finite = type(value) is not float or math.isfinite(value)
    if kind is NoneType and (value is None or (not finite if told else value == "none")):
        return None
    most = sys.float_info.max if told else 2**53  # beyond, digits would be lost
    if kind is float and type(value) is int and abs(value) <= most:
        return float(value)
    if kind is float and (type(value) is not float or math.isnan(value) or (told and not finite)):
        raise wrong()
    if type(value) is not kind and not (kind is str and isinstance(value, str)):
        raise wrong()
    return value


def as_table(value: Any) -> Any:
    """A configuration, or a value of one, as TOML can hold it."""
    if dataclasses.is_dataclass(value):
        each: Any = value
        named = {each.key: each.called} if isinstance(each, Registered) and each.key else {}
        return named | {part.name: as_table(getattr(value, part.name)) for part in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [as_table(item) for item in value]
    return "none" if value is None else value


def _is_table(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) or _is_chosen(kind)


def _is_chosen(kind: Any) -> bool:
    """Whether it is the base of several configurations, of which a table chooses one by name."""
    return isinstance(kind, type) and issubclass(kind, Registered) and "registry" in vars(kind)


def refuse_anothers(config: Any, name: str, value: Any) -> None:
    """Refuses an option that something else has which could have been chosen, as :func:`read_table` does.

    Raises:
        ArgumentError: ``config`` has no such option; it names what was chosen.
    """
    for choice, base in choices(config).items():
        table = choice.rpartition(".")[0]
        chosen = reduce(getattr, table.split("."), config)
        key = name.removeprefix(f"{table}.").partition(".")[0]
        if name.startswith(f"{table}.") and key not in _fields(type(chosen)) and _is_anothers(base, key):
            raise _not_of(base, chosen.called, name, value)


def _not_of(base: type[Registered], one: object, name: str, value: Any) -> ArgumentError:
    """That what was chosen has no option that another one has."""
    return ArgumentError(name, value, f"none, as {base.registry.what} {one!r} has no such option")


def _is_anothers(base: type[Registered], key: str) -> bool:
    """Whether it is an option of another of the package's own: for a wrong key nothing else is imported."""
    known = [*base.registry.own, *([""] if base.registry.others else [])]  # "" is no name of a thing
    return any(key in _fields(base.registry[name]) for name in known)


def _fields(kind: Any) -> Mapping[str, Any]:
    """The fields of a dataclass and their types; a base without fields of its own has none."""
    has_some = dataclasses.is_dataclass(kind)
    return _hinted(kind) if has_some else {}


@cache  # hints are slow
def _hinted(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {part.name: hints[part.name] for part in dataclasses.fields(kind)}


def changed(table: dict[str, Any], default: dict[str, Any], prefix: str = "--") -> list[str]:
    """The options that make a configuration's table of the default one, as words of a command line.

    >>> changed({"seed": 3, "part": {"on": True, "of": ["a", "b"]}}, {"seed": 0, "part": {"on": True}})
    ['--seed', '3', '--part.of', 'a', 'b']
    """
    words = []
    for key, value in table.items():
        before = default.get(key)
        if isinstance(value, dict):
            inner = before if isinstance(before, dict) else {}
            words += changed(value, inner, f"{prefix}{key}.")
        elif value != before:
            listed = value if isinstance(value, list) else [value]
            told = [str(item).lower() if isinstance(item, bool) else str(item) for item in listed]
            words += [f"{prefix}{key}", *told]
    return words


def commented(config: Any, path: str = "") -> str:
    """A dataclass, with dataclasses as its sections, as commented TOML.

    Args:
        path: of the section that it is, up to its last dot.

    >>> from fedstill.core.compute import EngineConfig
    >>> print(commented(EngineConfig()))  # doctest: +ELLIPSIS
    # ...
    name = ...
    """
    kind: Any = type(config)
    hints, told = get_type_hints(kind, include_extras=True), meanings(kind)
    values = {part.name: getattr(config, part.name) for part in dataclasses.fields(config)}
    lines: list[str] = []
    if isinstance(config, Registered):
        each = [f"{name}: {_first(of)}" for name, of in config.registry.working().items()]
        which = f"Each has options of its own. {' '.join(each)} Or package.module:Name, one of your own."
        lines += [*_comment(which), f"{config.key} = {_toml(config.called)}"]
    for name, value in values.items():
        if not dataclasses.is_dataclass(value):
            meaning, limits = told.get(name, ""), allowed(hints[name])
            if limits:
                meaning = f"{meaning} Allowed: {limits}.".strip()
            lines += [*_comment(meaning), f"{name} = {_toml(value)}"]
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            inner = f"{path}{name}"
            lines += ["", "", *_comment(told.get(name, "")), f"[{inner}]"]
            lines.append(commented(value, f"{inner}.").rstrip("\n"))
    return "\n".join(lines) + "\n"


def _first(kind: type[Any]) -> str:
    """The first sentence of what a class says of itself."""
    return " ".join(str(kind.__doc__).split("\n\n")[0].split())


def _comment(text: str) -> list[str]:
    wrapped = textwrap.wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" for line in wrapped]


def _toml(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_toml, value))}]"
    if value is None or isinstance(value, str):
        return json.dumps("none" if value is None else value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else repr(value)
