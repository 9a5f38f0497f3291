"""The rows of a ledger, each chained to the one before, and what they add up to: the SQL below an account.

``hash`` of a row is BLAKE2b over the previous row's hash and the row, so that everybody can check the chain;
``seal`` is that under a key from the node's secret, so that only who has the secret can write a row. What
:func:`walk` reports is computed from the rows' contents, never from the hashes that are written beside them.
A row that *settles* is sound if it follows from everything before it as it stood then, whatever was wrong
there: so it accepts exactly that, and no change after it.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fedstill.node.anchor import Totals, seal

SETTLED = "settled"  # the part of a row by which the owner accepts what was wrong
ALL, BARE = "", ""  # in the totals: the run that stands for all runs, the event that is no guarantee
QUESTIONS, BYTES = "questions", "bytes"  # there too, beside events: what a policy's limits count
MARK = 0x6665_6473  # "feds": this SQLite file is a ledger
VERSION = 2  # of its tables

COLUMNS: tuple[str, ...] = ("row", "at", "run", "node", "number", "question", "part", "content", "after")
COLUMNS += ("questions", "up", "rule", "price", "bare")
NAMES = ", ".join(f'"{name}"' for name in COLUMNS)
SCHEMA = (
    "CREATE TABLE rows (row INTEGER PRIMARY KEY, at TEXT NOT NULL, run TEXT NOT NULL, node TEXT NOT NULL, "
    "number INTEGER NOT NULL, question TEXT NOT NULL, part TEXT NOT NULL, content TEXT NOT NULL, "
    '"after" TEXT NOT NULL, questions INTEGER NOT NULL, up TEXT NOT NULL, rule TEXT NOT NULL, '
    "price TEXT NOT NULL, bare INTEGER NOT NULL, hash TEXT NOT NULL, seal TEXT NOT NULL)",
    'CREATE UNIQUE INDEX releases ON rows (node, run, number, part, content, "after")',
    "CREATE TABLE totals (node TEXT NOT NULL, run TEXT NOT NULL, event TEXT NOT NULL, "
    "times INTEGER NOT NULL, PRIMARY KEY (node, run, event)) WITHOUT ROWID",
    f"PRAGMA application_id = {MARK}",
    f"PRAGMA user_version = {VERSION}",
)


@dataclass(frozen=True)
class State:
    """Where a walk along the rows ended, and what it found.

    Args:
        row: number of the last row; 0 before the first.
        hash: over all of them, as they are.
        fault: the first thing that is wrong and not settled.
        settled: number of the last sound row that settles; 0 if there is none.
        totals: what the rows that were walked along add up to.
        wanted: the hash at the row that was asked for.
    """

    row: int = 0
    hash: str = ""
    fault: str | None = None
    settled: int = 0
    totals: Totals = field(default_factory=Totals)
    wanted: str | None = None


def walk(database: sqlite3.Connection, key: bytes | None, start: State, wanted: int = 0) -> State:
    """Go along the rows after a state, and check each against the one before.

    Args:
        database: with the rows.
        key: of the seals; None does not check them.
        start: where to begin; its totals are not counted again.
        wanted: number of a row whose hash is to be told.
    """
    row, chain, fault, settled = start.row, start.hash, start.fault, start.settled
    totals, found = Totals(), chain if wanted == row else None
    query = f"SELECT {NAMES}, hash, seal FROM rows WHERE row > ? ORDER BY row"
    # The first row is 1: what somebody has put before it is walked along as well.
    for *values, stored, sealed in database.execute(query, (row or -math.inf,)):
        number, _, run, node, *_, part, _, _, questions, up_text, _, price_text, bare = values
        if number < 1:
            fault = fault or f"row {number} is none that it has written"
        elif number != row + 1:
            fault = fault or f"row {row + 1} is missing"
        row, chain, price = number, link(chain, values), _spent(questions, up_text, price_text, bare)
        if stored != chain or price is None:
            fault = fault or f"row {row} is not as it was written"
        elif key is not None and sealed != seal(key, chain):
            fault = fault or f"row {row} was not sealed with this node's secret"
        elif part == SETTLED:
            fault, settled = None, row
        for event, times in price or ():
            totals[node, run, event] += times
        if row == wanted:
            found = chain
    return State(row, chain, fault, settled, totals, found)


def append(database: sqlite3.Connection, key: bytes, state: State, values: Sequence[Any]) -> State:
    """Write the next row, and add to the totals.

    Args:
        database: in a transaction.
        key: of the seals.
        state: after the last row.
        values: of the columns after ``row``.

    Returns:
        The state after that row, with its totals.
    """
    whole = [state.row + 1, *values]
    chain = link(state.hash, whole)
    marks = ", ".join("?" * (len(whole) + 2))
    database.execute(f"INSERT INTO rows VALUES ({marks})", [*whole, chain, seal(key, chain)])
    _, _, run, node, *_, questions, up, _, price, bare = whole
    spent = Totals({(node, run, event): n for event, n in _spent(questions, up, price, bare) or ()})
    add(database, spent)
    return State(state.row + 1, chain, totals=spent)


def altered(database: sqlite3.Connection) -> str | None:
    """What is not as :data:`SCHEMA` makes it, by its name; None if there is nothing.

    A trigger of somebody else's could change with each charge what nobody looks at until the next start.
    """
    found = dict(database.execute("SELECT sql, name FROM sqlite_master WHERE sql IS NOT NULL"))
    foreign = [name for statement, name in found.items() if statement not in SCHEMA]
    missing = [made for made in SCHEMA if made.startswith("CREATE") and made not in found]
    return next((f"{what!r} in it is not as it was made" for what in (*foreign, *missing)), None)


def mend(database: sqlite3.Connection) -> None:
    """Take out what somebody has put beside the rows, and make what is missing of tables and index."""
    database.execute("DELETE FROM rows WHERE row < 1")
    query = "SELECT sql, name, type FROM sqlite_master WHERE sql IS NOT NULL"
    found = {statement: (name, kind) for statement, name, kind in database.execute(query).fetchall()}
    for statement, (name, kind) in found.items():
        if statement not in SCHEMA and name not in ("rows", "totals"):
            quoted = name.replace('"', '""')
            database.execute(f'DROP {kind} IF EXISTS "{quoted}"')
    for statement in SCHEMA:
        if statement.startswith("CREATE UNIQUE INDEX") and statement not in found:
            database.execute(statement)


def last(database: sqlite3.Connection) -> tuple[int, str]:
    """Number and hash of the last row, as it is written there; 0 and nothing if there is none."""
    found = database.execute("SELECT row, hash FROM rows ORDER BY row DESC LIMIT 1").fetchone()
    return found or (0, "")


def add(database: sqlite3.Connection, spent: Totals) -> None:
    """Add to the table of totals, of the runs and of all runs."""
    query = (
        "INSERT INTO totals VALUES (?, ?, ?, ?) "
        "ON CONFLICT (node, run, event) DO UPDATE SET times = times + excluded.times"
    )
    database.executemany(query, [(*names, times) for names, times in with_all(spent).items()])


def totals(database: sqlite3.Connection) -> Totals:
    """The table of totals: of each run, and of all runs (:data:`ALL`)."""
    query = "SELECT node, run, event, times FROM totals"
    return Totals({(node, run, event): times for node, run, event, times in database.execute(query)})


def with_all(spent: Totals) -> Totals:
    """With the sums over all runs.

    >>> with_all(Totals({("a", "r", "e"): 1, ("a", "s", "e"): 2}))["a", ALL, "e"]
    3
    """
    sums = Totals(spent)
    for (node, _, event), times in spent.items():
        sums[node, ALL, event] += times
    return sums


def link(chain: str, values: Sequence[Any]) -> str:
    """The hash of a row: BLAKE2b, 256 bits, over the previous row's hash and the row as JSON."""
    text = chain + json.dumps(values, separators=(",", ":"), default=repr)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def text(table: Mapping[str, int]) -> str:
    """Numbers by name, as a row holds them."""
    return json.dumps(dict(sorted(table.items())), separators=(",", ":"))


@lru_cache(4096)  # rows repeat
def _spent(questions: Any, up: Any, price: Any, bare: Any) -> tuple[tuple[str, int], ...] | None:
    """What a row adds to the totals; None for what nobody could have charged."""
    sizes, events = numbers(up), numbers(price)
    if sizes is None or events is None or type(questions) is not int or type(bare) is not int:
        return None
    counted = ((QUESTIONS, questions), (BYTES, sum(size for _, size in sizes)), (BARE, bare))
    return (*events, *((name, count) for name, count in counted if count))


def numbers(written: str) -> tuple[tuple[str, int], ...] | None:
    """What :func:`text` wrote; None for anything else, which somebody else has put there.

    >>> numbers(text({"b": 2, "a": 1})), numbers("[1]")
    ((('a', 1), ('b', 2)), None)
    """
    try:
        said = json.loads(written)
    except (TypeError, ValueError):
        return None
    if not isinstance(said, dict) or not all(type(n) is int and 0 <= n < 2**53 for n in said.values()):
        return None
    return tuple(said.items())
