"""Arguments of commands and options of configurations: how their words are read, listed and refused.

A command is a function: its parameters are its arguments and options, and its docstring is its help
(cyclopts). Further words are options of a frozen configuration, as a table of TOML gives them
(:func:`override`). So a command line and a file take the same values, and refuse others in the same line.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, takewhile, zip_longest
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from cyclopts import App, Parameter

from fedstill.core.config_tables import (
    base_class_by_option,
    check_option_owner,
    describe_type,
    merge_tables,
    option_types,
    read_table,
    read_value,
    to_table,
)
from fedstill.core.errors import ArgumentError, UnknownName, closest_name
from fedstill.core.name_normalization import parse_cli_number
from fedstill.core.options import describe_constraints, field_docs
from fedstill.core.registry import Registrable

C = TypeVar("C")
FEW = 12  # options of a section that are named where another one was given
ALL_HELP = "--help-all"  # help, and then every option of a configuration with its default


def _complete_presets(_: Any) -> list[str]:
    from fedstill.runs import presets

    return presets.names()


def _complete_methods(_: Any) -> list[str]:
    from fedstill.protocol.method import METHODS

    return list(METHODS)


def _completed_with(names: Callable[[Any], list[str]]) -> Parameter:
    """Return a parameter whose values a shell completes, from Python 3.11 on (cyclopts 5)."""
    return Parameter(completer=names) if sys.version_info >= (3, 11) else Parameter()


Preset = Annotated[
    str,
    _completed_with(_complete_presets),
    Parameter(help="a preset (`fedstill list presets`) or a configuration FILE.toml"),
]
MethodName = Annotated[str, _completed_with(_complete_methods)]
AsJson = Annotated[bool, Parameter(name="--json", help="print the result as JSON")]
Quiet = Annotated[bool, Parameter(name="--quiet", help="hide progress bars")]


@dataclass(frozen=True)
class Call:
    """One call of a command that takes options of a configuration.

    Args:
        command: the whole command line, quoted for a shell.
        words: the words of the command's own arguments and options.
        overrides: options of a configuration, each followed by its values.
        known: the command's own options.
    """

    command: str = ""
    words: Sequence[str] = ()
    overrides: Sequence[str] = ()
    known: Sequence[str] = ()

    @property
    def positionals(self) -> list[str]:
        """Words before the first option."""
        return list(takewhile(_is_value, self.words))

    def value(self, option: str) -> str | None:
        """Return the value of one of the command's own options as a word, or None."""
        for word, after in pairwise([*self.words, ""]):
            if word.partition("=")[0] == option:
                return word.partition("=")[2] or after
        return None


CalledAs = Annotated[Call, Parameter(parse=False)]


def group(name: str, about: str) -> App:
    """Return an empty group of commands."""
    return App(name=name, help=about, help_flags=(), version_flags=())


class UsageError(ArgumentError):
    """A command lacks a required argument, or has a word too many.

    >>> raise UsageError("fedstill node init", missing="FOLDER")
    Traceback (most recent call last):
    ...
    fedstill.cli.arguments.UsageError: fedstill node init needs FOLDER (see `fedstill node init --help`)
    """

    def __init__(self, command: str, missing: str = "", extra: str = "") -> None:
        self.name, self.value, self.expected = command, extra, missing
        problem = f"takes no {extra!r}" if extra else f"needs {missing}"
        Exception.__init__(self, f"{command} {problem} (see `{command.partition(' --')[0]} --help`)")


class MissingValue(ArgumentError):
    """Error of an option without its value.

    >>> raise MissingValue("--seed", "an integer")
    Traceback (most recent call last):
    ...
    fedstill.cli.arguments.MissingValue: --seed needs a value (expected an integer)
    """

    def __init__(self, option: str, expected: str) -> None:
        self.name, self.value, self.expected = option, "", expected
        Exception.__init__(self, f"{option} needs a value (expected {expected})")


def convert(kind: Any, tokens: Sequence[Any]) -> Any:
    """Convert the words of an argument to its type, as those of a configuration's option are."""
    words = [token.value for token in tokens]
    return Path(words[-1]) if kind is Path else read_words(kind, words, tokens[0].keyword or "")


def split_overrides(words: Sequence[str], own: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of a call into those of the command itself and options of a configuration.

    >>> split_overrides(["demo", "--seed", "3", "--out=x", "--split.nodes=8"], ["--out"])
    (['demo', '--out=x'], ['--seed', '3', '--split.nodes=8'])
    """
    sorted_words: tuple[list[str], list[str]] = ([], [])
    target = sorted_words[0]
    for word in words:
        if not _is_value(word):
            target = sorted_words[0 if word.partition("=")[0] in own else 1]
        target.append(word)
    return sorted_words


class Option(NamedTuple):
    """An option as it was given: ``--split.nodes 8`` or ``--split.nodes=8``."""

    option: str
    values: list[str]

    @property
    def name(self) -> str:
        """The dotted name that it means."""
        return self.option.removeprefix("--").replace("-", "_")


def split_options(words: Sequence[str]) -> list[Option]:
    """Return each option with the values behind it.

    Raises:
        ArgumentError: a word before the first option.

    >>> split_options(["--seed", "3", "--split.nodes=8"])
    [Option(option='--seed', values=['3']), Option(option='--split.nodes', values=['8'])]
    """
    given: list[Option] = []
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            given.append(Option(option, [value] if equals else []))
        elif given:
            given[-1].values.append(word)
        else:
            raise ArgumentError("option", word, "--NAME VALUE; one preset, file or folder only")
    return given


def override(config: C, words: list[str], prog: str, also: Sequence[str] = ()) -> C:
    """Return the configuration with options from the command line.

    Args:
        config: a frozen dataclass, with the values of options that are not given.
        words: the options, each followed by its values.
        prog: the command before the options, for errors.
        also: options of the command itself, for suggestions.

    Raises:
        FedstillError: an option that does not exist, or a value that it cannot have.
    """
    kind = type(config)
    config, given = choose(config, split_options(words))
    known = option_types(config)
    for option in given:
        if option.name not in known:
            check_option_owner(config, option.name, " ".join(option.values))
            raise _unknown_option(config, option, [*known], prog, also)
    table = to_table(config)
    for option in given:
        if _lacks_value(known[option.name], option.values):
            raise MissingValue(option.option, describe_type(known[option.name]))
        *places, last = option.name.split(".")
        reduce(dict.__getitem__, places, table)[last] = _value(known[option.name], option.values)
    return read_table(kind, table)


def choose(config: C, given: Sequence[Option]) -> tuple[C, list[Option]]:
    """Return the configuration with the classes that options choose by name, and the other options.

    A newly chosen one has its defaults, except for options that all choices share.
    """
    kind, rest = type(config), list(given)
    for option in given:
        if option.name not in base_class_by_option(config):
            continue
        if len(option.values) != 1:
            if not any(option.values):
                base = base_class_by_option(config)[option.name]
                raise MissingValue(option.option, base.registry.choices_text)
            raise ArgumentError(option.name, " ".join(option.values), "one name")
        above: Any = option.values[0]
        for key in reversed(option.name.split(".")):
            above = {key: above}
        config = read_table(kind, merge_tables(kind, to_table(config), above))
        rest.remove(option)
    return config, rest


def read_words(kind: Any, words: list[str], name: str) -> Any:
    """Convert words of a command line to a type.

    Raises:
        ArgumentError: they do not say a value of the type.

    >>> read_words(tuple[int, ...], ["1", "2"], "--channels"), read_words(float | None, ["none"], "--lr")
    ((1, 2), None)
    """
    return read_value(kind, _value(kind, words), name)


def list_options(config: Any, words: Sequence[str] = ()) -> str:
    """Return every option of a configuration with its default, and the names to choose from.

    Args:
        config: a frozen dataclass with the defaults.
        words: options, of which those that choose by name decide which options there are.
    """
    config, _ = choose(config, split_options(list(words)))
    return "\n".join(_option_lines(config, "")) + "\n"


def _unknown_option(
    config: Any, option: Option, known: Collection[str], prog: str, also: Sequence[str]
) -> UnknownName:
    """Return the error of an option that does not exist, with the option that was probably meant."""
    names = [*also, *(f"--{name}" for name in known)]
    section = option.name.rpartition(".")[0]
    siblings = [f"--{name}" for name in known if section and name.rpartition(".")[0] == section]
    see = f"`{prog} {ALL_HELP}` lists all"
    if 0 < len(siblings) <= FEW:
        see = f"there are {', '.join(siblings)}; {see}"
    meant = _choice_by_name(config, option)
    return UnknownName("option", option.option, names, see=see, suggestion=repr(meant) if meant else "")


def _choice_by_name(config: Any, option: Option) -> str:
    """Return ``--method.name fedkd`` for ``--method fedkd``; empty if no choice has this name."""
    for name, base in base_class_by_option(config).items():
        if name.startswith(f"{option.name}."):
            value = " ".join(option.values)
            return " ".join([f"--{name}", *filter(None, [closest_name(value, base.registry)])])
    return ""


def _lacks_value(kind: Any, values: Sequence[str]) -> bool:
    """Return whether an option was given without a value that it needs.

    A list may be empty, and so may a text if that is written as ``--NAME=``.

    >>> [_lacks_value(kind, []) for kind in (int, str, tuple[int, ...])]
    [True, True, False]
    >>> [_lacks_value(kind, [""]) for kind in (int | None, str | None, tuple[int, ...])]
    [True, False, False]
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if any(values) or any(get_origin(part) is tuple for part in kinds):
        return False
    is_text = any(part is str or (get_origin(part) is Literal and "" in get_args(part)) for part in kinds)
    return not (values and is_text)


def _option_lines(config: Any, prefix: str) -> Iterator[str]:
    """Yield a heading for each table of a configuration, and each option with its meaning and default."""
    hints, docs = get_type_hints(type(config), include_extras=True), field_docs(type(config))
    values = {part.name: getattr(config, part.name) for part in dataclasses.fields(config)}
    tables = {name: value for name, value in values.items() if dataclasses.is_dataclass(value)}
    if isinstance(config, Registrable) and config.key:
        choices = f"One of {config.registry.choices_text}. (default: {config.registered_name})"
        yield from _option_entry(f"--{prefix}{config.key} NAME", choices)
    for name, kind in option_types(type(config)).items():
        if name in values:
            shown = to_table(values[name])
            default = " ".join(map(str, shown)) if isinstance(shown, list) else str(shown)
            default = default.lower() if isinstance(shown, bool) else default or "empty"
            limits = "" if get_origin(kind) is Literal else describe_constraints(hints[name])
            meaning = f"{docs.get(name, '')} (default: {default}{f'; {limits}' if limits else ''})"
            yield from _option_entry(f"--{prefix}{name} {_metavar(kind)}", meaning)
    for name, table in tables.items():
        yield ""
        yield from _filled(f"{prefix}{name}: {docs.get(name, '')}".strip(": "), "")
        yield from _option_lines(table, f"{prefix}{name}.")


def _option_entry(option: str, meaning: str) -> Iterator[str]:
    yield f"  {option}"
    yield from _filled(meaning.strip(), "      ")


def _filled(text: str, indent: str) -> list[str]:
    width = min(shutil.get_terminal_size().columns, 100)
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent or "  ", break_on_hyphens=False
    )


def _metavar(kind: Any) -> str:
    """Return the placeholder of a type in help.

    >>> [_metavar(kind) for kind in (int | None, tuple[float, ...], bool, Literal["a", "b"])]
    ['INT', 'FLOAT ...', 'true|false', 'a|b']
    """
    parts = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return "|".join(dict.fromkeys(_metavar(part) for part in parts if part is not NoneType))
    if get_origin(kind) is tuple:
        return f"{_metavar(parts[0])} ..."
    if get_origin(kind) is Literal:
        return "|".join(map(str, parts))
    return {int: "INT", float: "FLOAT", str: "TEXT", bool: "true|false"}.get(kind, "VALUE")


def _value(kind: Any, words: list[str]) -> Any:
    """Words as TOML would have what they say; what says nothing of the kind stays a text, to be refused.

    >>> _value(tuple[float, ...], ["1", "x"]), _value(int | None, ["3"]), _value(bool, ["a", "b"])
    ([1.0, 'x'], 3, 'a b')
    >>> _value(tuple[float, ...] | None, ["1", "10"]), _value(tuple[float, ...] | None, ["none"])
    ([1.0, 10.0], 'none')
    """
    if get_origin(kind) in (Union, UnionType) and words != ["none"]:
        kind = next((part for part in get_args(kind) if get_origin(part) is tuple), kind)
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        inner = parts if parts[1:] != (...,) else parts[:1] * len(words)
        return [_one(part, word) for part, word in zip_longest(inner, words)][: len(words)]
    return _one(kind, " ".join(words))


def _one(kind: Any, word: str) -> Any:
    if get_origin(kind) in (Union, UnionType):
        return next((value for part in get_args(kind) if (value := _one(part, word)) != word), word)
    if kind is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    value = parse_cli_number(kind, word) if kind in (int, float) else None
    return word if value is None else value


def _is_value(word: str) -> bool:
    return not word.startswith("--")
