"""A run that is not finished: how far it is and what it reaches so far, from the files that it writes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markupsafe import Markup

from fedstill.core.progress import PROGRESS_FILE, ProgressSnapshot
from fedstill.core.text_format import format_percent, format_seconds
from fedstill.report import live_page
from fedstill.report.bars import bar, sparkline
from fedstill.report.communication_time import PARTS
from fedstill.report.live_page import Panel, Section
from fedstill.report.run_figures import finite_points
from fedstill.report.run_files import MetricsLog
from fedstill.report.table_formats import Fact

MOST = 24  # small plots of a kind


@dataclass(frozen=True)
class RunProgress:
    """An unfinished run: its folder, and how far it is."""

    folder: Path
    note: ProgressSnapshot

    @classmethod
    def read(cls, folder: Path) -> RunProgress:
        """The run in a folder; :class:`RunFolderError` where a file is spoilt."""
        return cls(folder, ProgressSnapshot.read(folder / PROGRESS_FILE) or ProgressSnapshot())

    @cached_property
    def metrics(self) -> MetricsLog:
        """What was measured by its last saved state."""
        return MetricsLog.read(self.folder / "metrics.jsonl", self.note.run_info.get("metric", "accuracy"))

    @property
    def bar(self) -> Markup:
        """How far the phase is that it is in."""
        return bar(("bar student", 100 * self.note.done / self.note.total)) if self.note.total else bar()

    @property
    def done(self) -> str:
        """The same in words."""
        note = self.note
        return f"{note.phase} {note.done:,} of {note.total:,}" if note.total else note.phase

    @property
    def left(self) -> str | None:
        """The time that the phase still takes, in words; None where nothing tells."""
        return None if self.note.seconds_left is None else f"about {format_seconds(self.note.seconds_left)}"

    @property
    def reached(self) -> str | None:
        """The main figure so far, in words."""
        told, newest = self.metrics.central, self.note.note.strip()
        if newest:  # what was measured is in its file with the next saved state
            return newest.removeprefix(f"{self.note.run_info.get('metric')} ").replace(" %", "%")
        return self._told(told[max(told)]) if told else None

    @property
    def message(self) -> str | None:
        """What a message to the nodes costs, in words; None where they are in this process."""
        each = self.metrics.link.get("seconds_each")
        return None if each is None else f"{1000 * each:.0f} ms" if each < 1 else format_seconds(each)

    def facts(self) -> list[Fact]:
        """What stands on top of its page."""
        note, told = self.note, self.metrics.central
        choose = min if note.run_info.get("better") == "lower" else max
        best = "" if len(told) < 2 else f"best so far {self._told(choose(told.values()))}"
        silent = format_seconds(max(time.time() - note.updated_at, 0.0))
        seen = note.waiting_text() or f"last sign of work {silent} before this"
        seen = "; ".join(filter(None, (seen, note.excluded_text())))
        facts = [
            Fact(note.phase.capitalize(), f"{note.done:,} of {note.total:,}" if note.total else "0", seen),
            Fact(f"{note.run_info.get('metric_title', 'Main metric')} so far", self.reached, best),
            Fact("Time left", self.left, "of this phase, at its pace so far"),
        ]
        if self.message is not None:
            link = self.metrics.link
            parts = [f"{name} {format_seconds(link[key])}" for key, name, _ in PARTS if link.get(key)]
            facts.append(Fact("A round of messages", self.message, f"in all: {', '.join(parts)}"))
        return facts

    def sections(self) -> list[Section]:
        """What stands below."""
        metrics, metric = self.metrics, self.note.run_info.get("metric_title", "Main figure")
        course = self._panels({metric: metrics.central, f"{metric}, nodes' own": metrics.own})
        local = {**metrics.local, **({"centralized": metrics.centralized} if metrics.centralized else {})}
        about = "From left to right: steps or rounds; each line from its lowest value to its highest."
        none = "Nothing of this is here yet."
        return [
            Section(f"{metric} on the test data", about, panels=course, empty=none),
            Section("Losses at the server", about, panels=self._panels(metrics.losses), empty=none),
            *([Section("Losses of local training", about, panels=self._panels(local))] if local else []),
        ]

    def _panels(self, series: Mapping[str, Mapping[float, float | None]]) -> list[Panel]:
        lines = {name: [value for _, value in finite_points(values)] for name, values in series.items()}
        return [
            Panel(name, f"{line[-1]:.4g}", sparkline(line) if len(line) > 1 else None)
            for name, line in list(lines.items())[:MOST]
            if line
        ]

    def _told(self, value: float) -> str:
        unit = self.note.run_info.get("unit", "%")
        return format_percent(value) if unit == "%" else f"{value:.4g} {unit}".strip()


def page(folder: Path, served: str = "") -> str:
    """The page of a run that is not finished."""
    run = RunProgress.read(folder)
    title, error = run.note.run_info.get("title", folder.name), run.note.error
    lede = f"It stopped: {error}" if error else "It goes on: all figures are of what is done so far."
    eyebrow = f"fedstill \u00b7 {folder.name} \u00b7 not finished"
    return live_page.html(title, eyebrow, lede, run.facts(), run.sections(), served, back=bool(served))
