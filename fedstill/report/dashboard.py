"""Pages of the dashboard: runs of a researcher, a federation's server, and a node for its data owner."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from fedstill.core.errors import RunFolderError
from fedstill.core.hashing import group_digits, parse_fingerprint
from fedstill.core.private_files import is_locked
from fedstill.core.progress import PROGRESS_FILE
from fedstill.core.text_format import (
    NOT_MEASURED,
    format_bytes,
    format_count,
    format_seconds,
    to_printable_line,
)
from fedstill.federation.admin import ServerStatus
from fedstill.node.approvals import (
    MIN_DIGITS_TO_APPROVE,
    UNPROVEN,
    ApprovalRequest,
    describe_request,
    describe_security_event,
    requires_approval,
)
from fedstill.node.audit_entries import ALL_RUNS, WAITS
from fedstill.node.overview import Overview, SpentBudget
from fedstill.privacy.budget import describe_budgets, epsilon_text_rounded_down, epsilon_text_rounded_up
from fedstill.report import live_page, run_page
from fedstill.report.live_page import RunProgress, Section
from fedstill.report.records import RESULT_FILE, Result
from fedstill.report.tables import Cell, Column, Fact, Row, Table, bar, format_with_unit

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
        server.address, f"fedstill \u00b7 server of the federation {server.name}", lead, [], sections, nonce
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


# --- a node ---------------------------------------------------------------------------------------------


MAX_RELEASE_ROWS = 100
MAX_DECIDED_REQUESTS = 20
UNKNOWN = "unknown"


def render_node_page(node: Overview, folder: Path, process: int | None, nonce: str) -> str:
    """Return the HTML of a node's page.

    Args:
        node: state of the node.
        folder: folder of the node, for commands.
        process: number of the running process; None if the node does not run.
        nonce: nonce of the page's script.
    """
    pending = [request for request in node.requests if request.state == WAITS]
    decided = [request for request in node.requests if request.state != WAITS]
    released = sum(sums.bytes_by_kind.total() for sums in node.releases.values())
    approval = (
        "runs need your approval"
        if requires_approval(node.file)
        else "runs need no approval (policy.approve)"
    )
    remaining = _remaining(node.costs[ALL_RUNS]) if node.costs else "all"
    tiles = [
        Fact("Pending requests", str(len(pending)), approval),
        Fact("Released", format_bytes(released), format_count(len({run for _, run in node.releases}), "run")),
        Fact("Remaining budget", remaining, "epsilon, over all runs"),
        Fact(
            "Audit log",
            "intact" if node.audit_fault is None else "not intact",
            f"{node.entry_count:,} entries",
        ),
    ]
    lead = (
        "The node is not connected to a federation."
        if process is None
        else f"The node runs as process {process}."
    )
    sections = [
        _pending_section(pending, folder),
        Section(
            "Releases",
            "By day (UTC) and run, the latest first. Each release was written to the audit log first.",
            node.audit_fault and f"The audit log is not intact: {node.audit_fault}.",
            _release_table(node),
            empty="No releases yet.",
        ),
        Section(
            "Privacy budget",
            f"Epsilon spent per record by {node.file.privacy.accountant.upper()} accounting, rounded up, "
            "and the "
            f"remaining budget, rounded down. {'; '.join(describe_budgets(node.file.privacy)).capitalize()}.",
            table=_cost_table(node),
            empty="No epsilon spent yet.",
        ),
        Section(
            "Security events",
            "Connections, refusals, approvals, rejections and policy changes, the latest first.",
            table=_security_event_table(node),
            empty="No entries yet.",
        ),
        Section(
            "Decided requests",
            facts=_request_facts(decided[:MAX_DECIDED_REQUESTS]),
            empty="None.",
        ),
    ]
    return live_page.render_live_page(node.file.name, "fedstill \u00b7 node", lead, tiles, sections, nonce)


def _pending_section(pending: Sequence[ApprovalRequest], folder: Path) -> Section:
    about = (
        "Each request is listed under the SHA-256 of its description. Compare these digits and the server's "
        "fingerprint with the server's operators by phone. The command below a request approves it for this "
        "server only; replace approve by reject to reject it."
    )
    facts = _request_facts(pending, [_approve_command(request, folder) for request in pending])
    return Section("Pending requests", about if pending else "", facts=facts, empty="None.")


def _approve_command(request: ApprovalRequest, folder: Path) -> str:
    """Return the command that approves a request of this server alone."""
    words = ["fedstill", "node", "approve", str(folder), request.sha256[:MIN_DIGITS_TO_APPROVE]]
    return shlex.join([*words, "--server", parse_fingerprint(request.server) or UNPROVEN])


def _request_facts(
    requests: Sequence[ApprovalRequest], commands: Sequence[str] | None = None
) -> list[tuple[str, Sequence[Fact], str]]:
    groups: list[tuple[str, Sequence[Fact], str]] = []
    for request, command in zip(requests, commands or [""] * len(requests), strict=True):
        facts = [
            Fact(name, text if isinstance(text, str) else "\n".join(text))
            for name, text in describe_request(request).items()
        ]
        groups.append((group_digits(request.sha256), facts, command))
    return groups


def _release_table(node: Overview) -> Table:
    rows = []
    for (day, run), sums in list(node.releases.items())[:MAX_RELEASE_ROWS]:
        kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sorted(sums.bytes_by_kind.items()))
        no_guarantee = f"{sums.no_guarantee:,}" if sums.no_guarantee else "none"
        texts = (f"{len(sums.queries):,}", kinds or "nothing", no_guarantee, f"{sums.refused:,}")
        rows.append(Row(to_printable_line(run), list(map(Cell, texts)), day))
    columns = [
        Column("Queries"), Column("Released", ""), Column("Without guarantee"), Column("Refused queries")
    ]  # fmt: skip
    return Table("Releases by day and run", "Run", columns, rows, style="stacked")


def _cost_table(node: Overview) -> Table:
    rows = [
        Row(to_printable_line(run) or "all runs", [Cell(_spent(cost)), Cell(_remaining(cost))])
        for run, cost in node.costs.items()
    ]
    columns = [Column("Epsilon spent"), Column("Remaining")]
    return Table("Epsilon spent by run", "Run", columns, rows, style="stacked")


def _spent(cost: SpentBudget) -> str:
    return epsilon_text_rounded_up(cost.epsilon) if cost.events is not None else UNKNOWN


def _remaining(cost: SpentBudget) -> str:
    return epsilon_text_rounded_down(cost.remaining) if cost.remaining is not None else UNKNOWN


def _security_event_table(node: Overview) -> Table:
    rows = []
    for event in node.events:
        cells = [
            Cell(to_printable_line(event["event"])),
            Cell(to_printable_line(event["actor"]) or "not authenticated"),
            Cell(describe_security_event(event)),
        ]
        rows.append(Row(event["at"][:19].replace("T", " "), cells))
    columns = [Column("Event", "model"), Column("Party", ""), Column("Details", "")]
    return Table("Security events", "Time (UTC)", columns, rows, style="stacked")
