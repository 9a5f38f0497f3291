"""``fedstill server``: make a federation, and run its server."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Interval
from cyclopts import Parameter

from fedstill.cli.arguments import AsJson, group
from fedstill.cli.console import print_json
from fedstill.core.errors import ArgumentError, DeployError, closest_name
from fedstill.core.name_normalization import is_run_name
from fedstill.core.startup_kit import StartupKit
from fedstill.core.text_format import format_seconds, json_text

if TYPE_CHECKING:
    from fedstill.federation.admin import ServerStatus

MOST_RUNS = 10  # that are shown
FederationFolder = Annotated[Path, Parameter(help="folder of the federation")]
Port = Annotated[int, Interval(ge=1, le=65535), "1 to 65535"]

commands = group("server", "Create a federation on NVIDIA FLARE and run its server.")


@commands.command
def init(folder: FederationFolder, /, *, host: str, nodes: tuple[str, ...], port: Port = 8002) -> None:
    """Create a federation: certificates, and a startup kit for each node.

    example: fedstill server init federation --host fl.example.org --nodes north south

    Args:
        host: name or IPv4 address at which the nodes reach the server
        nodes: names of the nodes: letters, digits, - and _
        port: the one port that the server opens (default: 8002)
    """
    from fedstill.federation import provision

    port = provision.provision(folder, host, list(nodes), port=port)
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


@commands.command
def start(folder: FederationFolder, /) -> None:
    """Run the server until Ctrl+C.

    example: fedstill server start federation
    """
    from fedstill.federation import flare_site, provision

    federation = provision.read_federation(folder)
    this = flare_site.server(folder)
    this.kit.require_valid()
    if flare_site.process_id(this) is None:
        flare_site.require_free_port(this)
        address = f"{federation['host']}:{federation['port']}"
        print(f"Server of {federation['name']} at {address}; Ctrl+C ends it.", flush=True)
    sys.exit(flare_site.run(this))


@commands.command
def status(folder: FederationFolder, /, *, as_json: AsJson = False) -> None:
    """Show connected nodes and the outcome of runs. The exit code is 1 if the server does not run.

    example: fedstill server status federation
    """
    from fedstill.federation.admin import ServerMonitor

    with closing(ServerMonitor(folder)) as watch:
        server = watch.read_status()
    if server.error:
        raise DeployError(server.error)
    if as_json:
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


@commands.command
def stop(folder: FederationFolder, /) -> None:
    """Stop the server and the runs on it.

    example: fedstill server stop federation
    """
    from fedstill.federation import flare_site

    print("Stopped." if flare_site.stop(flare_site.server(folder)) else "It did not run.")


@commands.command
def add(folder: FederationFolder, /, *, nodes: tuple[str, ...]) -> None:
    """Create startup kits for more nodes, or with new certificates for known ones.

    example: fedstill server add federation --nodes west

    Args:
        nodes: names of the nodes
    """
    from fedstill.federation import provision

    provision.add_nodes(folder, list(nodes))
    for node in nodes:
        until = StartupKit(folder / "nodes" / node).valid_until
        print(f"{folder / 'nodes' / node}  to the owner of {node}; valid until {until:%Y-%m-%d}")
    print(f"Then delete {folder / 'nodes'} here.")


@commands.command
def renew(folder: FederationFolder, /) -> None:
    """Renew the certificates of the server and the admin.

    example: fedstill server renew federation
    """
    from fedstill.federation import provision

    provision.renew_certificates(folder)
    until = StartupKit(folder / "server").valid_until
    print(f"The certificates of the server and the admin are valid until {until:%Y-%m-%d}.")
    print(f"Restart the server to use them: fedstill server stop {folder}")


@commands.command
def revoke(folder: FederationFolder, node: str, /) -> None:
    """Exclude a node from the federation.

    example: fedstill server revoke federation west

    Args:
        node: name of the node
    """
    _set_admission(folder, node, command="revoke", done="is excluded", nothing="was revoked already")


@commands.command
def readmit(folder: FederationFolder, node: str, /) -> None:
    """Admit a revoked node again.

    example: fedstill server readmit federation west

    Args:
        node: name of the node
    """
    _set_admission(folder, node, command="readmit", done="is admitted again", nothing="was not revoked")


def _set_admission(folder: Path, node: str, *, command: str, done: str, nothing: str) -> None:
    from fedstill.core.run_writer import write_text
    from fedstill.federation import flare_site, provision
    from fedstill.federation.admin import STOPPED, Admin

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
