"""Options of a command line from the fields of a frozen configuration, as a table of TOML gives them.

So a command line and a file take the same values, and refuse others in the same line. tyro writes the help.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import zip_longest
from types import UnionType
from typing import Any, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin

from fedstill.cli.arguments import ALL_HELP
from fedstill.core.errors import ArgumentError, UnknownName
from fedstill.core.names import parse_cli_number

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


def override(config: C, words: list[str], prog: str, about: str, also: Sequence[str] = ()) -> C:
    """The same configuration with options from the command line.

    Args:
        config: a frozen dataclass: what holds where no option is given.
        words: the options, each followed by its values; ``--help-all`` prints all of them and exits with 0.
        prog: the command before the options, for help and errors.
        about: what help says above the options.
        also: options of the command itself, for suggestions.

    Raises:
        FedstillError: an option that does not exist, or a value that it cannot have.
    """
    from fedstill.core.config_tables import (
        base_class_by_option,
        check_option_owner,
        option_types,
        read_table,
        to_table,
    )

    kind = type(config)
    helps = ALL_HELP in words
    config, given = choose(config, group([word for word in words if word != ALL_HELP]))
    if helps:
        _help(config, prog, f"{about}\n{_choices(config)}")
    known = option_types(config)
    for option in given:
        if option.name not in known:
            check_option_owner(config, option.name, " ".join(option.values))
            names = [*also, *(f"--{name}" for name in known)]
            chosen = next(
                (f"'--{key}'" for key in base_class_by_option(config) if key.startswith(f"{option.name}.")),
                "",
            )
            section = option.name.rpartition(".")[0]
            siblings = [f"--{name}" for name in known if section and name.rpartition(".")[0] == section]
            see = f"`{prog} --help-all` lists all"
            if 0 < len(siblings) <= FEW:
                see = f"there are {', '.join(siblings)}; {see}"
            raise UnknownName("option", option.option, names, see=see, suggestion=chosen)
    table = to_table(config)
    for option in given:
        if not option.values and known[option.name] is str:  # who means none says --NAME=
            raise ArgumentError(option.option, "", "a value after it")
        *places, last = option.name.split(".")
        reduce(dict.__getitem__, places, table)[last] = _value(known[option.name], option.values)
    return read_table(kind, table)


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
            raise ArgumentError(option.name, " ".join(option.values), "one name")
        above: Any = option.values[0]
        for key in reversed(option.name.split(".")):
            above = {key: above}
        config = read_table(kind, merge_tables(kind, to_table(config), above))
        rest.remove(option)
    return config, rest


def _choices(config: Any) -> str:
    """Return a line for each option that chooses by name."""
    from fedstill.core.config_tables import base_class_by_option, to_table

    lines = []
    for name, base in base_class_by_option(config).items():
        now = reduce(dict.__getitem__, name.split("."), to_table(config))
        lines.append(f"--{name} NAME (default: {now}): {base.registry.choices_text}")
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


def _help(config: Any, prog: str, about: str) -> NoReturn:
    import tyro

    tyro.cli(
        type(config),
        default=config,
        args=["--help"],
        prog=prog,
        description=about,
        use_underscores=True,  # an option is spelled as its key in TOML
        config=(tyro.conf.FlagConversionOff,),  # and has a value, as there
    )
    raise AssertionError("help ends the command")


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
