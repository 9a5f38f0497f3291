"""Pages that refresh themselves: their layout, and the progress of an unfinished run.

A page has sections with tables, small plots and lists of facts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path

from markupsafe import Markup

from fedstill.core.progress import PROGRESS_FILE, ProgressSnapshot
from fedstill.core.text_format import format_percent, format_seconds
from fedstill.report.figures import finite_points
from fedstill.report.records import MetricsLog
from fedstill.report.run_tables import PARTS
from fedstill.report.tables import Fact, Table, bar, sparkline, template_environment

REFRESH_SECONDS = 5  # of a served page; a page in a file reloads every 30 seconds


@dataclass(frozen=True)
class Panel:
    """Small plot with its name and its latest value; the plot is None if there is only one value."""

    name: str
    last: str
    plot: Markup | None


@dataclass(frozen=True)
class Section:
    """One section of a page; empty parts are not shown.

    Args:
        title: its heading.
        about: introduction.
        error: message in a box before the content.
        table: rows.
        panels: small plots.
        facts: groups of facts: heading, facts, and a command to copy.
        empty: text if the section has neither table, panels nor facts.
    """

    title: str
    about: str = ""
    error: str | None = None
    table: Table | None = None
    panels: Sequence[Panel] = ()
    facts: Sequence[tuple[str, Sequence[Fact], str]] = ()
    empty: str = ""


def render_live_page(
    title: str,
    eyebrow: str,
    lead: str,
    tiles: Sequence[Fact],
    sections: Sequence[Section],
    nonce: str,
    back: bool = False,
) -> str:
    """Return the HTML of a page.

    Args:
        title: its heading.
        eyebrow: line above the heading.
        lead: sentence below the heading.
        tiles: key facts at the top.
        sections: sections below.
        nonce: nonce of the refresh script of a served page; empty for a file, which the browser reloads.
        back: whether to link to the first page.
    """
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    content = {"title": title, "eyebrow": eyebrow, "lead": lead, "tiles": tiles, "sections": sections}
    return (
        template_environment()
        .get_template("live.html.j2")
        .render(content, nonce=nonce, back=back, now=now, refresh_seconds=REFRESH_SECONDS)
    )


def render_error_page(text: str, nonce: str) -> str:
    """Return a page with an error message."""
    return render_live_page("This page cannot be shown", "fedstill", text, [], [], nonce)


# --- progress of an unfinished run ----------------------------------------------------------------------


MAX_PANELS = 24  # small plots per section


@dataclass(frozen=True)
class RunProgress:
    """Folder and progress of an unfinished run."""

    folder: Path
    note: ProgressSnapshot

    @classmethod
    def read(cls, folder: Path) -> RunProgress:
        """Read the progress of the run in a folder.

        Raises:
            RunFolderError: the file is broken.
        """
        return cls(folder, ProgressSnapshot.read(folder / PROGRESS_FILE) or ProgressSnapshot())

    @cached_property
    def metrics(self) -> MetricsLog:
        """Metrics up to the last saved state."""
        return MetricsLog.read(self.folder / "metrics.jsonl", self.note.run_info.get("metric", "accuracy"))

    @property
    def phase_bar(self) -> Markup:
        """Progress of the current phase as a bar."""
        return bar(("bar student", 100 * self.note.done / self.note.total)) if self.note.total else bar()

    @property
    def phase_text(self) -> str:
        """Progress of the current phase in words."""
        note = self.note
        return f"{note.phase} {note.done:,} of {note.total:,}" if note.total else note.phase

    @property
    def time_left(self) -> str | None:
        """Estimated time left in the phase, in words; None if unknown."""
        return None if self.note.seconds_left is None else f"about {format_seconds(self.note.seconds_left)}"

    @property
    def metric_text(self) -> str | None:
        """Latest value of the main metric, in words."""
        values, newest = self.metrics.main_model, self.note.note.strip()
        if newest:  # measured after the last saved state, so not yet in the metrics file
            return newest.removeprefix(f"{self.note.run_info.get('metric')} ").replace(" %", "%")
        return self._format(values[max(values)]) if values else None

    @property
    def message_round_time(self) -> str | None:
        """Time of a message round, in words; None if the nodes run in this process."""
        seconds = self.metrics.link.get("seconds_each")
        if seconds is None:
            return None
        return f"{1000 * seconds:.0f} ms" if seconds < 1 else format_seconds(seconds)

    def tiles(self) -> list[Fact]:
        """Return the key facts at the top of the page."""
        note, values = self.note, self.metrics.main_model
        best_of = min if note.run_info.get("better") == "lower" else max
        best = "" if len(values) < 2 else f"best so far {self._format(best_of(values.values()))}"
        idle = format_seconds(max(time.time() - note.updated_at, 0.0))
        activity = note.waiting_text() or f"last progress {idle} before this page was written"
        activity = "; ".join(filter(None, (activity, note.excluded_text())))
        facts = [
            Fact(
                note.phase.capitalize(), f"{note.done:,} of {note.total:,}" if note.total else "0", activity
            ),
            Fact(f"{note.run_info.get('metric_title', 'Main metric')} so far", self.metric_text, best),
            Fact("Time left", self.time_left, "of this phase, at its current speed"),
        ]
        if self.message_round_time is not None:
            link = self.metrics.link
            parts = [f"{name} {format_seconds(link[key])}" for key, name, _ in PARTS if link.get(key)]
            facts.append(Fact("Message round", self.message_round_time, f"in total: {', '.join(parts)}"))
        return facts

    def sections(self) -> list[Section]:
        """Return the sections of the page: main metric, losses at the server, losses of local training."""
        log, metric = self.metrics, self.note.run_info.get("metric_title", "Main metric")
        metric_panels = self._panels({metric: log.main_model, f"{metric} of local models": log.local_models})
        centralized = {"centralized": log.centralized_losses} if log.centralized_losses else {}
        local = {**log.local_losses, **centralized}
        about = "Horizontal: steps or rounds. Vertical: from each line's minimum to its maximum."
        empty = "No values yet."
        return [
            Section(f"{metric} on the test data", about, panels=metric_panels, empty=empty),
            Section("Losses at the server", about, panels=self._panels(log.server_losses), empty=empty),
            *([Section("Losses of local training", about, panels=self._panels(local))] if local else []),
        ]

    def _panels(self, series: Mapping[str, Mapping[float, float | None]]) -> list[Panel]:
        lines = {name: [value for _, value in finite_points(values)] for name, values in series.items()}
        return [
            Panel(name, f"{line[-1]:.4g}", sparkline(line) if len(line) > 1 else None)
            for name, line in list(lines.items())[:MAX_PANELS]
            if line
        ]

    def _format(self, value: float) -> str:
        unit = self.note.run_info.get("unit", "%")
        return format_percent(value) if unit == "%" else f"{value:.4g} {unit}".strip()


def render_progress_page(folder: Path, nonce: str = "") -> str:
    """Return the HTML page of an unfinished run; ``nonce`` is that of a served page's script."""
    run = RunProgress.read(folder)
    title, error = run.note.run_info.get("title", folder.name), run.note.error
    lead = (
        f"The run stopped: {error}" if error else "The run is not finished: metrics are intermediate values."
    )
    eyebrow = f"fedstill \u00b7 {folder.name} \u00b7 not finished"
    return render_live_page(title, eyebrow, lead, run.tiles(), run.sections(), nonce, back=bool(nonce))
