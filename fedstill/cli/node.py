"""``fedstill node``: set up and run a node, and decide which runs it takes part in.

``fedstill node check`` has a module of its own, :mod:`fedstill.cli.node_check`, which imports torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fedstill.cli.arguments import ParsedArgs
from fedstill.cli.console import plain, print_facts, print_json, print_table
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.hashing import group_digits
from fedstill.core.text_format import to_printable_line

if TYPE_CHECKING:
    from fedstill.node.approvals import ApprovalRequests


def init(args: ParsedArgs) -> None:
    folder, name = args.positionals[0], args.get("--name")

    from fedstill.core.startup_kit import KIT_FOLDER
    from fedstill.node import owner_folder

    if not owner_folder.init_folder(Path(folder), name):
        path = Path(folder) / owner_folder.SECRET
        print(f"Wrote {path} again (only you may read it); {owner_folder.FILE} is as it was.")
        print("Noise has a new key: runs that have begun here cannot resume; new ones can start.")
        return
    file, secret = Path(folder) / owner_folder.FILE, Path(folder) / owner_folder.SECRET
    print(f"Wrote {file} and {secret} (only you may read it).")
    print("Next:")
    print("  1. set in node.toml: data, model, and what may leave")
    kit = Path(folder) / KIT_FOLDER
    print(f"  2. copy the startup kit that you were given to {kit}; or set online = false to use files")
    print(f"  3. fedstill node check {folder}")


def start(args: ParsedArgs) -> None:
    from fedstill.federation import flare_site
    from fedstill.node import folder_check

    folder = Path(args.positionals[0])
    found = folder_check.check_folder(folder, quick=True)
    if found.file is None or found.faults:
        leave_faulty(folder, found.faults)
    if not found.file.online:
        allowed = "true to join a federation; `fedstill offline answer` responds to files"
        raise ArgumentError("online", False, allowed)
    here = flare_site.node(folder)
    if flare_site.process_id(here) is None:
        print(
            f"node {here.kit.node_name} joins {here.target}; Ctrl+C ends it. Its log: {here.log_file}",
            flush=True,
        )
    sys.exit(flare_site.run(here))


def status(args: ParsedArgs) -> None:
    from fedstill.federation import flare_site

    folder = Path(args.positionals[0])
    here = flare_site.node(folder)
    number = flare_site.process_id(here)
    if "--json" in args:
        target = None if number is None else here.target
        responses = target is not None and flare_site.is_reachable(target)
        print_json({"process": number, "server": target, "answers": responses, "log": str(here.log_file)})
        sys.exit(0 if responses else 1)
    if number is None:
        print(f"The node does not run on this machine: fedstill node start {folder}")
        sys.exit(1)
    address = here.target
    reached = flare_site.is_reachable(address)
    print(
        f"The node runs as process {number}; {address} {'is reachable' if reached else 'is not reachable'}."
    )
    print(f"Log of its connection: {here.log_file}")
    sys.exit(0 if reached else 1)


LAST = 50  # lines of the log that are shown


def requests(args: ParsedArgs) -> None:
    """The runs that were asked for, the latest first; of one the canonical text, to the byte."""
    from fedstill.node.approvals import describe_request, find_requests_by_hash

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
    from fedstill.node import folder_log, owner_folder
    from fedstill.node.approvals import describe_security_event
    from fedstill.node.folder_log import read_security_events

    folder = Path(args.positionals[0])
    if not (folder / owner_folder.FILE).is_file():
        raise FedstillError(f"{folder} has no {owner_folder.FILE}: it is no node's folder")
    file = owner_folder.read_node_file(folder)
    path = folder_log.audit_path(file, folder)
    noted, number, last_hash = args.positionals[1] if args.positionals[1:] else "", None, ""
    events: list[dict[str, Any]] = []
    fault = folder_log.missing_log_fault(path, folder)
    if path.exists():
        with closing(folder_log.open_audit(file, folder, read_only=True)) as audit:
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


def leave_faulty(folder: Path, faults: Sequence[str]) -> NoReturn:
    """Exit with the faults of a node."""
    if len(faults) == 1:
        raise FedstillError(faults[0])
    print(f"fedstill: {len(faults)} faults in {folder}:", file=sys.stderr)
    for fault in faults:
        print(f"  {' '.join(fault.split())}", file=sys.stderr)
    sys.exit(2)


def _requests(folder: Path) -> ApprovalRequests:
    from fedstill.node import owner_folder
    from fedstill.node.approvals import ApprovalRequests

    return ApprovalRequests(folder, owner_folder.read_node_file(folder))


def _decide(args: ParsedArgs, approved: bool) -> None:
    from fedstill.core.registry import searching_in
    from fedstill.node import owner_folder
    from fedstill.node.approvals import always_refused_queries

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
