"""``fedstill audit``: releases of a node and their privacy costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.cli.arguments import ParsedArgs, number
from fedstill.cli.audit_log_tables import charge_text, lost_numbers, print_entries, print_totals, totals
from fedstill.cli.console import plain, print_json
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.text_format import json_text

if TYPE_CHECKING:
    from fedstill.node.audit_log import AuditLog
    from fedstill.privacy.config import PrivacyConfig

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
    from fedstill.node import audit_log_inspection, owner_folder
    from fedstill.node.audit_log import FILE

    folder = path if path.is_dir() else path.parent
    log = _LogFile(folder / FILE)
    if (folder / owner_folder.FILE).is_file():
        file = owner_folder.read_node_file(folder)
        mine = file.privacy.unit(file.data.group)
        log = _LogFile(audit_log_inspection.audit_path(file, folder), folder, file.privacy, mine)
    elif path.is_dir() and not log.file.is_file():
        raise FedstillError(f"{path} is no node's folder, and a run's folder holds its audit log as {FILE}")
    if not path.is_dir() and log.file.resolve() != path.resolve():
        log = _LogFile(path)
    if not log.file.exists() and audit_log_inspection.missing_log_fault(log.file, log.folder) is None:
        if log.folder is None:
            raise FedstillError(f"file not found: {log.file} (expected an audit log, or a folder with one)")
        raise FedstillError(f"no audit log: {log.file} does not exist, as nothing was released yet")
    return log


@contextmanager
def _open_log(log: _LogFile, *, write: bool = False) -> Iterator[AuditLog]:
    from fedstill.node import audit_log_inspection
    from fedstill.node.audit_log import AuditLog

    lost = audit_log_inspection.missing_log_fault(log.file, log.folder)
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


def show(args: ParsedArgs) -> None:
    from fedstill.node.audit_entries import is_about_data

    log = _find_log(Path(args.positionals[0]))
    allowed = "an integer from 0 (all) up"
    most = number("--last", args.get("--last") or "20", int, lambda value: value >= 0, allowed)
    own = 1e-5 if log.privacy is None else log.privacy.delta
    within, allowed = (lambda value: 0 < value < 1), "above 0 and below 1"
    at = number("--delta", args.get("--delta") or str(own), float, within, allowed)

    console = plain()
    with _open_log(log) as audit:
        everything = list(audit.entries())
        entries = list(filter(is_about_data, everything))
        if "--json" in args:
            status = {"log": str(log.file), "sound": audit.fault is None, "trouble": audit.fault}
            shown = [_without_secrets(entry) for entry in entries[-most:]]
            print_json(
                {**status, "entries": shown, "totals": totals(audit, entries, at, log.privacy, log.mine)}
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


def verify(args: ParsedArgs) -> None:
    log, count, trouble = _find_log(Path(args.positionals[0])), None, None
    try:
        with _open_log(log) as audit:
            count = sum(1 for _ in audit.entries())
            audit.verify()
    except FedstillError as error:
        trouble = error
    if "--json" in args:
        status = {"sound": trouble is None, "trouble": None if trouble is None else str(trouble)}
        print_json({"log": str(log.file), **status, "entries": count})
    if trouble is not None:
        raise trouble
    if "--json" not in args:
        shown = "1 entry" if count == 1 else f"{count} entries"
        print(f"{log.file}: {shown}: hashes, totals and head agree")


def export(args: ParsedArgs) -> None:
    from fedstill.core.private_files import private_opener
    from fedstill.node.audit_entries import is_about_data

    log, to, whole = _find_log(Path(args.positionals[0])), args.path("--out"), "--whole" in args
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


def accept(args: ParsedArgs) -> None:
    from fedstill.node import audit_log_inspection

    log = _find_log(Path(args.positionals[0]))
    lost = audit_log_inspection.missing_log_fault(log.file, log.folder)
    with _open_log(log, write=True) as audit:
        before = max((entry["entry"] for entry in audit.entries()), default=0)
        trouble = audit.fault or lost
        audit.accept(args.options["--because"][-1], is_lost=lost is not None)
        again = [entry for entry in audit.entries(before + 1) if entry["run"]]
    print(f"Accepted: {trouble}.")
    for entry in again:
        print(f"Charged again to {entry['payer']}, run {entry['run']}: {charge_text(entry)}.")
