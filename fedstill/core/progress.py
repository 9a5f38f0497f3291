"""Progress of a run, shown as bars or lines, or written to a file for other processes.

Bars and lines show one phase each, with the remaining time and the main metric so far.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from fedstill.core.config_tables import read_received_dataclass
from fedstill.core.errors import FedstillError, RunFolderError
from fedstill.core.run_writer import write_text
from fedstill.core.safe_console import SafeConsole
from fedstill.core.text_format import format_seconds, to_printable_line

logger = logging.getLogger("fedstill.server")

MAX_COUNT = 10**12  # maximum of steps and seconds in a snapshot, which may come from another machine
PROGRESS_FILE = "progress.json"  # in the folder of an unfinished run


class ProgressBar:
    """Progress on standard error: bars on a terminal, lines elsewhere (a file, a pipe, a notebook).

    Args:
        enabled: show progress; else nothing is printed.
    """

    def __init__(self, enabled: bool) -> None:
        console = SafeConsole(stderr=True, highlight=False)
        self._enabled, self._lines = (
            enabled,
            None if not enabled or console.is_terminal else ProgressLines(console),
        )
        self._progress = Progress(
            TextColumn("{task.description:<18}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not (enabled and console.is_terminal),
        )
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        if self._lines:
            self._lines.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._lines:
            self._lines.stop()

    def print_line(self, text: str) -> None:
        """Print a line above the bars."""
        if self._enabled:
            self._progress.console.print(Text(text), soft_wrap=True)

    def update(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Move the bar of a phase. The bar appears at its first update.

        Args:
            phase: name of the phase.
            done: steps that are done.
            total: steps of the phase.
            note: text after the bar; empty: keep the last one.
        """
        self._move_bar(phase, done, total, note)
        if self._lines:
            self._lines.update(self._lines.snapshot.advanced(phase, done, total, note))

    def _move_bar(self, phase: str, done: int, total: int, note: str) -> None:
        if phase not in self._bars:
            self._bars[phase] = self._progress.add_task(phase, total=total, note="")
        if note:
            self._progress.update(self._bars[phase], note=note)
        self._progress.update(self._bars[phase], completed=done)

    def set_waiting(self, names: Sequence[str]) -> None:
        """Show which nodes have not responded yet; empty: all have."""
        if self._lines:
            self._lines.snapshot = replace(self._lines.snapshot, waiting_for=tuple(names))

    def set_excluded(self, names: Sequence[str]) -> None:
        """Show which nodes are excluded; empty: all take part."""
        if self._lines:
            self._lines.snapshot = replace(self._lines.snapshot, excluded=tuple(names))

    def set_run_info(self, run_info: Mapping[str, str]) -> None:
        """Describe the run in its snapshots: see :class:`ProgressSnapshot`."""

    def show_snapshot(self, snapshot: ProgressSnapshot) -> None:
        """Show the snapshot of another process."""
        if self._lines:
            self._lines.update(snapshot)
        if snapshot.total:
            for task in self._progress.tasks if snapshot.phase not in self._bars else ():
                self._progress.update(
                    task.id, completed=task.total, note=" "
                )  # finished since the last snapshot
            self._move_bar(
                snapshot.phase, snapshot.done, snapshot.total, snapshot.waiting_text() or snapshot.note or " "
            )


@dataclass(frozen=True)
class ProgressSnapshot:
    """Progress of a run, as its process writes it into a file.

    Args:
        phase, done, total: as in :meth:`ProgressBar.update`; ``total`` is 0 before the first phase.
        note: the main metric so far.
        updated_at: time of the last step, in seconds since the epoch.
        waiting_for: nodes that have not responded for a while.
        phase_started_at, phase_start_count: time of the first update of the phase, and ``done`` at that time.
        run_info: ``name`` and method (``title``) of the run, and of its main metric the key (``metric``),
            title, ``unit`` and ``better`` ("higher" or "lower").
        error: why the run stopped.
        excluded: nodes without which the run continues.
    """

    phase: str = "starting"
    done: int = 0
    total: int = 0
    note: str = ""
    updated_at: float = 0.0
    waiting_for: tuple[str, ...] = ()
    phase_started_at: float = 0.0
    phase_start_count: int = 0
    run_info: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    excluded: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> ProgressSnapshot | None:
        """Read a snapshot from a file, or return None if there is none.

        Raises:
            RunFolderError: the file is not a snapshot.
        """
        try:
            return cls.parse(path.read_text(encoding="utf-8", errors="replace"), path)
        except FileNotFoundError:
            return None

    @classmethod
    def parse(cls, text: str, source: Path) -> ProgressSnapshot:
        """Parse the JSON of a snapshot, which may come from another machine.

        Raises:
            RunFolderError: the text is not a snapshot.
        """
        try:
            table = json.loads(text)
        except (ValueError, RecursionError):
            table = None
        if not isinstance(table, dict):
            raise RunFolderError(f"{source} is not a progress file")
        snapshot = read_received_dataclass(cls, table, source)
        done, total, first = (
            min(max(count, 0), MAX_COUNT)
            for count in (snapshot.done, snapshot.total, snapshot.phase_start_count)
        )
        phase, note = to_printable_line(snapshot.phase), to_printable_line(snapshot.note)
        return replace(snapshot, phase=phase, note=note, done=done, total=total, phase_start_count=first)

    def to_json(self) -> str:
        """Return the snapshot as JSON."""
        return json.dumps(asdict(self))

    def advanced(self, phase: str, done: int, total: int, note: str) -> ProgressSnapshot:
        """Return the snapshot after another step, of the same phase or a new one."""
        now = time.time()
        if phase == self.phase:
            return replace(self, done=done, total=total, note=note or self.note, updated_at=now)
        return replace(
            self,
            phase=phase,
            done=done,
            total=total,
            note=note,
            updated_at=now,
            phase_started_at=now,
            phase_start_count=done,
        )

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the end of the phase, or None if there is no estimate.

        >>> times = {"updated_at": 120.0, "phase_started_at": 100.0}
        >>> ProgressSnapshot("rounds", 30, 60, phase_start_count=10, **times).seconds_left
        30.0
        """
        steps, seconds = self.done - self.phase_start_count, self.updated_at - self.phase_started_at
        remaining = (
            seconds / steps * (self.total - self.done) if steps > 0 and 0 < seconds < MAX_COUNT else None
        )
        return None if remaining is None else max(remaining, 0.0)

    def waiting_text(self, now: float | None = None) -> str:
        """Describe the nodes that the run waits for; empty if there are none.

        Args:
            now: the current time; None: by the clock.
        """
        if not self.waiting_for:
            return ""
        seconds = (time.time() if now is None else now) - self.updated_at
        names = to_printable_line(", ".join(self.waiting_for))
        return f"waits for {names} for {format_seconds(max(seconds, 0.0))}"

    def excluded_text(self) -> str:
        """Describe the excluded nodes; empty if there are none."""
        return f"continues without {to_printable_line(', '.join(self.excluded))}" if self.excluded else ""

    def describe(self, now: float | None = None) -> str:
        """Describe the snapshot in one line.

        >>> waiting = ProgressSnapshot("distillation", 31, 400, updated_at=1000.0, waiting_for=("north",))
        >>> waiting.describe(1042.0)
        'distillation 31 of 400, waits for north for 42.0 s'
        >>> times = {"updated_at": 130.0, "phase_started_at": 100.0}
        >>> ProgressSnapshot("distillation", 300, 400, "accuracy 71.0 %", **times).describe()
        'distillation 300 of 400, accuracy 71.0 %, about 10.0 s left'
        >>> ProgressSnapshot("rounds", 3, 4, excluded=("north",)).describe()
        'rounds 3 of 4, continues without north'
        """
        parts = [f"{self.phase} {self.done} of {self.total}" if self.total else self.phase, self.note]
        if self.waiting_for:
            parts.append(self.waiting_text(now))
        elif self.seconds_left:
            parts.append(f"about {format_seconds(self.seconds_left)} left")
        parts.append(self.excluded_text())
        return ", ".join(part for part in parts if part.strip())


class ProgressLines:
    """Progress as lines of text: at the start and end of a phase, and at intervals in between.

    A thread prints the lines in between, so that a step of many minutes is not silent.

    Attributes:
        snapshot: the current progress.
    """

    MAX_SILENCE = 30.0  # seconds without a line

    def __init__(self, console: SafeConsole) -> None:
        self._console, self.snapshot = console, ProgressSnapshot(updated_at=time.time())
        self._printed = self._phase_start = time.monotonic()
        self._finished_phase, self._stopped = "", threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start printing lines at intervals."""
        self._stopped.clear()
        self._printed = time.monotonic()
        self._thread = threading.Thread(target=self._print_periodically, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop printing."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def update(self, snapshot: ProgressSnapshot) -> None:
        """Update the progress, and print a line if a phase starts or ends."""
        with self._lock:
            before, self.snapshot = self.snapshot.phase, snapshot
            if not snapshot.total:
                return
            if snapshot.phase != before:
                self._phase_start = (
                    time.monotonic()
                )  # by the clock of this machine, as the snapshot may come from another
            if snapshot.phase != before and snapshot.done < snapshot.total:
                self._print(snapshot.describe())
            elif snapshot.done >= snapshot.total and self._finished_phase != snapshot.phase:
                self._finished_phase = snapshot.phase
                self._print(
                    f"{snapshot.describe()}, took {format_seconds(time.monotonic() - self._phase_start)}"
                )

    def _print_periodically(self) -> None:
        while not self._stopped.wait(min(self.MAX_SILENCE, 1.0)):
            with self._lock:
                if time.monotonic() - self._printed >= self.MAX_SILENCE:
                    self._print(self.snapshot.describe())

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        self._printed = time.monotonic()


class ProgressFile(ProgressBar):
    """Progress written to a file, for other processes.

    Args:
        path: the file.
        enabled: show bars as well.
        on_update: called at the start of the run, at intervals, and when the run fails. It takes one percent
            of the time at most.
        interval: minimum seconds between two calls.
    """

    WRITE_INTERVAL = 0.5  # seconds between two writes
    MAX_TIME_SHARE = 0.01  # maximum share of time for calls of on_update

    def __init__(
        self,
        path: Path,
        enabled: bool = False,
        on_update: Callable[[ProgressSnapshot], object] = lambda note: None,
        interval: float = 5.0,
    ) -> None:
        super().__init__(enabled)
        self._path, self._on_update, self._interval = path, on_update, interval
        self._written = self._next = -math.inf
        self._snapshot, self._failed = ProgressSnapshot(updated_at=time.time()), False

    def __enter__(self) -> ProgressFile:
        super().__enter__()
        self._write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, Exception | KeyboardInterrupt):
            message = "unexpected error"
            if isinstance(error, FedstillError | OSError):
                message = to_printable_line(str(error), 2000)
            elif isinstance(error, KeyboardInterrupt):
                message = "interrupted; continue with --resume"
            self._snapshot, self._next = replace(self._snapshot, error=message), -math.inf
            self._write()

    def update(self, phase: str, done: int, total: int, note: str = "") -> None:
        """See :meth:`ProgressBar.update`."""
        super().update(phase, done, total, note)
        self._snapshot = self._snapshot.advanced(phase, done, total, note)
        if time.monotonic() - self._written >= self.WRITE_INTERVAL or done == total or note:
            self._write()

    def set_waiting(self, names: Sequence[str]) -> None:
        """See :meth:`ProgressBar.set_waiting`."""
        super().set_waiting(names)
        if tuple(names) != self._snapshot.waiting_for:
            self._snapshot = replace(self._snapshot, waiting_for=tuple(names))
            self._write()

    def set_excluded(self, names: Sequence[str]) -> None:
        """See :meth:`ProgressBar.set_excluded`."""
        super().set_excluded(names)
        if tuple(names) != self._snapshot.excluded:
            self._snapshot = replace(self._snapshot, excluded=tuple(names))
            self._write()

    def set_run_info(self, run_info: Mapping[str, str]) -> None:
        """See :meth:`ProgressBar.set_run_info`."""
        self._snapshot = replace(self._snapshot, run_info=dict(run_info))

    def show_snapshot(self, snapshot: ProgressSnapshot) -> None:
        """See :meth:`ProgressBar.show_snapshot`. The snapshot is written to this file, too."""
        super().show_snapshot(snapshot)
        if snapshot != self._snapshot:
            self._snapshot = snapshot
            self._write()

    def _write(self) -> None:
        write_text(self._path, self._snapshot.to_json())
        self._written = start = time.monotonic()
        if start >= self._next:
            try:
                self._on_update(self._snapshot)
            except Exception as error:  # a failing callback must not stop the run
                if not self._failed:
                    logger.warning("progress callback failed: %s: %s", type(error).__name__, error)
                self._failed = True
            seconds = time.monotonic() - start
            self._next = start + max(self._interval, seconds / self.MAX_TIME_SHARE)


@contextlib.contextmanager
def follow_file(path: Path, bars: ProgressBar) -> Iterator[None]:
    """Show the progress that another process writes to a file, while the block runs.

    Args:
        path: the file, which need not exist yet.
        bars: shows the progress.
    """
    stopped = threading.Event()

    def show_repeatedly() -> None:
        while not stopped.wait(ProgressFile.WRITE_INTERVAL):
            with contextlib.suppress(FedstillError):
                if (snapshot := ProgressSnapshot.read(path)) is not None:
                    bars.show_snapshot(snapshot)

    thread = threading.Thread(target=show_repeatedly, daemon=True)
    with bars:
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
