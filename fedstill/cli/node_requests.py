"""``fedstill node requests``, ``approve``, ``reject`` and ``log``: which runs a node's owner lets in, and who
has come."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.cli.arguments import ParsedArgs
from fedstill.cli.console import plain, print_facts, print_json, print_table
from fedstill.core.hashing import group_digits
from fedstill.core.text_format import to_printable_line

if TYPE_CHECKING:
    from fedstill.node.requests import ApprovalRequests

LAST = 50  # events that are shown


def requests(args: ParsedArgs) -> None:
    """The runs that were asked for, the latest first; of one the canonical text, to the byte."""
    from fedstill.node.request_text import describe_request
    from fedstill.node.requests import find_requests_by_hash

    known = _requests(Path(args.positionals[0])).list_all()
    if args.positionals[1:]:
        sys.stdout.write(find_requests_by_hash(known, args.positionals[1])[0].description)
        return
    if "--json" in args:
        print_json(
            [
                {"sha256": each.sha256, **asdict(each), "description": json.loads(each.description)}
                for each in known
            ]
        )
        return
    console = plain()
    if not known:
        console.print("No run has asked for approval.")
    for request in known:
        console.print(group_digits(request.sha256))
        print_facts(console, describe_request(request))


def approve(args: ParsedArgs) -> None:
    """Let a run in."""
    _decide(args, True)


def reject(args: ParsedArgs) -> None:
    """Let it in no more."""
    _decide(args, False)


def log(args: ParsedArgs) -> None:
    """The security events in the audit log, and whether it is as it was written; exit code 2 if it is not."""
    from fedstill.cli.node_check import leave_faulty
    from fedstill.core.errors import FedstillError
    from fedstill.node import audit_log_inspection, owner_folder
    from fedstill.node.request_text import describe_security_event
    from fedstill.node.security_events import read_security_events

    folder = Path(args.positionals[0])
    if not (folder / owner_folder.FILE).is_file():
        raise FedstillError(f"{folder} has no {owner_folder.FILE}: it is no node's folder")
    file = owner_folder.read_node_file(folder)
    path = audit_log_inspection.audit_path(file, folder)
    noted, number, last_hash = args.positionals[1] if args.positionals[1:] else "", None, ""
    events: list[dict[str, Any]] = []
    fault = audit_log_inspection.missing_log_fault(path, folder)
    if path.exists():
        with closing(audit_log_inspection.open_audit(file, folder, read_only=True)) as audit:
            events, fault, last_hash = list(read_security_events(audit)), audit.fault, audit.last_hash
            number = audit.find_hash(noted) if noted else None
    if fault is None and noted and number is None:
        causes = "the folder was restored from before it, or this is another log"
        fault = f"no entry has the hash that you noted; {causes}"
    if "--json" in args:
        print_json({"fault": fault, "hash": last_hash, "events": events})
        sys.exit(2 if fault else 0)
    rows = []
    for event in events[-LAST:]:
        who = to_printable_line(event["actor"]) or "not proven"
        why = describe_security_event(event)
        rows.append([str(event["entry"]), event["at"][:19], event["event"], who, why])
    if rows:
        print_table(plain(), ["no.", "when (UTC)", "what", "who", "why"], rows, left=5)
    if fault is not None:
        leave_faulty(folder, [f"audit log {path}: {fault}"])
    print(f"{len(events)} security events, as they were written.")
    if last_hash:
        print(f"Hash of the audit log's last entry, to note elsewhere: {last_hash}")
    if number is not None:
        print(f"Entry {number} has the hash that you noted.")


def _requests(folder: Path) -> ApprovalRequests:
    from fedstill.node import owner_folder
    from fedstill.node.requests import ApprovalRequests

    return ApprovalRequests(folder, owner_folder.read_node_file(folder))


def _decide(args: ParsedArgs, approved: bool) -> None:
    from fedstill.core.registry import searching_in
    from fedstill.node import owner_folder
    from fedstill.node.request_text import always_refused_queries

    folder = Path(args.positionals[0])
    because, server = args.get("--because") or "", args.get("--server")
    request = _requests(folder).decide(args.positionals[1], approved, because, server=server)
    print(f"Run {request.run} of {request.server_name}, {group_digits(request.sha256)}: {request.state}.")
    if approved:
        print("The server can start or resume it now.")
        with searching_in(folder):
            refused = always_refused_queries(request, owner_folder.read_node_file(folder))
        for query, rule in refused.items():
            print(f"But {query} is refused all the same, as node.toml is: {rule}.")
