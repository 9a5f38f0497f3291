"""The account of a data set: what all releases about it have cost, never less than what has left.

One SQLite file holds a row for each release, written before the release is handed over, over all runs.

- *Durable.* Write-ahead log with full sync: a row that was charged survives a kill and a power failure.
- *Never less, never twice.* Whoever charges reads what was spent, asks whether the budget allows more, and
  writes, all in one transaction that no other process comes between. The same release again, after a stop, is
  the same row; one that differs in a single bit is another.
- *Limits last.* Questions and bytes are counted here too, so a policy's limits hold over all runs, whatever
  becomes of a run's folder and whatever the node is called.
- *Nobody edits it unseen.* The rows are chained and sealed (:mod:`fedstill.node.chain`), and an anchor beside
  the file tells an older copy from the newest (:mod:`fedstill.node.anchor`). Where both are put back to the
  same older moment, whoever opens them can say what is known from elsewhere to have been spent
  (:mod:`fedstill.node.witness`). What this cannot show: what all witnesses have lost, and whatever somebody
  does who knows the node's secret.
- *Trouble stops the node.* While anything is wrong nothing is charged, so nothing leaves, until the owner has
  settled it; then what anchor or witness say was spent, and the rows do not, is charged again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fedstill.core.errors import ArgumentError
from fedstill.node import anchor, chain
from fedstill.node.anchor import Anchor, Tally, Totals, make_key
from fedstill.node.chain import SETTLED
from fedstill.node.database import Database, LedgerError

__all__ = ["DATA", "Account", "Entry", "LedgerError", "Spent"]

DATA = "these data"
"""Who pays at a real node: its data, whatever the node is called, so that no other name has another total."""

SIBLINGS = 'node = ? AND run = ? AND number = ? AND part = ? AND "after" = ?'
WORDS = {  # of what the totals hold beside events
    chain.BARE: "{} without guarantee",
    chain.QUESTIONS: "{} questions",
    chain.BYTES: "{} bytes",
}


@dataclass(frozen=True)
class Entry:
    """One release.

    Args:
        run: that it is for.
        node: that it leaves, or :data:`DATA`: who pays.
        number: of the question.
        question: its name.
        part: of its answer: ``"answer"`` or ``"gradient"``.
        content: digest of what was asked, and of what leaves.
        after: fingerprint of what the node had answered before.
        up: bytes that leave, by kind.
        rule: how it is protected, one line.
        price: events as text (:func:`fedstill.privacy.events.as_text`) and how often each.
        guarantee: False if anything in it leaves without one.
        questions: as how many it counts for a policy's limit.
    """

    run: str
    node: str
    number: int
    question: str
    part: str
    content: str
    after: str
    up: Mapping[str, int]
    rule: str
    price: Mapping[str, int]
    guarantee: bool
    questions: int = 0


@dataclass(frozen=True)
class Spent:
    """What a node has paid: events as text and how often each, and releases without guarantee.

    Args:
        run: in one run.
        total: in all runs.
        bare_run: releases without guarantee in that run.
        bare_total: and in all runs.
        questions_run: questions answered in that run: each answer is one, and each further gradient of it.
        questions: and in all runs.
        bytes: that have left, in all runs.
    """

    run: Mapping[str, int]
    total: Mapping[str, int]
    bare_run: int = 0
    bare_total: int = 0
    questions_run: int = 0
    questions: int = 0
    bytes: int = 0


class Account:
    """What has been spent, in a file or, without one, in memory.

    Several threads may use it, and several processes the file, which has to be on a disk of this machine
    (SQLite's write-ahead log needs that). In trouble, it can still be read; ``trouble`` says what is wrong.

    Args:
        path: of the SQLite file; it and its anchor (``path`` + ``.head``) are made if neither is there. None:
            in memory, and gone with the object.
        secret: of the node; the key of the seals follows from it. None only to read: seals are not checked.
        durable: wait at each charge until the disk has it. False survives a kill, not a power failure.
        read_only: change nothing, not even the anchor.
        witness: what is known from elsewhere to have been spent by now; the rows must show all of it.

    Raises:
        LedgerError: the file cannot be read, or is no ledger.
    """

    def __init__(
        self,
        path: Path | None,
        secret: int | None,
        *,
        durable: bool = True,
        read_only: bool = False,
        witness: Totals | None = None,
    ) -> None:
        if secret is None and not read_only:
            raise ArgumentError("secret", secret, "a whole number, or none only to read")
        self._path, self._head = path, path and path.with_name(f"{path.name}.head")
        self._key = None if secret is None else make_key(secret)
        self._read_only, self._witness = read_only, witness or Totals()
        self.trouble: str | None = None
        self._state, self._tally = chain.State(), Tally(Totals())
        self._sums: dict[tuple[str, str], Counter[str]] = {}  # by node and run, and by node of all runs
        self._db = Database(path, durable=durable, read_only=read_only)
        try:
            self._open()
        except LedgerError:
            self._db.close()
            raise

    # --- charging -------------------------------------------------------------------------------------

    def charge(self, entry: Entry, check: Callable[[Spent], None]) -> bool:
        """Write a release down, before it is handed over.

        Args:
            entry: the release.
            check: is given what the node has spent before and may raise to refuse; then nothing is
                written. Nobody else can spend in between. It is not asked about a release that is paid for.

        Returns:
            True once the release is written; False if it (the same node, run, number, part, content and
            after) was written before, and costs nothing more.

        Raises:
            LedgerError: the ledger is in trouble, in use for too long, or cannot be written.
            ArgumentError: the entry cannot be one.
        """
        _check(entry)
        with self._db.lock:
            with self._db.turn():
                self._follow()
                if self._row(entry):
                    return False
                self._require_totals(entry.node, entry.run)
                check(self._spent(entry.node, entry.run))
                state = self._append(self._state, entry, int(not entry.guarantee))
            self._take(state)
            self._write_anchor()
        return True

    def row(self, entry: Entry) -> int:
        """The row of a release that is written; 0 if it is not."""
        with self._db.reading():
            return self._row(entry)

    def siblings(self, entry: Entry) -> int:
        """How many rows differ from an entry, if at all, in content, price and size alone."""
        query = f"SELECT count(*) FROM rows WHERE {SIBLINGS}"
        with self._db.reading():
            return int(self._db.execute(query, _place(entry)).fetchone()[0])

    def spent(self, node: str, run: str) -> Spent:
        """What a node has spent so far, in one run and in all."""
        with self._db.reading():
            return self._spent(node, run)

    def entries(self) -> Iterator[dict[str, Any]]:
        """All rows, oldest first.

        Each has ``row``, ``at`` (UTC), what :class:`Entry` has, and ``hash``; in the place of ``guarantee``
        it has ``bare``, how many releases without guarantee it counts. A part ``"settled"`` is the owner's.
        """
        query = f"SELECT {chain.NAMES}, hash FROM rows WHERE row > ? ORDER BY row LIMIT 1000"
        last = 0
        while True:
            with self._db.reading():
                page = self._db.execute(query, (last,)).fetchall()
            for values in page:
                row = dict(zip((*chain.COLUMNS, "hash"), values, strict=True))
                tables = {name: dict(chain.numbers(row[name]) or ()) for name in ("up", "price")}
                yield {**row, **tables}
            if not page:
                return
            last = page[-1][0]

    def verify(self) -> None:
        """Check every row, the totals, the anchor and the witness.

        Raises:
            LedgerError: what is wrong first, and with which row.
        """
        with self._db.reading():
            self._reexamine()
        self.require_sound()

    def require_sound(self) -> None:
        """Refuse a ledger in trouble, as every charge does.

        Raises:
            LedgerError: what is wrong.
        """
        if self.trouble is not None:
            told = f"{self.trouble}; nothing leaves until its owner has settled it (`fedstill ledger settle`)"
            raise LedgerError(self._db.where, told)

    def settle(self, because: str, beside: bool = False) -> None:
        """The owner accepts the ledger as it is: write that down, with the reason.

        What anchor or witness say was spent beyond what the rows show is charged again, to the same nodes
        and runs.

        Args:
            because: the reason, in words.
            beside: whether something is wrong beside the rows, which are sound.

        Raises:
            ArgumentError: no reason.
            LedgerError: nothing is wrong, or the ledger cannot be written.
        """
        if not because.strip():
            raise ArgumentError("because", because, "the reason, in words")
        with self._db.lock:
            with self._db.turn():
                self._settle(because, beside)
                self._reexamine()
            self.trouble = None  # the anchor, which is older than the settlement, is all that may be left
            self._write_anchor()

    def sign(self, run: str, line: str) -> str:
        """The seal of a line of a run's own ledger, which only who has the secret can write.

        Raises:
            LedgerError: there is no secret.
        """
        if self._key is None:
            raise LedgerError(self._db.where, "was opened without the secret that seals lines")
        return anchor.seal(self._key, f"{run} {line}")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    # --- opening --------------------------------------------------------------------------------------

    def _open(self) -> None:
        with self._db.reading() if self._read_only else self._db.turn():
            (mark,) = self._db.execute("PRAGMA application_id").fetchone()
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if mark != chain.MARK and (tables or self._read_only):
                raise LedgerError(self._db.where, "is no ledger")
            if mark == chain.MARK and version != chain.VERSION:
                told = f"has the form of another version of fedstill: {version}, not {chain.VERSION}"
                raise LedgerError(self._db.where, told)
            for statement in chain.SCHEMA if mark != chain.MARK else ():
                self._db.execute(statement)
            found = self._reexamine()
        if self.trouble is None and (found is None or found.row < self._state.row):
            self._write_anchor()  # somebody was killed before it was written

    # --- checking -------------------------------------------------------------------------------------

    def _examine(self) -> tuple[chain.State, Anchor | None, str | None]:
        """What the rows say, the anchor if it is one, and what is wrong. Within a transaction."""
        found, damage = None, None
        if self._head is not None:
            try:
                found = Anchor.read(self._head, self._key)
            except (OSError, ValueError) as error:
                damage = f"its anchor {self._head.name} is damaged: {error}"
        state = chain.walk(self._db.connection, self._key, chain.State(), found.row if found else 0)
        fault = state.fault or damage
        fault = fault or chain.altered(self._db.connection)
        if fault is None and self._head is not None and found is None and state.row:
            fault = f"its anchor {self._head.name} is missing"
        # An anchor older than the last settlement was settled with it.
        if fault is None and found is not None and found.row > state.settled:
            if found.row > state.row:
                fault = f"is an older copy: it ends at row {state.row}, and its anchor at row {found.row}"
            elif found.hash != state.wanted:
                fault = f"row {found.row} is not the row that its anchor names"
        if fault is None and chain.with_all(state.totals) != chain.totals(self._db.connection):
            fault = "its table of totals does not add up to its rows"
        lost = self._witness - state.totals
        if fault is None and lost:
            (_, run, event), times = next(iter(lost.items()))
            what = WORDS.get(event, f"{{}} x {event}").format(times)
            more = f", and {len(lost) - 1} more of the like" if len(lost) > 1 else ""
            fault = f"shows less than run {run!r} has released: {what}{more}"
        return state, found, fault

    def _reexamine(self) -> Anchor | None:
        """Take up all rows anew; the anchor. Within a transaction."""
        self._state, found, self.trouble = self._examine()
        self._tally, self._sums = Tally(self._state.totals), {}
        self._sum(self._state.totals)
        return found

    def _sum(self, totals: Totals) -> None:
        """Add to what the table of totals is held against."""
        for (node, run, event), times in chain.with_all(totals).items():
            self._sums.setdefault((node, run), Counter())[event] += times

    def _take(self, state: chain.State) -> None:
        """Go on from a state, whose totals are of the rows since the last."""
        self._state = state
        self._tally.add(state.totals)
        self._sum(state.totals)

    def _follow(self) -> None:
        """Take up what other processes have written since; refuse what does not follow from what was here."""
        if self.trouble is not None:  # the owner may have settled it meanwhile
            self._reexamine()
        self.require_sound()
        if self._db.replaced():
            raise LedgerError(self._db.where, "was replaced by another file: start again, and it is checked")
        mine = self._state.row, self._state.hash
        if chain.last(self._db.connection) == mine:
            return
        state = chain.walk(self._db.connection, self._key, self._state)
        query = "SELECT row, hash FROM rows WHERE row = ?"
        if mine[0] and self._db.execute(query, (mine[0],)).fetchone() != mine:
            self.trouble = f"row {mine[0]} is not as it was written"
        self.trouble = self.trouble or state.fault
        self.require_sound()
        self._take(state)

    # --- reading and writing, within a transaction ----------------------------------------------------

    def _totals(self, node: str, run: str) -> dict[str, int]:
        query = "SELECT event, times FROM totals WHERE node = ? AND run = ?"
        return dict(self._db.execute(query, (node, run)))

    def _require_totals(self, node: str, run: str) -> None:
        """Refuse to charge by totals that somebody has changed since the rows were walked along."""
        if any(self._totals(node, name) != self._sums.get((node, name), {}) for name in (run, chain.ALL)):
            self.trouble = "its table of totals does not add up to its rows"
            self.require_sound()

    def _spent(self, node: str, run: str) -> Spent:
        here, total = (self._totals(node, name) for name in (run, chain.ALL))
        bare_run, bare_total = here.pop(chain.BARE, 0), total.pop(chain.BARE, 0)
        questions_run, questions = here.pop(chain.QUESTIONS, 0), total.pop(chain.QUESTIONS, 0)
        here.pop(chain.BYTES, 0)
        left = total.pop(chain.BYTES, 0)
        return Spent(here, total, bare_run, bare_total, questions_run, questions, left)

    def _row(self, entry: Entry) -> int:
        query = f"SELECT row FROM rows WHERE {SIBLINGS} AND content = ?"
        found = self._db.execute(query, (*_place(entry), entry.content)).fetchone()
        return 0 if found is None else int(found[0])

    def _settle(self, because: str, beside: bool) -> None:
        database = self._db.connection
        if self._examine()[2] is None and not beside:
            raise LedgerError(self._db.where, "nothing is wrong with it, so there is nothing to settle")
        chain.mend(database)
        state, found, _ = self._examine()
        lost: dict[tuple[str, str], Counter[str]] = {}
        known = (found.spent if found else Totals()) | self._witness  # whichever says more
        for (node, run, event), times in (known - state.totals).items():
            lost.setdefault((node, run), Counter())[event] = times
        database.execute("DELETE FROM totals")
        chain.add(database, state.totals)
        # Numbers that were used are not used again: the gap shows what is lost.
        state = chain.State(max(state.row, found.row if found else 0), state.hash)
        for (node, run), price in (lost or {("", ""): Counter[str]()}).items():
            bare, questions = price.pop(chain.BARE, 0), price.pop(chain.QUESTIONS, 0)
            up = {name: price.pop(name) for name in (chain.BYTES,) if name in price}
            said = SETTLED, SETTLED, "", "", up, because, price
            state = self._append(state, Entry(run, node, state.row + 1, *said, True, questions), bare)

    def _append(self, state: chain.State, entry: Entry, bare: int) -> chain.State:
        if self._key is None or self._read_only:
            raise LedgerError(self._db.where, "is open to be read only")
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        asked = entry.run, entry.node, entry.number, entry.question, entry.part, entry.content, entry.after
        release = entry.questions, chain.text(entry.up), entry.rule, chain.text(entry.price), bare
        return chain.append(self._db.connection, self._key, state, (now, *asked, *release))

    def _write_anchor(self) -> None:
        """Write the anchor, unless another process has gone on since, and does so itself."""
        if self._head is None or self._key is None or self._read_only:
            return
        with self._db.turn():
            if chain.last(self._db.connection)[0] != self._state.row:
                return
            try:
                anchor.write(self._head, self._key, self._state.row, self._state.hash, self._tally)
            except OSError as error:
                raise LedgerError(self._head, f"cannot be written: {error.strerror}") from error


def _place(entry: Entry) -> tuple[str, str, int, str, str]:
    return entry.node, entry.run, entry.number, entry.part, entry.after


def _check(entry: Entry) -> None:
    if not entry.run:
        raise ArgumentError("run of an entry", entry.run, "its name")
    if entry.part == SETTLED:
        raise ArgumentError("part of an entry", entry.part, "that of an answer")
    for event, times in entry.price.items():
        if not event or type(times) is not int or times < 1:
            raise ArgumentError("price of an entry", dict(entry.price), "events as text, 1 or more of each")
