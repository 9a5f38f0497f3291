"""``fedstill node``: set up, check and run a node, and decide which runs it takes part in."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fedstill.cli.arguments import AsJson, group
from fedstill.cli.console import leave_faulty, plain, print_facts, print_json, print_table
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.hashing import group_digits
from fedstill.core.registry import searching_in
from fedstill.core.startup_kit import KIT_FOLDER
from fedstill.core.text_format import to_printable_line

if TYPE_CHECKING:
    from fedstill.node.approvals import ApprovalRequests


LAST = 50  # lines of the log that are shown
NodeFolder = Annotated[Path, Parameter(help="folder of the node")]
Sha256 = Annotated[str, Parameter(name="HASH")]
Fingerprint = Annotated[
    str | None, Parameter(help='the server, if several request the same run; "none": one without proof')
]
Because = Annotated[str, Parameter(help="reason, kept in the audit log")]

commands = group(
    "node",
    "Set up, check and run a node. A node is a folder that belongs to the owner of its data.",
)


@commands.command
def init(folder: NodeFolder, /, *, name: str | None = None) -> None:
    """Create a node's folder: node.toml with every option explained, and its secret.

    example: fedstill node init clinic --name north

    If only the secret is missing, a new one is written. Runs that have begun
    cannot resume then.

    Args:
        name: name of the node (default: the folder's name)
    """
    from fedstill.node import owner_folder

    if not owner_folder.init_folder(folder, name):
        path = folder / owner_folder.SECRET
        print(f"Wrote {path} again (only you may read it); {owner_folder.FILE} is as it was.")
        print("Noise has a new key: runs that have begun here cannot resume; new ones can start.")
        return
    file, secret = folder / owner_folder.FILE, folder / owner_folder.SECRET
    print(f"Wrote {file} and {secret} (only you may read it).")
    print("Next:")
    print("  1. set in node.toml: data, model, and what may leave")
    kit = folder / KIT_FOLDER
    print(f"  2. copy the startup kit that you were given to {kit}; or set online = false to use files")
    print(f"  3. fedstill node check {folder}")


@commands.command
def check(folder: NodeFolder, run: str | None = None, /, *, as_json: AsJson = False) -> None:
    """Check a node's configuration, and show the queries that it would refuse. Trains nothing.

    example: fedstill node check clinic digits-fedkd

    Args:
        run: a preset, or a run's FILE.toml, to check against (default: each method)
    """
    from fedstill.cli.node_check import check_node

    check_node(folder, run, as_json)


@commands.command
def start(folder: NodeFolder, /) -> None:
    """Join the federation of the startup kit in FOLDER/kit, until Ctrl+C.

    example: fedstill node start clinic
    """
    from fedstill.federation import flare_site
    from fedstill.node import folder_check

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


@commands.command
def status(folder: NodeFolder, /, *, as_json: AsJson = False) -> None:
    """Show whether the node runs and reaches its server. The exit code is 1 if not.

    example: fedstill node status clinic
    """
    from fedstill.federation import flare_site

    here = flare_site.node(folder)
    number = flare_site.process_id(here)
    if as_json:
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


@commands.command
def requests(folder: NodeFolder, sha256: Sha256 | None = None, /, *, as_json: AsJson = False) -> None:
    """List the runs that wait for your approval, with their servers and queries.

    example: fedstill node requests clinic

    Args:
        sha256: print the canonical description of this run, to the byte; HASH is its SHA-256
    """
    from fedstill.node.approvals import describe_request, find_requests_by_hash

    known = _requests(folder).list_all()
    if sha256 is not None:
        sys.stdout.write(find_requests_by_hash(known, sha256)[0].description)
        return
    if as_json:
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


@commands.command
def approve(
    folder: NodeFolder, sha256: Sha256, /, *, server: Fingerprint = None, because: Because = ""
) -> None:
    """Approve a run of one server.

    example: fedstill node approve clinic 3f2a-91c0 --because 'study 12'

    Args:
        sha256: SHA-256 of the run; compare it with the server's operators by phone
    """
    _decide(folder, sha256, True, server, because)


@commands.command
def reject(
    folder: NodeFolder, sha256: Sha256, /, *, server: Fingerprint = None, because: Because = ""
) -> None:
    """Reject a run, also one that is in progress.

    example: fedstill node reject clinic 3f2a-91c0

    Args:
        sha256: SHA-256 of the run
    """
    _decide(folder, sha256, False, server, because)


@commands.command
def log(folder: NodeFolder, noted: Sha256 = "", /, *, as_json: AsJson = False) -> None:
    """Show the security events in the audit log: joins, refusals and approvals.

    example: fedstill node log clinic

    The exit code is 2 if an entry of the audit log was changed or is missing.

    Args:
        noted: hash of an entry that you noted elsewhere; must be part of the log
    """
    from fedstill.node import folder_log, owner_folder
    from fedstill.node.approvals import describe_security_event
    from fedstill.node.folder_log import read_security_events

    if not (folder / owner_folder.FILE).is_file():
        raise FedstillError(f"{folder} has no {owner_folder.FILE}: it is no node's folder")
    file = owner_folder.read_node_file(folder)
    path = folder_log.audit_path(file, folder)
    number, last_hash = None, ""
    events: list[dict[str, Any]] = []
    fault = folder_log.missing_log_fault(path, folder)
    if path.exists():
        with closing(folder_log.open_audit(file, folder, read_only=True)) as audit:
            events, fault, last_hash = list(read_security_events(audit)), audit.fault, audit.last_hash
            number = audit.find_hash(noted) if noted else None
    if fault is None and noted and number is None:
        causes = "the folder was restored from before it, or this is another log"
        fault = f"no entry has the hash that you noted; {causes}"
    if as_json:
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
    from fedstill.node.approvals import ApprovalRequests

    return ApprovalRequests(folder, owner_folder.read_node_file(folder))


def _decide(folder: Path, sha256: str, approved: bool, server: str | None, because: str) -> None:
    from fedstill.node import owner_folder
    from fedstill.node.approvals import always_refused_queries

    request = _requests(folder).decide(sha256, approved, because, server=server)
    print(f"Run {request.run} of {request.server_name}, {group_digits(request.sha256)}: {request.state}.")
    if approved:
        print("The server can start or resume it now.")
        with searching_in(folder):
            refused = always_refused_queries(request, owner_folder.read_node_file(folder))
        for query, rule in refused.items():
            print(f"But {query} is refused all the same, as node.toml is: {rule}.")
