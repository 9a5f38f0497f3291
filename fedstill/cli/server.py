"""``fedstill server``: make a federation, and run its server."""

from __future__ import annotations

import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.arguments import Command, Given, dispatch, number
from fedstill.cli.console import print_json
from fedstill.core.errors import ArgumentError, DeployError, nearest
from fedstill.core.names import is_run_name
from fedstill.core.startup_kit import StartupKit
from fedstill.core.text_format import human_seconds, json_text

if TYPE_CHECKING:
    from fedstill.federation.server_view import ServerView

HELP = """\
fedstill server makes a federation on NVIDIA FLARE, and runs its server.

usage:
  fedstill server init DIR --host NAME --nodes A B C [--port N]
                                    a new federation: certificates and one startup kit for each node
  fedstill server start DIR         be the server, until Ctrl+C
  fedstill server status DIR [--json]
                                    does it run (else the exit code is 1), which nodes are there, and what
                                    became of the runs
  fedstill server stop DIR          end it, and the runs on it
  fedstill server add DIR --nodes D E
                                    kits for more nodes, or with new certificates for old ones
  fedstill server renew DIR         new certificates for the server and the admin
  fedstill server revoke DIR NODE   let a node in no more
  fedstill server readmit DIR NODE  let it in again

options of `init`:
  --host NAME     name or IPv4 address by which the nodes reach the server
  --nodes A B C   names of the nodes: letters, digits, - and _
  --port N        the one port that the server opens (default: 8002)
"""

PORT = 8002
MOST_RUNS = 10  # that are shown


def main(words: list[str]) -> None:
    """``fedstill server ...``."""
    revoke = partial(_admit, command="revoke", done="is let in no more", nothing="was revoked already")
    readmit = partial(_admit, command="readmit", done="is let in again", nothing="was not revoked")
    commands: dict[str, Command] = {"init": _init, "start": _start, "status": _status, "stop": _stop}
    more: dict[str, Command] = {"add": _add, "renew": _renew, "revoke": revoke, "readmit": readmit}
    dispatch("server", words, HELP, commands | more)


def _init(given: Given) -> None:
    from fedstill.federation import provision

    folder, host, nodes = Path(given.places[0]), given.options["--host"][-1], given.options["--nodes"]
    in_range, allowed = (lambda value: 0 <= value < 100_000), "1 to 65535"
    port = number("--port", given.get("--port") or str(PORT), int, in_range, allowed)
    port = provision.provision(folder, host, nodes, port=port)
    admin = folder / "admin"
    until = StartupKit(admin).valid_until
    print(f"A federation of {len(nodes)} nodes, in {folder}.")
    print(f"The server opens port {port} of {host}; the nodes open none.")
    print()
    print(f"Its authority is {StartupKit(admin).authority_fingerprint}: a node may let in nobody else")
    print("(policy.allowed_servers), if you read that out to its owner.")
    print()
    print("Give each node its startup kit, over a channel that you trust: it holds the node's private key.")
    for node in nodes:
        print(f"  {folder / 'nodes' / node}  to the owner of {node}, who copies it to DIR/kit of the node")
    print(f"Then delete {folder / 'nodes'} here.")
    print(f"Keep {admin} for whoever starts runs: fedstill run ... --startup-kit {admin}")
    print(f"Keep {folder / 'provision'} secret: its key lets nodes in.")
    print(f"The certificates are valid until {until:%Y-%m-%d}; `fedstill server add` makes new ones.")
    print()
    print(f"Next: fedstill server start {folder}")


def _start(given: Given) -> None:
    from fedstill.federation import flare_kit, flare_site, provision

    folder = Path(given.places[0])
    federation = provision.read_federation(folder)
    this = flare_kit.server(folder)
    this.kit.require_in_force()
    if flare_site.running(this) is None:
        flare_kit.check_port(this)
        address = f"{federation['host']}:{federation['port']}"
        print(f"Server of {federation['name']} at {address}; Ctrl+C ends it.", flush=True)
    sys.exit(flare_site.run(this))


def _status(given: Given) -> None:
    from fedstill.federation.server_view import ServerWatch

    folder = Path(given.places[0])
    with closing(ServerWatch(folder)) as watch:
        server = watch.look()
    if server.trouble:
        raise DeployError(server.trouble)
    if "--json" in given:
        runs = [
            {
                "run": run.folder.name,
                "begun": run.begun.isoformat(timespec="seconds"),
                "job": run.job,
                "outcome": run.outcome,
            }
            for run in server.runs
        ]
        about = {"process": server.process, "address": server.address, "nodes": server.nodes, "runs": runs}
        print_json(about)
    else:
        _say(server, folder)
    if server.process is None:
        sys.exit(1)


def _say(server: ServerView, folder: Path) -> None:
    if server.process is None:
        print(f"The server does not run on this machine: fedstill server start {folder}")
    else:
        print(f"The server runs as process {server.process}, at {server.address}.")
        print(f"{len(server.nodes)} nodes are there" + (":" if server.nodes else "."))
    for node, seconds in sorted(server.nodes.items()):
        print(f"  {node}  seen {human_seconds(seconds)} ago")
    if server.runs:
        print("Runs, the newest first:")
    for run in server.runs[:MOST_RUNS]:
        begun = run.begun.astimezone()  # by this machine's clock
        print(f"  {run.folder.name}  {begun:%Y-%m-%d %H:%M}" + (f"  job {run.job}" if run.job else ""))
        print(f"    {run.outcome}")
    if len(server.runs) > MOST_RUNS:
        print(f"  and {len(server.runs) - MOST_RUNS} older, in {folder / 'runs'}")


def _stop(given: Given) -> None:
    from fedstill.federation import flare_kit, flare_site

    folder = Path(given.places[0])
    print("Stopped." if flare_site.stop(flare_kit.server(folder)) else "It did not run.")


def _add(given: Given) -> None:
    from fedstill.federation import provision

    folder, nodes = Path(given.places[0]), given.options["--nodes"]
    provision.add(folder, nodes)
    for node in nodes:
        until = StartupKit(folder / "nodes" / node).valid_until
        print(f"{folder / 'nodes' / node}  to the owner of {node}; valid until {until:%Y-%m-%d}")
    print(f"Then delete {folder / 'nodes'} here.")


def _renew(given: Given) -> None:
    from fedstill.federation import provision

    folder = Path(given.places[0])
    provision.renew(folder)
    until = StartupKit(folder / "server").valid_until
    print(f"The certificates of the server and the admin are valid until {until:%Y-%m-%d}.")
    print(f"The server takes its own when it is started again: fedstill server stop {folder}")


def _admit(given: Given, *, command: str, done: str, nothing: str) -> None:
    from fedstill.core.run_writer import write_text
    from fedstill.federation import flare_kit, flare_site, provision
    from fedstill.federation.admin import Admin
    from fedstill.federation.run_status import STOPPED

    folder, node = Path(given.places[0]), given.places[1]
    if flare_site.running(flare_kit.server(folder)) is None:
        raise DeployError(f"the server does not run on this machine: fedstill server start {folder}")
    federation = provision.read_federation(folder)
    with Admin(folder / "admin") as admin:
        known = sorted({*federation["nodes"], *provision.revoked(folder), *admin.nodes()})
        if node not in known:  # FLARE would revoke any name, and the one that was meant would stay
            meant = nearest(node, known)
            hint = f"; did you mean {meant!r}?" if meant else ""
            raise ArgumentError("NODE", node, f"one of {', '.join(known)}{hint}")
        changed = getattr(admin, command)(node)
        print(f"{node} {done if changed else nothing}.")
        # FLARE lets a job go on that a revoked node has a part in.
        for job in admin.with_node(node) if command == "revoke" else ():
            if not admin.abort(str(job["job_id"])):  # of a server that was killed: FLARE says that it runs
                continue
            told = {"error": "NodeFault", "text": f"{node}, which had a part in it, was revoked"}
            run = folder / "runs" / str(job["name"])
            if is_run_name(str(job["name"])) and run.is_dir():  # what FLARE ended says nothing of why
                write_text(run / STOPPED, json_text(told, indent=None) + "\n")
            print(f"Ended run {job['name']}, in which it took part.")
            print("  `fedstill run --resume` goes on without it, where link.quorum allows that.")
