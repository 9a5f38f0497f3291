"""Pages of several runs, of a researcher or of a server: progress and main metric of each run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from fedstill.core.errors import RunFolderError
from fedstill.core.private_files import is_locked
from fedstill.core.progress import PROGRESS_FILE
from fedstill.core.text_format import NOT_MEASURED, format_seconds, to_printable_line
from fedstill.federation.admin import ServerStatus
from fedstill.report import live_page, run_page
from fedstill.report.bars import bar
from fedstill.report.live_page import Section
from fedstill.report.metric_text import format_with_unit
from fedstill.report.result import RESULT_FILE, Result
from fedstill.report.run_progress import RunProgress
from fedstill.report.table_formats import Cell, Column, Row, Table

MAX_RUNS = 100  # the newest ones
EMPTY_CELL = Cell("", style="empty-cell")
RUNNING = "running"  # state of a run in progress; a server's runs add details
RUN_PREFIX = "run/"  # before the name of a run in a URL path


def find_runs(folder: Path) -> dict[str, Path]:
    """Return the runs in a folder and two levels below, by relative path, the newest first."""
    candidates = [folder, *folder.glob("*/"), *folder.glob("*/*/")]
    runs = [path for path in candidates if (path / RESULT_FILE).exists() or (path / PROGRESS_FILE).exists()]
    outermost = [path for path in runs if not any(parent in runs for parent in path.parents)]
    newest = sorted(outermost, key=lambda path: -path.stat().st_mtime)[:MAX_RUNS]
    return {str(path.relative_to(folder)) if path != folder else path.resolve().name: path for path in newest}


def run_state(folder: Path) -> str:
    """Return the state of a run on this machine in words."""
    if (folder / RESULT_FILE).exists():
        return "done"
    if error := RunProgress.read(folder).note.error:
        return f"stopped: {error}"
    return RUNNING if is_locked(folder) else "interrupted (fedstill run --resume continues it)"


def render_runs_page(folder: Path, runs: Mapping[str, Path], nonce: str) -> str:
    """Return the HTML page of a researcher's runs.

    Args:
        folder: folder that contains the runs.
        runs: folders of the runs by name.
        nonce: nonce of the page's script.
    """
    section = Section(
        "Runs",
        "The newest first.",
        table=_runs_table({name: (path, "") for name, path in runs.items()}),
        empty="No runs yet.",
    )
    resolved = folder.resolve()
    return live_page.render_live_page(
        resolved.name, "fedstill \u00b7 runs", f"Runs in {resolved}.", [], [section], nonce
    )


def render_run_page(runs: Mapping[str, Path], path: str, nonce: str) -> str | None:
    """Return the HTML page of the run at a URL path; None if there is no such run."""
    folder = runs.get(path.removeprefix(RUN_PREFIX)) if path.startswith(RUN_PREFIX) else None
    return None if folder is None else run_page.render_run_page(folder, nonce)


def render_server_page(server: ServerStatus, nonce: str) -> str:
    """Return the HTML page of a federation's server: connected nodes and runs."""
    runs = {run.folder.name: (run.folder, run.status_line) for run in server.runs[:MAX_RUNS]}
    rows = [
        Row(to_printable_line(name), [Cell(f"{format_seconds(seconds)} ago")])
        for name, seconds in sorted(server.nodes.items())
    ]
    lead = (
        "The server does not run on this machine."
        if server.process is None
        else f"The server runs as process {server.process}."
    )
    sections = [
        Section(
            "Nodes",
            "Connected nodes, and the time since each was last seen.",
            server.error,
            Table("Connected nodes", "Node", [Column("Last seen")], rows, style="stacked"),
            empty="None.",
        ),
        Section("Runs", "The newest first.", table=_runs_table(runs), empty="No runs yet."),
    ]
    return live_page.render_live_page(
        server.address, f"fedstill \u00b7 server of {server.name}", lead, [], sections, nonce
    )


def _runs_table(runs: Mapping[str, tuple[Path, str]]) -> Table:
    rows = [_row(name, folder, state) for name, (folder, state) in runs.items()]
    columns = [
        Column("Method", "model"),
        Column("State", ""),
        Column("Progress", "bar"),
        Column("Metric"),
        Column("Time left"),
        Column("Message round"),
    ]
    return Table("Runs", "Run", columns, rows, style="stacked", no_value=NOT_MEASURED)


def _row(name: str, folder: Path, state: str) -> Row:
    link = Markup('<a href="{}{}">{}</a>').format(RUN_PREFIX, quote(name, safe=""), to_printable_line(name))
    try:
        state = state or run_state(folder)
        if (folder / RESULT_FILE).exists():
            result = Result.read(folder)
            value = (
                None
                if result.value is None
                else f"{result.metric.title} {format_with_unit(result.metric, result.value)}"
            )
            full = Cell(bar(("bar", 100.0)))
            return Row(
                link, [Cell(result.method_title), Cell(state), full, Cell(value), EMPTY_CELL, EMPTY_CELL]
            )
        run = RunProgress.read(folder)
        is_running = state.startswith(RUNNING)
        if is_running:  # details of the progress are in other cells
            state = ", ".join(filter(None, (RUNNING, run.note.waiting_text(), run.note.excluded_text())))
        metric = run.note.run_info.get("metric", "")
        cells = [
            Cell(run.phase_bar, run.phase_text),
            Cell(f"{metric} {run.metric_text}".strip() if run.metric_text else None),
            Cell(run.time_left) if run.time_left and is_running else EMPTY_CELL,
            Cell(run.message_round_time) if run.message_round_time else EMPTY_CELL,
        ]
        return Row(
            link, [Cell(run.note.run_info.get("title", "")), Cell(to_printable_line(state, 500)), *cells]
        )
    except RunFolderError as error:
        return Row(
            to_printable_line(name), [EMPTY_CELL, Cell(to_printable_line(str(error))), *[EMPTY_CELL] * 4]
        )
