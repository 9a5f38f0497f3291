"""Parse the words of a command by its usage: ``fedstill node init DIR [--name NAME]``.

A usage has the words that are required, ``[]`` around optional ones, ``...`` after what can be repeated, and
``[--OPTION VALUE ...]`` where options of a configuration can follow.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from fedstill.cli.commands import Command, CommandGroup
from fedstill.core.errors import ArgumentError, UnknownName, closest_name
from fedstill.core.name_normalization import parse_cli_number

HELP_FLAGS = ("-h", "--help")
ALL_HELP = "--help-all"  # help, and then every option of a configuration with its default
OPTIONS = "--OPTION"  # stands for all options of a configuration


class UsageError(ArgumentError):
    """A command lacks a required word or option, or has a word too many.

    >>> raise UsageError("fedstill node init", "DIR", "")
    Traceback (most recent call last):
    ...
    fedstill.cli.arguments.UsageError: fedstill node init needs DIR (see `fedstill node init --help`)
    """

    def __init__(self, command: str, missing: str, extra: str) -> None:
        self.name, self.value, self.expected = command, extra, missing
        problem = f"takes no {extra!r}" if extra else f"needs {missing}"
        name = command.partition(" --")[0]
        Exception.__init__(self, f"{command} {problem} (see `{name} --help`)")


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


@dataclass(frozen=True)
class ParsedArgs:
    """Words of one call of a command.

    Args:
        command: the whole command line, quoted for a shell.
        known: options that the command has.
        positionals: words that belong to no option.
        options: values of each option that was given; empty for a flag.
        overrides: options of a configuration, each followed by its values.
    """

    command: str
    known: tuple[str, ...]
    positionals: list[str] = field(default_factory=list)
    options: dict[str, list[str]] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)

    def __contains__(self, option: str) -> bool:
        return option in self.options

    def get(self, option: str) -> str | None:
        """Return the last value of an option, or None if it was not given."""
        return self.options[option][-1] if option in self.options else None

    def path(self, option: str, default: str | Path | None = None) -> Any:
        """Return the value of an option, or a default, as a path."""
        value = self.options[option][-1] if option in self.options else default
        return None if value is None else Path(value)

    @property
    def show_progress(self) -> bool:
        """True unless ``--quiet`` is given: progress is shown on standard error."""
        return "--quiet" not in self


def dispatch(words: Sequence[str], commands: Mapping[str, Command | CommandGroup], prefix: str = "") -> None:
    """Run the command that the words name, or print its help.

    Args:
        words: words after ``fedstill`` and the prefix.
        commands: commands and groups by name.
        prefix: name of the group, as ``"node"``.

    Raises:
        FedstillError: the words name no command or do not fit its usage.
    """
    name = f"{prefix} {words[0]}".strip()
    if words[0] not in commands:
        raise _unknown_command(words[0], list(commands), prefix)
    command, rest = commands[words[0]], list(words[1:])
    if isinstance(command, CommandGroup):
        if not rest or rest[0] in (*HELP_FLAGS, ALL_HELP):
            print(command.help(name), end="")
        else:
            dispatch(rest, command.commands, name)
        return
    if any(word in HELP_FLAGS for word in rest):
        print(command.help(name), end="")
        return
    usage = _matching_usage(command.usage, rest)
    if ALL_HELP in rest:
        page = command.help(name)
        if OPTIONS in usage:
            args = _sort_words(name, usage, [word for word in rest if word != ALL_HELP])
            page += f"\n{load_function(command.all_options)(name, args)}"
        print(page, end="")
        return
    load_function(command.function)(parse(name, usage, rest))


def _unknown_command(word: str, commands: Sequence[str], prefix: str) -> UnknownName:
    """Return the error of a word that is no command: the closest one, or those of the group."""
    see = f"`{f'fedstill {prefix}'.strip()} --help` lists them"
    if word.startswith("-"):
        return UnknownName("option", word, ["--help", *(() if prefix else ["--version"])], see=see)
    close = closest_name(word, commands)
    meant = repr(f"{prefix} {close}".strip()) if close else ""
    if prefix:
        see = f"the commands of `fedstill {prefix}` are {', '.join(commands)}"
    return UnknownName("command", f"{prefix} {word}".strip(), commands, see=see, suggestion=meant)


def load_function(name: str) -> Any:
    """Import and return the function ``module:function``."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def parse(name: str, usage: str, words: Sequence[str]) -> ParsedArgs:
    """Sort the words of a command into positionals, options and overrides.

    Raises:
        UsageError: too few or too many words, or a required option is missing.
        MissingValue: an option without its value.
        UnknownName: an option that the command does not have.

    >>> args = parse("node init", "DIR [--name NAME]", ["clinic", "--name=north"])
    >>> args.positionals, args.get("--name")
    (['clinic'], 'north')
    """
    args = _sort_words(name, usage, words)
    positionals, options, required = _parse_usage(usage)
    command = f"fedstill {name}"
    needed = [word for word in positionals if word[0] not in "[."]
    if len(args.positionals) < len(needed):
        raise UsageError(command, needed[len(args.positionals)], "")
    if len(args.positionals) > len(positionals) and "..." not in positionals:
        chosen = " ".join([command, *(option for option in required if option in args)])
        raise UsageError(chosen, "", args.positionals[len(positionals)])
    for option in required:
        if option not in args:
            raise UsageError(command, " ".join([option, *options[option]]), "")
    return args


def _sort_words(name: str, usage: str, words: Sequence[str]) -> ParsedArgs:
    """Sort the words of a command as :func:`parse`, but allow required words to be missing."""
    _, options, required = _parse_usage(usage)
    takes_overrides = options.pop(OPTIONS, None) is not None
    args = ParsedArgs(shlex.join(["fedstill", *name.split(), *words]), tuple(options))
    queue = list(words)
    while queue:
        word = queue.pop(0)
        option, equals, value = word.partition("=")
        if option in options:
            values = _option_values(options[option], option, equals, value, queue)
            args.options.setdefault(option, []).extend(values)
        elif word.startswith("--"):
            if not takes_overrides:
                see = "a resumed run keeps its options" if "--resume" in required else ""
                raise UnknownName("option", option, options, see=see or f"fedstill {name} {usage}")
            args.overrides.append(word)
        else:
            (args.overrides or args.positionals).append(word)
    return args


def _parse_usage(usage: str) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Return the positionals of a usage, the values that each option takes, and the required options.

    >>> _parse_usage("DIR [FILE] --nodes A B [--whole]")
    (['DIR', '[FILE]'], {'--nodes': ['A', 'B'], '--whole': []}, ['--nodes'])
    """
    positionals: list[str] = []
    options: dict[str, list[str]] = {}
    required: list[str] = []
    target = positionals
    for part in re.findall(r"\[[^]]*\]|\S+", usage):
        if part.startswith("--"):
            target = options.setdefault(part, [])
            required.append(part)
        elif part.startswith("[--"):
            option, *values = part.strip("[]").split()
            options[option] = values
        else:
            target.append(part)
    return positionals, options, required


def _option_values(takes: Sequence[str], option: str, equals: str, value: str, queue: list[str]) -> list[str]:
    """Take the values of an option from the queue."""
    if not takes:
        if equals:
            raise ArgumentError(option, value, "no value")
        return []
    values = [value] if equals else []
    while queue and not queue[0].startswith("--") and (len(takes) > 1 or not values):
        values.append(queue.pop(0))
    if not any(values):
        raise MissingValue(option, " ".join(takes))
    return values


def _matching_usage(usages: Sequence[str], words: Sequence[str]) -> str:
    """Return the usage whose required options are given, as ``--resume``; else the first."""
    given = {word.partition("=")[0] for word in words}
    required = {usage: _parse_usage(usage)[2] for usage in usages[1:]}
    return next((usage for usage, names in required.items() if names and given.issuperset(names)), usages[0])


def number(
    name: str,
    text: str | None,
    kind: type[int] | type[float] = float,
    is_valid: Callable[[Any], bool] = lambda _: True,
    expected: str = "",
) -> Any:
    """Return the number that an option gives, or None if it was not given.

    Raises:
        ArgumentError: no number, or no valid one.
    """
    if text is None:
        return None
    expected = expected or ("a number" if kind is float else "an integer")
    value = parse_cli_number(kind, text)
    if value is None or not is_valid(value):
        raise ArgumentError(name, text, expected)
    return value


def leave(message: str, code: int) -> NoReturn:
    """Exit with a code and one line on standard error."""
    print(f"fedstill: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
