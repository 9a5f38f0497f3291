"""A rich console that prints text from other parties safely, and keeps its own colors and bars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from fedstill.core.safe_output import SafeStream, printable


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
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
