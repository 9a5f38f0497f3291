"""The audit log of a node's folder: its path, faults and totals, and the security events in it.

Security events (joins, refusals, approvals, changes of the owner's rules) are entries of the same hash chain
as the releases. They hold no private values: of the node's internal errors an entry says only that they
occurred.
"""

from __future__ import annotations

import getpass
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fedstill.core.text_format import to_printable_line
from fedstill.node import owner_folder
from fedstill.node.audit_entries import ALL_RUNS, NODE_DATA, REFUSED, RULES_CHANGED, SECURITY_EVENTS, Entry
from fedstill.node.audit_log import AuditError, AuditLog
from fedstill.node.node_file import NodeFile
from fedstill.protocol.run_plan import PLAN_FILE


def audit_path(file: NodeFile, folder: Path) -> Path:
    """Return the path of a node's audit log."""
    return folder / Path(file.privacy.audit_log).expanduser()


def open_audit(file: NodeFile, folder: Path, *, read_only: bool = False) -> AuditLog:
    """Open a node's audit log, which may have a fault.

    Raises:
        AuditError: it cannot be read, or it is missing.
    """
    path = audit_path(file, folder)
    if (fault := missing_log_fault(path, folder)) is not None:
        raise AuditError(path, f"{fault}: put it back, or `fedstill audit accept {folder}` starts a new one")
    return AuditLog(path, read_only=read_only)


def missing_log_fault(path: Path, folder: Path | None) -> str | None:
    """Return the evidence that an audit log existed and is missing; None: it exists, or never existed.

    Args:
        path: path of the log.
        folder: the node's folder, or None.
    """
    if path.exists():
        return None
    if path.with_name(f"{path.name}.head").exists():
        return "is missing, but its head exists"
    for pattern, evidence in ((f"runs/*/{PLAN_FILE}", "runs"), ("requests/*.json", "requests for approval")):
        if folder is not None and any(folder.glob(pattern)):
            return f"is missing, but its node's {evidence} exist"
    return None


def log_size_bytes(path: Path) -> int:
    """Return the bytes of an audit log on disk, with those of SQLite's write-ahead log."""
    size = 0
    for file in (path, path.with_name(f"{path.name}-wal")):
        with suppress(FileNotFoundError):  # SQLite deletes the second file when the log is closed
            size += file.stat().st_size
    return size


def unwritable_reason(path: Path) -> str:
    """Return the reason why an audit log cannot be written; empty: it can. Without the log nothing is
    released.
    """
    if not path.parent.is_dir():
        return f"folder not found: {path.parent}"
    paths = [path.parent, *([path] if path.exists() else [])]  # SQLite creates further files there
    unwritable = [path_ for path_ in paths if not os.access(path_, os.W_OK)]
    return f"{unwritable[0]} is not writable" if unwritable else ""


@dataclass(frozen=True)
class TotalSpent:
    """Charges of a node's data over all runs.

    Attributes:
        events: number of charges of each event, by its text.
        no_guarantee: number of releases without a guarantee.
        units: charged privacy units.
        fault: fault of the audit log, or None.
    """

    events: Mapping[str, int]
    no_guarantee: int = 0
    units: frozenset[str] = frozenset()
    fault: str | None = None


def read_total_spent(file: NodeFile, folder: Path) -> TotalSpent:
    """Return the totals of a folder's audit log; zero if nothing has been charged yet.

    Raises:
        AuditError: the log cannot be read.
    """
    path = audit_path(file, folder)
    if not path.exists():
        return TotalSpent({}, fault=missing_log_fault(path, folder))
    with closing(AuditLog(path, read_only=True)) as audit:
        spending = audit.spending(NODE_DATA, ALL_RUNS)
        return TotalSpent(
            spending.total_events,
            spending.total_no_guarantee,
            frozenset(audit.totals.units(NODE_DATA)),
            audit.fault,
        )


# A server could fill the disk: these limits hold for one process.
MAX_EVENTS = 100  # events other than refusals
MAX_REFUSALS = 100  # refusals in entries of their own, besides the first by each rule
MAX_COUNTED_RULES = 50  # rules of a query whose further refusals are counted separately
MAX_RULE_NAMES = 200  # rules whose first refusal always has an entry; a node has fewer
MAX_LETTERS = 1000


class _Rule(NamedTuple):
    """Refusals that are counted together; no text of a server is in it, which could have any number of them.

    Args:
        actor: the server.
        run: the joined run; empty: of a request outside of it.
        query: a declared query; empty: any other.
        name: name of the rule, or type of the error.
        payer: as in the entries.
    """

    actor: str
    run: str
    query: str
    name: str
    payer: str


@dataclass
class _Repeats:
    """Number of refusals by one rule without an entry of their own: in total, and since the last entry."""

    total: int = 0
    unwritten: int = 0

    def add(self, count: int) -> None:
        """Add refusals to both numbers."""
        self.total, self.unwritten = self.total + count, self.unwritten + count


# --- security events --------------------------------------------------------------------------------


class SecurityEvents:
    """Writes the security events of one node, for one process.

    Args:
        folder: the node's folder.
        file: its ``node.toml``; None: it is read at the first use.
    """

    def __init__(self, folder: Path, file: NodeFile | None = None) -> None:
        self._folder, self._given_file = folder, file
        self._audit: AuditLog | None = None
        self._lock = threading.Lock()
        self._written: set[tuple[object, ...]] = set()  # events caused by a server
        self._refusals: set[tuple[object, ...]] = set()
        self._numberless: set[tuple[object, ...]] = set()  # refused queries without their numbers
        self._rule_names: set[str] = set()
        self._repeats: dict[_Rule, _Repeats] = {}

    @cached_property
    def _file(self) -> NodeFile:
        return owner_folder.read_node_file(self._folder) if self._given_file is None else self._given_file

    @property
    def audit(self) -> AuditLog:
        """The node's audit log: opened at the first use, and again if it was replaced or has a fault, which
        the owner may have accepted meanwhile.

        Raises:
            AuditError: it is missing or cannot be used.
        """
        with self._lock:
            audit = self._audit
            if audit is None or audit.fault is not None or audit.was_replaced():
                # The earlier one is not closed: a run that uses it shall find it replaced.
                audit = self._audit = open_audit(self._file, self._folder)
            return audit

    def close(self) -> None:
        """Close the audit log."""
        if self._audit is not None:
            self._audit.close()
            self._audit = None

    def write(
        self, event: str, actor: str, reason: str, *, run: str = "", query: str = "", **details: str
    ) -> None:
        """Write an event, which is on disk on return.

        Args:
            event: kind of the event, of :data:`~fedstill.node.audit_entries.SECURITY_EVENTS`.
            actor: cause of the event: a server's fingerprint, or an account of this machine.
            reason: the reason or the rule, in words.
            run: name of the run, if any.
            query: name of the query, if any.
            details: further facts.

        Raises:
            AuditError: the log has a fault, or cannot be written.
        """
        short = {name: to_printable_line(value, MAX_LETTERS) for name, value in details.items() if value}
        self._append(event, actor, reason, run, query, short)

    def write_once(
        self, event: str, actor: str, reason: str, *, run: str = "", query: str = "", **details: str
    ) -> None:
        """Write an event that a server can cause any number of times, unless this process has written the
        same, or too many such events, already.
        """
        key = (event, actor, reason, run, query, *details.values())
        if key in self._written or len(self._written) >= MAX_EVENTS or self._is_disk_full:
            return
        if len(self._written) + 1 == MAX_EVENTS:
            event, reason = REFUSED, "further events of this process are in node.log only"
            run, query, details = "", "", {}
        self.write(event, actor, reason, run=run, query=query, **details)
        self._written.add(key)  # after a failed write it is written the next time

    def record_refusal(
        self, actor: str, reason: str, *, run: str = "", query: str = "", rule_name: str = ""
    ) -> None:
        """Write the refusal of a run or a request, as :meth:`record_refused_query`, unless it is that of a
        query that was written with its number.
        """
        if (actor, reason, run, query) not in self._numberless:
            rule = _Rule(actor, "", "", rule_name or reason.partition(":")[0], "")
            self._record(rule, reason, run, query, -1)

    def record_refused_query(
        self,
        actor: str,
        reason: str,
        run: str,
        query: str,
        number: int,
        *,
        rule_name: str = "",
        is_declared: bool = True,
        has_space: bool = True,
    ) -> None:
        """Write the refusal of a query of the joined run.

        The first refusal by each rule has an entry. Repeated refusals, those after :data:`MAX_REFUSALS`, and
        those for which there is no space on the disk are counted by rule: an entry holds their number when
        there are 10, 100, 1000 and so on, and at the end of the run.

        Args:
            actor: the server's fingerprint.
            reason: the rule, in words.
            run: name of the run.
            query: name of the query, as the server sent it.
            number: number of the query.
            rule_name: a name of the rule without any text of the server; empty: the reason up to its colon.
            is_declared: whether the run declares such a query.
            has_space: whether there is space for further entries.
        """
        name = rule_name or reason.partition(":")[0]
        rule = _Rule(actor, run, query if is_declared else "", name, NODE_DATA)
        self._record(rule, reason, run, query, number, has_space)

    def _record(
        self, rule: _Rule, reason: str, run: str, query: str, number: int, has_space: bool = True
    ) -> None:
        actor, name, payer = rule.actor, rule.name, rule.payer
        has_space = has_space and not self._is_disk_full
        is_first = name not in self._rule_names and len(self._rule_names) < MAX_RULE_NAMES
        if rule not in self._repeats and len(self._repeats) >= MAX_COUNTED_RULES:
            rule = rule._replace(query="", name="other rules")  # one for each run
        else:
            is_first = is_first or rule not in self._repeats
        repeats = self._repeats.setdefault(rule, _Repeats())
        repeats.add(1)  # before the write, which may fail
        refusal = (actor, reason, run, query, number)
        if not has_space:
            return
        if refusal not in self._refusals and (is_first or len(self._refusals) < MAX_REFUSALS):
            self._append(REFUSED, actor, reason, run, query, {}, number, payer)
            repeats.add(-1)  # it has an entry of its own
            self._refusals.add(refusal)
            self._rule_names.add(name)
            if number >= 0:
                self._numberless.add(refusal[:-1])
        elif repeats.total >= 10 and math.log10(repeats.total).is_integer():
            self._write_repeats(rule, repeats)

    def record_repeats(self) -> None:
        """Write the numbers of refusals that no entry holds yet, at the end of a run or of the process."""
        for rule, repeats in list(self._repeats.items()):  # another thread may refuse a message meanwhile
            if repeats.unwritten and not self._is_disk_full:
                self._write_repeats(rule, repeats)

    def _write_repeats(self, rule: _Rule, repeats: _Repeats) -> None:
        actor, run, query, name, payer = rule
        reason, count = f"{name}: {repeats.unwritten} more refusals", str(repeats.unwritten)
        self._append(REFUSED, actor, reason, run, query, {"refusals": count}, -1, payer)
        repeats.unwritten = 0

    @property
    def _is_disk_full(self) -> bool:
        """True if the log has reached the owner's limit for files that a server can cause."""
        max_bytes = self._file.policy.max_disk
        return bool(max_bytes) and log_size_bytes(audit_path(self._file, self._folder)) >= max_bytes

    def record_rules(self, rules: Mapping[str, Any]) -> None:
        """Write the owner's rules if they differ from those written last.

        Raises:
            AuditError: as for :meth:`write`.
        """
        current = {name: json.dumps(value) for name, value in rules.items()}
        recorded = self.audit.totals.rules.get(self._file.name, {})
        changed = {name: value for name, value in current.items() if recorded.get(name) != value}
        if changed or recorded.keys() - current.keys():
            changes = ", ".join(f"{name} = {value}" for name, value in changed.items())
            reason = changes if recorded else "first start"
            self._append(RULES_CHANGED, process_user_name(), reason, "", "", current)

    def _append(
        self,
        event: str,
        actor: str,
        reason: str,
        run: str,
        query: str,
        details: Mapping[str, str],
        number: int = -1,
        payer: str = "",
    ) -> None:
        texts = (to_printable_line(text, MAX_LETTERS) for text in (run, query, actor, reason))
        run, query, actor, reason = texts
        keys = (run, payer, self._file.name, number, query, event)
        self.audit.append(Entry(*keys, rule=reason, actor=actor, details=details))


def read_security_events(audit: AuditLog) -> Iterator[dict[str, Any]]:
    """Yield the security events of a log, oldest first: number ``entry``, time ``at``, ``event``, ``actor``,
    ``reason``, and ``run``, ``query``, ``number`` and further facts if there are any.
    """
    for entry in audit.entries():
        if entry["part"] in SECURITY_EVENTS:
            yield as_security_event(entry)


def as_security_event(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of the audit log as :func:`read_security_events` does."""
    event = {name: entry[name] for name in ("entry", "at", "actor")}
    event |= {"event": entry["part"], "reason": entry["rule"]}
    event |= {name: entry[name] for name in ("run", "query") if entry[name]}
    if entry["number"] >= 0:
        event["number"] = entry["number"]
    if entry["part"] == RULES_CHANGED:
        return {**event, "policy": dict(entry["details"])}
    return {**entry["details"], **event}


def process_user_name() -> str:
    """Return the user name of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no user name
        return f"account {os.getuid()}"
