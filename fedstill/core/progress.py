"""Progress of a run: one bar a phase, or lines, with the time left and the main metric so far."""

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

from fedstill.core.config_tables import load_record
from fedstill.core.console import SafeConsole
from fedstill.core.errors import FedstillError, RunFolderError
from fedstill.core.run_writer import write_text
from fedstill.core.text_format import clip_text, format_seconds

logger = logging.getLogger("fedstill.server")

MAX_COUNT = 10**12  # steps, and seconds, that a note may count: it may come from another machine
PROGRESS_FILE = "progress.json"  # in the folder of a run that is not finished: how far it is


class ProgressBar:
    """Progress on standard error: bars on a terminal, elsewhere (a file, a pipe, a notebook) lines.

    Args:
        enabled: show it; else nothing is.
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
        """Print a line of its own, above the bars."""
        if self._enabled:
            self._progress.console.print(Text(text), soft_wrap=True)

    def update(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Move a phase's bar; it appears when first shown, and keeps its note until the next one."""
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
        """Say which nodes have not answered yet; none is that all have."""
        if self._lines:
            self._lines.snapshot = replace(self._lines.snapshot, waiting_for=tuple(names))

    def set_excluded(self, names: Sequence[str]) -> None:
        """Say which nodes are left out; none is that all take part."""
        if self._lines:
            self._lines.snapshot = replace(self._lines.snapshot, excluded=tuple(names))

    def set_run_info(self, run_info: Mapping[str, str]) -> None:
        """Say what the run is, for whoever reads its notes: see :class:`ProgressSnapshot`."""

    def show_snapshot(self, snapshot: ProgressSnapshot) -> None:
        """Show what another process has noted."""
        if self._lines:
            self._lines.update(snapshot)
        if snapshot.total:
            for task in self._progress.tasks if snapshot.phase not in self._bars else ():
                self._progress.update(task.id, completed=task.total, note=" ")  # done since the last look
            self._move_bar(
                snapshot.phase, snapshot.done, snapshot.total, snapshot.waiting_text() or snapshot.note or " "
            )


@dataclass(frozen=True)
class ProgressSnapshot:
    """How far a run is, as the process at work on it notes it.

    Args:
        phase, done, total: as bars show them; before the first of them the total is 0.
        note: the main figure so far.
        updated_at: seconds of the clock when the last of these was done.
        waiting_for: nodes that have not answered for a while.
        phase_started_at, first: seconds of the clock, and what was done by then, when the phase was first seen.
        run_info: the run's ``name`` and method (``title``), and its main figure: ``metric`` is its key,
            ``metric`` its title, ``unit``, ``better`` "higher" or "lower".
        error: why it stopped.
        excluded: nodes that are left out, and the run goes on.
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
        """What stands in a file; None where nothing has been noted.

        Raises:
            RunFolderError: the file holds something else.
        """
        try:
            return cls.parse(path.read_text(encoding="utf-8", errors="replace"), path)
        except FileNotFoundError:
            return None

    @classmethod
    def parse(cls, text: str, source: Path) -> ProgressSnapshot:
        """From its text, which may be another machine's; :class:`RunFolderError` where it is none."""
        try:
            table = json.loads(text)
        except (ValueError, RecursionError):
            table = None
        if not isinstance(table, dict):
            raise RunFolderError(f"{source} does not hold how far a run is")
        found = load_record(cls, table, source)
        done, total, first = (
            min(max(count, 0), MAX_COUNT) for count in (found.done, found.total, found.phase_start_count)
        )
        phase, note = clip_text(found.phase), clip_text(found.note)
        return replace(found, phase=phase, note=note, done=done, total=total, phase_start_count=first)

    def to_json(self) -> str:
        """As a file holds it."""
        return json.dumps(asdict(self))

    def advanced(self, phase: str, done: int, total: int, note: str) -> ProgressSnapshot:
        """It a little later, in this phase or in a new one."""
        at = time.time()
        if phase == self.phase:
            return replace(self, done=done, total=total, note=note or self.note, updated_at=at)
        return replace(
            self,
            phase=phase,
            done=done,
            total=total,
            note=note,
            updated_at=at,
            phase_started_at=at,
            phase_start_count=done,
        )

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the phase is done at its pace so far; None where nothing tells.

        >>> ProgressSnapshot("rounds", 30, 60, updated_at=120.0, phase_started_at=100.0, phase_start_count=10).seconds_left
        30.0
        """
        came, took = self.done - self.phase_start_count, self.updated_at - self.phase_started_at
        left = took / came * (self.total - self.done) if came > 0 and 0 < took < MAX_COUNT else None
        return None if left is None else max(left, 0.0)

    def waiting_text(self, now: float | None = None) -> str:
        """For whom it waits, in words; empty where it does not."""
        if not self.waiting_for:
            return ""
        seconds = (time.time() if now is None else now) - self.updated_at
        return f"waits for {clip_text(', '.join(self.waiting_for))} for {format_seconds(max(seconds, 0.0))}"

    def excluded_text(self) -> str:
        """Who is left out, in words; empty where nobody is."""
        return f"goes on without {clip_text(', '.join(self.excluded))}" if self.excluded else ""

    def describe(self, now: float | None = None) -> str:
        """It in words.

        >>> ProgressSnapshot("distillation", 31, 400, updated_at=1000.0, waiting_for=("north",)).describe(1042.0)
        'distillation 31 of 400, waits for north for 42.0 s'
        >>> ProgressSnapshot("distillation", 300, 400, "accuracy 71.0 %", updated_at=130.0, phase_started_at=100.0).describe()
        'distillation 300 of 400, accuracy 71.0 %, about 10.0 s left'
        >>> ProgressSnapshot("rounds", 3, 4, excluded=("north",)).describe()
        'rounds 3 of 4, goes on without north'
        """
        told = [f"{self.phase} {self.done} of {self.total}" if self.total else self.phase, self.note]
        if self.waiting_for:
            told.append(self.waiting_text(now))
        elif self.seconds_left:
            told.append(f"about {format_seconds(self.seconds_left)} left")
        told.append(self.excluded_text())
        return ", ".join(part for part in told if part.strip())


class ProgressLines:
    """Progress as lines of text: one as a phase begins, one as it ends, and one now and then between.

    The last come from a thread, so that a step of many minutes is no silence.

    Attributes:
        snapshot: how far the run is.
    """

    MAX_SILENCE = 30.0  # seconds without a line, at most

    def __init__(self, console: SafeConsole) -> None:
        self._console, self.snapshot = console, ProgressSnapshot(updated_at=time.time())
        self._printed = self._phase_start = time.monotonic()
        self._finished_phase, self._stopped = "", threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Print a line now and then from here on."""
        self._stopped.clear()
        self._printed = time.monotonic()
        self._thread = threading.Thread(target=self._print_periodically, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Print no line any more."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def update(self, snapshot: ProgressSnapshot) -> None:
        """Take what has been done, and print it where a phase begins or ends."""
        with self._lock:
            before, self.snapshot = self.snapshot.phase, snapshot
            if not snapshot.total:
                return
            if snapshot.phase != before:
                self._phase_start = time.monotonic()  # by this machine's clock: a note may come from another
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
    """Progress written into a file, for whoever watches the run from elsewhere.

    Args:
        enabled: show bars as well.
        on_update: is called when the run begins, now and then as it goes on, and when it stops before its end;
            so rarely that it takes a hundredth of the time at most.
        interval: seconds between two such calls, and more where a call takes long.
    """

    WRITE_INTERVAL = 0.5  # seconds between two writings
    MAX_TIME_SHARE = 0.01  # of the time, that calls take at most

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
            told = "it failed where it should not"
            if isinstance(error, FedstillError | OSError):
                told = clip_text(str(error), 2000)
            elif isinstance(error, KeyboardInterrupt):
                told = "it was interrupted, and goes on with --resume"
            self._snapshot, self._next = replace(self._snapshot, error=told), -math.inf
            self._write()

    def update(self, phase: str, done: int, total: int, note: str = "") -> None:
        """See :class:`ProgressBar`."""
        super().update(phase, done, total, note)
        self._snapshot = self._snapshot.advanced(phase, done, total, note)
        if time.monotonic() - self._written >= self.WRITE_INTERVAL or done == total or note:
            self._write()

    def set_waiting(self, names: Sequence[str]) -> None:
        """See :class:`ProgressBar`."""
        super().set_waiting(names)
        if tuple(names) != self._snapshot.waiting_for:
            self._snapshot = replace(self._snapshot, waiting_for=tuple(names))
            self._write()

    def set_excluded(self, names: Sequence[str]) -> None:
        """See :class:`ProgressBar`."""
        super().set_excluded(names)
        if tuple(names) != self._snapshot.excluded:
            self._snapshot = replace(self._snapshot, excluded=tuple(names))
            self._write()

    def set_run_info(self, run_info: Mapping[str, str]) -> None:
        """See :class:`ProgressBar`."""
        self._snapshot = replace(self._snapshot, run_info=dict(run_info))

    def show_snapshot(self, snapshot: ProgressSnapshot) -> None:
        """See :class:`ProgressBar`; it is noted here as it is there."""
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
            except Exception as error:  # whatever is wrong with a report, the run goes on
                if not self._failed:
                    logger.warning("what shows how far the run is fails: %s: %s", type(error).__name__, error)
                self._failed = True
            took = time.monotonic() - start
            self._next = start + max(self._interval, took / self.MAX_TIME_SHARE)


@contextlib.contextmanager
def follow_file(path: Path, bars: ProgressBar) -> Iterator[None]:
    """Show what another process notes in a file, as long as the block lasts.

    Args:
        path: of the file; it need not exist yet.
    """
    over = threading.Event()

    def follow() -> None:
        while not over.wait(ProgressFile.WRITE_INTERVAL):
            with contextlib.suppress(FedstillError):
                if (noted := ProgressSnapshot.read(path)) is not None:
                    bars.show_snapshot(noted)

    thread = threading.Thread(target=follow, daemon=True)
    with bars:
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
