"""Arguments that several commands share, the call that a command is part of, and errors in its words.

A command is a function: its parameters are its arguments and options, and its docstring is its help
(cyclopts). Values are read and checked as those of a configuration file are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from fedstill.cli.options import read_words
from fedstill.core.errors import ArgumentError


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


def _is_value(word: str) -> bool:
    return not word.startswith("--")
