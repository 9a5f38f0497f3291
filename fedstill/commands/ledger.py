"""``fedstill ledger``: what left a node, and what it cost its records' privacy."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from fedstill.cli import _take
from fedstill.errors import ArgumentError, FedstillError, UnknownName

if TYPE_CHECKING:
    from rich.console import Console

    from fedstill.node.account import Account, Spent
    from fedstill.node.anchor import Totals
    from fedstill.privacy.config import Accountant, PrivacyConfig

HELP = """\
The ledger of a node's privacy: every release, what it cost, and what all of them cost together.

usage:
  fedstill ledger show PATH [--last N] [--delta D]   what left, when, to which run, under which rule, at which
                                             price: the last N releases (default: 20; 0 is all), and totals
                                             with epsilon at delta D (default: the node's, or 1e-5), and what
                                             is left of the node's budgets
  fedstill ledger verify PATH                whether it is whole and unchanged, and shows all that the node's
                                             runs have released; exits with 2 if not
  fedstill ledger export PATH --out FILE [--whole]   every row as JSON lines (FILE.jsonl) or as a table
                                             (FILE.csv); --whole with the fingerprints by which rows can be
                                             checked: keep that to yourself, since fingerprints follow from
                                             your records, and tell who has the node's secret whether guesses
                                             at them are right
  fedstill ledger settle PATH --because TEXT   accept it, as its owner, after verify has found something
                                             wrong; what is known to have been spent is charged again

PATH is a node's folder, a run's folder, or the .sqlite file itself.
"""

FILE = "ledger.sqlite"  # in a run's folder; a node's file can name another
MAGIC = b"SQLite format 3\0"  # how a ledger's file begins
MANY = 6  # prices that are shown of all that was paid
FINGERPRINTS = ("content", "after", "hash")  # columns that follow from the records, or from such columns


@dataclass(frozen=True)
class _Place:
    """A ledger's file.

    Args:
        file: its path.
        secret: that its seals are made with, where it is at hand.
        witness: what the runs of the node whose ledger it is have released.
        privacy: what the node's owner says, with the budgets.
    """

    file: Path
    secret: int | None
    witness: Totals | None = None
    privacy: PrivacyConfig | None = None


def main(words: list[str]) -> None:
    """Do what the words after ``fedstill ledger`` say.

    Raises:
        FedstillError: they say nothing that can be done, or the ledger is not sound.
    """
    commands = {"show": _show, "verify": _verify, "export": _export, "settle": _settle}
    if not words or any(word in ("-h", "--help") for word in words):
        print(HELP, end="")
    elif words[0] not in commands:
        raise UnknownName("command", f"ledger {words[0]}", [f"ledger {name}" for name in commands])
    else:
        commands[words[0]](words[1:])


# --- where it is --------------------------------------------------------------------------------------


def _path(words: list[str], command: str, options: str = "") -> Path:
    """The one word that is left when the options are taken."""
    unknown = [word for word in words if word.startswith("--")]
    if unknown:
        raise UnknownName("option", unknown[0].partition("=")[0], options.split())
    if len(words) != 1:
        raise ArgumentError(f"fedstill ledger {command}", " ".join(words), "PATH: a folder or a .sqlite file")
    return Path(words[0])


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
    from fedstill import presets

    if (folder / "node.toml").is_file():
        from fedstill.node import owner, witness

        privacy = owner.read(folder).privacy
        path = folder / Path(privacy.ledger).expanduser()
        secret = owner.secret(folder) if (folder / owner.SECRET).exists() else None
        return _Place(path, secret, witness.released(folder), privacy)
    config = folder / "config.toml"
    if (folder / FILE).is_file() and config.is_file():
        from fedstill.seeds import derive

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


def _show(words: list[str]) -> None:
    last, words = _take("--last", words)
    delta, words = _take("--delta", words)
    place = _place(_path(words, "show", "--last --delta"))
    most = _number("--last", last, int, lambda value: value >= 0, "a whole number from 0 (all) up", 20)
    own = 1e-5 if place.privacy is None else place.privacy.delta
    at = _number("--delta", delta, float, lambda value: 0 < value < 1, "above 0 and below 1", own)

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
        _print_rows(console, rows[-most:], len(rows))
        _print_totals(console, account, rows, at, place.privacy)


def _number(
    option: str,
    given: str | None,
    kind: Callable[[str], Any],
    fits: Callable[[Any], bool],
    allowed: str,
    default: Any,
) -> Any:
    if given is None:
        return default
    try:
        value = kind(given)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise ArgumentError(option, given, allowed)
    return value


def _print_rows(console: Console, rows: list[dict[str, Any]], count: int) -> None:
    """One table of releases, and one of the rules that they name by letter: there are few of these."""
    from rich.table import Table

    from fedstill.node.account import DATA
    from fedstill.node.chain import SETTLED

    told = dict.fromkeys(row["rule"] for row in rows if row["part"] != SETTLED)
    rules = {rule: _letters(number) for number, rule in enumerate(told)}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("row", justify="right", no_wrap=True, header_style="bold")
    table.add_column("when (UTC)", width=10, header_style="bold")
    named = any(row["node"] != DATA for row in rows)  # a simulation's ledger has several nodes
    table.add_column("run, node" if named else "run", max_width=15, overflow="fold", header_style="bold")
    table.add_column("what left", max_width=22, overflow="fold", header_style="bold")
    table.add_column("rule", no_wrap=True, header_style="bold")
    table.add_column("price", overflow="fold", header_style="bold")
    for row in rows:
        when = str(row["at"])[:19].replace("T", "\n")
        run = _short(row["run"])
        to = run if row["node"] == DATA else f"{run}\n{row['node']}"
        letters = "" if row["part"] == SETTLED else rules[row["rule"]]
        table.add_row(str(row["row"]), when, to, _what(row), letters, _priced(row, "\n"))
    console.print()
    console.print(table)
    for first, last in _gaps([row["row"] for row in rows]):
        which = f"row {first}" if first == last else f"rows {first} to {last}"
        console.print(f"There is no {which}: the numbers of rows that are lost are not used again.")
    if len(rows) < count:
        console.print(f"These are the last {len(rows)} of {count} rows; --last 0 shows all.")
    legend = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    legend.add_column("rule", no_wrap=True, header_style="bold")
    legend.add_column("what is done before it leaves", header_style="bold")
    for rule, letters in rules.items():
        legend.add_row(letters, rule)
    console.print()
    console.print(legend)
    console.print()


def _gaps(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last number of each stretch that is not there.

    >>> _gaps([1, 2, 5, 6, 8])
    [(3, 4), (7, 7)]
    """
    pairs = zip(numbers, numbers[1:], strict=False)
    return [(before + 1, after - 1) for before, after in pairs if after > before + 1]


def _short(run: str) -> str:
    """A run's name as it fits a row; the totals have it whole.

    >>> _short("spring"), _short("0123456789abcdef0123456789abcdef")
    ('spring', '01234567…')
    """
    return run if len(run) <= 15 else f"{run[:8]}…"


def _letters(number: int) -> str:
    """A, B, ..., Z, AA, AB, ...

    >>> _letters(0), _letters(25), _letters(26)
    ('A', 'Z', 'AA')
    """
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _what(row: Mapping[str, Any]) -> str:
    from fedstill.report.table import human_bytes

    if row["part"] == "settled":
        return f"settled by the owner: {row['rule']}"
    kinds = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in row["up"].items())
    asked = f"{row['question']} {row['number']}, {row['part']}" if row["number"] >= 0 else row["question"]
    return f"{asked}\n{kinds or 'nothing'}"


def _priced(row: Mapping[str, Any], between: str = ", ") -> str:
    """What one row cost, in words."""
    parts = _events(row["price"])
    if row["bare"]:
        parts.append("no guarantee" if row["bare"] == 1 else f"no guarantee, {row['bare']} times")
    return between.join(parts) or "free"


def _events(price: Mapping[str, int]) -> list[str]:
    """Events and how often each, numbers to four digits."""
    short = [re.sub(r"\d+\.\d+(e-?\d+)?", lambda found: f"{float(found[0]):.4g}", event) for event in price]
    return [
        event if times == 1 else f"{times} x {event}"
        for event, times in zip(short, price.values(), strict=True)
    ]


def _print_totals(
    console: Console,
    account: Account,
    rows: list[dict[str, Any]],
    delta: float,
    privacy: PrivacyConfig | None,
) -> None:
    from rich.table import Table

    from fedstill.node.account import DATA

    limited = privacy is not None and math.isfinite(min(privacy.epsilon, privacy.over_all[0]))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    heads = ["whose", "run", "releases", "without guarantee", f"epsilon at delta {delta:g}"]
    for place, head in enumerate([*heads, "left"] if limited else heads):
        justify: Literal["left", "right"] = "left" if place < 2 else "right"
        table.add_column(head, justify=justify, overflow="fold", header_style="bold")
    paid: list[str] = []
    accountant: Accountant = "pld" if privacy is None else privacy.accountant
    for node in dict.fromkeys(row["node"] for row in rows if row["run"]):
        budgets = privacy if limited and node == DATA else None
        left = [row["run"] for row in rows if row["node"] == node and row["part"] != "settled"]
        runs = list(dict.fromkeys(row["run"] for row in rows if row["node"] == node and row["run"]))
        for run in runs:
            spent = account.spent(node, run)
            said = _epsilon(spent.run, spent.bare_run, delta, accountant)
            kept = _kept(budgets, False, spent.run, spent.bare_run)
            table.add_row(node, run, str(left.count(run)), str(spent.bare_run), said, kept)
        total: Spent = account.spent(node, runs[-1])
        if len(runs) > 1 or budgets is not None:
            said = _epsilon(total.total, total.bare_total, delta, accountant)
            kept = _kept(budgets, True, total.total, total.bare_total)
            table.add_row(node, "all runs", str(len(left)), str(total.bare_total), said, kept)
        events = _events(total.total)
        more = f" and {len(events) - MANY} other prices" if len(events) > MANY else ""
        paid.append(f"Paid in all for {node}: {', '.join(events[:MANY]) or 'nothing'}{more}.")
    console.print(table)
    if privacy is not None and limited:
        console.print(f"Budgets, by {accountant.upper()}: {_budgets(privacy)}.")
    for line in paid:
        console.print(line)


def _budgets(privacy: PrivacyConfig) -> str:
    """What a node's owner allows, in words."""
    both = (("a run", privacy.epsilon, privacy.delta), ("all runs on these data", *privacy.over_all))
    return "; ".join(
        f"{what} has " + (f"epsilon {most:g} at delta {at:g}" if math.isfinite(most) else "none")
        for what, most, at in both
    )


def _kept(privacy: PrivacyConfig | None, over_all: bool, spent: Mapping[str, int], bare: int) -> str:
    """What is left of a run's budget or of that of all runs, rounded down; nothing where there are none."""
    from fedstill.privacy.budget import Budget
    from fedstill.privacy.events import from_text

    if privacy is None:
        return ""
    most, delta = privacy.over_all if over_all else (privacy.epsilon, privacy.delta)
    if math.isinf(most):
        return "no budget"
    try:
        left = 0.0 if bare else Budget(most, delta, privacy.accountant).left(from_text(spent))
    except ArgumentError:  # an edited row
        return "not known"
    return f"{math.floor(1000 * left) / 1000:g}"


def _epsilon(spent: Mapping[str, int], bare: int, delta: float, accountant: Accountant) -> str:
    """An epsilon, rounded up; none where something left without a guarantee."""
    from fedstill.privacy.accounting import epsilon
    from fedstill.privacy.events import from_text

    if bare:
        return "no guarantee"
    try:
        value = epsilon(from_text(spent), delta, accountant)
    except ArgumentError:  # an edited row
        return "not known"
    return f"{math.ceil(1000 * value) / 1000:g}" if math.isfinite(value) else "inf"


# --- verify, export, settle ---------------------------------------------------------------------------


def _verify(words: list[str]) -> None:
    place = _place(_path(words, "verify"))
    with _opened(place) as account:
        account.verify()
        count = sum(1 for _ in account.entries())
    rows = "1 row" if count == 1 else f"{count} rows"
    if place.secret is None:
        told = "rows, totals and anchor agree; the seals take the node's secret, and were not checked"
    else:
        told = "rows, seals, totals and anchor agree"
    if place.witness:
        told += ", and show all that the node's runs have released"
    print(f"{place.file}: {rows}: {told}")


def _export(words: list[str]) -> None:
    from fedstill.node.chain import COLUMNS

    out, words = _take("--out", words)
    whole, words = "--whole" in words, [word for word in words if word != "--whole"]
    place = _place(_path(words, "export", "--out --whole"))
    to = Path(out or "")
    if to.suffix not in (".jsonl", ".csv"):
        raise ArgumentError("--out", out or "", "a file that ends in .jsonl or .csv")
    if to.exists():
        raise ArgumentError("--out", out, "a file that is not there yet")
    with _opened(place) as account, to.open("x", encoding="utf-8", newline="") as file:
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


def _settle(words: list[str]) -> None:
    because, words = _take("--because", words)
    place = _place(_path(words, "settle", "--because"))
    if because is None:
        raise ArgumentError("--because", "", "the reason, in words, which is kept in the ledger")
    if place.secret is None:
        told = "name the node's folder; where its secret is lost, `fedstill node init` makes a new one"
        raise FedstillError(f"{place.file} can be settled by its owner alone: {told}")
    with _opened(place, write=True) as account:
        trouble, before = account.trouble, max((row["row"] for row in account.entries()), default=0)
        account.settle(because)
        again = [row for row in account.entries() if row["row"] > before and row["run"]]
    print(f"Settled: {trouble}.")
    for row in again:
        print(f"Charged again to {row['node']}, run {row['run']}: {_priced(row)}.")
