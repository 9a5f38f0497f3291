"""Configuration tables: read frozen dataclasses from TOML and JSON, and convert them back.

Reading is strict: no unknown keys, and no silent conversions, except that an integer is also a float. Each
error is one line that names the option. TOML has no null, so an option without a value is written as the text
``"none"``. Files and messages of other parties are read more leniently, by :func:`read_received_dataclass`.

Values also have dotted names (``split.nodes``): :func:`flatten` and :func:`unflatten` convert between both
forms, and :func:`option_types` lists the options of a configuration. :func:`read_toml` reads a file as a
table, and :func:`commented_toml` writes one that explains each option in the words of the code
(:mod:`fedstill.core.options`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, reduce
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fedstill.core.errors import ArgumentError, FedstillError, RunFolderError, UnknownName
from fedstill.core.options import describe_constraints, field_docs
from fedstill.core.registry import Registrable

if sys.version_info >= (3, 11):
    import tomllib
else:  # tomllib is in the standard library since 3.11
    import tomli as tomllib

Table = dict[str, Any]
BOM = "\ufeff"  # prefix that Windows editors write
WIDTH = 100  # columns of a comment
C = TypeVar("C")


def read_toml(path: Path) -> Table:
    """Read a TOML file, with or without byte order prefix (BOM).

    Raises:
        FedstillError: the file cannot be read, or is not UTF-8 text or TOML.
    """
    return parse_toml(read_text(path), str(path))


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


def parse_toml(text: str, source: str = "the text") -> Table:
    """Parse TOML.

    Args:
        text: the TOML text.
        source: description of the text, for errors.

    Raises:
        FedstillError: the text is not TOML.

    >>> parse_toml("seed = 1\\n[split]\\nnodes = 8")
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


def flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of nested tables by dotted name.

    >>> flatten({"seed": 1, "split": {"nodes": 8}})
    {'seed': 1, 'split.nodes': 8}
    """
    values: dict[str, Any] = {}
    for key, value in table.items():
        value = to_table(value)
        if isinstance(value, Mapping):
            values |= {f"{key}.{name}": inner for name, inner in flatten(value).items()}
        else:
            values[key] = value
    return values


def unflatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables from values by dotted name. The inverse of :func:`flatten`.

    Raises:
        ArgumentError: one name is a prefix of another.

    >>> unflatten({"seed": 1, "split.nodes": 8})
    {'seed': 1, 'split': {'nodes': 8}}
    """
    table: dict[str, Any] = {}
    for name, value in values.items():
        *above, last = name.split(".")
        if wider := next((other for other in values if name.startswith(f"{other}.")), None):
            raise ArgumentError(wider, values[wider], f"none together with {name}")
        inner = table
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return table


def option_types(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the type of each single option of a configuration, by dotted name.

    Options that are lists of tables (published metrics) are left out.

    Args:
        config: a dataclass instance, or its class. Where a class is chosen by name, an instance has the
            options of that class, and a type has the options that all classes share.
        prefix: prefix of all names.

    >>> Point = dataclasses.make_dataclass("Point", [("x", float), ("y", int, 2)])
    >>> option_types(Point, "at.")
    {'at.x': <class 'float'>, 'at.y': <class 'int'>}
    """
    is_class = isinstance(config, type)
    types: dict[str, Any] = {}
    for name, inner in _fields(config if is_class else type(config)).items():
        if _is_table(inner):
            if _is_registrable_base(inner):
                types[f"{prefix}{name}.{inner.key}"] = str
            types |= option_types(inner if is_class else getattr(config, name), f"{prefix}{name}.")
        elif not any(map(_is_table, get_args(inner))):
            types[prefix + name] = inner
    return types


def base_class_by_option(config: Any, prefix: str = "") -> dict[str, type[Registrable]]:
    """Return the base class of each part that is chosen by name, by the dotted name of the choosing key."""
    bases: dict[str, type[Registrable]] = {}
    for name, inner in _fields(type(config)).items():
        if _is_table(inner):
            if _is_registrable_base(inner):
                bases[f"{prefix}{name}.{inner.key}"] = inner
            bases |= base_class_by_option(getattr(config, name), f"{prefix}{name}.")
    return bases


def read_received_dataclass(kind: type[C], record: Mapping[str, Any], path: Path) -> C:
    """Read a dataclass from the JSON of another party, whose keys may be more than this version knows.

    Unknown keys are ignored. NaN and infinity become None where a field may be None.

    Args:
        kind: a dataclass of texts, numbers, booleans, tuples, mappings with text keys, and such dataclasses.
        record: the JSON object.
        path: the file, for errors.

    Raises:
        RunFolderError: a value has the wrong type, or is missing without a default.

    >>> Point = dataclasses.make_dataclass("Point", [("x", float), ("names", tuple[str, ...], ())])
    >>> read_received_dataclass(Point, {"x": 1, "names": ["a"], "more": None}, Path("point.json"))
    Point(x=1.0, names=('a',))
    """
    try:
        loaded: C = read_value(kind, record, "", lenient=True)
    except ArgumentError as error:
        value = repr(error.value)
        what = f"{error.name or 'all of it'} is {value if len(value) <= 60 else value[:60] + '...'}"
        missing = isinstance(error.value, _Missing)
        raise RunFolderError(f"{path}: {what}{'' if missing else f' (expected {error.expected})'}") from error
    return loaded


def read_table(kind: type[C], table: Mapping[str, Any], prefix: str = "", lenient: bool = False) -> C:
    """Read a configuration of one type from a table.

    Args:
        kind: a dataclass, or a :class:`~fedstill.core.registry.Registrable` base whose subclass a key of the
            table names.
        table: values by field. Missing fields get their defaults.
        prefix: the dotted path of the table, for errors.
        lenient: read as :func:`read_received_dataclass` does.

    Raises:
        UnknownName: a key is not a field, or a name is not registered.
        ArgumentError: a value has the wrong type or is out of range.

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
    # A part that is a dataclass keeps the defaults of this configuration for what its table leaves out.
    defaults = {} if lenient else {name: _default(plain, name) for name in table}
    values = {
        key: read_value(fields[key], _with_defaults(defaults.get(key), value), prefix + key, lenient)
        for key, value in table.items()
    }
    try:
        return kind(**values)
    except ArgumentError as error:
        raise with_full_name(error, [prefix + name for name in fields]) from error


def _default(kind: Any, name: str) -> Any:
    """Return the default of a field; None: it has none."""
    part = next(each for each in dataclasses.fields(kind) if each.name == name)
    if part.default_factory is not dataclasses.MISSING:
        return part.default_factory()
    return None if part.default is dataclasses.MISSING else part.default


def _with_defaults(default: Any, value: Any) -> Any:
    """Return the table of a part, completed from the part's default if that is a plain dataclass."""
    is_plain = dataclasses.is_dataclass(default) and not isinstance(default, (type, Registrable))
    if not is_plain or not isinstance(value, Mapping):
        return value
    known = {name: inner for name, inner in to_table(default).items() if name not in value}
    return known | {
        name: _with_defaults(getattr(default, name, None), inner) for name, inner in value.items()
    }


def resolve_class(base: type[Registrable], table: Mapping[str, Any], prefix: str = "") -> Any:
    """Return the subclass that a table names.

    Raises:
        UnknownName: the name is not registered.
        ArgumentError: a name is required and missing, or the class cannot be imported.
    """
    path = f"{prefix}{base.key}"
    if base.key not in table and base.default is None:
        raise ArgumentError(path, "", f"one of {base.registry.choices_text}")
    return base.registry[read_value(str, table.get(base.key, base.default), path)]


def merge_tables(kind: Any, below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables of one configuration. Values of ``above`` override those of ``below``.

    If ``above`` chooses another method, task or split than ``below``, only the options of ``below`` that all
    classes share are kept, or those that the new class has too if equal names have equal meaning
    (``same_meaning``).

    Args:
        kind: the dataclass of the tables; None: unknown.
        below: the table of lower priority.
        above: the table of higher priority.
    """
    fields = {} if kind is None else _fields(kind)
    merged = dict(below)
    for key, value in above.items():
        old, inner = below.get(key), fields.get(key)
        if not isinstance(old, Mapping) or not isinstance(value, Mapping):
            merged[key] = value
            continue
        if inner is not None and _is_registrable_base(inner):
            old_name = old.get(inner.key, inner.default)
            new_name = value.get(inner.key, old_name)
            new_class = inner.registry[new_name] if isinstance(new_name, str) else None
            names = [
                inner.registry.canonical_name(name) for name in (new_name, old_name) if isinstance(name, str)
            ]
            if new_name != old_name and len(set(names)) > 1:
                shared = _fields(new_class if inner.same_meaning else inner)
                old = {name: old[name] for name in old if name in shared}
            inner = new_class
        merged[key] = merge_tables(inner if inner is not None and _is_table(inner) else None, old, value)
    return merged


def with_full_name(error: ArgumentError, names: Iterable[str]) -> ArgumentError:
    """Return the error with the full dotted name of its option.

    Args:
        error: an error with a partial name, such as ``local.lr``.
        names: dotted names of options. The error is unchanged unless exactly one of them ends with its name.

    >>> with_full_name(ArgumentError("local.lr", -1.0, "0 or more"), ["nodes.local.lr"])
    ArgumentError('invalid nodes.local.lr = -1.0 (expected 0 or more)')
    """
    all_names = list(names)
    matches = [name for name in all_names if name.endswith(f".{error.name}")]
    if error.name in all_names or len(matches) != 1:
        return error
    return ArgumentError(matches[0], error.value, error.expected)


def describe_type(kind: Any) -> str:
    """Describe the values that a type accepts.

    >>> describe_type(Literal["iid", "shards"] | None)
    "one of 'iid', 'shards' or 'none'"
    >>> describe_type(tuple[int, ...])
    'a list, each an integer'
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
        int: "an integer",
        str: "a text",
        NoneType: "'none'",
    }
    return words.get(kind, "a table")


def read_value(kind: Any, value: Any, path: str, lenient: bool = False) -> Any:
    """Convert a value to the type of its option.

    Args:
        kind: the type.
        value: the value.
        path: dotted name, for errors.
        lenient: read as :func:`read_received_dataclass` does.

    Raises:
        ArgumentError: the value has another type.
    """

    def wrong() -> ArgumentError:
        return ArgumentError(path, value, describe_type(kind))

    if _is_table(kind):
        if not isinstance(value, Mapping):
            raise wrong()
        return read_table(kind, value, f"{path}." if path else "", lenient=lenient)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        # None comes first, as in `str | None` the text "none" means None.
        for part in sorted(parts, key=lambda part: part is not NoneType):
            try:
                return read_value(part, value, path, lenient)
            except ArgumentError:
                if part is not NoneType and (lenient or (_is_table(part) and isinstance(value, Mapping))):
                    raise  # this error is more specific
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
    max_int = sys.float_info.max if lenient else 2**53  # larger integers would lose digits as floats
    if kind is float and type(value) is int and abs(value) <= max_int:
        return float(value)
    if kind is float and (type(value) is not float or math.isnan(value) or (lenient and not finite)):
        raise wrong()
    if type(value) is not kind and not (kind is str and isinstance(value, str)):
        raise wrong()
    return value


def to_table(value: Any) -> Any:
    """Convert a configuration, or one of its values, to TOML types."""
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
    """Return whether a type is a base class whose subclass a table chooses by name."""
    return isinstance(kind, type) and issubclass(kind, Registrable) and "registry" in vars(kind)


def check_option_owner(config: Any, name: str, value: Any) -> None:
    """Refuse an option that only another choice has, such as an option of another method.

    Args:
        config: the configuration.
        name: dotted name of the option.
        value: its value, for the error.

    Raises:
        ArgumentError: the chosen class has no such option.
    """
    for choice, base in base_class_by_option(config).items():
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
    return ArgumentError(name, value, f"none: {base.registry.what} {one!r} has no such option")


def _belongs_to_another(base: type[Registrable], key: str) -> bool:
    """Return whether another built-in class has an option. Custom classes are not imported."""
    names = [*base.registry.builtin, *([""] if base.registry.fallback else [])]  # "" is not a name
    return any(key in _fields(base.registry[name]) for name in names)


def _fields(kind: Any) -> Mapping[str, Any]:
    """Return the fields of a dataclass with their types; empty for a base class without fields."""
    is_dataclass = dataclasses.is_dataclass(kind)
    return _field_types(kind) if is_dataclass else {}


@cache  # hints are slow
def _field_types(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {part.name: hints[part.name] for part in dataclasses.fields(kind)}


def changed_options_as_cli_words(
    table: dict[str, Any], default: dict[str, Any], prefix: str = "--"
) -> list[str]:
    """Return the command line words that turn the default configuration into this one.

    Args:
        table: table of the configuration.
        default: table of the default configuration.
        prefix: prefix of each option.

    >>> table = {"seed": 3, "part": {"on": True, "of": ["a"]}}
    >>> changed_options_as_cli_words(table, {"seed": 0, "part": {"on": True}})
    ['--seed', '3', '--part.of', 'a']
    """
    words = []
    for key, value in table.items():
        before = default.get(key)
        if isinstance(value, dict):
            inner = before if isinstance(before, dict) else {}
            words += changed_options_as_cli_words(value, inner, f"{prefix}{key}.")
        elif value != before:
            listed = value if isinstance(value, list) else [value]
            texts = [str(item).lower() if isinstance(item, bool) else str(item) for item in listed]
            words += [f"{prefix}{key}", *texts]
    return words


def commented_toml(config: Any, path: str = "") -> str:
    """Return a configuration as TOML in which each option is preceded by a comment with its meaning.

    Args:
        config: a dataclass. Fields that are dataclasses become sections.
        path: dotted name of this section, with a trailing dot.

    >>> from fedstill.core.compute import EngineConfig
    >>> print(commented_toml(EngineConfig()))  # doctest: +ELLIPSIS
    # ...
    device = ...
    """
    kind: Any = type(config)
    hints, docs = get_type_hints(kind, include_extras=True), field_docs(kind)
    values = {part.name: getattr(config, part.name) for part in dataclasses.fields(config)}
    lines: list[str] = []
    if isinstance(config, Registrable):
        known = [
            f"{name}: {_first_paragraph(kind)}" for name, kind in config.registry.importable_objects().items()
        ]
        meaning = f"Each has its own options. {' '.join(known)} Or package.module:Name for a custom class."
        lines += [*_comment_lines(meaning), f"{config.key} = {_toml_value(config.registered_name)}"]
    for name, value in values.items():
        if not dataclasses.is_dataclass(value):
            meaning, limits = docs.get(name, ""), describe_constraints(hints[name])
            if limits:
                meaning = f"{meaning} Expected: {limits}.".strip()
            lines += [*_comment_lines(meaning), f"{name} = {_toml_value(value)}"]
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            inner = f"{path}{name}"
            lines += ["", "", *_comment_lines(docs.get(name, "")), f"[{inner}]"]
            lines.append(commented_toml(value, f"{inner}.").rstrip("\n"))
    return "\n".join(lines) + "\n"


def _first_paragraph(kind: type[Any]) -> str:
    """Return the first paragraph of a class's docstring in one line."""
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


class _Missing:
    """Stands in an error for a value that is missing."""

    def __repr__(self) -> str:
        return "missing"
