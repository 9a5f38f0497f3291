"""What a person sees while a run goes on: one bar a phase, time left, the main figure so far."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedstill.core.text_format import human_seconds


class Bars:
    """Progress bars on the terminal's standard error; silent where that is no terminal, or if not wanted.

    Args:
        wanted: show them at all.
    """

    def __init__(self, wanted: bool) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not (wanted and console.is_terminal),
        )
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Move a phase's bar; it appears when first shown, and keeps its note until the next one."""
        if phase not in self._bars:
            self._bars[phase] = self._progress.add_task(phase, total=total, note="")
        if note:
            self._progress.update(self._bars[phase], note=note)
        self._progress.update(self._bars[phase], completed=done)

    def wait_for(self, names: Sequence[str]) -> None:
        """Say which nodes have not answered yet; none is that all have."""


@dataclass(frozen=True)
class Note:
    """How far a run is, as the process at work on it notes it.

    Args:
        phase, done, total: as bars show them.
        note: the main figure so far.
        since: seconds of the clock when the last of these was done.
        waits_for: nodes that have not answered for a while.
    """

    phase: str
    done: int
    total: int
    note: str = ""
    since: float = 0.0
    waits_for: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Note | None:
        """What stands in a file; None where nothing has been noted."""
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return cls(**{**table, "waits_for": tuple(table["waits_for"])})

    def words(self, now: float | None = None) -> str:
        """It in words.

        >>> Note("distillation", 31, 400, since=1000.0, waits_for=("north",)).words(1042.0)
        'distillation 31 of 400, waits for north for 42.0 s'
        """
        told = f"{self.phase} {self.done} of {self.total}"
        if not self.waits_for:
            return told
        seconds = (time.time() if now is None else now) - self.since
        return f"{told}, waits for {', '.join(self.waits_for)} for {human_seconds(seconds)}"


class Noted(Bars):
    """Progress written into a file, for whoever started this process and watches it.

    Args:
        path: of the file.
    """

    EVERY = 0.5  # seconds

    def __init__(self, path: Path) -> None:
        super().__init__(False)
        self._path, self._written = path, -self.EVERY
        self._last = Note("starting", 0, 1, since=time.time())

    def show(self, phase: str, done: int, total: int, note: str = "") -> None:
        """See :class:`Bars`."""
        kept = note or (self._last.note if phase == self._last.phase else "")
        self._last = Note(phase, done, total, kept, time.time(), self._last.waits_for)
        now = time.monotonic()
        if now - self._written >= self.EVERY or done == total or note:
            self._write()
            self._written = now

    def wait_for(self, names: Sequence[str]) -> None:
        """See :class:`Bars`."""
        if tuple(names) != self._last.waits_for:
            self._last = replace(self._last, waits_for=tuple(names))
            self._write()

    def _write(self) -> None:
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(asdict(self._last)), encoding="utf-8")
        part.replace(self._path)


@contextlib.contextmanager
def following(path: Path, wanted: bool) -> Iterator[None]:
    """Show what another process notes in a file, as long as the block lasts.

    Args:
        path: of the file; it need not exist yet.
        wanted: show it at all.
    """
    over = threading.Event()

    def follow() -> None:
        with Bars(wanted) as bars:
            while not over.wait(Noted.EVERY):
                if (noted := Note.read(path)) is not None:
                    waits = noted.words().partition(", ")[2]
                    bars.show(noted.phase, noted.done, noted.total, waits or noted.note or " ")

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
