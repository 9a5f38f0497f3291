"""``fedstill ledger``: what left a node, and what it cost its records' privacy."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fedstill.cli.ledger_tables import priced, print_rows, print_totals
from fedstill.cli.usage import Given, dispatch, number
from fedstill.core.errors import ArgumentError, FedstillError

if TYPE_CHECKING:
    from fedstill.node.account import Account
    from fedstill.node.anchor import Totals
    from fedstill.privacy.config import PrivacyConfig

HELP = """\
The ledger of a node's privacy: every release, what it cost, and what all of them cost together.

usage:
  fedstill ledger show PATH [--last N] [--delta D]   what left, when, to which run, under which rule, at which
                                             price: the last N releases (default: 20; 0 is all), and totals
                                             with epsilon at delta D (default: the node's, or 1e-5), and what
                                             is left of the node's budgets
  fedstill ledger verify PATH                whether it is whole and unchanged, and the node's runs tell the
                                             same, line by line; exits with 2 if not
  fedstill ledger export PATH --out FILE [--whole]   every row as JSON lines (FILE.jsonl) or as a table
                                             (FILE.csv); --whole with the fingerprints by which rows can be
                                             checked: keep that to yourself, since fingerprints follow from
                                             your records, and tell who has the node's secret whether guesses
                                             at them are right
  fedstill ledger settle PATH --because TEXT   accept it, as its owner, after verify has found something
                                             wrong; the reason is kept in it, and what is known
                                             to have been spent is charged again

PATH is a node's folder, a run's folder, or the .sqlite file itself.
"""

FILE = "ledger.sqlite"  # in a run's folder; a node's file can name another
MAGIC = b"SQLite format 3\0"  # how a ledger's file begins
FINGERPRINTS = ("content", "after", "hash")  # columns that follow from the records, or from such columns


@dataclass(frozen=True)
class _Place:
    """A ledger's file.

    Args:
        file: its path.
        secret: that its seals are made with, where it is at hand.
        witness: what the runs of the node whose ledger it is have released.
        privacy: what the node's owner says, with the budgets.
        folder: the node's.
    """

    file: Path
    secret: int | None
    witness: Totals | None = None
    privacy: PrivacyConfig | None = None
    folder: Path | None = None


def main(words: list[str]) -> None:
    """Do what the words after ``fedstill ledger`` say.

    Raises:
        FedstillError: they say nothing that can be done, or the ledger is not sound.
    """
    commands = {"show": _show, "verify": _verify, "export": _export, "settle": _settle}
    dispatch("ledger", words, HELP, commands)


# --- where it is --------------------------------------------------------------------------------------


def _place(path: Path) -> _Place:
    """The ledger that a path means.

    Raises:
        FedstillError: there is none.
    """
    if path.is_dir():
        place = _of_folder(path)
        if place is None:
            raise FedstillError(f"{path} is no node's folder, and a run's folder holds its ledger as {FILE}")
    else:
        place, beside = _Place(path, None), _of_folder(path.parent)
        if beside is not None and beside.file.resolve() == path.resolve():
            place = replace(beside, file=path)
    lost = place.witness or place.file.with_name(f"{place.file.name}.head").exists()
    if place.file.is_file() and not lost:
        with place.file.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:  # nothing says that it ever was one
                raise FedstillError(f"{place.file} is no ledger")
    if not place.file.exists() and not lost:
        raise FedstillError(f"{place.file} is not there: nothing has been charged to it")
    return place


def _of_folder(folder: Path) -> _Place | None:
    """The ledger of a node's or a run's folder; None if it is neither."""
    from fedstill.runs import presets

    if (folder / "node.toml").is_file():
        from fedstill.node import owner, witness

        privacy = owner.read(folder).privacy
        path = folder / Path(privacy.ledger).expanduser()
        secret = owner.secret(folder) if (folder / owner.SECRET).exists() else None
        return _Place(path, secret, witness.released(folder), privacy, folder)
    config = folder / "config.toml"
    if (folder / FILE).is_file() and config.is_file():
        from fedstill.core.seeds import derive

        seed = presets.parse(config.read_text(encoding="utf-8"), source=str(config)).get("seed", 0)
        return _Place(folder / FILE, derive(seed, FILE))  # a simulation keeps no secret
    return _Place(folder / FILE, None) if (folder / FILE).is_file() else None


@contextmanager
def _opened(place: _Place, *, write: bool = False) -> Iterator[Account]:
    from fedstill.node.account import Account

    if not write and not place.file.exists():
        left = "its node's runs are" if place.witness else "its anchor is"
        told = f"is gone, and {left} there: put it back, or `fedstill ledger settle` starts it anew"
        raise FedstillError(f"{place.file} {told}")
    account = Account(place.file, place.secret, read_only=not write, witness=place.witness)
    try:
        yield account
    finally:
        account.close()


# --- show ---------------------------------------------------------------------------------------------


def _show(given: Given) -> None:
    place = _place(Path(given.places[0]))
    allowed = "a whole number from 0 (all) up"
    most = number("--last", given.get("--last") or "20", int, lambda value: value >= 0, allowed)
    own = 1e-5 if place.privacy is None else place.privacy.delta
    within, allowed = (lambda value: 0 < value < 1), "above 0 and below 1"
    at = number("--delta", given.get("--delta") or str(own), float, within, allowed)

    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    with _opened(place) as account:
        rows = list(account.entries())
        console.print(f"ledger {place.file}", soft_wrap=True)
        if account.trouble is not None:
            console.print(f"NOT SOUND: {account.trouble}.", style="bold", soft_wrap=True)
        if place.secret is None:
            console.print("Seals are not checked: that takes the node's secret.", soft_wrap=True)
        if not rows:
            console.print("Nothing has left.")
            return
        print_rows(console, rows[-most:], len(rows))
        print_totals(console, account, rows, at, place.privacy)


# --- verify, export, settle ---------------------------------------------------------------------------


def _verify(given: Given) -> None:
    place = _place(Path(given.places[0]))
    with _opened(place) as account:
        account.verify()
        rows = list(account.entries())
        found = _disagreements(place, account)
        if found:
            more = f"; and {len(found) - 1} more" if len(found) > 1 else ""
            runs = (place.folder or place.file.parent) / "runs"
            told = f"{place.file} is sound, and {runs} tells otherwise: {found[0]}{more}"
            raise FedstillError(f"{told}; if you know why, `fedstill ledger settle` accepts it")
    count = len(rows)
    shown = "1 row" if count == 1 else f"{count} rows"
    if place.secret is None:
        told = "rows, totals and anchor agree; the seals take the node's secret, and were not checked"
    else:
        told = "rows, seals, totals and anchor agree"
    if place.witness:
        told += ", and show all that the node's runs have released, line by line"
    print(f"{place.file}: {shown}: {told}")


def _disagreements(place: _Place, account: Account) -> list[str]:
    """Where the lines of a node's runs and the rows of its ledger, which is sound, do not agree."""
    from fedstill.node import reconcile

    if place.folder is None:
        return []
    until = max((row["row"] for row in account.entries()), default=0)  # a node at work writes more
    shared = not place.file.resolve().is_relative_to(place.folder.resolve())
    sealed = None if place.secret is None else account.sign
    lines = reconcile.read(place.folder)
    rows = account.entries()
    return list(reconcile.disagreements(lines, rows, sealed=sealed, until=until, shared=shared))


def _export(given: Given) -> None:
    from fedstill.core.owner_only import opener
    from fedstill.node.chain import COLUMNS

    place, to, whole = _place(Path(given.places[0])), given.path("--out"), "--whole" in given
    if to.suffix not in (".jsonl", ".csv"):
        raise ArgumentError("--out", str(to), "a file that ends in .jsonl or .csv")
    if to.exists():
        raise ArgumentError("--out", str(to), "a file that is not there yet")
    with _opened(place) as account, open(to, "x", encoding="utf-8", newline="", opener=opener) as file:
        names = [name for name in (*COLUMNS, "hash") if whole or name not in FINGERPRINTS]
        rows = ({name: row[name] for name in names} for row in account.entries())
        (_as_lines if to.suffix == ".jsonl" else _as_table)(file, names, rows)
        print(f"Wrote {to}{': keep it to yourself' if whole else ''}.")
        if account.trouble is not None:
            raise FedstillError(f"{place.file} is not sound, and {to} holds it as it is: {account.trouble}")


def _as_lines(file: TextIO, names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    file.writelines(json.dumps(row) + "\n" for row in rows)


def _as_table(file: TextIO, names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    writer = csv.DictWriter(file, names)
    writer.writeheader()
    writer.writerows({**row, "up": json.dumps(row["up"]), "price": json.dumps(row["price"])} for row in rows)


def _settle(given: Given) -> None:
    place = _place(Path(given.places[0]))
    if place.secret is None:
        told = "name the node's folder; where its secret is lost, `fedstill node init` makes a new one"
        raise FedstillError(f"{place.file} can be settled by its owner alone: {told}")
    with _opened(place, write=True) as account:
        before = max((row["row"] for row in account.entries()), default=0)
        beside = [] if account.trouble is not None else _disagreements(place, account)
        trouble = account.trouble or "; ".join(beside)
        account.settle(given.options["--because"][-1], bool(beside))
        again = [row for row in account.entries() if row["row"] > before and row["run"]]
    print(f"Settled: {trouble}.")
    for row in again:
        print(f"Charged again to {row['node']}, run {row['run']}: {priced(row)}.")
