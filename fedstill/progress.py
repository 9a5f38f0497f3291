"""What a person sees while a run goes on: one bar a phase, time left, the accuracy so far."""

from __future__ import annotations

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
