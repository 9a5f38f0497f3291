"""``fedstill node``: what the owner of a node does with its folder."""

from __future__ import annotations

import sys
from pathlib import Path

from fedstill.cli.arguments import Given, dispatch
from fedstill.cli.console import print_json
from fedstill.core.errors import ArgumentError

HELP = """\
A node is a folder that belongs to the owner of its data.

usage:
  fedstill node init DIR [--name NAME]      write DIR/node.toml, with every option explained, and DIR/secret;
                                            where only the secret is missing, a new one
  fedstill node check DIR [RUN.toml|PRESET] [--json]
                                            what the node is, what it would answer and refuse (in one run, or
                                            by each method), and everything that is wrong; trains nothing
  fedstill node start DIR                   join the federation that the startup kit in DIR/kit is for
  fedstill node status DIR [--json]         does it run, and can the server be reached from here? Else the
                                            exit code is 1
  fedstill node requests DIR [HASH] [--json]
                                            which runs have asked for your approval (policy approve), of which
                                            server (its fingerprint), and what each may ask; of one run
                                            the canonical text, whose SHA-256 is HASH
  fedstill node approve DIR HASH [--server FINGERPRINT] [--because TEXT]
                                            let this server's run in; compare HASH and FINGERPRINT with the
                                            server's people by phone. FINGERPRINT is needed where several
                                            servers ask for the same ("none": of a server that nothing proves)
  fedstill node reject DIR HASH [--server FINGERPRINT] [--because TEXT]
                                            do not, or no more: also while it is at work
  fedstill node log DIR [HASH] [--json] [--archive FOLDER]
                                            the security log: who joined, was refused, approved or rejected;
                                            and whether a line was changed, or the one is gone whose hash you
                                            noted elsewhere: then the exit code is 2. --archive moves its full
                                            files away first
  fedstill node answer DIR FILE [--out FILE] [--server-key FILE|FINGERPRINT]
                                            answer queries that came as a file, into a file; `fedstill
                                            queries` explains
"""


def main(words: list[str]) -> None:
    """``fedstill node ...``."""
    afar = {"check": "fedstill.cli.node_check:check", "answer": "fedstill.cli.offline:answer"}
    afar |= {name: f"fedstill.cli.node_requests:{name}" for name in ("requests", "approve", "reject", "log")}
    dispatch("node", words, HELP, {"init": _init, **afar, "start": _start, "status": _status})


def _init(given: Given) -> None:
    folder, name = given.places[0], given.get("--name")

    from fedstill.core.startup_kit import KIT
    from fedstill.node import owner_folder

    if not owner_folder.init(Path(folder), name):
        path = Path(folder) / owner_folder.SECRET
        print(f"Wrote {path} anew (which nobody else may read); {owner_folder.FILE} is as it was.")
        print("Noise is keyed anew: runs that have begun here cannot go on, and new ones can.")
        return
    file, secret = Path(folder) / owner_folder.FILE, Path(folder) / owner_folder.SECRET
    print(f"Wrote {file} and {secret} (which nobody else may read).")
    print("Next:")
    print("  1. say in node.toml where your data are, which model you have and what may leave")
    kit = Path(folder) / KIT
    print(f"  2. copy the startup kit that you were given to {kit}; or say online = false and answer files")
    print(f"  3. fedstill node check {folder}")


def _start(given: Given) -> None:
    from fedstill.cli.node_check import leave_faulty
    from fedstill.federation import flare_kit, flare_site
    from fedstill.node import owner_folder

    folder = Path(given.places[0])
    found = owner_folder.examine(folder, quick=True)
    if found.file is None or found.faults:
        leave_faulty(folder, found.faults)
    if not found.file.online:
        allowed = "true to join a federation; `fedstill node answer` answers files"
        raise ArgumentError("online", False, allowed)
    here = flare_kit.node(folder)
    if flare_site.running(here) is None:
        print(f"node {here.kit.name} joins {here.target}; Ctrl+C ends it. Its log: {here.log}", flush=True)
    sys.exit(flare_site.run(here))


def _status(given: Given) -> None:
    from fedstill.federation import flare_kit, flare_site

    folder = Path(given.places[0])
    here = flare_kit.node(folder)
    number = flare_site.running(here)
    if "--json" in given:
        target = None if number is None else here.target
        responses = target is not None and flare_kit.reaches(target)
        print_json({"process": number, "server": target, "answers": responses, "log": str(here.log)})
        sys.exit(0 if responses else 1)
    if number is None:
        print(f"The node does not run on this machine: fedstill node start {folder}")
        sys.exit(1)
    address = here.target
    reached = flare_kit.reaches(address)
    print(f"The node runs as process {number}; {address} {'responses' if reached else 'does not response'}.")
    print(f"What became of its link stands in {here.log}.")
    sys.exit(0 if reached else 1)
