"""``fedstill audit``: releases of a node and their privacy costs, in tables of 80 columns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fedstill.cli.arguments import AsJson, group
from fedstill.cli.console import columns, plain, print_json
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.options import Fraction, NonNegativeInt
from fedstill.core.private_files import private_opener
from fedstill.core.text_format import format_bytes, format_count, json_text, shorten_numbers

if TYPE_CHECKING:
    from rich.console import Console

    from fedstill.node.audit_log import AuditLog
    from fedstill.privacy.config import Accountant, PrivacyConfig

LogPath = Annotated[Path, Parameter(help="a node's folder, a run's folder, or the .sqlite file of a log")]

commands = group(
    "audit",
    """Show, verify and export a node's audit log: every release and its privacy cost.

PATH is a node's folder, a run's folder, or the .sqlite file of a log.""",
)

MAGIC = b"SQLite format 3\0"  # how a log's file begins
SECRET = ("content_hash", "history_hash", "release_hash", "hash")  # fields that depend on the records
SECURITY = ("actor", "details")  # fields of security events


@dataclass(frozen=True)
class _LogFile:
    """File of a log; for a node's log also the node's folder and privacy options."""

    file: Path
    folder: Path | None = None
    privacy: PrivacyConfig | None = None
    mine: str = ""  # protected unit


def _find_log(path: Path) -> _LogFile:
    from fedstill.node import folder_log, owner_folder
    from fedstill.node.audit_log import FILE

    folder = path if path.is_dir() else path.parent
    log = _LogFile(folder / FILE)
    if (folder / owner_folder.FILE).is_file():
        file = owner_folder.read_node_file(folder)
        mine = file.privacy.unit(file.data.group)
        log = _LogFile(folder_log.audit_path(file, folder), folder, file.privacy, mine)
    elif path.is_dir() and not log.file.is_file():
        raise FedstillError(f"{path} is no node's folder, and a run's folder holds its audit log as {FILE}")
    if not path.is_dir() and log.file.resolve() != path.resolve():
        log = _LogFile(path)
    if not log.file.exists() and folder_log.missing_log_fault(log.file, log.folder) is None:
        if log.folder is None:
            raise FedstillError(f"file not found: {log.file} (expected an audit log, or a folder with one)")
        raise FedstillError(f"no audit log: {log.file} does not exist, as nothing was released yet")
    return log


@contextmanager
def _open_log(log: _LogFile, *, write: bool = False) -> Iterator[AuditLog]:
    from fedstill.node import folder_log
    from fedstill.node.audit_log import AuditLog

    lost = folder_log.missing_log_fault(log.file, log.folder)
    if lost is not None and not write:
        raise FedstillError(f"{log.file} {lost}: put it back, or `fedstill audit accept` starts a new one")
    if lost is None and not log.file.with_name(f"{log.file.name}.head").exists():
        with log.file.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:  # nothing says that it ever was one
                raise FedstillError(f"{log.file} is not an audit log")
    audit = AuditLog(log.file, read_only=not write)
    try:
        yield audit
    finally:
        audit.close()


@commands.command
def show(
    path: LogPath, /, *, last: NonNegativeInt = 20, delta: Fraction | None = None, as_json: AsJson = False
) -> None:
    """Show the last releases, the total epsilon, and what is left of the privacy budgets.

    example: fedstill audit show clinic --last 5

    Args:
        last: number of entries (default: 20; 0 shows all)
        delta: delta of the totals (default: the node's, or 1e-5)
    """
    from fedstill.node.audit_entries import is_about_data

    log, most = _find_log(path), last
    at = delta or (1e-5 if log.privacy is None else log.privacy.delta)

    console = plain()
    with _open_log(log) as audit:
        everything = list(audit.entries())
        entries = list(filter(is_about_data, everything))
        if as_json:
            status = {"log": str(log.file), "sound": audit.fault is None, "trouble": audit.fault}
            shown = [_without_secrets(entry) for entry in entries[-most:]]
            print_json(
                {
                    **status,
                    "entries": shown,
                    "totals": totals(audit, entries, at, log.privacy, log.mine),
                }
            )
            return
        console.print(f"audit log {log.file}", soft_wrap=True)
        if audit.fault is not None:
            console.print(f"NOT SOUND: {audit.fault}.", style="bold", soft_wrap=True)
        if not entries:
            console.print("Nothing has left.")
            return
        print_entries(console, entries[-most:], len(entries), lost_numbers(everything))
        print_totals(console, audit, entries, at, log.privacy, log.mine)


@commands.command
def verify(path: LogPath, /, *, as_json: AsJson = False) -> None:
    """Verify that the log is complete and unchanged. The exit code is 2 if not.

    example: fedstill audit verify clinic
    """
    log, count, trouble = _find_log(path), None, None
    try:
        with _open_log(log) as audit:
            count = sum(1 for _ in audit.entries())
            audit.verify()
    except FedstillError as error:
        trouble = error
    if as_json:
        status = {"sound": trouble is None, "trouble": None if trouble is None else str(trouble)}
        print_json({"log": str(log.file), **status, "entries": count})
    if trouble is not None:
        raise trouble
    if not as_json:
        shown = "1 entry" if count == 1 else f"{count} entries"
        print(f"{log.file}: {shown}: hashes, totals and head agree")


@commands.command
def export(path: LogPath, /, *, out: Path, whole: bool = False) -> None:
    """Export releases, charges and refused queries as JSON lines.

    example: fedstill audit export clinic --out clinic.jsonl

    Keep a file with --whole private: with the node's secret its fingerprints
    confirm guesses of your records.

    Args:
        out: file to write, NAME.jsonl
        whole: also security events, and fingerprints to check entries by
    """
    from fedstill.node.audit_entries import is_about_data

    log, to = _find_log(path), out
    if to.suffix != ".jsonl":
        raise ArgumentError("--out", str(to), "a file that ends in .jsonl")
    if to.exists():
        raise ArgumentError("--out", str(to), "a file that does not exist")
    with _open_log(log) as audit, open(to, "x", encoding="utf-8", opener=private_opener) as file:
        for entry in audit.entries():
            if whole or is_about_data(entry):
                file.write(json_text(entry if whole else _without_secrets(entry), indent=None) + "\n")
        print(f"Wrote {to}{': keep it to yourself' if whole else ''}.")
        if audit.fault is not None:
            raise FedstillError(f"{log.file} is not sound, and {to} holds it as it is: {audit.fault}")


def _without_secrets(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry without the fields that depend on the records, and without those of security events."""
    return {name: value for name, value in entry.items() if name not in (*SECRET, *SECURITY)}


@commands.command
def accept(path: LogPath, /, *, because: str) -> None:
    """Accept a damaged log as its owner. Known privacy costs are charged again.

    example: fedstill audit accept clinic --because 'restored from backup'

    Args:
        because: reason, kept in the log
    """
    from fedstill.node import folder_log

    log = _find_log(path)
    lost = folder_log.missing_log_fault(log.file, log.folder)
    with _open_log(log, write=True) as audit:
        before = max((entry["entry"] for entry in audit.entries()), default=0)
        trouble = audit.fault or lost
        audit.accept(because, is_lost=lost is not None)
        again = [entry for entry in audit.entries(before + 1) if entry["run"]]
    print(f"Accepted: {trouble}.")
    for entry in again:
        print(f"Charged again to {entry['payer']}, run {entry['run']}: {charge_text(entry)}.")


MANY = 6  # charges that are shown of all


def lost_numbers(entries: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the first and the last number of each gap in the entries of a log."""
    return [
        (before + 1, after - 1)
        for before, after in pairwise(entry["entry"] for entry in entries)
        if after > before + 1
    ]


def print_entries(
    console: Console, entries: list[dict[str, Any]], count: int, lost: list[tuple[int, int]]
) -> None:
    """Print a table of entries, and a table of the rules that it names by letter.

    Args:
        console: where to print.
        entries: the last entries that are releases, charges, refused queries or acceptances.
        count: number of all of these.
        lost: lost numbers of entries, of any kind.
    """
    from fedstill.node.audit_entries import ACCEPTED, NODE_DATA, REFUSED

    shown_rules = dict.fromkeys(
        entry["rule"] for entry in entries if entry["part"] not in (ACCEPTED, REFUSED)
    )
    rules = {rule: _number_as_letters(number) for number, rule in enumerate(shown_rules)}
    named = any(entry["payer"] != NODE_DATA for entry in entries)  # a simulation's log has several nodes
    table = columns(
        "entry",
        "when (UTC)",
        "run, node" if named else "run",
        "released",
        "rule",
        "charge",
        justify="right",
        no_wrap=True,
    )
    for place, width in ((1, 10), (2, 15), (3, 22)):
        table.columns[place].max_width = width
    table.columns[1].width = 10
    table.columns[4].no_wrap = True
    for entry in entries:
        when = str(entry["at"])[:19].replace("T", "\n")
        run = entry["run"] if len(entry["run"]) <= 15 else f"{entry['run'][:8]}…"  # the totals have it whole
        to = run if entry["payer"] == NODE_DATA else f"{run}\n{entry['payer']}"
        letters = rules.get(entry["rule"], "")
        charge = "" if entry["part"] == REFUSED else charge_text(entry, "\n")
        table.add_row(str(entry["entry"]), when, to, _entry_description(entry), letters, charge)
    console.print()
    console.print(table)
    for first, last in lost:
        if last > entries[0]["entry"]:
            numbers = f"Entry {first} is" if first == last else f"Entries {first} to {last} are"
            console.print(f"{numbers} lost, and their numbers are not used again.")
    if len(entries) < count:
        console.print(f"These are the last {len(entries)} of {count} entries; --last 0 shows all.")
    legend = columns("rule", "processing before the release", no_wrap=True)
    for rule, letters in rules.items():
        legend.add_row(letters, rule)
    console.print()
    console.print(legend)
    _explain(console, {kind for entry in entries for kind in entry["up"]})
    console.print()


def _explain(console: Console, kinds: set[str]) -> None:
    """Print the meaning of the queries and payload kinds in the entries."""
    from fedstill.protocol.payload_kinds import payload_kind

    console.print(
        "Each release is named by its query, number and part: the response, or the gradient that the server "
        "requested through it. Payload kinds:"
    )
    for kind in sorted(kinds):
        console.print(f"  {kind}: {payload_kind(kind).description or 'not declared by any method here'}")


def _number_as_letters(number: int) -> str:
    """A, B, ..., Z, AA, AB, ...

    >>> _number_as_letters(0), _number_as_letters(25), _number_as_letters(26)
    ('A', 'Z', 'AA')
    """
    return (_number_as_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _entry_description(entry: Mapping[str, Any]) -> str:
    from fedstill.node.audit_entries import ACCEPTED, REFUSED, RESPONSE_FILE

    asked = f"{entry['query']} {entry['number']}" if entry["number"] >= 0 else entry["query"]
    if entry["part"] == ACCEPTED:
        return f"accepted by the owner: {entry['rule']}"
    if entry["part"] == REFUSED:
        return f"{asked or 'other queries'}, refused: {entry['rule']}"
    if entry["part"] == RESPONSE_FILE:
        return "file of responses,\nmay be released again"
    kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sorted(entry["up"].items()))
    asked = asked if asked == entry["part"] else f"{asked}, {entry['part']}"
    return f"{asked}\n{kinds or 'nothing'}"


def charge_text(entry: Mapping[str, Any], between: str = ", ") -> str:
    """Return the privacy cost of an entry in words."""
    parts = events(entry["cost"])
    if entry["no_guarantee"]:
        parts.append(
            "no guarantee" if entry["no_guarantee"] == 1 else f"no guarantee, {entry['no_guarantee']} times"
        )
    return between.join(parts) or "free"


def events(charge: Mapping[str, int]) -> list[str]:
    """Return events with their counts, numbers to four digits."""
    short = map(shorten_numbers, charge)
    return [
        event if times == 1 else f"{times} x {event}"
        for event, times in zip(short, charge.values(), strict=True)
    ]


def print_totals(
    console: Console,
    audit: AuditLog,
    entries: list[dict[str, Any]],
    delta: float,
    privacy: PrivacyConfig | None,
    mine: str = "",
) -> None:
    """Print a table of the privacy cost of each run, and of all runs of a node, at delta.

    Args:
        delta: of the epsilons that are shown; budgets have their own.
        privacy: the owner's: by which accountant, and what is left of its budgets. None: neither is known.
        mine: what it protects as one.
    """
    from fedstill.node.audit_entries import ALL_RUNS, NODE_DATA
    from fedstill.privacy.budget import describe_budgets, epsilon_text_rounded_down, epsilon_text_rounded_up

    limited = _has_finite_budget(privacy)
    heads = ["whose", "run", "releases", "without\nguarantee", f"epsilon at\ndelta {delta:g}"]
    table = columns(*heads, *(["left"] if limited else []), left=2)
    rows = totals(audit, entries, delta, privacy, mine)
    for row in rows:
        known = row["events"] is not None
        cells = [
            row["whose"],
            "all runs" if row["run"] is None else row["run"],
            str(row["releases"]),
            str(row["without_guarantee"]),
            epsilon_text_rounded_up(row["epsilon"]) if known else "not known",
        ]
        if limited and row["whose"] == NODE_DATA:
            cells.append(epsilon_text_rounded_down(row["budget_epsilon_left"]) if known else "not known")
        table.add_row(*cells)
    console.print(table)
    if privacy is not None and limited:
        console.print(f"Budgets, by {privacy.accountant.upper()}: {'; '.join(describe_budgets(privacy))}.")
    for payer in dict.fromkeys(row["whose"] for row in rows):
        spent = audit.spending(payer, ALL_RUNS)
        charges, bare = events(spent.total_events), spent.total_no_guarantee
        cells = [*charges[:MANY], *([f"{len(charges) - MANY} other charges"] if len(charges) > MANY else [])]
        cells += [f"{format_count(bare, 'release')} without guarantee"] if bare else []
        units = sorted(audit.totals.units(payer))
        apart = f", of which units add up to nothing ({', '.join(units)})" if len(units) > 1 else ""
        console.print(f"Total cost for {payer}: {', '.join(cells) or 'nothing'}{apart}.")


def _has_finite_budget(privacy: PrivacyConfig | None) -> bool:
    return privacy is not None and math.isfinite(min(privacy.epsilon, privacy.total_budget[0]))


def totals(
    audit: AuditLog,
    entries: list[dict[str, Any]],
    delta: float,
    privacy: PrivacyConfig | None,
    mine: str = "",
) -> list[dict[str, Any]]:
    """Return the privacy cost of each run, and of all runs (run: None) of a node.

    Arguments are those of :func:`print_totals`.
    Each has ``events`` and how often each was charged (None: unknown, as of an edited entry, or of all runs
    if they were charged for units of two kinds), ``epsilon`` at ``delta`` (None: no guarantee), and what is
    left of the owner's budget, at the budget's own delta (None: there is no budget, or it is not known).
    """
    from fedstill.node.audit_entries import ALL_RUNS, NODE_DATA, RELEASES
    from fedstill.node.overview import compute_spent_budget

    accountant: Accountant = "pld" if privacy is None else privacy.accountant
    gone = Counter((entry["payer"], entry["run"]) for entry in entries if entry["part"] in RELEASES)
    runs: dict[str, list[str]] = {}
    for payer, run in audit.totals.events:
        if run != ALL_RUNS:
            runs.setdefault(payer, []).append(run)
    rows = []
    for payer, names in runs.items():
        own = privacy if payer == NODE_DATA and _has_finite_budget(privacy) else None
        for run in names if len(names) == 1 and own is None else [*names, ALL_RUNS]:
            found = compute_spent_budget(audit, payer, run, delta, accountant, own, mine)
            rows.append(
                {
                    "whose": payer,
                    "run": run or None,
                    "releases": gone[payer, run] if run else sum(gone[payer, name] for name in names),
                    "without_guarantee": found.no_guarantee,
                    "events": found.events,
                    "epsilon": found.epsilon,
                    "delta": delta,
                    "budget_epsilon_left": found.remaining,
                }
            )
    return rows
