"""A rich console that removes control characters from texts and keeps its own colors and bars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from fedstill.core.safe_output import SafeStream, printable


class SafeConsole(Console):
    """Like :class:`rich.console.Console`, but without escape sequences in texts, which rich lets through."""

    @property
    def file(self) -> IO[str]:
        """Output stream. A :class:`SafeStream` is bypassed, as it removes the console's own sequences."""
        stream = Console.file.fget(self)  # type: ignore[attr-defined]
        return cast(IO[str], stream.stream if isinstance(stream, SafeStream) else stream)

    @file.setter
    def file(self, new: IO[str]) -> None:
        Console.file.fset(self, new)  # type: ignore[attr-defined]

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See :meth:`rich.console.Console.render`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
