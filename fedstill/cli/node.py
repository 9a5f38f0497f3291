"""``fedstill node``: what the owner of a node does with its folder."""

from __future__ import annotations

import sys
from pathlib import Path

from fedstill.cli.arguments import ParsedArgs
from fedstill.cli.console import print_json
from fedstill.core.errors import ArgumentError


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
    from fedstill.cli.node_check import leave_faulty
    from fedstill.federation import flare_kit, flare_site
    from fedstill.node import owner_folder

    folder = Path(args.positionals[0])
    found = owner_folder.check_folder(folder, quick=True)
    if found.file is None or found.faults:
        leave_faulty(folder, found.faults)
    if not found.file.online:
        allowed = "true to join a federation; `fedstill offline answer` responds to files"
        raise ArgumentError("online", False, allowed)
    here = flare_kit.node(folder)
    if flare_site.process_id(here) is None:
        print(
            f"node {here.kit.node_name} joins {here.target}; Ctrl+C ends it. Its log: {here.log_file}",
            flush=True,
        )
    sys.exit(flare_site.run(here))


def status(args: ParsedArgs) -> None:
    from fedstill.federation import flare_kit, flare_site

    folder = Path(args.positionals[0])
    here = flare_kit.node(folder)
    number = flare_site.process_id(here)
    if "--json" in args:
        target = None if number is None else here.target
        responses = target is not None and flare_kit.is_reachable(target)
        print_json({"process": number, "server": target, "answers": responses, "log": str(here.log_file)})
        sys.exit(0 if responses else 1)
    if number is None:
        print(f"The node does not run on this machine: fedstill node start {folder}")
        sys.exit(1)
    address = here.target
    reached = flare_kit.is_reachable(address)
    print(
        f"The node runs as process {number}; {address} {'is reachable' if reached else 'is not reachable'}."
    )
    print(f"Log of its connection: {here.log_file}")
    sys.exit(0 if reached else 1)
