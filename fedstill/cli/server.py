"""``fedstill server``: make a federation, and run its server."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.arguments import ParsedArgs, number
from fedstill.cli.console import print_json
from fedstill.core.errors import ArgumentError, DeployError, closest_name
from fedstill.core.name_normalization import is_run_name
from fedstill.core.startup_kit import StartupKit
from fedstill.core.text_format import format_seconds, json_text

if TYPE_CHECKING:
    from fedstill.federation.admin import ServerStatus

PORT = 8002
MOST_RUNS = 10  # that are shown


def revoke(args: ParsedArgs) -> None:
    """Exclude a node."""
    _set_admission(args, command="revoke", done="is excluded", nothing="was revoked already")


def readmit(args: ParsedArgs) -> None:
    """Admit a revoked node again."""
    _set_admission(args, command="readmit", done="is admitted again", nothing="was not revoked")


def init(args: ParsedArgs) -> None:
    from fedstill.federation import provision

    folder, host, nodes = Path(args.positionals[0]), args.options["--host"][-1], args.options["--nodes"]
    in_range, allowed = (lambda value: 0 <= value < 100_000), "1 to 65535"
    port = number("--port", args.get("--port") or str(PORT), int, in_range, allowed)
    port = provision.provision(folder, host, nodes, port=port)
    admin = folder / "admin"
    until = StartupKit(admin).valid_until
    print(f"A federation of {len(nodes)} nodes, in {folder}.")
    print(f"The server opens port {port} of {host}; the nodes open none.")
    print()
    print(f"Its authority is {StartupKit(admin).authority_fingerprint}. Read it out to the nodes' owners:")
    print("with policy.allowed_servers a node accepts no other server.")
    print()
    print("Give each node its startup kit, over a channel that you trust: it holds the node's private key.")
    for node in nodes:
        print(f"  {folder / 'nodes' / node}  to the owner of {node}, who copies it to DIR/kit of the node")
    print(f"Then delete {folder / 'nodes'} here.")
    print(f"Keep {admin} for the person who starts runs: fedstill run ... --startup-kit {admin}")
    print(f"Keep {folder / 'provision'} secret: its key lets nodes in.")
    print(f"The certificates are valid until {until:%Y-%m-%d}; `fedstill server add` makes new ones.")
    print()
    print(f"Next: fedstill server start {folder}")


def start(args: ParsedArgs) -> None:
    from fedstill.federation import flare_site, provision

    folder = Path(args.positionals[0])
    federation = provision.read_federation(folder)
    this = flare_site.server(folder)
    this.kit.require_valid()
    if flare_site.process_id(this) is None:
        flare_site.require_free_port(this)
        address = f"{federation['host']}:{federation['port']}"
        print(f"Server of {federation['name']} at {address}; Ctrl+C ends it.", flush=True)
    sys.exit(flare_site.run(this))


def status(args: ParsedArgs) -> None:
    from fedstill.federation.admin import ServerMonitor

    folder = Path(args.positionals[0])
    with closing(ServerMonitor(folder)) as watch:
        server = watch.read_status()
    if server.error:
        raise DeployError(server.error)
    if "--json" in args:
        runs = [
            {
                "run": run.folder.name,
                "begun": run.begun.isoformat(timespec="seconds"),
                "job": run.job,
                "status": run.status_line,
            }
            for run in server.runs
        ]
        about = {"process": server.process, "address": server.address, "nodes": server.nodes, "runs": runs}
        print_json(about)
    else:
        _say(server, folder)
    if server.process is None:
        sys.exit(1)


def _say(server: ServerStatus, folder: Path) -> None:
    if server.process is None:
        print(f"The server does not run on this machine: fedstill server start {folder}")
    else:
        print(f"The server runs as process {server.process}, at {server.address}.")
        print(f"{len(server.nodes)} nodes are there" + (":" if server.nodes else "."))
    for node, seconds in sorted(server.nodes.items()):
        print(f"  {node}  seen {format_seconds(seconds)} ago")
    if server.runs:
        print("Runs, the newest first:")
    for run in server.runs[:MOST_RUNS]:
        begun = run.begun.astimezone()  # by this machine's clock
        print(f"  {run.folder.name}  {begun:%Y-%m-%d %H:%M}" + (f"  job {run.job}" if run.job else ""))
        print(f"    {run.status_line}")
    if len(server.runs) > MOST_RUNS:
        print(f"  and {len(server.runs) - MOST_RUNS} older, in {folder / 'runs'}")


def stop(args: ParsedArgs) -> None:
    from fedstill.federation import flare_site

    folder = Path(args.positionals[0])
    print("Stopped." if flare_site.stop(flare_site.server(folder)) else "It did not run.")


def add(args: ParsedArgs) -> None:
    from fedstill.federation import provision

    folder, nodes = Path(args.positionals[0]), args.options["--nodes"]
    provision.add_nodes(folder, nodes)
    for node in nodes:
        until = StartupKit(folder / "nodes" / node).valid_until
        print(f"{folder / 'nodes' / node}  to the owner of {node}; valid until {until:%Y-%m-%d}")
    print(f"Then delete {folder / 'nodes'} here.")


def renew(args: ParsedArgs) -> None:
    from fedstill.federation import provision

    folder = Path(args.positionals[0])
    provision.renew_certificates(folder)
    until = StartupKit(folder / "server").valid_until
    print(f"The certificates of the server and the admin are valid until {until:%Y-%m-%d}.")
    print(f"Restart the server to use them: fedstill server stop {folder}")


def _set_admission(args: ParsedArgs, *, command: str, done: str, nothing: str) -> None:
    from fedstill.core.run_writer import write_text
    from fedstill.federation import flare_site, provision
    from fedstill.federation.admin import STOPPED, Admin

    folder, node = Path(args.positionals[0]), args.positionals[1]
    if flare_site.process_id(flare_site.server(folder)) is None:
        raise DeployError(f"the server does not run on this machine: fedstill server start {folder}")
    federation = provision.read_federation(folder)
    with Admin(folder / "admin") as admin:
        known = sorted({*federation["nodes"], *provision.revoked_nodes(folder), *admin.nodes()})
        if node not in known:  # FLARE would revoke any name, and the one that was meant would stay
            meant = closest_name(node, known)
            hint = f"; did you mean {meant!r}?" if meant else ""
            raise ArgumentError("NODE", node, f"one of {', '.join(known)}{hint}")
        changed = getattr(admin, command)(node)
        print(f"{node} {done if changed else nothing}.")
        # FLARE lets a job go on that a revoked node has a part in.
        for job in admin.unfinished_jobs(node) if command == "revoke" else ():
            if not admin.abort(str(job["job_id"])):  # of a server that was killed: FLARE says that it runs
                continue
            outcome = {"error": "NodeFault", "text": f"{node}, which had a part in it, was revoked"}
            run = folder / "runs" / str(job["name"])
            if is_run_name(str(job["name"])) and run.is_dir():  # what FLARE ended says nothing of why
                write_text(run / STOPPED, json_text(outcome, indent=None) + "\n")
            print(f"Ended run {job['name']}, in which it took part.")
            print("  `fedstill run --resume` resumes without it, where link.quorum allows that.")
