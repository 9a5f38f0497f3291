"""All that listen to one run: they are told alike, and one that fails is let go."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.core.config_tables import flat
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.registry import first_line
from fedstill.track.tracker import TRACKERS, Tracker


class Listeners:
    """The trackers of one run.

    Args:
        named: each a name, or one that is made already.

    Attributes:
        notes: of each that was let go, why.

    Raises:
        ArgumentError: nothing has such a name, or what it writes with is not installed.
    """

    def __init__(self, named: Sequence[str | Tracker] = (), options: Mapping[str, Any] | None = None) -> None:
        self._made = {_name(each): _made(each) for each in named}
        if len(self._made) < len(named):
            raise ArgumentError("track", [_name(each) for each in named], "each tracker once")
        self._options = {name: _short(value) for name, value in flat(options or {}).items()}
        self._there: dict[str, Tracker] = {}  # those that have begun
        self.notes: list[str] = []

    def start(self, folder: Path, title: str, *, over: bool = False) -> None:
        """Tell all that a run begins, or goes on.

        Args:
            folder: of the run, which gives it its name.
            over: all has been trained elsewhere: one that cannot begin is let go.

        Raises:
            FedstillError: one cannot.
        """
        about = {"name": folder.resolve().name, "method": title, "options": self._options}
        for name, tracker in self._made.items():
            try:
                tracker.start(folder, about)
            except Exception as error:  # whatever somebody's tracker does
                if over:
                    self._let_go(name, error)
                    continue
                raise FedstillError(f"tracker {name!r} cannot begin: {first_line(error)}") from error
            self._there[name] = tracker

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Tell all what was measured."""
        if lines:
            self._tell(lambda tracker: tracker.log(lines))

    def close(self, result: Mapping[str, Any] | None) -> None:
        """Tell all that the run is over; None: that it was stopped. Nobody is told anything after it."""
        self._tell(lambda tracker: tracker.close(result))
        self._there = {}

    def _tell(self, what: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._there.items()):
            try:
                what(tracker)
            except Exception as error:  # of a tracker that fails, the run is not the worse
                del self._there[name]
                self._let_go(name, error)

    def _let_go(self, name: str, error: Exception) -> None:
        self.notes.append(f"tracker {name!r} failed and was let go: {first_line(error)}")
        print(f"Note: {self.notes[-1]}", file=sys.stderr)


def _name(each: str | Tracker) -> str:
    return each if isinstance(each, str) else type(each).__name__


def _made(each: str | Tracker) -> Tracker:
    if isinstance(each, Tracker):
        return each
    try:
        return TRACKERS[each]()
    except ArgumentError as error:
        raise ArgumentError("track", each, error.allowed) from error


def _short(value: Any) -> Any:
    """An option as others may read it: of a path of this machine its last part."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
