"""Holds what the runs of a node have written down, line by line, against the sealed rows of its ledger.

``runs/RUN/ledger.jsonl`` is text that anybody who gets at it can edit. Each line names its row and is sealed
with the node's secret, and the rows say the same of each release: where the two differ, the rows are right,
and what differs is named.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.core.errors import RunFolderError
from fedstill.node.account import DATA
from fedstill.node.chain import SETTLED
from fedstill.node.ledger import ANSWER, GRADIENT, unsealed

RELEASED = (ANSWER, GRADIENT)  # parts of rows that have a line; learning, settlements and the like have none
KEPT = "kept"  # the part of a row that says which file of answers was let out, after all of them
LINES = "ledger.jsonl"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """One line of a run's own ledger.

    Args:
        place: in the file, from 1.
        told: what it says.
    """

    place: int
    told: Mapping[str, Any]

    def __str__(self) -> str:
        return f"line {self.place} ({_named(self.told)})"


def read(folder: Path) -> dict[str, list[Line]]:
    """The lines that the runs of a node have written, by run.

    To be read before the rows: each is charged before its line is written, also while the node is at work.

    Args:
        folder: the node's.

    Raises:
        RunFolderError: a line is none.
    """
    return {path.parent.name: list(_lines(path)) for path in sorted(folder.glob(f"runs/*/{LINES}"))}


def _lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        for place, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):  # what a kill while writing leaves
                return
            try:
                told = json.loads(raw)
                released = "part" in told
                for name in ("at", "number", "question", *(("content", "up", "privacy") if released else ())):
                    told[name]
                for table in (told["up"], told["privacy"]["price"] or {}) if released else ():
                    sum(table[name] for name in table)
            except (ValueError, TypeError, LookupError) as error:
                raise RunFolderError(f"{path}: line {place} is no line of a ledger: {error}") from error
            yield Line(place, told)


def disagreements(
    lines: Mapping[str, Sequence[Line]],
    rows: Iterable[Row],
    *,
    sealed: Callable[[str, str], str] | None = None,
    until: int | None = None,
    shared: bool = False,
) -> Iterator[str]:
    """Where lines and rows differ, in the order of the runs; each by run, line and row.

    A row has its line, except the last of a run: whoever is killed after the charge has not written it. A
    line has its row and its seal. What the owner has settled since is accepted as it stood.

    Args:
        lines: as :func:`read` gives them.
        rows: of the ledger, oldest first.
        sealed: the seal of a run's line, by the run's name and the line's text; None: seals are not checked.
        until: the number of the last row that was there before the lines were read; None: all were.
        shared: other nodes, whose runs are not here, charge to the ledger as well.
    """
    by_run: dict[str, list[Row]] = defaultdict(list)
    closed: set[str] = set()  # runs whose last release was handed over, as a later row says
    settled = ""  # when the owner has last accepted the ledger as it was
    for row in rows:
        if row["part"] == SETTLED:
            settled = max(settled, row["at"])
        elif row["node"] == DATA and row["part"] == KEPT:
            closed.add(row["run"])
        elif row["node"] == DATA and row["part"] in RELEASED:
            by_run[row["run"]].append(row)
    for run in dict.fromkeys([*by_run, *lines]):
        mine = by_run.get(run, [])
        if run in lines:
            stopped = run not in closed
            yield from _of_run(run, lines[run], mine, sealed, settled, until, shared, stopped)
        elif not shared and mine[-1]["at"] > settled and (until is None or mine[0]["row"] <= until):
            size = sum(sum(row["up"].values()) for row in mine)
            yield f"run {run!r}: runs/{run}/{LINES} is gone; its rows hold {len(mine)} releases, {size} bytes"


def _of_run(
    run: str,
    lines: Sequence[Line],
    rows: Sequence[Row],
    sealed: Callable[[str, str], str] | None,
    settled: str,
    until: int | None,
    shared: bool,
    stopped: bool,
) -> Iterator[str]:
    by_number = {row["row"]: row for row in rows}
    told_of: set[int] = set()
    for line in lines:
        told, number = line.told, line.told.get("row", 0)
        row, old = by_number.get(number), told["at"] <= settled
        if row is not None and row["at"] > told["at"]:  # its own was lost, and the number is another's
            row = None
        text, seal = unsealed(told)
        if row is not None and "up" in told and (_named(told), told["up"]) != (_named(row), row["up"]):
            sizes = f"{_table(told['up'])}, and {_table(row['up'])} of {_named(row)} in the row"
            yield f"run {run!r}: {line} and row {number} differ: bytes {sizes}"
        elif sealed is not None and not old and seal != sealed(run, text):
            yield f"run {run!r}: {line} is not as it was written"
        elif "part" in told and not old and (row is None or number in told_of):
            yield f"run {run!r}: {line} has no row"
        if row is not None:
            told_of.add(number)
    there = [row for row in rows if until is None or row["row"] <= until]
    for row in [] if shared else there[:-1] if stopped else there:
        if row["row"] not in told_of and row["at"] > settled:
            yield f"run {run!r}: row {row['row']} ({_named(row)}) has no line in {LINES}"


def _named(told: Mapping[str, Any]) -> str:
    return f"question {told['number']}, {told['question']}, {told.get('part', 'no release')}"


def _table(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in sorted(values.items())) or "none"
