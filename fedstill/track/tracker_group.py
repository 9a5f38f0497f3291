"""All that listen to one run: they are told alike, and one that fails is let go."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.core.config_tables import flatten
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.registry import first_line
from fedstill.track.tracker import TRACKERS, Tracker


class TrackerGroup:
    """The trackers of one run.

    Args:
        trackers: each a name, or one that is made already.

    Attributes:
        notes: of each that was let go, why.

    Raises:
        ArgumentError: nothing has such a name, or what it writes with is not installed.
    """

    def __init__(
        self, trackers: Sequence[str | Tracker] = (), options: Mapping[str, Any] | None = None
    ) -> None:
        self._trackers = {_tracker_name(each): _make_tracker(each) for each in trackers}
        if len(self._trackers) < len(trackers):
            raise ArgumentError("track", [_tracker_name(each) for each in trackers], "each tracker once")
        self._options = {name: _shorten_path(value) for name, value in flatten(options or {}).items()}
        self._started: dict[str, Tracker] = {}  # those that have begun
        self.notes: list[str] = []

    def start(self, folder: Path, title: str, *, finished: bool = False) -> None:
        """Tell all that a run begins, or goes on.

        Args:
            folder: of the run, which gives it its name.
            finished: all has been trained elsewhere: one that cannot begin is let go.

        Raises:
            FedstillError: one cannot.
        """
        about = {"name": folder.resolve().name, "method": title, "options": self._options}
        for name, tracker in self._trackers.items():
            try:
                tracker.start(folder, about)
            except Exception as error:  # whatever somebody's tracker does
                if finished:
                    self._disable(name, error)
                    continue
                raise FedstillError(f"tracker {name!r} cannot begin: {first_line(error)}") from error
            self._started[name] = tracker

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Tell all what was measured."""
        if lines:
            self._call_all(lambda tracker: tracker.log(lines))

    def close(self, result: Mapping[str, Any] | None) -> None:
        """Tell all that the run is over; None: that it was stopped. Nobody is told anything after it."""
        self._call_all(lambda tracker: tracker.close(result))
        self._started = {}

    def _call_all(self, what: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._started.items()):
            try:
                what(tracker)
            except Exception as error:  # of a tracker that fails, the run is not the worse
                del self._started[name]
                self._disable(name, error)

    def _disable(self, name: str, error: Exception) -> None:
        self.notes.append(f"tracker {name!r} failed and was let go: {first_line(error)}")
        print(f"Note: {self.notes[-1]}", file=sys.stderr)


def _tracker_name(each: str | Tracker) -> str:
    return each if isinstance(each, str) else type(each).__name__


def _make_tracker(each: str | Tracker) -> Tracker:
    if isinstance(each, Tracker):
        return each
    try:
        return TRACKERS[each]()
    except ArgumentError as error:
        raise ArgumentError("track", each, error.expected) from error


def _shorten_path(value: Any) -> Any:
    """An option as others may read it: of a path of this machine its last part."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
