"""The trackers of one run. A tracker that fails is disabled."""

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
        trackers: names of trackers, or trackers.
        options: options of the run, which trackers log.

    Attributes:
        notes: why trackers were disabled.

    Raises:
        ArgumentError: a name is unknown, or the tracker's package is not installed.
    """

    def __init__(
        self, trackers: Sequence[str | Tracker] = (), options: Mapping[str, Any] | None = None
    ) -> None:
        self._trackers = {_tracker_name(tracker): _make_tracker(tracker) for tracker in trackers}
        if len(self._trackers) < len(trackers):
            raise ArgumentError(
                "track", [_tracker_name(tracker) for tracker in trackers], "each tracker once"
            )
        self._options = {name: _shorten_path(value) for name, value in flatten(options or {}).items()}
        self._started: dict[str, Tracker] = {}  # trackers that have started
        self.notes: list[str] = []

    def start(self, folder: Path, title: str, *, finished: bool = False) -> None:
        """Start all trackers for a new or resumed run.

        Args:
            folder: folder of the run; its name is the name of the run.
            title: the method.
            finished: training has finished elsewhere: a tracker that cannot start is disabled.

        Raises:
            FedstillError: a tracker cannot start.
        """
        run_info = {"name": folder.resolve().name, "method": title, "options": self._options}
        for name, tracker in self._trackers.items():
            try:
                tracker.start(folder, run_info)
            except Exception as error:  # custom trackers may raise anything
                if finished:
                    self._disable(name, error)
                    continue
                raise FedstillError(f"tracker {name!r} cannot start: {first_line(error)}") from error
            self._started[name] = tracker

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Log lines of metrics."""
        if lines:
            self._call_all(lambda tracker: tracker.log(lines))

    def close(self, result: Mapping[str, Any] | None) -> None:
        """Close all trackers. Nothing is logged afterwards.

        Args:
            result: the result of the run; None: the run was interrupted.
        """
        self._call_all(lambda tracker: tracker.close(result))
        self._started = {}

    def _call_all(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._started.items()):
            try:
                action(tracker)
            except Exception as error:  # a failing tracker must not stop the run
                del self._started[name]
                self._disable(name, error)

    def _disable(self, name: str, error: Exception) -> None:
        self.notes.append(f"tracker {name!r} failed and was disabled: {first_line(error)}")
        print(f"Note: {self.notes[-1]}", file=sys.stderr)


def _tracker_name(tracker: str | Tracker) -> str:
    return tracker if isinstance(tracker, str) else type(tracker).__name__


def _make_tracker(tracker: str | Tracker) -> Tracker:
    if isinstance(tracker, Tracker):
        return tracker
    try:
        return TRACKERS[tracker]()
    except ArgumentError as error:
        raise ArgumentError("track", tracker, error.expected) from error


def _shorten_path(value: Any) -> Any:
    """Return an option as others may read it: only the last part of an absolute path."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
