"""Seconds of a run, by phase and in all, over stops.

A time by which a computation must be done, or an event that ends it, looked at between its steps.

Whoever has a limit sets it with :func:`time_limit` or :func:`stop_on`; loops call :func:`check_limits`. Without one that
costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event
from typing import Any


class Clock:
    """Seconds of a run by phase and in all, over stops.

    >>> clock = Clock()
    >>> with clock.phase("distillation"):
    ...     clock.phase_seconds("distillation") > 0
    True
    >>> list(clock.seconds)
    ['local_training', 'centralized', 'distillation']
    """

    def __init__(self) -> None:
        self.seconds = {"local_training": 0.0, "centralized": 0.0, "distillation": 0.0}
        self._earlier = 0.0  # of the run before it was stopped
        self._start = time.monotonic()
        self._at: tuple[str, float] | None = None  # the phase at work, and when it began

    def start(self) -> None:
        """Count from now."""
        self._start = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is done in the block as a phase; a phase that fails counts for nothing."""
        self._at = name, time.monotonic()
        yield
        self.seconds[name] = self.phase_seconds(name)
        self._at = None

    def phase_seconds(self, name: str) -> float:
        """Seconds of a phase so far."""
        at = self._at
        return self.seconds[name] + (time.monotonic() - at[1] if at is not None and at[0] == name else 0.0)

    def add_seconds(self, name: str, seconds: float) -> None:
        """Count what a phase took elsewhere, as if it had been done here."""
        self.seconds[name] += seconds
        self._earlier += seconds

    @property
    def total(self) -> float:
        """Seconds of the run so far."""
        return self._earlier + time.monotonic() - self._start

    def state_dict(self) -> dict[str, Any]:
        """What must be remembered."""
        return {"seconds": {name: self.phase_seconds(name) for name in self.seconds}, "total": self.total}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what was remembered, if anything was."""
        if state is not None:
            self.seconds, self._earlier = dict(state["seconds"]), state["total"]


_limit: ContextVar[tuple[float, Callable[[], Exception]] | None] = ContextVar("limit", default=None)
_end: ContextVar[Event | None] = ContextVar("end", default=None)


class ComputationCancelled(Exception):
    """Nobody waits any more for what is computed here."""


@contextmanager
def time_limit(seconds: float, make_error: Callable[[], Exception]) -> Iterator[None]:
    """Let what is computed here, in this thread, take so many seconds.

    Args:
        seconds: from now on; 0 is no limit.
        make_error: makes the error that :func:`check_limits` raises once they are over.
    """
    token = _limit.set((time.monotonic() + seconds, make_error) if seconds else None)
    try:
        yield
    finally:
        _limit.reset(token)


@contextmanager
def stop_on(event: Event) -> Iterator[None]:
    """Let what is computed in this thread go on until an event is set: then :class:`ComputationCancelled` is raised."""
    token = _end.set(event)
    try:
        yield
    finally:
        _end.reset(token)


def check_limits() -> None:
    """Raise the error of the limit that holds here, if its time is over.

    >>> with time_limit(1e-9, lambda: TimeoutError("too long")):
    ...     check_limits()
    Traceback (most recent call last):
    ...
    TimeoutError: too long
    """
    end = _end.get()
    if end is not None and end.is_set():
        raise ComputationCancelled
    limit = _limit.get()
    if limit is not None and time.monotonic() > limit[0]:
        raise limit[1]()
