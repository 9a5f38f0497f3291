"""Texts of others on a terminal: a server's, a node's, a file's. None of them moves the cursor, names the
window or turns what stands beside it around; whatever prints them need not think of it.

A console of rich that shows others' texts safely, and keeps its own colors and bars.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment


def shown(text: str) -> str:
    """A text with a space in place of each sign that is not printed, but for ends of lines and tabs.

    >>> shown("two\\nlines \\x1b[31mred\\u202e")
    'two\\nlines  [31mred '
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in "\n\t" else " " for sign in text)


class SafeStream:
    """A stream of text that shows it safely; else it is the stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """See :meth:`io.TextIOBase.write`."""
        self.stream.write(shown(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def safe_output() -> Iterator[None]:
    """Within, all that is printed is shown safely; rich's own sequences pass by :mod:`safe_console`."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(SafeStream, map(_writable, before))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _writable(stream: Any) -> Any:
    """Return a stream that accepts any text, with `?` for what its encoding lacks, also for a closed one."""
    if stream is None:  # as of `fedstill ... >&-`
        return open(os.devnull, "w", encoding="utf-8")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return stream


class SafeConsole(Console):
    """As :class:`rich.console.Console`, which lets escape sequences in texts through."""

    @property
    def file(self) -> IO[str]:
        """Where it writes: past :class:`SafeStream`, which would take its own sequences, too."""
        found = Console.file.fget(self)  # type: ignore[attr-defined]
        return cast(IO[str], found.stream if isinstance(found, SafeStream) else found)

    @file.setter
    def file(self, new: IO[str]) -> None:
        Console.file.fset(self, new)  # type: ignore[attr-defined]

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See :meth:`rich.console.Console.render`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)
