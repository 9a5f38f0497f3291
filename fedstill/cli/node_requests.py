"""``fedstill node requests``, ``approve``, ``reject`` and ``log``: which runs a node's owner lets in, and who
has come."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.arguments import Given
from fedstill.cli.console import plain, print_facts, print_table
from fedstill.core.fingerprints import grouped
from fedstill.core.text_format import clip

if TYPE_CHECKING:
    from fedstill.node.requests import Request, Requests

LAST = 50  # lines of the log that are shown


def requests(given: Given) -> None:
    """The runs that were asked for, the latest first; of one the canonical text, to the byte."""
    from fedstill.node.request_text import facts

    known = _requests(Path(given.places[0])).all()
    if given.places[1:]:
        sys.stdout.write(known[_one(known, given.places[1])].description)
        return
    console = plain()
    if not known:
        console.print("No run has asked for approval.")
    for sha256, request in known.items():
        console.print(grouped(sha256))
        print_facts(console, facts(request))


def approve(given: Given) -> None:
    """Let a run in."""
    _decide(given, True)


def reject(given: Given) -> None:
    """Let it in no more."""
    _decide(given, False)


def log(given: Given) -> None:
    """The security log, and whether it is as it was written; exit code 2 where it is not."""
    from fedstill.cli.node_check import leave_faulty
    from fedstill.core.errors import FedstillError
    from fedstill.node import owner_folder
    from fedstill.node.security_log import SecurityLog

    folder = Path(given.places[0])
    if not (folder / owner_folder.FILE).is_file():
        raise FedstillError(f"{folder} has no {owner_folder.FILE}: it is no node's folder")
    kept = SecurityLog(folder)
    lines = list(kept.lines())
    rows = []
    for line in lines[-LAST:]:
        about = " ".join(str(line[name]) for name in ("run", "question") if line.get(name))
        sha256 = grouped(str(line.get("description", ""))[:16])
        why = "; ".join(clip(part) for part in (about, str(line["why"]), sha256) if part)
        rows.append(
            [str(line["line"]), line["at"][:19], line["event"], clip(line["who"]) or "not proven", why]
        )
    if rows:
        print_table(plain(), ["line", "when (UTC)", "what", "who", "why"], rows, left=5)
    if (fault := kept.verify()) is not None:
        leave_faulty(folder, [f"the security log of {folder}: {fault}"])
    first = (
        f" from line {lines[0]['line']} on, as older files were moved away"
        if lines[:1] and lines[0]["line"] > 1
        else ""
    )
    print(f"{len(lines)} lines, as they were written{first}.")


def _requests(folder: Path) -> Requests:
    from fedstill.node import owner_folder
    from fedstill.node.requests import Requests

    return Requests(folder, owner_folder.read(folder))


def _one(known: dict[str, Request], text: str) -> str:
    from fedstill.node.requests import one_of

    return one_of(known, text)


def _decide(given: Given, approved: bool) -> None:
    sha256, request = _requests(Path(given.places[0])).decide(
        given.places[1], approved, given.get("--because") or ""
    )
    whose = request.server or "a server that nothing proves"
    print(f"Run {request.run} of {whose}, {grouped(sha256)}: {request.state}.")
    if approved:
        print("The server starts it again, or goes on with it, and it is let in.")
