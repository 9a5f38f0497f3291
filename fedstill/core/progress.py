"""What a person sees while a run goes on: one bar a phase, time left, the main figure so far."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


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


class Noted(Bars):
    """Progress written into a file, for whoever started this process and watches it.

    Args:
        path: of the file.
    """

    EVERY = 0.5  # seconds

    def __init__(self, path: Path) -> None:
        super().__init__(False)
        self._path, self._written = path, -self.EVERY

    def show(self, phase: str, done: int, total: int, note: str = "") -> None:
        """See :class:`Bars`."""
        now = time.monotonic()
        if now - self._written >= self.EVERY or done == total or note:
            part = self._path.with_name(self._path.name + ".part")
            part.write_text(json.dumps([phase, done, total, note]), encoding="utf-8")
            part.replace(self._path)
            self._written = now


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
                if path.exists():
                    bars.show(*json.loads(path.read_text(encoding="utf-8")))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
