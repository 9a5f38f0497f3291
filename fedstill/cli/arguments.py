"""Reads words as a command's line in the help describes them: ``fedstill node init DIR [--name NAME]``.

A usage has the words that must be there, ``[]`` around those that may be missing, ``...`` after what there
may be any number of, and ``[--OPTION VALUE ...]`` where options of a configuration may follow.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from fedstill.core.errors import ArgumentError, UnknownName
from fedstill.core.names import typed

HELPS = ("-h", "--help")
OPTIONS = "--OPTION"  # stands for all options of a configuration


class WordsError(ArgumentError):
    """A command lacks a word or an option, or has a word too many.

    >>> raise WordsError("fedstill node init", "DIR", "")
    Traceback (most recent call last):
    ...
    fedstill.cli.arguments.WordsError: fedstill node init needs DIR: `fedstill node init --help` says more
    """

    def __init__(self, command: str, needs: str, extra: str) -> None:
        self.name, self.value, self.allowed = command, extra, needs
        told = f"takes no {extra!r}" if extra else f"needs {needs}"
        bare = command.partition(" --")[0]
        Exception.__init__(self, f"{command} {told}: `{bare} --help` says more")


@dataclass(frozen=True)
class Given:
    """The words behind a command.

    Args:
        command: the whole of it, as a shell takes it.
        places: the words that are no options.
        options: what was given with each option; with a flag, nothing.
        rest: options of a configuration, each with its values.
    """

    command: str
    known: tuple[str, ...]
    places: list[str] = field(default_factory=list)
    options: dict[str, list[str]] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)

    def __contains__(self, option: str) -> bool:
        return option in self.options

    def get(self, option: str) -> str | None:
        """The value of an option: the last, if it is there more than once; None: it is not."""
        return self.options[option][-1] if option in self.options else None

    def path(self, option: str, default: str | Path | None = None) -> Any:
        """The value of an option as a path, or the default as one."""
        value = self.options[option][-1] if option in self.options else default
        return None if value is None else Path(value)

    @property
    def bars(self) -> bool:
        """Return whether progress is shown on standard error: unless ``--quiet`` is given."""
        return "--quiet" not in self


Command = Callable[[Given], None]


def dispatch(
    room: str,
    words: Sequence[str],
    about: str,
    commands: Mapping[str, Command | str],
    beside: Iterable[str] = (),
) -> None:
    """Do what words say.

    Args:
        room: the words before them, as "node"; empty for ``fedstill`` itself.
        about: the help, which has the usage of each command.
        commands: by name, the function that does it, or ``module:function``, imported when it is wanted.
        beside: names that could be meant as well.

    Raises:
        FedstillError: they say nothing that can be done.
    """
    names = [f"{room} {name}".strip() for name in (*commands, *beside)]
    if not words or words[0] in HELPS:
        print(about, end="")
        return
    name, rest = f"{room} {words[0]}".strip(), words[1:]
    if words[0] not in commands:
        see = f"`{f'fedstill {room}'.strip()} --help` lists them"
        if words[0].startswith("-"):
            raise UnknownName("option", words[0], ["--help"] if room else ["--help", "--version"], see=see)
        raise UnknownName("command", name, names, see=see)
    usage = _fitting(_usages(name, about), rest)
    anywhere = rest[:1] if OPTIONS in usage else rest  # else help is about the options that follow
    if any(word in HELPS for word in anywhere):
        print(about if room else _of_one(words[0], about), end="")
        return
    command = commands[words[0]]
    given = read(name, usage, rest)
    (imported(command) if isinstance(command, str) else command)(given)


def imported(place: str) -> Any:
    """The function ``module:function``: what a command needs is imported when it is called."""
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)


def read(name: str, usage: str, words: Sequence[str]) -> Given:
    """The words behind a command, sorted out.

    Raises:
        WordsError: too few or too many words, or an option that must be there is not.
        ArgumentError: an option without value.
        UnknownName: an option that it does not have.

    >>> given = read("node init", "DIR [--name NAME]", ["clinic", "--name=north"])
    >>> given.places, given.get("--name")
    (['clinic'], 'north')
    """
    places, options, needed = _parse(usage)
    open_ended = options.pop(OPTIONS, None) is not None
    given = Given(shlex.join(["fedstill", *name.split(), *words]), tuple(options))
    queue = list(words)
    while queue:
        word = queue.pop(0)
        option, equals, value = word.partition("=")
        if option in options:
            given.options.setdefault(option, []).extend(
                _values(options[option], option, equals, value, queue)
            )
        elif word.startswith("--") or (open_ended and word in HELPS):
            if not open_ended:
                see = "what goes on has the options that it began with" if "--resume" in needed else ""
                raise UnknownName("option", option, options, see=see or f"fedstill {name} {usage}")
            given.rest.append(word)
        else:
            (given.rest or given.places).append(word)
    command = f"fedstill {name}"
    wanted = [place for place in places if place[0] not in "[."]
    if len(given.places) < len(wanted):
        raise WordsError(command, wanted[len(given.places)], "")
    if len(given.places) > len(places) and "..." not in places:
        chosen = " ".join([command, *(option for option in needed if option in given)])
        raise WordsError(chosen, "", given.places[len(places)])
    for option in needed:
        if option not in given:
            raise WordsError(command, " ".join([option, *options[option]]), "")
    return given


def _parse(usage: str) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """The words without option, those that each option takes, and the options that must be there.

    >>> _parse("DIR [FILE] --nodes A B [--whole]")
    (['DIR', '[FILE]'], {'--nodes': ['A', 'B'], '--whole': []}, ['--nodes'])
    """
    places: list[str] = []
    options: dict[str, list[str]] = {}
    needed: list[str] = []
    into = places
    for part in re.findall(r"\[[^]]*\]|\S+", usage):
        if part.startswith("--"):
            into = options.setdefault(part, [])
            needed.append(part)
        elif part.startswith("[--"):
            option, *values = part.strip("[]").split()
            options[option] = values
        else:
            into.append(part)
    return places, options, needed


def _values(takes: Sequence[str], option: str, equals: str, value: str, queue: list[str]) -> list[str]:
    """What stands behind an option, which is taken from the queue."""
    if not takes:
        if equals:
            raise ArgumentError(option, value, "alone, without a value")
        return []
    values = [value] if equals else []
    while queue and not queue[0].startswith("--") and (len(takes) > 1 or not values):
        values.append(queue.pop(0))
    if not any(values):
        raise ArgumentError(option, "" if equals or not queue else queue[0], "a value after it")
    return values


def _usages(name: str, about: str) -> list[str]:
    """What a command takes, one of these: from its lines in the help, up to where these say what it does.

    >>> _usages("node init", "usage:\\n  fedstill node init DIR\\n      [--name NAME]   write node.toml\\n")
    ['DIR [--name NAME]']
    """
    lines = about.partition("usage:\n")[2].partition("\n\n")[0]
    words = r"\S+(?: \S+)*"
    found = re.findall(rf"^  fedstill {name}((?: {words})?(?:\n +\[{words})*)(?=\s|$)", lines, re.MULTILINE)
    return [" ".join(usage.split()) for usage in found if "--help" not in usage]


def _of_one(command: str, about: str) -> str:
    """What the general help says of one command: its lines, and its options."""
    usage, *others = about.partition("usage:\n")[2].split("\n\n")
    entries = re.split(r"^(?=  fedstill )", usage, flags=re.MULTILINE)
    own = [entry for entry in entries if entry.startswith(f"  fedstill {command} ")]
    heads = [part.partition(":")[0].partition(";")[0] for part in others]
    of_it = [head.startswith("options of `") and f"`{command}`" in head for head in heads]
    told = [part for part, of in zip(others, of_it, strict=True) if of]
    return "\n".join(["usage:", *(entry.rstrip("\n") for entry in own), *(f"\n{part}" for part in told), ""])


def _fitting(usages: Sequence[str], words: Sequence[str]) -> str:
    """The usage whose options are there, as --resume is; else the first."""
    given = {word.partition("=")[0] for word in words}
    others = [usage for usage in usages[1:] if _parse(usage)[2] and given.issuperset(_parse(usage)[2])]
    return (others or usages)[0]


def number(
    name: str,
    text: str | None,
    kind: type[int] | type[float] = float,
    fits: Callable[[Any], bool] = lambda _: True,
    allowed: str = "",
) -> Any:
    """What an option says, as a number; None where it says nothing.

    Raises:
        ArgumentError: it is none, or none that fits.
    """
    if text is None:
        return None
    allowed = allowed or ("a number" if kind is float else "a whole number")
    value = typed(kind, text)
    if value is None or not fits(value):
        raise ArgumentError(name, text, allowed)
    return value


def leave(message: str, code: int) -> NoReturn:
    """End the command with one line on stderr."""
    print(f"fedstill: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
