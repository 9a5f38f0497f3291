"""A time by which a computation must be done, looked at between its steps.

Whoever has a limit sets it with :func:`within`; loops call :func:`check`. Without a limit that costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_limit: ContextVar[tuple[float, Callable[[], Exception]] | None] = ContextVar("limit", default=None)


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


def check() -> None:
    """Raise the error of the limit that holds here, if its time is over.

    >>> with within(1e-9, lambda: TimeoutError("too long")):
    ...     check()
    Traceback (most recent call last):
    ...
    TimeoutError: too long
    """
    limit = _limit.get()
    if limit is not None and time.monotonic() > limit[0]:
        raise limit[1]()
