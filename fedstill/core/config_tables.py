"""Frozen dataclasses whose types say what their fields may hold: ``lr: Annotated[float, Gt(0)]``.

The constraints are those of the library annotated-types. A text beside them says what is allowed in better
words: ``Annotated[int, Ge(0), "0 (no limit) or more"]``.

Tables in tables as values by dotted name, and back.

What options mean, read from where it is written: the texts below the fields of a dataclass.

So files that explain themselves, ``help()`` of a class and the site's reference cannot say different things.

Frozen dataclasses from tables (TOML, JSON) and back: strict, and each error one line that names the place.

No unknown keys, no silent conversions, except that a whole number is also a number. TOML has no null: where a
value may be none, it is written as the text ``"none"``.

What others have written, a run's files and the words of nodes, is loaded by the same types (:func:`load_record`).

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
from fedstill.core.options import describe_constraints, field_docs
from fedstill.core.registry import Registrable


def flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a table of tables, by dotted name.

    >>> flatten({"seed": 1, "split": {"nodes": 8}})
    {'seed': 1, 'split.nodes': 8}
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        value = to_table(value)
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": each for name, each in flatten(value).items()}
        else:
            found[key] = value
    return found


def unflatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted name as a table of tables.

    Raises:
        ArgumentError: a name, and another below it.

    >>> unflatten({"seed": 1, "split.nodes": 8})
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


def option_types(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every single value of a configuration by its dotted name, with its type.

    Lists of tables (published figures) are left to files.

    Args:
        config: a dataclass, or its type. Of what is chosen by name a type knows only what all have, an instance
            the options of the one that was chosen.
        prefix: of all names.

    >>> Point = dataclasses.make_dataclass("Point", [("x", float), ("y", int, 2)])
    >>> option_types(Point, "at.")
    {'at.x': <class 'float'>, 'at.y': <class 'int'>}
    """
    known = isinstance(config, type)
    found: dict[str, Any] = {}
    for name, inner in _fields(config if known else type(config)).items():
        if _is_table(inner):
            if _is_registrable_base(inner):
                found[f"{prefix}{name}.{inner.key}"] = str
            found |= option_types(inner if known else getattr(config, name), f"{prefix}{name}.")
        elif not any(map(_is_table, get_args(inner))):
            found[prefix + name] = inner
    return found


def registered_choices(config: Any, prefix: str = "") -> dict[str, type[Registrable]]:
    """The parts of a configuration that are chosen by name: their base classes by the choosing key's dotted
    name."""
    found: dict[str, type[Registrable]] = {}
    for name, inner in _fields(type(config)).items():
        if _is_table(inner):
            if _is_registrable_base(inner):
                found[f"{prefix}{name}.{inner.key}"] = inner
            found |= registered_choices(getattr(config, name), f"{prefix}{name}.")
    return found


class _Missing:
    """What stands in an error where nothing was given."""

    def __repr__(self) -> str:
        return "missing"


def load_record(kind: type[C], record: Mapping[str, Any], path: Path) -> C:
    """A dataclass from the JSON of a file that may tell more than one reader wants.

    Keys that the class does not know are left out. NaN and infinity, which are no figures, are None where a
    field may be that.

    Args:
        kind: a dataclass of texts, numbers, truth values, tuples, mappings from texts, and such dataclasses.

    Raises:
        RunFolderError: a value of another type, or none where there is no default.

    >>> Point = dataclasses.make_dataclass("Point", [("x", float), ("names", tuple[str, ...], ())])
    >>> load_record(Point, {"x": 1, "names": ["a"], "more": None}, Path("point.json"))
    Point(x=1.0, names=('a',))
    """
    try:
        made: C = read_value(kind, record, "", lenient=True)
    except ArgumentError as error:
        value = repr(error.value)
        what = f"{error.name or 'all of it'} is {value if len(value) <= 60 else value[:60] + '...'}"
        missing = isinstance(error.value, _Missing)
        raise RunFolderError(f"{path}: {what}{'' if missing else f' (expected {error.expected}'})") from error
    return made


def read_table(kind: type[C], table: Mapping[str, Any], prefix: str = "", lenient: bool = False) -> C:
    """A configuration of one type from a table.

    Args:
        kind: a dataclass; or the base of what is chosen by a key of the table.
        table: values by field; fields that are not named have their defaults.
        prefix: the dotted path of the table, for errors.
        lenient: as :func:`load_record`.

    Raises:
        UnknownName: a key that is no field, or a name that nothing has.
        ArgumentError: a value of the wrong type, or one that the configuration refuses.

    >>> read_table(dataclasses.make_dataclass("Point", [("x", float), ("y", int, 2)]), {"x": 1})
    Point(x=1.0, y=2)
    """
    base: Any = kind
    if _is_registrable_base(kind):
        kind = resolve_class(base, table, prefix)
        table = {key: value for key, value in table.items() if key != base.key or key in _fields(kind)}
    fields = _fields(kind)
    if lenient:
        table = {key: value for key, value in table.items() if key in fields}
    for key, value in table.items():
        if key not in fields and _is_registrable_base(base) and _belongs_to_another(base, key):
            raise _wrong_owner_error(
                base, table.get(base.key) or base.registry.name_of(kind), prefix + key, value
            )
        if key not in fields:
            choosing = [base.key] if _is_registrable_base(base) else []
            raise UnknownName("key", f"{prefix}{key}", [prefix + name for name in (*choosing, *fields)])
    plain: Any = kind
    for part in dataclasses.fields(plain):
        if part.name not in table and part.default is part.default_factory is dataclasses.MISSING:
            raise ArgumentError(
                prefix + part.name, _Missing() if lenient else "", describe_type(fields[part.name])
            )
    values = {key: read_value(fields[key], value, prefix + key, lenient) for key, value in table.items()}
    try:
        return kind(**values)
    except ArgumentError as error:
        raise with_full_name(error, [prefix + name for name in fields]) from error


def resolve_class(base: type[Registrable], table: Mapping[str, Any], prefix: str = "") -> Any:
    """The type that a table chooses among those below a base.

    Raises:
        UnknownName: none has that name.
        ArgumentError: the table names none and must, or one that cannot be imported.
    """
    path = f"{prefix}{base.key}"
    if base.key not in table and base.default is None:
        raise ArgumentError(path, "", f"one of {base.registry.choices}")
    return base.registry[read_value(str, table.get(base.key, base.default), path)]


def merge_tables(kind: Any, below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two tables of one configuration as one: where both have a value, the one above holds.

    Where the table above chooses another method, task or split, the one below keeps only such options as all
    of them have, or as that one has where options of one name mean the same in all (``same_meaning``). A ``kind`` of
    None is no type that is known.
    """
    fields = {} if kind is None else _fields(kind)
    merged = dict(below)
    for key, value in above.items():
        old, inner = below.get(key), fields.get(key)
        if not isinstance(old, Mapping) or not isinstance(value, Mapping):
            merged[key] = value
            continue
        if inner is not None and _is_registrable_base(inner):
            was = old.get(inner.key, inner.default)
            now = value.get(inner.key, was)
            found = inner.registry[now] if isinstance(now, str) else None
            names = [inner.registry.canonical_name(name) for name in (now, was) if isinstance(name, str)]
            if now != was and len(set(names)) > 1:
                kept = _fields(found if inner.same_meaning else inner)
                old = {name: old[name] for name in old if name in kept}
            inner = found
        merged[key] = merge_tables(inner if inner is not None and _is_table(inner) else None, old, value)
    return merged


def with_full_name(error: ArgumentError, names: Iterable[str]) -> ArgumentError:
    """The same error with the whole one of these dotted names: a part does not know where it stands.

    >>> with_full_name(ArgumentError("local.lr", -1.0, "0 or more"), ["nodes.local.lr"])
    ArgumentError('nodes.local.lr is -1.0: allowed is 0 or more')
    """
    known = list(names)
    whole = [name for name in known if name.endswith(f".{error.name}")]
    if error.name in known or len(whole) != 1:
        return error
    return ArgumentError(whole[0], error.value, error.expected)


def describe_type(kind: Any) -> str:
    """What a value of a type may be, in words.

    >>> describe_type(Literal["iid", "shards"] | None)
    "one of 'iid', 'shards' or 'none'"
    >>> describe_type(tuple[int, ...])
    'a list, each a whole number'
    """
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(describe_type(part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if get_origin(kind) is tuple:
        inner, *more = get_args(kind)
        if more == [...]:
            return f"a list, each {describe_type(inner)}"
        return f"a list of {', '.join(describe_type(part) for part in (inner, *more))}"
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


def read_value(kind: Any, value: Any, path: str, lenient: bool = False) -> Any:
    """The value at a path as a value of the type that belongs there; ``lenient`` by others, as :func:`load_record`."""

    def wrong() -> ArgumentError:
        return ArgumentError(path, value, describe_type(kind))

    if _is_table(kind):
        if not isinstance(value, Mapping):
            raise wrong()
        return read_table(kind, value, f"{path}." if path else "", lenient=lenient)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        # None first: in `str | None` the text "none" means None.
        for part in sorted(parts, key=lambda part: part is not NoneType):
            try:
                return read_value(part, value, path, lenient)
            except ArgumentError:
                if part is not NoneType and (lenient or (_is_table(part) and isinstance(value, Mapping))):
                    raise  # of what can be meant: it says more
        raise wrong()
    if kind is Any:
        return value
    if origin is Mapping and isinstance(value, Mapping):
        within = f"{path}." if path else ""
        return {key: read_value(parts[1], part, f"{within}{key}", lenient) for key, part in value.items()}
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
            read_value(part, item, f"{path}[{index}]", lenient)
            for index, (part, item) in enumerate(zip(kinds, value, strict=True))
        )
    finite = type(value) is not float or math.isfinite(value)
    if kind is NoneType and (value is None or (not finite if lenient else value == "none")):
        return None
    most = sys.float_info.max if lenient else 2**53  # beyond, digits would be lost
    if kind is float and type(value) is int and abs(value) <= most:
        return float(value)
    if kind is float and (type(value) is not float or math.isnan(value) or (lenient and not finite)):
        raise wrong()
    if type(value) is not kind and not (kind is str and isinstance(value, str)):
        raise wrong()
    return value


def to_table(value: Any) -> Any:
    """A configuration, or a value of one, as TOML can hold it."""
    if dataclasses.is_dataclass(value):
        each: Any = value
        named = {each.key: each.registered_name} if isinstance(each, Registrable) and each.key else {}
        return named | {part.name: to_table(getattr(value, part.name)) for part in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_table(item) for item in value]
    return "none" if value is None else value


def _is_table(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) or _is_registrable_base(kind)


def _is_registrable_base(kind: Any) -> bool:
    """Whether it is the base of several configurations, of which a table chooses one by name."""
    return isinstance(kind, type) and issubclass(kind, Registrable) and "registry" in vars(kind)


def check_option_owner(config: Any, name: str, value: Any) -> None:
    """Refuses an option that something else has which could have been chosen, as :func:`read_table` does.

    Raises:
        ArgumentError: ``config`` has no such option; it names what was chosen.
    """
    for choice, base in registered_choices(config).items():
        table = choice.rpartition(".")[0]
        chosen = reduce(getattr, table.split("."), config)
        key = name.removeprefix(f"{table}.").partition(".")[0]
        if (
            name.startswith(f"{table}.")
            and key not in _fields(type(chosen))
            and _belongs_to_another(base, key)
        ):
            raise _wrong_owner_error(base, chosen.registered_name, name, value)


def _wrong_owner_error(base: type[Registrable], one: object, name: str, value: Any) -> ArgumentError:
    """That what was chosen has no option that another one has."""
    return ArgumentError(name, value, f"none, as {base.registry.what} {one!r} has no such option")


def _belongs_to_another(base: type[Registrable], key: str) -> bool:
    """Whether it is an option of another of the package's own: for a wrong key nothing else is imported."""
    known = [*base.registry.builtin, *([""] if base.registry.fallback else [])]  # "" is no name of a thing
    return any(key in _fields(base.registry[name]) for name in known)


def _fields(kind: Any) -> Mapping[str, Any]:
    """The fields of a dataclass and their types; a base without fields of its own has none."""
    has_some = dataclasses.is_dataclass(kind)
    return _field_types(kind) if has_some else {}


@cache  # hints are slow
def _field_types(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {part.name: hints[part.name] for part in dataclasses.fields(kind)}


def changed_options(table: dict[str, Any], default: dict[str, Any], prefix: str = "--") -> list[str]:
    """The options that make a configuration's table of the default one, as words of a command line.

    >>> changed_options({"seed": 3, "part": {"on": True, "of": ["a", "b"]}}, {"seed": 0, "part": {"on": True}})
    ['--seed', '3', '--part.of', 'a', 'b']
    """
    words = []
    for key, value in table.items():
        before = default.get(key)
        if isinstance(value, dict):
            inner = before if isinstance(before, dict) else {}
            words += changed_options(value, inner, f"{prefix}{key}.")
        elif value != before:
            listed = value if isinstance(value, list) else [value]
            told = [str(item).lower() if isinstance(item, bool) else str(item) for item in listed]
            words += [f"{prefix}{key}", *told]
    return words


def commented_toml(config: Any, path: str = "") -> str:
    """A dataclass, with dataclasses as its sections, as commented TOML.

    Args:
        path: of the section that it is, up to its last dot.

    >>> from fedstill.core.compute import EngineConfig
    >>> print(commented_toml(EngineConfig()))  # doctest: +ELLIPSIS
    # ...
    name = ...
    """
    kind: Any = type(config)
    hints, told = get_type_hints(kind, include_extras=True), field_docs(kind)
    values = {part.name: getattr(config, part.name) for part in dataclasses.fields(config)}
    lines: list[str] = []
    if isinstance(config, Registrable):
        each = [f"{name}: {_first_sentence(of)}" for name, of in config.registry.importable().items()]
        which = f"Each has options of its own. {' '.join(each)} Or package.module:Name, one of your own."
        lines += [*_comment_lines(which), f"{config.key} = {_toml_value(config.registered_name)}"]
    for name, value in values.items():
        if not dataclasses.is_dataclass(value):
            meaning, limits = told.get(name, ""), describe_constraints(hints[name])
            if limits:
                meaning = f"{meaning} Allowed: {limits}.".strip()
            lines += [*_comment_lines(meaning), f"{name} = {_toml_value(value)}"]
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            inner = f"{path}{name}"
            lines += ["", "", *_comment_lines(told.get(name, "")), f"[{inner}]"]
            lines.append(commented_toml(value, f"{inner}.").rstrip("\n"))
    return "\n".join(lines) + "\n"


def _first_sentence(kind: type[Any]) -> str:
    """The first sentence of what a class says of itself."""
    return " ".join(str(kind.__doc__).split("\n\n")[0].split())


def _comment_lines(text: str) -> list[str]:
    wrapped = textwrap.wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" for line in wrapped]


def _toml_value(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_toml_value, value))}]"
    if value is None or isinstance(value, str):
        return json.dumps("none" if value is None else value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else repr(value)
