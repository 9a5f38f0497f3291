"""The page of several runs, at a researcher's machine or at a server: how far each is and what it reaches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from fedstill.core.errors import RunFolderError
from fedstill.core.private_files import is_locked
from fedstill.core.progress import PROGRESS_FILE
from fedstill.core.text_format import NOT_MEASURED, clip_text, format_seconds
from fedstill.federation.server_status import ServerStatus
from fedstill.report import live_page, run_page
from fedstill.report.bars import bar
from fedstill.report.live_page import Section
from fedstill.report.metric_text import format_with_unit
from fedstill.report.result import FILE, Result
from fedstill.report.run_progress import RunProgress
from fedstill.report.table_formats import Cell, Column, Row, Table

MOST = 100  # runs that are shown, the newest
NOTHING = Cell("", style="empty-cell")
AT_WORK = "at work"  # said of a run of this machine that goes on
RUN = "run/"  # before the name of a run, in an address


def found(folder: Path) -> dict[str, Path]:
    """The runs in a folder, or in folders in it, by their paths there: the newest first."""
    places = [folder, *folder.glob("*/"), *folder.glob("*/*/")]
    runs = [place for place in places if (place / FILE).exists() or (place / PROGRESS_FILE).exists()]
    inner = [place for place in runs if not any(above in runs for above in place.parents)]
    newest = sorted(inner, key=lambda place: -place.stat().st_mtime)[:MOST]
    return {
        str(place.relative_to(folder)) if place != folder else place.resolve().name: place for place in newest
    }


def state(folder: Path) -> str:
    """What became of a run of this machine."""
    if (folder / FILE).exists():
        return "done"
    if error := RunProgress.read(folder).note.error:
        return f"stopped: {error}"
    return AT_WORK if is_locked(folder) else "ended before it was done; fedstill run --resume goes on with it"


def page(folder: Path, runs: Mapping[str, Path], served: str) -> str:
    """The page of a researcher's runs, by name."""
    section = Section(
        "Runs",
        "The newest first.",
        table=_table({name: (place, "") for name, place in runs.items()}),
        empty="None yet.",
    )
    here = folder.resolve()
    return live_page.html(here.name, "fedstill \u00b7 runs", f"The runs in {here}.", [], [section], served)


def run(runs: Mapping[str, Path], path: str, served: str) -> str | None:
    """The page of one of some runs, by its address; None where it is that of none."""
    place = runs.get(path.removeprefix(RUN)) if path.startswith(RUN) else None
    return None if place is None else run_page.page(place, served)


def server_page(server: ServerStatus, served: str) -> str:
    """The page of a federation's server."""
    runs = {run.folder.name: (run.folder, run.status_line) for run in server.runs[:MOST]}
    rows = [
        Row(clip_text(name), [Cell(f"{format_seconds(seconds)} ago")])
        for name, seconds in sorted(server.nodes.items())
    ]
    lede = (
        "It does not run on this machine."
        if server.process is None
        else f"It runs as process {server.process}."
    )
    sections = [
        Section(
            "Nodes",
            "Those that are there, and when each gave its last sign of life.",
            server.error,
            Table("Nodes that are there", "Node", [Column("Seen")], rows, style="price"),
            empty="None.",
        ),
        Section("Runs", "The newest first.", table=_table(runs), empty="None yet."),
    ]
    return live_page.html(
        server.address, f"fedstill \u00b7 server of {server.name}", lede, [], sections, served
    )


def _table(runs: Mapping[str, tuple[Path, str]]) -> Table:
    rows = [_row(name, place, told) for name, (place, told) in runs.items()]
    heads = [
        Column("Method", "model"),
        Column("State", ""),
        Column("Done", "bar"),
        Column("Reached"),
        Column("Time left"),
        Column("Round of messages"),
    ]
    return Table("Runs", "Run", heads, rows, style="price", none=NOT_MEASURED)


def _row(name: str, place: Path, became: str) -> Row:
    link = Markup('<a href="{}{}">{}</a>').format(RUN, quote(name, safe=""), clip_text(name))
    try:
        became = became or state(place)
        if (place / FILE).exists():
            result = Result.read(place)
            value = (
                None
                if result.value is None
                else f"{result.metric.title} {format_with_unit(result.metric, result.value)}"
            )
            whole = Cell(bar(("bar", 100.0)))
            return Row(link, [Cell(result.method_title), Cell(became), whole, Cell(value), NOTHING, NOTHING])
        run = RunProgress.read(place)
        going = became.startswith("running") or became == AT_WORK
        if became.startswith("running"):  # how far is in the other cells
            became = ", ".join(filter(None, ("running", run.note.waiting_text(), run.note.excluded_text())))
        cells = [
            Cell(run.bar, run.done),
            Cell(f"{run.note.run_info.get('metric', '')} {run.reached}".strip() if run.reached else None),
            Cell(run.left) if run.left and going else NOTHING,
            Cell(run.message) if run.message else NOTHING,
        ]
        return Row(link, [Cell(run.note.run_info.get("title", "")), Cell(clip_text(became, 500)), *cells])
    except RunFolderError as error:
        return Row(clip_text(name), [NOTHING, Cell(clip_text(str(error))), *[NOTHING] * 4])
