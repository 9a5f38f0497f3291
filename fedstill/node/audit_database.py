"""One SQLite file that several threads and processes read and write, whole transactions at a time."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path

from fedstill.core import private_files
from fedstill.core.errors import FedstillError

APPLICATION_ID = 0x6665_6473  # "feds": this SQLite file is an audit log
VERSION = 4
TABLE = "CREATE TABLE entries (entry INTEGER PRIMARY KEY, line TEXT NOT NULL, hash TEXT NOT NULL)"
SCHEMA = (TABLE, f"PRAGMA application_id = {APPLICATION_ID}", f"PRAGMA user_version = {VERSION}")
LOCK_TIMEOUT = 120.0  # seconds to wait for another process, which may be computing what its budget allows


class AuditError(FedstillError):
    """An audit log cannot be trusted or used; nothing is charged to it, so nothing leaves."""

    def __init__(self, location: object, fault: str) -> None:
        super().__init__(f"{location}: {fault}")


class Database:
    """A connection to a file, which is made if it is not there; None: in memory. It raises
    :class:`AuditError`.

    Args:
        durable: wait at the end of each transaction until the disk has it. False survives a kill, not a
            power failure.
        read_only: the file must be there, and is not changed.
    """

    def __init__(self, path: Path | None, *, durable: bool, read_only: bool) -> None:
        self.location: object = path or "the audit log in memory"
        self.lock = threading.RLock()
        self._path, self._read_only, self._remove_wal = (
            path,
            read_only,
            not (durable or read_only or path is None),
        )
        self.connection = self._connect(durable, read_only)
        self.execute = self.connection.execute
        self._inode = 0 if path is None else os.stat(path).st_ino

    def _connect(self, durable: bool, read_only: bool) -> sqlite3.Connection:
        target = ":memory:" if self._path is None else self._path.resolve().as_uri()
        mode = "?mode=ro" if read_only and self._path is not None else ""
        try:
            if self._path is not None and not read_only:
                if not self._path.exists():
                    _create_atomically(self._path.resolve())
                # SQLite gives its own further files the same rights.
                private_files.create_empty(self._path.resolve())
            connection = sqlite3.connect(
                target + mode,
                LOCK_TIMEOUT,
                isolation_level=None,
                check_same_thread=False,
                uri=bool(self._path),
            )
        except sqlite3.Error as error:
            raise self._audit_error(error) from error
        except OSError as error:
            raise AuditError(self.location, f"cannot be used: unable to open it: {error.strerror}") from error
        try:
            if not mode:
                _retry_while_locked(lambda: connection.execute("PRAGMA journal_mode = WAL"))
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone leaves it in the disk's cache
            # Bytes that are no UTF-8 stay what they are, so that the entry is found damaged and not the file.
            connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
            return connection
        except sqlite3.Error as error:
            connection.close()
            raise self._audit_error(error) from error

    def require_format(self) -> None:
        """Refuse what is no audit log, or one to which somebody has added what changes entries, as a trigger
        does; an empty file becomes one. Within a transaction."""
        (application_id,) = self.execute("PRAGMA application_id").fetchone()
        (version,) = self.execute("PRAGMA user_version").fetchone()
        objects = self.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
        if application_id != APPLICATION_ID and (objects or self._read_only):
            raise AuditError(self.location, "is no audit log")
        if application_id != APPLICATION_ID:
            for statement in SCHEMA:
                self.execute(statement)
        elif version != VERSION:
            message = f"has the form of another version of fedstill: {version}, not {VERSION}"
            raise AuditError(self.location, message)
        elif objects != [("table", "entries", TABLE)]:
            message = "holds other tables, indexes or triggers than fedstill makes: put it back as it was"
            raise AuditError(self.location, f"{message}, or move it away and settle what its head says")

    def write_transaction(self) -> AbstractContextManager[None]:
        """A transaction that no other process comes between, undone if anything is raised in it."""
        return self._transaction("IMMEDIATE")

    def read_transaction(self) -> AbstractContextManager[None]:
        """A transaction that sees one moment of the file."""
        return self._transaction("DEFERRED")

    def was_replaced(self) -> bool:
        """Whether the path leads to another file by now, or to none: what is written here is lost then."""
        try:
            return self._path is not None and os.stat(self._path).st_ino != self._inode
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """Close the connection; of a simulation's log one file stays, which can be read where it may not be
        written."""
        with self.lock:
            if self._remove_wal:
                with suppress(sqlite3.Error):  # somebody reads it, or it is closed
                    self.execute("PRAGMA journal_mode = DELETE")
            self.connection.close()

    @contextmanager
    def _transaction(self, mode: str) -> Iterator[None]:
        with self.lock:
            try:
                self.execute(f"BEGIN {mode}")
                try:
                    yield
                    self.execute("COMMIT")
                finally:
                    if self.connection.in_transaction:
                        self.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise self._audit_error(error) from error

    def _audit_error(self, error: sqlite3.Error) -> AuditError:
        if type(error) is not sqlite3.DatabaseError:  # which is a file full of something else
            return AuditError(self.location, f"cannot be used: {error}")
        message = f"cannot be read any more ({error}): move it away, and settle what its head says"
        return AuditError(self.location, message)


def _create_atomically(path: Path) -> None:
    """Make an audit log under another name, so that nobody meets a half of it; who is quicker has made it."""
    if any(path.with_name(path.name + suffix).exists() for suffix in ("-wal", "-journal")):
        return  # of a log that is gone: SQLite gives them to the next file of that name, unless it is empty
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        private_files.create_empty(temporary)
        with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            for statement in (
                "PRAGMA journal_mode = WAL",
                "PRAGMA fullfsync = ON",
                "BEGIN",
                *SCHEMA,
                "COMMIT",
            ):
                connection.execute(statement)
        with suppress(OSError):  # it is there by now; or this disk has no links: then it is made in its place
            os.link(temporary, path)


def _retry_while_locked(action: Callable[[], object]) -> None:
    """Try again while another process has the file: SQLite does not always wait by itself."""
    end = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            action()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.02)
