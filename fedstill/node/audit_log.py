"""The audit log of a node: every release and charge, written before the release, and every security event.

One SQLite file holds the entries of all runs in one hash chain.

- *Durable.* A charged entry survives a kill and a power failure.
- *Never less, never twice.* A charge reads the totals, checks the budget and writes in one transaction,
  which no other process interrupts. The same release after a resume is the same entry; one that differs in
  a single bit is another.
- *Whole.* Each entry has a hash over the one before and itself. A head, a small file with the last entry and
  the totals, distinguishes an older copy from the newest. That reveals damage and restored copies; a
  person who can write to the folder can write another log with another head.
- *A fault stops the node.* While anything is wrong nothing is charged, so nothing is released, until the
  owner has accepted it. Totals of the head that the entries do not show are then charged again.

The head is written after its entry is durable, by renaming a finished file over the old one. A kill at any
moment leaves a whole head, at worst an older one. It is not synced to the disk: a power failure can leave an
older head, which the entries correct, or on some file systems an empty one, which stops the node until its
owner has accepted it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from fedstill.core.errors import ArgumentError
from fedstill.core.hashing import chain_hash
from fedstill.node.audit_database import AuditError, Database
from fedstill.node.audit_entries import (
    ACCEPTED,
    ALL_RUNS,
    BYTES,
    GRADIENT,
    MAX_COUNT,
    NO_GUARANTEE,
    QUERIES,
    RELEASES,
    RESPONSE,
    RULES_CHANGED,
    SECURITY_EVENTS,
    TRAINING,
    UNIT_PREFIX,
    Entry,
    check_entry,
    is_text,
    parse_entry_fields,
)
from fedstill.node.audit_head import MAX_ENTRY_NUMBER, AuditLogHead, format_head_total, write_audit_head

__all__ = ["FILE", "AuditError", "AuditLog", "Charge", "Spending"]

Check = Callable[[Callable[[], "Spending"]], None]
FILE = "audit.sqlite"  # in a run's folder; a node's owner may choose another name


@dataclass(frozen=True)
class Charge:
    """An entry to be written, and the rules for it.

    Args:
        entry: the entry.
        check: as in :meth:`AuditLog.charge`.
    """

    entry: Entry
    check: Check = lambda spending: None


class AuditLog:
    """Entries in a file or, without one, in memory.

    Several threads may use it, and several processes the file, which has to be on a local disk (required by
    SQLite's write-ahead log). A log with a fault can still be read.

    Args:
        path: the file; it and its head (``path`` + ``.head``) are created if both are missing.
        durable: wait at each entry until the disk has it, and write the head with each. False survives a
            kill, but not a power failure, and the head is updated only when the log is opened or closed.
        read_only: change nothing, not even the head.

    Attributes:
        totals: totals of the entries.
        fault: description of a fault, or None.

    Raises:
        AuditError: the file cannot be read, or is not an audit log.
    """

    def __init__(self, path: Path | None = None, *, durable: bool = True, read_only: bool = False) -> None:
        self._durable, self._read_only = durable, read_only
        self.fault: str | None = None
        self._is_open = True
        self.totals, self._last_hash = EntryTotals(), ""
        self._last_number = self._accepted_number = self._head_number = 0
        self._open_database(path)

    def open(self, path: Path | None) -> None:
        """Continue with the entries of another file."""
        self.close()
        self._open_database(path)
        self._is_open = True

    # --- writing --------------------------------------------------------------------------------------

    def charge(self, entry: Entry, check: Check = lambda spending: None) -> int:
        """Write a release before it is handed over, or a charge before its cause.

        Args:
            entry: the entry.
            check: gets a function that returns the payer's earlier spending, and may raise an error to
                refuse; then nothing is written. No other process can charge in between. It is not called if
                the entry exists already.

        Returns:
            Number of the entry. If the same entry (run, node, number, part, and all hashes) exists, its
                number, at no further cost.

        Raises:
            AuditError: the log has a fault, is locked for too long, or cannot be written.
            ArgumentError: an invalid entry.
        """
        return self.charge_all([Charge(entry, check)])[0]

    def charge_all(self, charges: Sequence[Charge]) -> list[int]:
        """Write several charges in one transaction, in order: all of them, or none if one is refused.

        Each check reads the spending with the charges before it. Arguments, result and errors are as in
        :meth:`charge`.
        """
        for entry in (charge.entry for charge in charges):
            if not entry.run:
                raise ArgumentError("run of an entry", entry.run, "its name")
            if entry.part == ACCEPTED:
                raise ArgumentError("part of an entry", entry.part, "that of an answer")
        return self._write_entries(charges, skip_repeated=True)

    def append(self, entry: Entry) -> None:
        """Write an entry that costs nothing, also if the same exists: a security event."""
        self._write_entries([Charge(entry)], skip_repeated=False)

    def _write_entries(self, charges: Sequence[Charge], skip_repeated: bool) -> list[int]:
        for charge in charges:
            check_entry(charge.entry)
        with self._database.lock:
            numbers, first = [], None
            try:
                with self._database.write_transaction():
                    self._sync_before_write()
                    first = self._last_number
                    for charge in charges:
                        entry = charge.entry
                        number = self.totals.entry_number(vars(entry)) if skip_repeated else 0
                        if not number:
                            charge.check(partial(self.totals.spending, entry.payer, entry.run))
                            number = self._insert_entry(entry)
                        numbers.append(number)
            except BaseException:
                if first is not None and self._last_number > first:  # the totals have what was rolled back
                    with self._database.read_transaction():
                        self._verify_all()
                raise
            if max(numbers, default=0) > self._head_number:  # for example after a failed write of the head
                self._write_head()
        return numbers

    def accept(self, reason: str, *, is_lost: bool = False) -> None:
        """Accept the log as it is: write that down, with the owner's reason.

        Totals of the head that the entries do not show are charged again, to the same payers and runs.

        Args:
            reason: the reason, in words.
            is_lost: whether the file was lost, so that a new one is expected.

        Raises:
            ArgumentError: no reason.
            AuditError: the log has no fault, cannot be written, or has no number left for an entry.
        """
        if not reason.strip() or not is_text(reason):
            raise ArgumentError("because", reason, "the reason, in words")
        with self._database.lock:
            with self._database.write_transaction():
                head = self._verify_all() or AuditLogHead()
                if self.fault is None and not is_lost:
                    raise AuditError(self._database.location, "it has no fault to accept")
                missing = {
                    names: difference
                    for names, counts in head.totals.items()
                    if (difference := counts - self.totals.events.get(names, Counter()))
                }
                # Used numbers are not used again: the gap shows the lost entries.
                self._last_number = max(self._last_number, head.number, self._known[0])
                for (payer, run), cost in (missing or {("", ""): Counter[str]()}).items():
                    counted = (NO_GUARANTEE, QUERIES, BYTES)
                    no_guarantee, queries, byte_count = (cost.pop(name, 0) for name in counted)
                    keys = (run, payer, payer, self._last_number + 1, ACCEPTED, ACCEPTED)
                    up = {BYTES: byte_count} if byte_count else {}
                    units = [
                        name for name in head.totals.get((payer, run), ()) if name.startswith(UNIT_PREFIX)
                    ]
                    for name in units:
                        cost.pop(name, 0)
                    entry = Entry(
                        *keys,
                        rule=reason,
                        up=up,
                        cost=cost,
                        no_guarantee=no_guarantee,
                        unit=" and ".join(name.removeprefix(UNIT_PREFIX) for name in units),
                        queries=queries,
                    )
                    self._insert_entry(entry)
                self._verify_all()
            self.fault = None  # only an outdated head may remain
            self._write_head(always=True)

    # --- reading --------------------------------------------------------------------------------------

    def spending(self, payer: str, run: str) -> Spending:
        """Return a payer's spending so far, in one run and in all, including other processes' entries."""
        if self._is_open and self.fault is None:
            with self._database.lock:
                if self._database.has_changed():
                    with self._database.read_transaction():
                        self._read_new_entries()
        return self.totals.spending(payer, run)

    def traffic_totals(self, run: str | None = None) -> dict[str, Any]:
        """Return bytes and queries of one run, or of all:
        :meth:`fedstill.node.audit_log.EntryTotals.traffic_totals`.
        """
        return self.totals.traffic_totals(run)

    def entry(self, number: int) -> dict[str, Any]:
        """Return one entry, as :meth:`entries` does."""
        return next(self.entries(number, 1))

    def entries(self, first: int = -(2**62), limit: int = -1) -> Iterator[dict[str, Any]]:
        """Yield entries from a number on, oldest first, without unreadable ones.

        Each holds ``entry`` (its number), ``at`` (UTC), the fields of :class:`Entry`, and ``hash``.

        Args:
            first: number of the first entry.
            limit: maximum number of entries; -1: all.
        """
        query = "SELECT entry, line, CAST(hash AS TEXT) FROM entries WHERE entry >= ? ORDER BY entry LIMIT ?"
        with self._database.read_transaction():
            rows = self._database.execute(query, (first, limit)).fetchall()
        for number, line, hash_ in rows:
            if (fields := parse_entry_fields(line)) is not None:
                yield {"entry": number, **fields, "hash": hash_}

    def verify(self) -> None:
        """Check every entry and the head; :class:`AuditError` names the first fault and its entry."""
        with self._database.read_transaction():
            self._verify_all()
        self.require_sound()

    def require_sound(self) -> None:
        """Refuse a log with a fault, as every charge does, with :class:`AuditError`."""
        if self.fault is not None:
            message = (
                f"{self.fault}; nothing is released until its owner has accepted it (`fedstill audit accept`)"
            )
            raise AuditError(self._database.location, message)

    def was_replaced(self) -> bool:
        """Return whether the path now leads to another file, or to none."""
        return self._database.was_replaced()

    @property
    def last_hash(self) -> str:
        """Hash of the last entry; empty if there is none."""
        return self._last_hash

    def find_hash(self, hash_: str) -> int | None:
        """Return the number of the entry with a hash that was noted elsewhere; None: the log was restored
        from before it, or is another one.
        """
        query = "SELECT entry FROM entries WHERE hash = ? LIMIT 1"
        with self._database.read_transaction():
            row = self._database.execute(query, (hash_,)).fetchone()
        return None if row is None else int(row[0])

    def close(self) -> None:
        """Close the file; totals can still be read."""
        try:
            if self._is_open and not self._durable and self.fault is None:
                self._write_head(always=True)
        finally:
            self._is_open = False
            self._database.close()

    # --- opening and checking ---------------------------------------------------------------------------

    def _open_database(self, path: Path | None) -> None:
        self._head_path = None if path is None else path.with_name(f"{path.name}.head")
        self._database = Database(path, durable=self._durable, read_only=self._read_only)
        self._known = 0, ""  # last entry before the newest ones were read
        transaction = self._database.read_transaction if self._read_only else self._database.write_transaction
        try:
            with transaction():
                self._database.require_format()
            with transaction():  # a reader's view of the file begins after reading the head
                head = self._verify_all()
            if self.fault is None and (head is None or head.number < self._last_number):
                self._write_head(always=True)  # a process was killed before writing it
        except AuditError:
            self._database.close()
            raise

    def _verify_all(self) -> AuditLogHead | None:
        """Read all entries again, set ``fault``, and return the head. Call it within a transaction."""
        head, damage = None, None
        if self._head_path is not None:
            try:
                head = AuditLogHead.read(self._head_path)
            except (OSError, ValueError) as error:
                damage = f"its head {self._head_path.name} is damaged: {error}"
        self.totals, self._last_number, self._last_hash, self._accepted_number = EntryTotals(), 0, "", 0
        self._head_number = 0 if head is None else head.number
        expected = self._read_entries(-(2**62), self._head_number)
        self.fault = self.fault or damage
        if self.fault is None and self._head_path is not None and head is None and self._last_number:
            self.fault = f"its head {self._head_path.name} is missing"
        # A head older than the last settlement is covered by it.
        if self.fault is None and head is not None and head.number >= self._accepted_number:
            if head.number > self._last_number:
                ends = f"it ends at entry {self._last_number}, and its head at {head.number}"
                self.fault = f"is an older copy: {ends}"
            elif head.hash != expected.hash:
                self.fault = f"entry {head.number} differs from the one in its head"
            elif head.totals != expected.totals:
                self.fault = f"its entries up to {head.number} do not add up to the totals in its head"
        # Without an acceptance an older copy is no better for having its own head.
        if self.fault is None and self._accepted_number <= self._known[0] and not self._holds(self._known):
            remedy = "restart the node after its owner has checked the log"
            self.fault = f"entry {self._known[0]} is not the one that this process has seen: {remedy}"
        return head

    def _read_entries(self, last_read: int, head_number: int = 0) -> AuditLogHead:
        """Read the entries after a number, and check each against the one before.

        Returns:
            The head that the entries imply at ``head_number``.
        """
        fault: str | None = None
        expected = AuditLogHead()
        query = "SELECT entry, line, hash FROM entries WHERE entry > ? ORDER BY entry"
        for number, line, stored_hash in self._database.execute(query, (last_read,)):
            fields, hash_ = parse_entry_fields(line), chain_hash(self._last_hash, number, line)
            if number != self._last_number + 1:
                fault = fault or f"entry {self._last_number + 1} is missing"
            if fields is None or stored_hash != hash_:
                fault = fault or f"entry {number} is not as it was written"
            elif fields["part"] == ACCEPTED:  # the owner accepted everything before it
                fault, self._accepted_number = None, number
            self._apply_entry(number, hash_, fields)
            if number == head_number:
                expected = AuditLogHead(number, hash_, self.totals.run_totals())
        self.fault = fault
        return expected

    def _sync_before_write(self) -> None:
        """Read entries of other processes; refuse entries that do not follow from the known ones."""
        if self.fault is not None:  # the owner may have accepted it meanwhile
            self._verify_all()
        self.require_sound()
        if self._database.was_replaced():
            raise AuditError(
                self._database.location, "was replaced by another file: restart the node to check it"
            )
        self._database.require_format()
        self._read_new_entries()
        self.require_sound()

    def _read_new_entries(self) -> None:
        self._known = self._last_number, self._last_hash
        if self._newest_entry() == self._known:
            return
        is_unchanged = self._holds(self._known)
        self._read_entries(self._last_number)
        self.fault = self.fault if is_unchanged else f"entry {self._known[0]} is not as it was written"

    def _holds(self, entry: tuple[int, str]) -> bool:
        """Return whether the file has an entry of this number and hash; number 0 is before the first."""
        query = "SELECT entry, hash FROM entries WHERE entry = ?"
        return not entry[0] or self._database.execute(query, entry[:1]).fetchone() == entry

    def _newest_entry(self) -> tuple[int, str]:
        query = "SELECT entry, hash FROM entries ORDER BY entry DESC LIMIT 1"
        return self._database.execute(query).fetchone() or (0, "")

    def _insert_entry(self, entry: Entry) -> int:
        """Write an entry within a transaction, add it to the totals, and return its number."""
        if self._read_only:
            raise AuditError(self._database.location, "is open read-only")
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        number, line = self._last_number + 1, entry.to_line(time)
        if number > MAX_ENTRY_NUMBER:
            message = f"no entry can follow number {self._last_number}: move this log or its head away"
            raise AuditError(self._database.location, f"{message}, and run `fedstill audit accept`")
        hash_ = chain_hash(self._last_hash, number, line)
        insert = "INSERT INTO entries VALUES (?, ?, ?)"
        if self._database.execute(insert, (number, line, hash_)).rowcount != 1:
            raise AuditError(self._database.location, "did not store an entry")
        self._apply_entry(number, hash_, vars(entry))
        return number

    def _apply_entry(self, number: int, hash_: str, fields: Mapping[str, Any] | None) -> None:
        self._last_number, self._last_hash = number, hash_
        if fields is not None:
            self.totals.add(number, fields)

    def _write_head(self, always: bool = False) -> None:
        """Write a head for the newest entry, possibly of another process."""
        if self._head_path is None or self._read_only or not (always or self._durable):
            return
        with self._database.write_transaction():
            self._read_new_entries()
            self.require_sound()
            try:
                write_audit_head(self._head_path, self._last_number, self._last_hash, self.totals.head_rows())
            except OSError as error:
                raise AuditError(self._head_path, f"cannot be written: {error.strerror}") from error
            self._head_number = self._last_number


# --- totals -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spending:
    """Spending of one payer, in one run and in all: number of charges of each event, by its text.

    Attributes:
        run_events, total_events: charges in this run and in all runs.
        run_no_guarantee, total_no_guarantee: releases without a guarantee.
        run_queries, total_queries: queries; each response counts, and each further gradient of it.
        total_bytes: released bytes in all runs.
    """

    run_events: Mapping[str, int]
    total_events: Mapping[str, int]
    run_no_guarantee: int = 0
    total_no_guarantee: int = 0
    run_queries: int = 0
    total_queries: int = 0
    total_bytes: int = 0


class EntryTotals:
    """Totals of entries, in memory: a charge takes constant time, however many entries there are.

    Attributes:
        events: by payer and run (:data:`ALL_RUNS` is all of them): number of events, and counts for limits;
            each up to :data:`~fedstill.node.audit_entries.MAX_COUNT`.
        bytes: bytes of releases, by run, node, way ("down" or "up") and payload kind.
        response_counts: number of responses and of further gradients, by run, node and query; a repeated
            response counts again if a bit differs.
        rules: the owner's rules as written last, by node.
    """

    def __init__(self) -> None:
        self.events: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.bytes: Counter[tuple[str, str, str, str]] = Counter()
        self.response_counts: Counter[tuple[str, str, str]] = Counter()
        self.rules: dict[str, Mapping[str, str]] = {}
        self._entry_numbers: dict[tuple[Any, ...], dict[tuple[str, str], int]] = defaultdict(dict)
        self._query_names: dict[tuple[str, int, str], str] = {}  # run, number and content hash -> query name
        self._unreported: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # by run and node
        self._charged_runs: set[str] = set()  # runs
        self._head_rows: dict[tuple[str, str], str] = {}  # texts of the head; empty if outdated

    def add(self, number: int, entry: Mapping[str, Any]) -> None:
        """Add one entry, as :func:`parse_entry_fields` returns it."""
        run, node, part = entry["run"], entry["node"], entry["part"]
        if part in SECURITY_EVENTS:
            if part == RULES_CHANGED:
                self.rules[node] = entry["details"]
            return
        self._charged_runs.add(run)
        cost = dict(entry["cost"])
        byte_count = sum(entry["up"].values())
        for name, count in (
            (QUERIES, entry["queries"]), (BYTES, byte_count), (NO_GUARANTEE, entry["no_guarantee"])
        ):  # fmt: skip
            if count:
                cost[name] = count
        for name in (run, ALL_RUNS):
            events = self.events[entry["payer"], name]
            for event, times in cost.items():
                events[event] = min(events[event] + times, MAX_COUNT)
            if entry["unit"]:
                events[f"{UNIT_PREFIX}{entry['unit']}"] = 1
        if run != ALL_RUNS:
            self._head_rows[entry["payer"], run] = ""
        siblings = self._entry_numbers[_query_key(entry)]
        if part == RESPONSE or (part == GRADIENT and siblings):
            self.response_counts[run, node, entry["query"]] += 1
        siblings[entry["content_hash"], entry["release_hash"]] = number
        if part == TRAINING:
            self._unreported[run, node].update(cost)
        if part not in RELEASES:
            return
        if entry["training_cost"]:
            self._unreported[run, node].subtract(entry["training_cost"])
        if part == RESPONSE:
            self._query_names[run, entry["number"], entry["content_hash"]] = entry["query"]
        for direction in ("down", "up"):
            for kind, size in entry[direction].items():
                self.bytes[run, node, direction, kind] += size

    def spending(self, payer: str, run: str) -> Spending:
        """Return a payer's spending, in one run and in all."""
        in_run, in_all = self._events_of(payer, run), self._events_of(payer, ALL_RUNS)
        return Spending(
            _privacy_events(in_run),
            _privacy_events(in_all),
            in_run.get(NO_GUARANTEE, 0),
            in_all.get(NO_GUARANTEE, 0),
            in_run.get(QUERIES, 0),
            in_all.get(QUERIES, 0),
            in_all.get(BYTES, 0),
        )

    def units(self, payer: str, run: str = ALL_RUNS) -> set[str]:
        """Return the privacy units of a payer's charges, in one run or in all; events of two units cannot
        be added.
        """
        return {
            name.removeprefix(UNIT_PREFIX)
            for name in self._events_of(payer, run)
            if name.startswith(UNIT_PREFIX)
        }

    def _events_of(self, payer: str, run: str) -> Mapping[str, int]:
        return self.events.get((payer, run), {})

    def entry_number(self, entry: Mapping[str, Any]) -> int:
        """Return the number of the entry with equal run, node, number, part and hashes; 0 if none."""
        return self._entry_numbers.get(_query_key(entry), {}).get(
            (entry["content_hash"], entry["release_hash"]), 0
        )

    def sibling_content_hashes(self, entry: Mapping[str, Any]) -> list[str]:
        """Return the content hashes of entries that differ from this one at most in content and release."""
        return [content_hash for content_hash, _ in self._entry_numbers.get(_query_key(entry), ())]

    def unreported_training_charges(self, run: str, node: str) -> dict[str, int]:
        """Return charges for training that no reply has reported to a server yet."""
        charges: Mapping[str, int] = self._unreported.get((run, node), {})
        return {name: min(count, MAX_COUNT) for name, count in charges.items() if count > 0}

    def run_totals(self) -> dict[tuple[str, str], Counter[str]]:
        """Return the totals by payer and run, as a head holds them."""
        return {names: Counter(counts) for names, counts in self.events.items() if names[1] != ALL_RUNS}

    def head_rows(self) -> Iterable[str]:
        """Yield the totals as texts. Only the rows of changed runs are computed again."""
        for names, text in self._head_rows.items():
            if not text:
                self._head_rows[names] = format_head_total(*names, self.events[names])
        return self._head_rows.values()

    def has_charged(self, run: str) -> bool:
        """Return whether a run has entries other than refusals."""
        return run in self._charged_runs

    def traffic_totals(self, run: str | None = None) -> dict[str, Any]:
        """Return bytes ``up`` and ``down``, total, ``by_kind`` and ``by_node``, and numbers of queries: of
        one run, or of all.
        """
        by_kind: dict[str, dict[str, int]] = {}
        by_node: dict[str, dict[str, int]] = {}
        total = {"up": 0, "down": 0}
        for (entry_run, node, direction, kind), size in sorted(self.bytes.items()):
            if run in (None, entry_run):
                for table, key in ((by_kind, kind), (by_node, node)):
                    table.setdefault(key, {"up": 0, "down": 0})[direction] += size
                total[direction] += size
        names = [name for (entry_run, _, _), name in self._query_names.items() if run in (None, entry_run)]
        return {
            **total,
            "by_kind": by_kind,
            "by_node": by_node,
            "queries": len(names),  # a query to K nodes counts once
            "queries_by_name": dict(sorted(Counter(names).items())),
        }


def _privacy_events(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the events among the counts of a payer."""
    return {
        name: count
        for name, count in counts.items()
        if name not in (NO_GUARANTEE, QUERIES, BYTES) and not name.startswith(UNIT_PREFIX)
    }


def _query_key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return entry["run"], entry["node"], entry["number"], entry["part"], entry["history_hash"]
