"""Runs that ask a node's owner, and what the owner has said: one file a description, in ``requests/``.

A server that wants a run which nobody has approved is refused, and its description is kept for the owner to
read. An approval is of one description, by its SHA-256, and of the protection that ``node.toml`` had then:
what differs in a single option is another description.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fedstill.core import file_permissions
from fedstill.core.config_tables import as_table, read_table
from fedstill.core.errors import ArgumentError, QuestionRefused, RunFolderError
from fedstill.core.fingerprints import digits, grouped
from fedstill.core.run_writer import read_object
from fedstill.node.node_file import NodeFile
from fedstill.node.policy import EACH_RUN, POLICY
from fedstill.node.security_log import SecurityLog, account
from fedstill.protocol.run_description import Description

FOLDER = "requests"
WAITS, APPROVED, USED, REJECTED = "waits", "approved", "used", "rejected"
MOST_WAITING = 100  # a server could fill the disk with them
LARGEST = 1_000_000  # bytes of a description
# Digits of a SHA-256 that name a request, and that approve it: a server can make a description that agrees
# with another in few of them.
NAMES, APPROVES = 8, 32


@dataclass(frozen=True)
class Request:
    """What a server wants, and what the owner says of it.

    Args:
        description: the run's, as canonical text.
        run: the name of the latest that asked.
        server: the fingerprint of who asked; empty: nothing proves it.
        at: when, in UTC.
        state: ``waits``, ``approved``, ``used`` (for the one run that it was good for) or ``rejected``.
        protection: of ``node.toml`` when it was approved, as canonical text.
        runs: names of those that have begun under it, each with the server that had it begin.
    """

    description: str
    run: str
    server: str
    at: str
    state: str = WAITS
    protection: str = ""
    runs: tuple[str, ...] = ()

    @property
    def about(self) -> Description:
        """What is asked for."""
        return Description(json.loads(self.description))


class Requests:
    """The requests in a node's folder.

    Args:
        file: its ``node.toml``.
    """

    def __init__(self, folder: Path, file: NodeFile) -> None:
        self._folder, self._file = folder / FOLDER, file
        self._log = SecurityLog(folder, file.policy.most_disk)

    # --- at the node -------------------------------------------------------------------------------------

    def require(self, run: str, description: Description, server: str) -> None:
        """Refuse a run that the owner has not approved, and keep it for the owner to read.

        Raises:
            QuestionRefused: it waits, was rejected, or was approved under another protection.
        """
        sha256 = description.sha256
        with self._alone():
            found = self._read(sha256)
            state = self._state(found, run, server)
            if state == APPROVED and found is not None:
                if (begun := _begun(run, server)) not in found.runs:
                    once = USED if self._file.policy.approve == EACH_RUN else APPROVED
                    self._write(sha256, replace(found, state=once, runs=(*found.runs, begun)))
                return
            if state == WAITS:
                self._keep(sha256, description, run, server, found)
        self._refuse("join", sha256, state)

    def require_still(self, run: str, server: str, sha256: str, question: str) -> None:
        """Refuse a question once the owner has taken back what was approved, with QuestionRefused."""
        with self._alone():
            state = self._state(self._read(sha256), run, server)
        if state != APPROVED:
            self._refuse(question, sha256, state)

    def _state(self, found: Request | None, run: str, server: str) -> str:
        if found is None or found.state == REJECTED:
            return WAITS if found is None else REJECTED
        granted = found.state == APPROVED and found.server == server
        if self._file.policy.approve == EACH_RUN:  # it was said of this one
            granted = granted and found.run == run
        if not granted and _begun(run, server) not in found.runs:
            return WAITS
        return APPROVED if found.protection == self._protection() else WAITS

    def _refuse(self, question: str, sha256: str, state: str) -> None:
        told = f"run {grouped(sha256)} is rejected by its owner"
        if state == WAITS:
            told = f"run {grouped(sha256)} waits until its owner approves it"
        raise QuestionRefused(self._file.name, question, f"approve: {told}")

    def _keep(
        self, sha256: str, description: Description, run: str, server: str, found: Request | None
    ) -> None:
        if found is not None and (found.run, found.server, found.state) == (run, server, WAITS):
            return
        waiting = [
            request for name, request in self._all().items() if request.state == WAITS and name != sha256
        ]
        if len(waiting) >= MOST_WAITING or len(description.text) > LARGEST:
            rule = f"approve: {MOST_WAITING} requests wait already, or this one is too large"
            raise QuestionRefused(self._file.name, "join", rule)
        at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        new = Request(description.text, run, server, at)
        if found is not None:  # under which other runs may be at work
            new = replace(new, runs=found.runs, protection=found.protection)
        self._write(sha256, new)
        earlier = "" if found is None or found.state == WAITS else found.state  # it waits again
        why = f"approve = {self._file.policy.approve!r}"
        self._log.once("waits", server, why, run=run, description=sha256, earlier=earlier)

    def _protection(self) -> str:
        return json.dumps(as_table(self._file.privacy), sort_keys=True)

    # --- for the owner -----------------------------------------------------------------------------------

    def all(self) -> dict[str, Request]:
        """All requests by the SHA-256 of their descriptions, the latest first; nobody waits meanwhile."""
        return dict(sorted(self._all().items(), key=lambda each: each[1].at, reverse=True))

    def decide(self, sha256: str, approved: bool, because: str = "") -> tuple[str, Request]:
        """The owner approves or rejects a request; also one that was decided otherwise before.

        Args:
            sha256: of the description, or its beginning: at least eight digits, and 32 to approve it.

        Returns:
            The whole SHA-256 and the request.

        Raises:
            ArgumentError: no request has it, or several.
            SecurityLogError: it cannot be written down; then nothing is decided.
        """
        with self._alone():
            known = self._all()
            name = one_of(known, sha256, APPROVES if approved else NAMES)
            before = known[name]
            state = APPROVED if approved else REJECTED
            # What began under another protection has to ask anew: it may be another server's than this one.
            same = before.protection == self._protection()
            runs = before.runs if approved and same else ()
            after = replace(before, state=state, protection=self._protection(), runs=runs)
            event: Any = state
            self._log.write(event, account(), because or "no reason given", run=before.run, description=name)
            self._write(name, after)
        return name, after

    # --- the files ---------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process decides or asks meanwhile."""
        file_permissions.make_folder(self._folder)
        with open(self._folder / "lock", "ab", opener=file_permissions.opener) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _all(self) -> dict[str, Request]:
        found = {path.stem: self._read(path.stem) for path in self._folder.glob("*.json")}
        return {name: request for name, request in found.items() if request is not None}

    def _read(self, sha256: str) -> Request | None:
        path = self._folder / f"{sha256}.json"
        if not path.exists():
            return None
        try:
            request = read_table(Request, dict(read_object(path)))
            named = request.about.sha256 == sha256
        except (ArgumentError, ValueError, TypeError):
            named = False
        if not named:
            raise RunFolderError(f"{path} does not hold the description that it is named after: delete it")
        return request

    def _write(self, sha256: str, request: Request) -> None:
        file_permissions.replace(
            self._folder / f"{sha256}.json", json.dumps(asdict(request)).encode(), sync=True
        )


def _begun(run: str, server: str) -> str:
    """A run of a server, among those that have begun: another server's of that name is another."""
    return f"{run} of {server}"


def asks(file: NodeFile) -> bool:
    """Whether a node's runs need its owner's approval."""
    return file.policy.approve != POLICY


def one_of(known: Iterable[str], sha256: str, least: int = NAMES) -> str:
    """The one of some descriptions that begins so; ArgumentError where there is none, or are several.

    Args:
        least: digits that are needed.
    """
    wanted = digits(sha256)
    found = [name for name in known if len(wanted) >= least and name.startswith(wanted)]
    if len(found) != 1:
        those = "`fedstill node requests`"
        allowed = f"the SHA-256 of one request, or its first digits, {least} or more: {those}"
        raise ArgumentError("HASH", sha256, allowed)
    return found[0]
