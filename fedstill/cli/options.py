"""Options of a command line from the fields of a frozen configuration, as a table of TOML gives them.

So a command line and a file take the same values, and refuse others in the same line. tyro writes the help.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from functools import reduce
from itertools import zip_longest
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from fedstill.cli.arguments import ALL_HELP, MissingValue
from fedstill.core.errors import ArgumentError, UnknownName, closest_name
from fedstill.core.name_normalization import parse_cli_number

C = TypeVar("C")
FEW = 12  # options of a section that are named where another one was given


class Option(NamedTuple):
    """An option as it was given: ``--split.nodes 8`` or ``--split.nodes=8``."""

    option: str
    values: list[str]

    @property
    def name(self) -> str:
        """The dotted name that it means."""
        return self.option.removeprefix("--").replace("-", "_")


def override(config: C, words: list[str], prog: str, also: Sequence[str] = ()) -> C:
    """The same configuration with options from the command line.

    Args:
        config: a frozen dataclass: what holds where no option is given.
        words: the options, each followed by its values.
        prog: the command before the options, for errors.
        also: options of the command itself, for suggestions.

    Raises:
        FedstillError: an option that does not exist, or a value that it cannot have.
    """
    from fedstill.core.config_tables import (
        check_option_owner,
        describe_type,
        option_types,
        read_table,
        to_table,
    )

    kind = type(config)
    config, given = choose(config, group(words))
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
    from fedstill.core.config_tables import base_class_by_option

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


def choose(config: C, given: Sequence[Option]) -> tuple[C, list[Option]]:
    """The configuration with those methods, tasks, splits that options choose by name; and the other options.

    A newly chosen one has its defaults, except for options that all choices share.
    """
    from fedstill.core.config_tables import base_class_by_option, merge_tables, read_table, to_table

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


def list_options(config: Any, words: Sequence[str] = ()) -> str:
    """Return every option of a configuration with its default, and the names to choose from.

    Args:
        config: a frozen dataclass with the defaults.
        words: options, of which those that choose by name decide which options there are.
    """
    import tyro

    config, _ = choose(config, group(list(words)))
    page = _CapturedOutput()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
        tyro.cli(
            type(config),
            default=config,
            args=["--help"],
            description=_choices(config),
            use_underscores=True,  # an option is spelled as its key in TOML
            config=(tyro.conf.FlagConversionOff,),  # and has a value, as there
        )
    return page.getvalue().partition("\n\n")[2]  # without tyro's own line of usage


class _CapturedOutput(io.StringIO):
    """Text in place of standard output, with colors and boxes if standard output can show them."""

    def __init__(self) -> None:
        super().__init__()
        self._stdout = sys.stdout

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stdout.encoding

    def isatty(self) -> bool:
        return self._stdout.isatty()


def _choices(config: Any) -> str:
    """Return a line for each option that chooses by name."""
    from fedstill.core.config_tables import base_class_by_option, to_table

    lines = []
    width = min(shutil.get_terminal_size().columns, 100)
    for name, base in base_class_by_option(config).items():
        now = reduce(dict.__getitem__, name.split("."), to_table(config))
        line = f"--{name} NAME (default: {now}): {base.registry.choices_text}"
        lines.append(textwrap.fill(line, width, subsequent_indent="    ", break_on_hyphens=False))
    return "\n".join(lines)


def group(words: list[str]) -> list[Option]:
    """Each option with the values behind it.

    Raises:
        ArgumentError: a word before the first option.

    >>> group(["--seed", "3", "--split.nodes=8"])
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
