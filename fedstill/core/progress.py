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

from fedstill.core.config_tables import load
from fedstill.core.console import SafeConsole
from fedstill.core.errors import FedstillError, RunFolderError
from fedstill.core.run_writer import write_text
from fedstill.core.text_format import clip, human_seconds

logger = logging.getLogger("fedstill.server")

MOST = 10**12  # steps, and seconds, that a note may count: it may come from another machine
PROGRESS = "progress.json"  # in the folder of a run that is not finished: how far it is


class Bars:
    """Progress on standard error: bars on a terminal, elsewhere (a file, a pipe, a notebook) lines.

    Args:
        wanted: show it; else nothing is.
    """

    def __init__(self, wanted: bool) -> None:
        console = SafeConsole(stderr=True, highlight=False)
        self._wanted, self._lines = wanted, None if not wanted or console.is_terminal else Lines(console)
        self._progress = Progress(
            TextColumn("{task.description:<18}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not (wanted and console.is_terminal),
        )
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
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

    def say(self, text: str) -> None:
        """Print a line of its own, above the bars."""
        if self._wanted:
            self._progress.console.print(Text(text), soft_wrap=True)

    def show(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Move a phase's bar; it appears when first shown, and keeps its note until the next one."""
        self._move(phase, done, total, note)
        if self._lines:
            self._lines.take(self._lines.last.moved(phase, done, total, note))

    def _move(self, phase: str, done: int, total: int, note: str) -> None:
        if phase not in self._bars:
            self._bars[phase] = self._progress.add_task(phase, total=total, note="")
        if note:
            self._progress.update(self._bars[phase], note=note)
        self._progress.update(self._bars[phase], completed=done)

    def wait_for(self, names: Sequence[str]) -> None:
        """Say which nodes have not answered yet; none is that all have."""
        if self._lines:
            self._lines.last = replace(self._lines.last, waits_for=tuple(names))

    def go_without(self, names: Sequence[str]) -> None:
        """Say which nodes are left out; none is that all take part."""
        if self._lines:
            self._lines.last = replace(self._lines.last, without=tuple(names))

    def describe(self, about: Mapping[str, str]) -> None:
        """Say what the run is, for whoever reads its notes: see :class:`Note`."""

    def follow(self, noted: Note) -> None:
        """Show what another process has noted."""
        if self._lines:
            self._lines.take(noted)
        if noted.total:
            for task in self._progress.tasks if noted.phase not in self._bars else ():
                self._progress.update(task.id, completed=task.total, note=" ")  # done since the last look
            self._move(noted.phase, noted.done, noted.total, noted.waiting() or noted.note or " ")


@dataclass(frozen=True)
class Note:
    """How far a run is, as the process at work on it notes it.

    Args:
        phase, done, total: as bars show them; before the first of them the total is 0.
        note: the main figure so far.
        since: seconds of the clock when the last of these was done.
        waits_for: nodes that have not answered for a while.
        began, first: seconds of the clock, and what was done by then, when the phase was first seen.
        about: the run's ``name`` and method (``title``), and its main figure: ``metric`` is its key,
            ``metric`` its title, ``unit``, ``better`` "higher" or "lower".
        error: why it stopped.
        without: nodes that are left out, and the run goes on.
    """

    phase: str = "starting"
    done: int = 0
    total: int = 0
    note: str = ""
    since: float = 0.0
    waits_for: tuple[str, ...] = ()
    began: float = 0.0
    first: int = 0
    about: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    without: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Note | None:
        """What stands in a file; None where nothing has been noted.

        Raises:
            RunFolderError: the file holds something else.
        """
        try:
            return cls.parse(path.read_text(encoding="utf-8", errors="replace"), path)
        except FileNotFoundError:
            return None

    @classmethod
    def parse(cls, text: str, source: Path) -> Note:
        """From its text, which may be another machine's; :class:`RunFolderError` where it is none."""
        try:
            table = json.loads(text)
        except (ValueError, RecursionError):
            table = None
        if not isinstance(table, dict):
            raise RunFolderError(f"{source} does not hold how far a run is")
        found = load(cls, table, source)
        done, total, first = (min(max(count, 0), MOST) for count in (found.done, found.total, found.first))
        phase, note = clip(found.phase), clip(found.note)
        return replace(found, phase=phase, note=note, done=done, total=total, first=first)

    def text(self) -> str:
        """As a file holds it."""
        return json.dumps(asdict(self))

    def moved(self, phase: str, done: int, total: int, note: str) -> Note:
        """It a little later, in this phase or in a new one."""
        at = time.time()
        if phase == self.phase:
            return replace(self, done=done, total=total, note=note or self.note, since=at)
        return replace(self, phase=phase, done=done, total=total, note=note, since=at, began=at, first=done)

    @property
    def left(self) -> float | None:
        """Seconds until the phase is done at its pace so far; None where nothing tells.

        >>> Note("rounds", 30, 60, since=120.0, began=100.0, first=10).left
        30.0
        """
        came, took = self.done - self.first, self.since - self.began
        left = took / came * (self.total - self.done) if came > 0 and 0 < took < MOST else None
        return None if left is None else max(left, 0.0)

    def waiting(self, now: float | None = None) -> str:
        """For whom it waits, in words; empty where it does not."""
        if not self.waits_for:
            return ""
        seconds = (time.time() if now is None else now) - self.since
        return f"waits for {clip(', '.join(self.waits_for))} for {human_seconds(max(seconds, 0.0))}"

    def missing(self) -> str:
        """Who is left out, in words; empty where nobody is."""
        return f"goes on without {clip(', '.join(self.without))}" if self.without else ""

    def words(self, now: float | None = None) -> str:
        """It in words.

        >>> Note("distillation", 31, 400, since=1000.0, waits_for=("north",)).words(1042.0)
        'distillation 31 of 400, waits for north for 42.0 s'
        >>> Note("distillation", 300, 400, "accuracy 71.0 %", since=130.0, began=100.0).words()
        'distillation 300 of 400, accuracy 71.0 %, about 10.0 s left'
        >>> Note("rounds", 3, 4, without=("north",)).words()
        'rounds 3 of 4, goes on without north'
        """
        told = [f"{self.phase} {self.done} of {self.total}" if self.total else self.phase, self.note]
        if self.waits_for:
            told.append(self.waiting(now))
        elif self.left:
            told.append(f"about {human_seconds(self.left)} left")
        told.append(self.missing())
        return ", ".join(part for part in told if part.strip())


class Lines:
    """Progress as lines of text: one as a phase begins, one as it ends, and one now and then between.

    The last come from a thread, so that a step of many minutes is no silence.

    Attributes:
        last: how far the run is.
    """

    EVERY = 30.0  # seconds without a line, at most

    def __init__(self, console: SafeConsole) -> None:
        self._console, self.last = console, Note(since=time.time())
        self._printed = self._began = time.monotonic()
        self._ended, self._over = "", threading.Event()
        self._thread: threading.Thread | None = None
        self._alone = threading.Lock()

    def start(self) -> None:
        """Print a line now and then from here on."""
        self._over.clear()
        self._printed = time.monotonic()
        self._thread = threading.Thread(target=self._now_and_then, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Print no line any more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def take(self, noted: Note) -> None:
        """Take what has been done, and print it where a phase begins or ends."""
        with self._alone:
            before, self.last = self.last.phase, noted
            if not noted.total:
                return
            if noted.phase != before:
                self._began = time.monotonic()  # by this machine's clock: a note may come from another
            if noted.phase != before and noted.done < noted.total:
                self._print(noted.words())
            elif noted.done >= noted.total and self._ended != noted.phase:
                self._ended = noted.phase
                self._print(f"{noted.words()}, took {human_seconds(time.monotonic() - self._began)}")

    def _now_and_then(self) -> None:
        while not self._over.wait(min(self.EVERY, 1.0)):
            with self._alone:
                if time.monotonic() - self._printed >= self.EVERY:
                    self._print(self.last.words())

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        self._printed = time.monotonic()


class Noted(Bars):
    """Progress written into a file, for whoever watches the run from elsewhere.

    Args:
        wanted: show bars as well.
        then: is called when the run begins, now and then as it goes on, and when it stops before its end;
            so rarely that it takes a hundredth of the time at most.
        pace: seconds between two such calls, and more where a call takes long.
    """

    EVERY = 0.5  # seconds between two writings
    SHARE = 0.01  # of the time, that calls take at most

    def __init__(
        self,
        path: Path,
        wanted: bool = False,
        then: Callable[[Note], object] = lambda note: None,
        pace: float = 5.0,
    ) -> None:
        super().__init__(wanted)
        self._path, self._then, self._pace = path, then, pace
        self._written = self._next = -math.inf
        self._last, self._failed = Note(since=time.time()), False

    def __enter__(self) -> Noted:
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
                told = clip(str(error), 2000)
            elif isinstance(error, KeyboardInterrupt):
                told = "it was interrupted, and goes on with --resume"
            self._last, self._next = replace(self._last, error=told), -math.inf
            self._write()

    def show(self, phase: str, done: int, total: int, note: str = "") -> None:
        """See :class:`Bars`."""
        super().show(phase, done, total, note)
        self._last = self._last.moved(phase, done, total, note)
        if time.monotonic() - self._written >= self.EVERY or done == total or note:
            self._write()

    def wait_for(self, names: Sequence[str]) -> None:
        """See :class:`Bars`."""
        super().wait_for(names)
        if tuple(names) != self._last.waits_for:
            self._last = replace(self._last, waits_for=tuple(names))
            self._write()

    def go_without(self, names: Sequence[str]) -> None:
        """See :class:`Bars`."""
        super().go_without(names)
        if tuple(names) != self._last.without:
            self._last = replace(self._last, without=tuple(names))
            self._write()

    def describe(self, about: Mapping[str, str]) -> None:
        """See :class:`Bars`."""
        self._last = replace(self._last, about=dict(about))

    def follow(self, noted: Note) -> None:
        """See :class:`Bars`; it is noted here as it is there."""
        super().follow(noted)
        if noted != self._last:
            self._last = noted
            self._write()

    def _write(self) -> None:
        write_text(self._path, self._last.text())
        self._written = start = time.monotonic()
        if start >= self._next:
            try:
                self._then(self._last)
            except Exception as error:  # whatever is wrong with a report, the run goes on
                if not self._failed:
                    logger.warning("what shows how far the run is fails: %s: %s", type(error).__name__, error)
                self._failed = True
            took = time.monotonic() - start
            self._next = start + max(self._pace, took / self.SHARE)


@contextlib.contextmanager
def following(path: Path, bars: Bars) -> Iterator[None]:
    """Show what another process notes in a file, as long as the block lasts.

    Args:
        path: of the file; it need not exist yet.
    """
    over = threading.Event()

    def follow() -> None:
        while not over.wait(Noted.EVERY):
            with contextlib.suppress(FedstillError):
                if (noted := Note.read(path)) is not None:
                    bars.follow(noted)

    thread = threading.Thread(target=follow, daemon=True)
    with bars:
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
