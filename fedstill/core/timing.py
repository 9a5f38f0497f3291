"""Time of a run by phase, and time limits of computations.

A caller sets a limit with :func:`time_limit` or :func:`stop_on`, and loops call :func:`check_limits` between
their steps. Without a limit that costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event
from typing import Any


class Clock:
    """Seconds of a run, by phase and in total, over interruptions.

    >>> clock = Clock()
    >>> with clock.phase("distillation"):
    ...     clock.phase_seconds("distillation") > 0
    True
    >>> list(clock.seconds)
    ['local_training', 'centralized', 'distillation']
    """

    def __init__(self) -> None:
        self.seconds = {"local_training": 0.0, "centralized": 0.0, "distillation": 0.0}
        self._earlier = 0.0  # seconds before the interruption
        self._start = time.monotonic()
        self._at: tuple[str, float] | None = None  # the current phase and its start

    def start(self) -> None:
        """Start counting."""
        self._start = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block as a phase. A phase that fails is not counted."""
        self._at = name, time.monotonic()
        yield
        self.seconds[name] = self.phase_seconds(name)
        self._at = None

    def phase_seconds(self, name: str) -> float:
        """Return the seconds of a phase so far."""
        at = self._at
        return self.seconds[name] + (time.monotonic() - at[1] if at is not None and at[0] == name else 0.0)

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add seconds of a phase that was computed elsewhere."""
        self.seconds[name] += seconds
        self._earlier += seconds

    @property
    def total(self) -> float:
        """Seconds of the run so far."""
        return self._earlier + time.monotonic() - self._start

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"seconds": {name: self.phase_seconds(name) for name in self.seconds}, "total": self.total}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a saved state, if there is one."""
        if state is not None:
            self.seconds, self._earlier = dict(state["seconds"]), state["total"]


_limit: ContextVar[tuple[float, Callable[[], Exception]] | None] = ContextVar("limit", default=None)
_end: ContextVar[Event | None] = ContextVar("end", default=None)


class ComputationCancelled(Exception):
    """Nobody waits for the result of this computation any more."""


@contextmanager
def time_limit(seconds: float, make_error: Callable[[], Exception]) -> Iterator[None]:
    """Limit the time of computations in this thread.

    Args:
        seconds: seconds from now; 0: no limit.
        make_error: returns the error that :func:`check_limits` raises after that time.
    """
    token = _limit.set((time.monotonic() + seconds, make_error) if seconds else None)
    try:
        yield
    finally:
        _limit.reset(token)


@contextmanager
def stop_on(event: Event) -> Iterator[None]:
    """Stop computations in this thread when an event is set, by :class:`ComputationCancelled`."""
    token = _end.set(event)
    try:
        yield
    finally:
        _end.reset(token)


def check_limits() -> None:
    """Raise the error of the current limit if its time is over.

    >>> with time_limit(1e-9, lambda: TimeoutError("too long")):
    ...     check_limits()
    Traceback (most recent call last):
    ...
    TimeoutError: too long
    """
    event = _end.get()
    if event is not None and event.is_set():
        raise ComputationCancelled
    limit = _limit.get()
    if limit is not None and time.monotonic() > limit[0]:
        raise limit[1]()
