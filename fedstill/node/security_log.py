"""Security log of a node: joins, refusals, approvals and changes of the owner's rules.

JSON lines in ``security.jsonl``. Each line has its number, the previous line's hash (``before``) and its
own. A head next to the file, as for the audit log, holds the last number and hash, so that changed lines,
missing lines and a missing end are noticed. A person who can write to the folder can write another log with
another head. A full file is renamed to ``security-NUMBER.jsonl`` after its last line. Files are never
deleted here: the owner moves full ones away with :meth:`SecurityLog.archive`, which writes a line, so that
a missing beginning is noticed, too.

Releases are in the audit log. Neither log holds private values: of the node's internal errors a line says
only that they occurred.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from fedstill.core import private_files
from fedstill.core.errors import FedstillError
from fedstill.core.hashing import chain_hash, read_head, write_head
from fedstill.core.text_format import to_printable_line

FILE, HEAD, LOCK = "security.jsonl", "security.jsonl.head", "security.lock"
MAX_FILE_BYTES = 1_000_000
MAX_REFUSALS = 1000  # lines of refusals per process: a server could fill the disk
MAX_LETTERS = 1000
TEXT_FIELDS = ("at", "event", "hash", "actor", "previous", "reason")  # text fields of each line

Event = Literal["joined", "waits", "approved", "rejected", "refused", "policy", "certificate", "archived"]


class SecurityLogError(FedstillError):
    """A node's security log is damaged or cannot be written."""


class SecurityLog:
    """Log in a node's folder, to which several processes may write.

    Args:
        folder: the node's folder.
        max_bytes: size from which lines caused by a server are no longer written; 0 is no limit.
    """

    def __init__(self, folder: Path, max_bytes: int = 0) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._written_keys: set[tuple[str, ...]] = set()  # lines caused by a server, written by this process

    def write(self, event: Event, actor: str, reason: str, **details: str) -> None:
        """Write a line, which is on disk on return.

        Args:
            event: kind of the event.
            actor: cause of the event: a server's fingerprint, or an account of this machine.
            reason: the reason or the rule, in words.
            details: further facts: ``run``, ``query``, ``description``.

        Raises:
            SecurityLogError: the log does not match its head, or cannot be written.
        """
        line = {
            "event": event,
            "actor": to_printable_line(actor, MAX_LETTERS),
            "reason": to_printable_line(reason, MAX_LETTERS),
        }
        line |= {name: to_printable_line(value, MAX_LETTERS) for name, value in details.items() if value}
        with self._locked():
            self._append(line)

    def record_refusal(self, actor: str, reason: str, **details: str) -> None:
        """Write a refusal, unless this process has written the same, or too many, already."""
        self.write_once("refused", actor, reason, **details)

    def write_once(self, event: Event, actor: str, reason: str, **details: str) -> None:
        """Write an event that a server can cause any number of times, unless this process has written the
        same, or too many such lines, already.
        """
        key = (event, actor, reason, *details.values())
        if self._max_bytes and log_size_bytes(self._folder) >= self._max_bytes:
            return
        if key not in self._written_keys and len(self._written_keys) < MAX_REFUSALS:
            self._written_keys.add(key)
            if len(self._written_keys) == MAX_REFUSALS:
                event, details, reason = (
                    "refused",
                    {},
                    "further lines of this process are in node.log only",
                )
            self.write(event, actor, reason, **details)

    def record_policy(self, rules: Mapping[str, Any]) -> None:
        """Write the owner's rules that differ from those written last.

        Raises:
            SecurityLogError: as for :meth:`write`.
        """
        current = {name: json.dumps(value) for name, value in rules.items()}
        with self._locked():
            recorded = self._last_policy()
            changed = {name: value for name, value in current.items() if recorded.get(name) != value}
            if changed or recorded.keys() - current.keys():
                changes = ", ".join(f"{name} = {value}" for name, value in changed.items())
                reason = to_printable_line(changes, MAX_LETTERS) if recorded else "first start"
                self._append(
                    {"event": "policy", "actor": process_user_name(), "reason": reason, "policy": current}
                )

    def archive(self, folder: Path) -> list[Path]:
        """Move all full files to another folder, and record the last archived line.

        Args:
            folder: target folder; created if missing.

        Returns:
            The new paths, the oldest first.

        Raises:
            SecurityLogError: the log is damaged, a file of that name exists, or one cannot be moved.
        """
        with self._locked():
            if (fault := self._fault()) is not None:
                raise SecurityLogError(fault)
            full_files = [path for path in self._files() if path.name != FILE]
            targets = [folder / path.name for path in full_files]
            for path, target in zip(full_files, targets, strict=True):  # left by an interrupted call
                if target.exists() and target.read_bytes() != path.read_bytes():
                    raise SecurityLogError(f"{target} exists already with other content")
            if full_files:
                private_files.make_folder(folder)
                through, policy = _last_line_of(full_files[-1]), self._last_policy()
                details = {
                    "event": "archived",
                    "actor": process_user_name(),
                    "reason": f"lines up to {through}: {folder}",
                }
                self._append({**details, "through": str(through)} | ({"policy": policy} if policy else {}))
            for path, target in zip(full_files, targets, strict=True):
                private_files.replace_file(target, path.read_bytes(), sync=True)
                path.unlink()
        return targets

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield all readable lines, oldest first."""
        for path in self._files():
            for text in path.read_bytes().split(b"\n"):
                if (line := _parse_line(text)) is not None:
                    yield line

    def find_fault(self) -> str | None:
        """Return the log's fault and its line; None: no fault, or no log.

        No lock is taken, so that no node waits for a reader. An apparent fault during a write or a move is
        checked again.
        """
        if not self._files() and not (self._folder / HEAD).exists():
            return None
        fault = None
        for _ in range(3):
            try:
                if (fault := self._fault()) is None:
                    break
            except FileNotFoundError:
                fault = f"{self._folder / FILE} was moved while it was read"
            except OSError as error:
                raise SecurityLogError(f"{self._folder / FILE} cannot be used: {error.strerror}") from error
            time.sleep(0.02)
        return fault

    def find_hash(self, hash_: str) -> int | None:
        """Return the number of the line with a hash that was noted elsewhere; None: the folder was restored
        from before it, or has another log.
        """
        return next((line["line"] for line in self.lines() if line["hash"] == hash_), None)

    # --- the file ---------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the log's lock; a full disk is a :class:`SecurityLogError`."""
        try:
            with open(self._folder / LOCK, "ab", opener=private_files.private_opener) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise SecurityLogError(f"{self._folder / FILE} cannot be used: {error.strerror}") from error

    def _files(self) -> list[Path]:
        older = {
            int(match[1]): path
            for path in self._folder.glob("security-*.jsonl")
            if (match := re.fullmatch(r"security-([0-9]{1,19})\.jsonl", path.name))
        }
        file = self._folder / FILE
        return [*(older[number] for number in sorted(older)), *([file] if file.exists() else [])]

    def _append(self, line: Mapping[str, Any]) -> None:
        path, head = self._folder / FILE, self._read_head()
        number, last_hash = self._last_line()
        if head is not None and (head[0] > number or (head[0] == number and head != (number, last_hash))):
            raise SecurityLogError(f"{path} does not end as its head says; {self._advice()}")
        if head is None and number:
            raise SecurityLogError(f"{path} has no head; {self._advice()}")
        if path.exists() and path.stat().st_size > MAX_FILE_BYTES:
            os.rename(path, path.with_name(f"security-{number}.jsonl"))
        time_ = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        record = {"line": number + 1, "at": time_, "previous": last_hash, **line}
        text = json.dumps(record, sort_keys=True, separators=(",", ":"))
        hash_ = chain_hash(last_hash, number + 1, text)
        with open(path, "ab", opener=private_files.private_opener) as file:
            file.write(f"{text[:-1]}{_hash_suffix(hash_)}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        write_head(self._folder / HEAD, number + 1, hash_)

    def _last_line(self) -> tuple[int, str]:
        """Return number and hash of the last line; delete an incomplete line of a killed process."""
        for path in reversed(self._files()):
            with open(path, "rb+") as file:
                content = file.read()
                complete = content[: content.rfind(b"\n") + 1]
                if len(complete) < len(content):
                    file.truncate(len(complete))
            if complete:
                last = _parse_line(complete[:-1].rpartition(b"\n")[2])
                if last is None:
                    raise SecurityLogError(f"{path} does not end with a line of a log; {self._advice()}")
                return last["line"], last["hash"]
        return 0, ""

    def _read_head(self) -> tuple[int, str] | None:
        try:
            return read_head(self._folder / HEAD)
        except ValueError as error:
            raise SecurityLogError(f"{self._folder / HEAD} is damaged: {error}; {self._advice()}") from error

    def _fault(self) -> str | None:
        try:
            head = self._read_head()
        except SecurityLogError as error:
            return str(error)
        first, archived = 1, 0
        last: int | None = None
        last_hash, head_hash = "", ""
        for path in self._files():
            *lines, _ = path.read_bytes().split(b"\n")
            for text in lines:
                line, number = _parse_line(text), 1 if last is None else last + 1
                if last is None and line is not None:
                    first = number = line["line"]
                if line is None or line["line"] != number:
                    return (
                        f"{path.name}: line {number} is missing, or not as it was written; {self._advice()}"
                    )
                unhashed = text.decode().removesuffix(_hash_suffix(line["hash"])) + "}"
                is_linked = last is None or line["previous"] == last_hash
                if not is_linked or line["hash"] != chain_hash(line["previous"], line["line"], unhashed):
                    return f"{path.name}: line {line['line']} is not as it was written; {self._advice()}"
                last, last_hash = line["line"], line["hash"]
                if line["event"] == "archived":
                    archived = _archived_through(line)
                if head is not None and last == head[0]:
                    head_hash = last_hash
            if path.name != FILE and last != _last_line_of(path):
                return f"{path.name} does not end with the line that it is named after; {self._advice()}"
        if head is None:
            return None if last is None else f"{HEAD} is missing; {self._advice()}"
        if last is None or last < head[0]:
            return f"it ends at line {last or 0}, and its head at {head[0]}; {self._advice()}"
        if head_hash != head[1]:
            return f"line {head[0]} is not the one of its head; {self._advice()}"
        if first > archived + 1:
            message = "no line says that those before were archived"
            return f"it begins at line {first}, and {message}; {self._advice()}"
        return None

    def _last_policy(self) -> Mapping[str, str]:
        for path in reversed(self._files()):
            for text in reversed(path.read_bytes().split(b"\n")):
                if (line := _parse_line(text)) is not None and isinstance(line.get("policy"), dict):
                    return dict(line["policy"])
        return {}

    def _advice(self) -> str:
        return f"examine it, then move {self._folder}/security* elsewhere to begin a new log"


def process_user_name() -> str:
    """Return the user name of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no user name
        return f"account {os.getuid()}"


def _parse_line(text: bytes) -> dict[str, Any] | None:
    """Return a line as a dictionary, or None if no node could have written it."""
    try:
        line = json.loads(text.decode())
        is_valid = type(line["line"]) is int and all(isinstance(line[name], str) for name in TEXT_FIELDS)
        return line if is_valid else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _last_line_of(path: Path) -> int:
    """Return the number of a full file's last line, from its name."""
    return int(path.stem.partition("-")[2])


def _archived_through(line: Mapping[str, Any]) -> int:
    """Return the number of the last archived line, from a line about archiving."""
    text = str(line.get("through", ""))
    return int(text) if re.fullmatch("[0-9]{1,19}", text) else 0


def _hash_suffix(hash_: str) -> str:
    """Return the end of a line with its hash."""
    return f',"hash":"{hash_}"}}'


def log_size_bytes(folder: Path) -> int:
    """Return the bytes of the security log in a folder, including full files."""
    return sum(path.stat().st_size for path in folder.glob("security*.jsonl"))
