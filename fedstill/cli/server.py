"""``fedstill server``: make a federation, and run its server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.core import certificates
from fedstill.core.errors import ArgumentError, DeployError, UnknownName, nearest

HELP = """\
fedstill server makes a federation on NVIDIA FLARE, and runs its server.

usage:
  fedstill server init DIR --host NAME --nodes A B C [--port N]
                                    a new federation: certificates and one startup kit for each node
  fedstill server start DIR         be the server, until Ctrl+C
  fedstill server status DIR        does it run (else the exit code is 1), which nodes are there, and what
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
    """Do what the words after ``fedstill server`` say.

    Raises:
        FedstillError: a wrong word, or something that cannot be done.
    """
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return
    name, *rest = words
    if name not in COMMANDS:
        raise UnknownName("command", f"server {name}", [f"server {known}" for known in COMMANDS])
    if any(word in ("-h", "--help") for word in rest):
        print(HELP, end="")
        return
    COMMANDS[name](rest)


def _init(words: list[str]) -> None:
    from fedstill.federation import provision

    folder, given = _read("init", words, host=1, nodes=None, port=1)
    for option in ("host", "nodes"):
        if option not in given:
            raise ArgumentError(
                f"--{option}", "", f"a value: fedstill server init {folder} --host NAME --nodes A B C"
            )
    provision.provision(
        folder, given["host"][0], given["nodes"], port=_port(given.get("port", [str(PORT)])[0])
    )
    _say_init(folder, given["host"][0], given["nodes"])


def _say_init(folder: Path, host: str, nodes: list[str]) -> None:
    from fedstill.federation import provision

    port = provision.read_federation(folder)["port"]
    until = certificates.valid_until(folder / "admin")
    print(f"A federation of {len(nodes)} nodes, in {folder}.")
    print(f"The server opens port {port} of {host}; the nodes open none.")
    print()
    print("Give each node its startup kit, over a channel that you trust: it holds the node's private key.")
    for node in nodes:
        print(f"  {folder / 'nodes' / node}  to the owner of {node}, who copies it to DIR/kit of the node")
    print(f"Then delete {folder / 'nodes'} here.")
    print(
        f"Keep {folder / 'admin'} for whoever starts runs: fedstill run ... --startup-kit {folder / 'admin'}"
    )
    print(f"Keep {folder / 'provision'} secret: its key lets nodes in.")
    print(f"The certificates are valid until {until:%Y-%m-%d}; `fedstill server add` makes new ones.")
    print()
    print(f"Next: fedstill server start {folder}")


def _start(words: list[str]) -> None:
    import sys

    from fedstill.federation import provision, site

    folder, _ = _read("start", words)
    federation = provision.read_federation(folder)
    this = site.server(folder)
    provision.check_kit(this.kit)
    if site.running(this) is None:
        site.check_port(this)
        print(
            f"Server of {federation['name']} at {federation['host']}:{federation['port']}; Ctrl+C ends it.",
            flush=True,
        )
    sys.exit(site.run(this))


def _status(words: list[str]) -> None:
    import sys

    from fedstill.federation import provision, site
    from fedstill.federation.admin import Admin

    folder, _ = _read("status", words)
    federation = provision.read_federation(folder)
    number = site.running(site.server(folder))
    if number is None:
        print(f"The server does not run on this machine: fedstill server start {folder}")
        _say_runs(folder, [])
        sys.exit(1)
    print(f"The server runs as process {number}, at {federation['host']}:{federation['port']}.")
    with Admin(folder / "admin") as admin:
        nodes, jobs = admin.nodes(), admin.jobs()
    print(f"{len(nodes)} nodes are there" + (":" if nodes else "."))
    for node, seconds in sorted(nodes.items()):
        print(f"  {node}  seen {seconds:.0f} s ago")
    _say_runs(folder, jobs)


def _say_runs(folder: Path, jobs: Sequence[Mapping[str, Any]]) -> None:
    """What became of the latest runs.

    Args:
        folder: of the federation.
        jobs: of all runs, the newest first; a run that was resumed has several.
    """
    from datetime import datetime

    from fedstill.federation.runs import outcome

    latest = {str(job["name"]): job for job in reversed(jobs)}
    here = {path.name: path.stat().st_mtime for path in (folder / "runs").glob("*") if path.is_dir()}
    begun = {**here, **{name: float(job["submit_time"]) for name, job in latest.items()}}
    if begun:
        print("Runs, the newest first:")
    for name in sorted(begun, key=lambda name: -begun[name])[:MOST_RUNS]:
        job = latest.get(name, {})
        at = f"{datetime.fromtimestamp(begun[name]):%Y-%m-%d %H:%M}"
        print(f"  {name}  {at}" + (f"  job {job['job_id']}" if job else ""))
        since = begun[name] if job else 0.0
        print(f"    {outcome(folder / 'runs' / name, str(job.get('status', '')), since)}")
    if len(begun) > MOST_RUNS:
        print(f"  and {len(begun) - MOST_RUNS} older, in {folder / 'runs'}")


def _stop(words: list[str]) -> None:
    from fedstill.federation import site

    folder, _ = _read("stop", words)
    print("Stopped." if site.stop(site.server(folder)) else "It did not run.")


def _add(words: list[str]) -> None:
    from fedstill.federation import provision

    folder, given = _read("add", words, nodes=None)
    if "nodes" not in given:
        raise ArgumentError("--nodes", "", f"a value: fedstill server add {folder} --nodes D")
    provision.add(folder, given["nodes"])
    for node in given["nodes"]:
        until = certificates.valid_until(folder / "nodes" / node)
        print(f"{folder / 'nodes' / node}  to the owner of {node}; valid until {until:%Y-%m-%d}")
    print(f"Then delete {folder / 'nodes'} here.")


def _renew(words: list[str]) -> None:
    from fedstill.federation import provision

    folder, _ = _read("renew", words)
    provision.renew(folder)
    until = certificates.valid_until(folder / "server")
    print(f"The certificates of the server and the admin are valid until {until:%Y-%m-%d}.")
    print(f"The server takes its own when it is started again: fedstill server stop {folder}")


def _revoke(words: list[str]) -> None:
    _admit("revoke", words, "is let in no more", "was revoked already")


def _readmit(words: list[str]) -> None:
    _admit("readmit", words, "is let in again", "was not revoked")


def _admit(command: str, words: list[str], done: str, nothing: str) -> None:
    from fedstill.core.records import write_text
    from fedstill.federation import provision, site
    from fedstill.federation.admin import Admin
    from fedstill.federation.runs import STOPPED

    folder, given = _read(command, words, node=0)
    node = given["node"][0]
    if site.running(site.server(folder)) is None:
        raise DeployError(f"the server does not run on this machine: fedstill server start {folder}")
    federation = provision.read_federation(folder)
    with Admin(folder / "admin") as admin:
        names = {*federation.get("nodes", ()), *provision.revoked(folder), *admin.nodes()}
        if "nodes" not in federation:  # made before there was a list: whoever ever had part in a run is known
            names |= {site for job in admin.jobs() for site in job["mandatory_clients"]}
        known = sorted(names)
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
            if run.is_dir():  # what FLARE ended says nothing of why
                write_text(run / STOPPED, json.dumps(told) + "\n")
            print(f"Ended run {job['name']}, in which it took part.")
            print("  `fedstill run --resume` goes on without it, where link.quorum allows that.")


def _read(command: str, words: list[str], **known: int | None) -> tuple[Path, dict[str, list[str]]]:
    """The folder and the options behind a command.

    Args:
        known: how many values each option takes, None for any number; 0 is a word without option, the last.

    Raises:
        ArgumentError: no folder, or an option without value.
        UnknownName: an option that the command does not have.
    """
    given: dict[str, list[str]] = {}
    plain: list[str] = []
    into = plain
    for word in words:
        if word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            if not known.get(option, 0) and known.get(option, 0) is not None:
                raise UnknownName(
                    "option", word, [f"--{name}" for name, count in known.items() if count != 0]
                )
            into = given.setdefault(option, [])
            into += [value] if equals else []
        else:
            into.append(word)
    expected = ["DIR", *(name.upper() for name, count in known.items() if count == 0)]
    if len(plain) != len(expected):
        raise ArgumentError(f"fedstill server {command}", " ".join(plain), " ".join(expected))
    for option, values in given.items():
        if not values or (known[option] is not None and len(values) != known[option]):
            raise ArgumentError(
                f"--{option}", " ".join(values), "one value" if known[option] else "one value or more"
            )
    given |= {name.lower(): [value] for name, value in zip(expected[1:], plain[1:], strict=True)}
    return Path(plain[0]), given


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text):
        raise ArgumentError("--port", text, "1 to 65535")
    return int(text)


COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "init": _init,
    "start": _start,
    "status": _status,
    "stop": _stop,
    "add": _add,
    "renew": _renew,
    "revoke": _revoke,
    "readmit": _readmit,
}
