"""A time by which a computation must be done, or an event that ends it, looked at between its steps.

Whoever has a limit sets it with :func:`within` or :func:`until`; loops call :func:`check`. Without one that
costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event

_limit: ContextVar[tuple[float, Callable[[], Exception]] | None] = ContextVar("limit", default=None)
_end: ContextVar[Event | None] = ContextVar("end", default=None)


class Ended(Exception):
    """Nobody waits any more for what is computed here."""


@contextmanager
def within(seconds: float, late: Callable[[], Exception]) -> Iterator[None]:
    """Let what is computed here, in this thread, take so many seconds.

    Args:
        seconds: from now on; 0 is no limit.
        late: makes the error that :func:`check` raises once they are over.
    """
    token = _limit.set((time.monotonic() + seconds, late) if seconds else None)
    try:
        yield
    finally:
        _limit.reset(token)


@contextmanager
def until(end: Event) -> Iterator[None]:
    """Let what is computed in this thread go on until an event is set: then :class:`Ended` is raised."""
    token = _end.set(end)
    try:
        yield
    finally:
        _end.reset(token)


def check() -> None:
    """Raise the error of the limit that holds here, if its time is over.

    >>> with within(1e-9, lambda: TimeoutError("too long")):
    ...     check()
    Traceback (most recent call last):
    ...
    TimeoutError: too long
    """
    end = _end.get()
    if end is not None and end.is_set():
        raise Ended
    limit = _limit.get()
    if limit is not None and time.monotonic() > limit[0]:
        raise limit[1]()
