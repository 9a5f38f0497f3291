"""The page of a node, for the owner of its data: who waits, what left, what is left to spend, the logs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from fedstill.core.hashing import group_digits, parse_fingerprint
from fedstill.core.text_format import clip_text, format_bytes, format_count
from fedstill.node.audit_cost import AuditCost
from fedstill.node.audit_entries import ALL_RUNS
from fedstill.node.overview import Overview
from fedstill.node.request_text import describe_log_line, describe_request
from fedstill.node.requests import MIN_DIGITS_TO_APPROVE, UNPROVEN, WAITS, ApprovalRequest, requires_approval
from fedstill.privacy.budget import describe_budgets, round_down, round_up
from fedstill.report import live_page
from fedstill.report.live_page import Section
from fedstill.report.table_formats import Cell, Column, Fact, Row, Table

MOST_DAYS = 100  # rows of what left
MOST_DECIDED = 20  # requests that were decided
UNKNOWN = "not known"


def page(node: Overview, folder: Path, process: int | None, served: str) -> str:
    """The page.

    Args:
        served: the nonce of the page's script.
    """
    waiting = [each for each in node.requests if each.state == WAITS]
    decided = [each for each in node.requests if each.state != WAITS]
    left = sum(sums.bytes_by_kind.total() for sums in node.releases.values())
    sound = node.audit_fault is None and node.security_fault is None
    asked = (
        "runs ask for your approval"
        if requires_approval(node.file)
        else "runs need no approval: policy.approve"
    )
    tiles = [
        Fact("Requests that wait", str(len(waiting)), asked),
        Fact(
            "Left the node", format_bytes(left), format_count(len({run for _, run in node.releases}), "run")
        ),
        Fact("Budget left", _left(node.costs[ALL_RUNS]) if node.costs else "all", "epsilon, over all runs"),
        Fact("Logs", "sound" if sound else "not sound", f"{node.entry_count:,} entries in the audit log"),
    ]
    runs = "is not joined to a federation" if process is None else f"runs as process {process}"
    sections = [
        _asking(waiting, folder),
        Section(
            "What left",
            "By day (UTC) and run, the latest first. The audit log had each release before it left.",
            node.audit_fault and f"The audit log is not sound: {node.audit_fault}.",
            _released(node),
            empty="Nothing has left.",
        ),
        Section(
            "Budget",
            f"What records have paid, as epsilon by {node.file.privacy.accountant.upper()}, rounded up, and "
            f"what is left, rounded down. {'; '.join(describe_budgets(node.file.privacy)).capitalize()}.",
            table=_costs(node),
            empty="Nothing has been spent.",
        ),
        Section(
            "Security log",
            "Who joined, was refused, approved or rejected, and which rules changed; the latest first.",
            node.security_fault and f"The security log is not as it was written: {node.security_fault}",
            _log(node),
            empty="Nothing has happened.",
        ),
        Section(
            "Requests that were decided",
            facts=_requests(decided[:MOST_DECIDED]),
            empty="None.",
        ),
    ]
    return live_page.html(node.file.name, "fedstill \u00b7 node", f"It {runs}.", tiles, sections, served)


def _asking(waiting: Sequence[ApprovalRequest], folder: Path) -> Section:
    about = (
        "Each under the SHA-256 of its description: compare the digits, and the server's fingerprint, with "
        "the server's people by phone. The command below a request lets in this server alone; with reject "
        "in the place of approve it does not."
    )
    facts = _requests(waiting, [_command(each, folder) for each in waiting])
    return Section("Requests that wait", about if waiting else "", facts=facts, empty="None.")


def _command(request: ApprovalRequest, folder: Path) -> str:
    """Return the command that approves this request, and no other server's of the same description."""
    words = ["fedstill", "node", "approve", str(folder), request.sha256[:MIN_DIGITS_TO_APPROVE]]
    return shlex.join([*words, "--server", parse_fingerprint(request.server) or UNPROVEN])


def _requests(
    known: Sequence[ApprovalRequest], commands: Sequence[str] | None = None
) -> list[tuple[str, Sequence[Fact], str]]:
    shown: list[tuple[str, Sequence[Fact], str]] = []
    for request, command in zip(known, commands or [""] * len(known), strict=True):
        lines = [
            Fact(head, text if isinstance(text, str) else "\n".join(text))
            for head, text in describe_request(request).items()
        ]
        shown.append((group_digits(request.sha256), lines, command))
    return shown


def _released(node: Overview) -> Table:
    rows = []
    for (day, run), sums in list(node.releases.items())[:MOST_DAYS]:
        kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sorted(sums.bytes_by_kind.items()))
        bare = f"{sums.no_guarantee:,}" if sums.no_guarantee else "none"
        counts = (f"{len(sums.queries):,}", kinds or "nothing", bare, f"{sums.refused:,}")
        rows.append(Row(clip_text(run), list(map(Cell, counts)), day))
    heads = [Column("Answered"), Column("Left", ""), Column("Without guarantee"), Column("Refused")]
    return Table("What left by day and run", "Run", heads, rows, style="price")


def _costs(node: Overview) -> Table:
    rows = [
        Row(clip_text(run) or "all runs", [Cell(_spent(cost)), Cell(_left(cost))])
        for run, cost in node.costs.items()
    ]
    return Table("What runs have cost", "Run", [Column("Spent"), Column("Left")], rows, style="price")


def _spent(cost: AuditCost) -> str:
    return round_up(cost.epsilon) if cost.events is not None else UNKNOWN


def _left(cost: AuditCost) -> str:
    return round_down(cost.remaining) if cost.remaining is not None else UNKNOWN


def _log(node: Overview) -> Table:
    rows = []
    for line in node.security_lines:
        cells = [
            Cell(clip_text(line["event"])),
            Cell(clip_text(line["who"]) or "not proven"),
            Cell(describe_log_line(line)),
        ]
        rows.append(Row(line["at"][:19].replace("T", " "), cells))
    heads = [Column("What", "model"), Column("Who", ""), Column("Why", "")]
    return Table("The security log", "When (UTC)", heads, rows, style="price")
