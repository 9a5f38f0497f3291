"""Text from other parties on a terminal: a server's, a node's or a file's.

Control characters are replaced, so that no text can move the cursor, change the window's title or reverse
the direction of the text around it. :func:`safe_output` does so for a whole process. A rich console needs
:class:`fedstill.core.safe_console.SafeConsole`, which is apart because the help of a command needs no rich.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def printable(text: str) -> str:
    """Replace each unprintable character by a space, except newlines and tabs.

    >>> printable("two\\nlines \\x1b[31mred\\u202e")
    'two\\nlines  [31mred '
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else " " for char in text)


class SafeStream:
    """A text stream that writes only printable text. Other attributes are those of the wrapped stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """See :meth:`io.TextIOBase.write`."""
        self.stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def safe_output() -> Iterator[None]:
    """Make all output printable within the block, except rich's (:mod:`fedstill.core.safe_console`)."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(SafeStream, map(_make_writable, before))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _make_writable(stream: Any) -> Any:
    """Return a stream that accepts any text, also if it is closed.

    Characters outside its encoding become ``?``.
    """
    if stream is None:  # closed, as by `fedstill ... >&-`
        return open(os.devnull, "w", encoding="utf-8")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return stream
