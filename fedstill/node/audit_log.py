"""The audit log of a node: everything that left it, was refused or was paid for, written before it leaves.

One SQLite file holds an entry for each, over all runs.

- *Durable.* An entry that was charged survives a kill and a power failure.
- *Never less, never twice.* Whoever charges reads what was spent, asks whether the budget allows more, and
  writes, all in one transaction that no other process comes between. The same release again, after a stop, is
  the same entry; one that differs in a single bit is another.
- *Whole.* Each entry has a hash over the one before and itself, and a head beside the file
  (:mod:`fedstill.node.audit_head`), which has their totals too, tells an older copy from the newest. That
  shows damage, and copies that somebody has put back; who can write to the folder can write another log
  with another head.
- *Trouble stops the node.* While anything is wrong nothing is charged, so nothing leaves, until the owner has
  settled it; then what the head says was spent, and the entries do not, is charged again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fedstill.core.errors import ArgumentError
from fedstill.core.hashing import chain_hash
from fedstill.node import audit_head
from fedstill.node.audit_database import AuditError, Database
from fedstill.node.audit_entries import (
    BYTES,
    NO_GUARANTEE,
    QUERIES,
    SETTLED,
    UNIT_PREFIX,
    Entry,
    check_entry,
    is_text,
    parse_line,
)
from fedstill.node.audit_head import MAX_ENTRY_NUMBER, Head
from fedstill.node.audit_totals import EntryTotals, Spending

__all__ = ["FILE", "AuditError", "AuditLog", "Spending"]

FILE = "audit.sqlite"  # in a run's folder; a node's owner may name another


class AuditLog:
    """Entries in a file or, without one, in memory.

    Several threads may use it, and several processes the file, which has to be on a disk of this machine
    (SQLite's write-ahead log needs that). In trouble, it can still be read; ``fault`` says what is wrong.

    Args:
        path: of the file; it and its head (``path`` + ``.head``) are made if neither is there.
        durable: wait at each entry until the disk has it, and write the head with each. False survives a
            kill, not a power failure, and the head is as new as the last opening or closing.
        read_only: change nothing, not even the head.

    Attributes:
        totals: what the entries add up to.

    Raises:
        AuditError: the file cannot be read, or is no audit log.
    """

    def __init__(self, path: Path | None = None, *, durable: bool = True, read_only: bool = False) -> None:
        self._durable, self._read_only = durable, read_only
        self.fault: str | None = None
        self._is_open = True
        self.totals, self._last_number, self._last_hash, self._settled_number, self._head_number = (
            EntryTotals(),
            0,
            "",
            0,
            0,
        )
        self._open_database(path)

    def open(self, path: Path | None) -> None:
        """Go on with the entries of another file."""
        self.close()
        self._open_database(path)
        self._is_open = True

    # --- writing --------------------------------------------------------------------------------------

    def charge(self, entry: Entry, check: Callable[[Spending], None] = lambda spent: None) -> int:
        """Write a release down before it is handed over, or what it costs before it happens.

        Args:
            check: is given what the payer has spent before and may raise to refuse; then nothing is written.
                Nobody else can spend in between. It is not asked about what is written already.

        Returns:
            The entry's number: where the same (of the same run, node, number, part, content, after and left)
            was written before, which costs nothing more, that one's.

        Raises:
            AuditError: the log is in trouble, in use for too long, or cannot be written.
            ArgumentError: the entry cannot be one.
        """
        if not entry.run:
            raise ArgumentError("run of an entry", entry.run, "its name")
        if entry.part == SETTLED:
            raise ArgumentError("part of an entry", entry.part, "that of an answer")
        return self._write_entry(entry, check, skip_repeated=True)

    def append(self, entry: Entry) -> None:
        """Write down what costs nothing, also if it was written before: a refusal."""
        self._write_entry(entry, lambda spent: None, skip_repeated=False)

    def _write_entry(self, entry: Entry, check: Callable[[Spending], None], skip_repeated: bool) -> int:
        check_entry(entry)
        with self._database.lock:
            inserted = None
            with self._database.write_transaction():
                self._sync_before_write()
                number = self.totals.entry_number(vars(entry)) if skip_repeated else 0
                if not number:
                    check(self.totals.spending(entry.payer, entry.run))
                    inserted = self._insert_entry(entry)
            if inserted is not None:
                self._apply_entry(*inserted)
                number = inserted[0]
            if number > self._head_number:  # as after a head that could not be written
                self._write_head()
        return number

    def settle(self, reason: str, *, is_lost: bool = False) -> None:
        """The owner accepts the log as it is: write that down, with the reason.

        What the head says was spent beyond what the entries show is charged again, to the same payers and
        runs.

        Args:
            reason: the reason, in words.
            is_lost: whether the file was lost, so that it is sound for being new.

        Raises:
            ArgumentError: no reason.
            AuditError: nothing is wrong, the log cannot be written, or no number is left for an entry.
        """
        if not reason.strip() or not is_text(reason):
            raise ArgumentError("because", reason, "the reason, in words")
        with self._database.lock:
            with self._database.write_transaction():
                head = self._verify_all() or Head()
                if self.fault is None and not is_lost:
                    raise AuditError(self._database.location, "nothing is wrong with it: nothing to settle")
                missing = {
                    names: difference
                    for names, counts in head.totals.items()
                    if (difference := counts - self.totals.events.get(names, Counter()))
                }
                # Numbers that were used are not used again: the gap shows what is lost.
                self._last_number = max(self._last_number, head.number)
                for (payer, run), cost in (missing or {("", ""): Counter[str]()}).items():
                    no_guarantee, queries, byte_count = (
                        cost.pop(NO_GUARANTEE, 0),
                        cost.pop(QUERIES, 0),
                        cost.pop(BYTES, 0),
                    )
                    keys = (run, payer, payer, self._last_number + 1, SETTLED, SETTLED)
                    up = {BYTES: byte_count} if byte_count else {}
                    units = [
                        what for what in head.totals.get((payer, run), ()) if what.startswith(UNIT_PREFIX)
                    ]
                    for what in units:
                        cost.pop(what, 0)
                    entry = Entry(
                        *keys,
                        rule=reason,
                        up=up,
                        cost=cost,
                        no_guarantee=no_guarantee,
                        unit=" and ".join(what.removeprefix(UNIT_PREFIX) for what in units),
                        queries=queries,
                    )
                    self._apply_entry(*self._insert_entry(entry))
                self._verify_all()
            self.fault = None  # the head, which is older than the settlement, is all that may be left
            self._write_head(always=True)

    # --- reading --------------------------------------------------------------------------------------

    def spending(self, payer: str, run: str) -> Spending:
        """What a payer has spent so far, in one run and in all, also by what other processes have written."""
        if self._is_open and self.fault is None:
            with self._database.read_transaction():
                self._read_new_entries()
        return self.totals.spending(payer, run)

    def summary(self, run: str | None = None) -> dict[str, Any]:
        """Bytes and queries of one run, or of all: :meth:`fedstill.node.audit_totals.Sums.summary`."""
        return self.totals.summary(run)

    def entry(self, number: int) -> dict[str, Any]:
        """One entry, as :meth:`entries` gives them."""
        return next(self.entries(number, 1))

    def entries(self, first: int = -(2**62), limit: int = -1) -> Iterator[dict[str, Any]]:
        """Entries from a number on, oldest first; so many, -1 is all. What cannot be read is left out.

        Each has ``entry``, its number, ``at`` (UTC), what :class:`Entry` has, and ``hash``.
        """
        query = "SELECT entry, line, CAST(hash AS TEXT) FROM entries WHERE entry >= ? ORDER BY entry LIMIT ?"
        with self._database.read_transaction():
            rows = self._database.execute(query, (first, limit)).fetchall()
        for number, line, hash_ in rows:
            if (fields := parse_line(line)) is not None:
                yield {"entry": number, **fields, "hash": hash_}

    def verify(self) -> None:
        """Check every entry and the head; :class:`AuditError` says what is wrong first, and with which
        entry."""
        with self._database.read_transaction():
            self._verify_all()
        self.require_sound()

    def require_sound(self) -> None:
        """Refuse a log in trouble, as every charge does, with :class:`AuditError`."""
        if self.fault is not None:
            message = f"{self.fault}; nothing leaves until its owner has settled it (`fedstill audit accept`)"
            raise AuditError(self._database.location, message)

    def close(self) -> None:
        """Close the file; what the entries add up to can still be read."""
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
        transaction = self._database.read_transaction if self._read_only else self._database.write_transaction
        try:
            with transaction():
                self._database.require_format()
            with transaction():  # a reader's view of the file begins after it has read the head
                head = self._verify_all()
            if self.fault is None and (head is None or head.number < self._last_number):
                self._write_head(always=True)  # somebody was killed before it was written
        except AuditError:
            self._database.close()
            raise

    def _verify_all(self) -> Head | None:
        """Take up all entries anew and say what is wrong; the head. Within a transaction."""
        head, damage = None, None
        if self._head_path is not None:
            try:
                head = Head.read(self._head_path)
            except (OSError, ValueError) as error:
                damage = f"its head {self._head_path.name} is damaged: {error}"
        self.totals, self._last_number, self._last_hash, self._settled_number = EntryTotals(), 0, "", 0
        self._head_number = 0 if head is None else head.number
        expected = self._read_entries(-(2**62), self._head_number)
        self.fault = self.fault or damage
        if self.fault is None and self._head_path is not None and head is None and self._last_number:
            self.fault = f"its head {self._head_path.name} is missing"
        # A head older than the last settlement was settled with it.
        if self.fault is None and head is not None and head.number >= self._settled_number:
            if head.number > self._last_number:
                ends = f"it ends at entry {self._last_number}, and its head at {head.number}"
                self.fault = f"is an older copy: {ends}"
            elif head.hash != expected.hash:
                self.fault = f"entry {head.number} is not the one that its head names"
            elif head.totals != expected.totals:
                self.fault = f"its entries up to {head.number} do not add up to the totals in its head"
        return head

    def _read_entries(self, after: int, head_number: int = 0) -> Head:
        """Take up the entries after a number, each checked against the one before.

        Returns:
            What a head that names a wanted one has to say, over all entries as they are.
        """
        fault: str | None = None
        expected = Head()
        query = "SELECT entry, line, hash FROM entries WHERE entry > ? ORDER BY entry"
        for number, line, stored_hash in self._database.execute(query, (after,)):
            fields, hash_ = parse_line(line), chain_hash(self._last_hash, number, line)
            if number != self._last_number + 1:
                fault = fault or f"entry {self._last_number + 1} is missing"
            if fields is None or stored_hash != hash_:
                fault = fault or f"entry {number} is not as it was written"
            elif fields["part"] == SETTLED:  # by which everything before it, as it stands here, is accepted
                fault, self._settled_number = None, number
            self._apply_entry(number, hash_, fields)
            if number == head_number:
                expected = Head(number, hash_, self.totals.run_totals())
        self.fault = fault
        return expected

    def _sync_before_write(self) -> None:
        """Take up what other processes have written since; refuse what does not follow from what was here."""
        if self.fault is not None:  # the owner may have settled it meanwhile
            self._verify_all()
        self.require_sound()
        if self._database.was_replaced():
            raise AuditError(
                self._database.location, "was replaced by another file: start again, and it is checked"
            )
        self._database.require_format()
        self._read_new_entries()
        self.require_sound()

    def _read_new_entries(self) -> None:
        last_entry = self._last_number, self._last_hash
        if self._newest_entry() == last_entry:
            return
        query = "SELECT entry, hash FROM entries WHERE entry = ?"
        is_unchanged = (
            not last_entry[0] or self._database.execute(query, last_entry[:1]).fetchone() == last_entry
        )
        self._read_entries(self._last_number)
        self.fault = self.fault if is_unchanged else f"entry {last_entry[0]} is not as it was written"

    def _newest_entry(self) -> tuple[int, str]:
        query = "SELECT entry, hash FROM entries ORDER BY entry DESC LIMIT 1"
        return self._database.execute(query).fetchone() or (0, "")

    def _insert_entry(self, entry: Entry) -> tuple[int, str, Mapping[str, Any]]:
        if self._read_only:
            raise AuditError(self._database.location, "is open to be read only")
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        number, line = self._last_number + 1, entry.to_line(time)
        if number > MAX_ENTRY_NUMBER:
            message = f"no entry can follow number {self._last_number}: move away what says so, this log or its head"
            raise AuditError(self._database.location, f"{message}, and settle")
        hash_ = chain_hash(self._last_hash, number, line)
        if (
            self._database.execute("INSERT INTO entries VALUES (?, ?, ?)", (number, line, hash_)).rowcount
            != 1
        ):
            raise AuditError(self._database.location, "has not taken an entry")
        return number, hash_, vars(entry)

    def _apply_entry(self, number: int, hash_: str, fields: Mapping[str, Any] | None) -> None:
        self._last_number, self._last_hash = number, hash_
        if fields is not None:
            self.totals.add(number, fields)

    def _write_head(self, always: bool = False) -> None:
        """Write the head, as new as the log, to which another process may have written since."""
        if self._head_path is None or self._read_only or not (always or self._durable):
            return
        with self._database.write_transaction():
            self._read_new_entries()
            self.require_sound()
            try:
                audit_head.write_audit_head(
                    self._head_path, self._last_number, self._last_hash, self.totals.head_rows()
                )
            except OSError as error:
                raise AuditError(self._head_path, f"cannot be written: {error.strerror}") from error
            self._head_number = self._last_number
