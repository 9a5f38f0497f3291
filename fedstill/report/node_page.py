"""Page of a node for its data owner: pending requests, releases, privacy budget and logs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from fedstill.core.hashing import group_digits, parse_fingerprint
from fedstill.core.text_format import format_bytes, format_count, to_printable_line
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
from fedstill.report import live_page
from fedstill.report.live_page import Section
from fedstill.report.table_formats import Cell, Column, Fact, Row, Table

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
