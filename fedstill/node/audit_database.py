"""A SQLite file that several threads and processes read and write in whole transactions."""

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

APPLICATION_ID = 0x6665_6473  # "feds": identifies SQLite files of audit logs
VERSION = 6
TABLE = "CREATE TABLE entries (entry INTEGER PRIMARY KEY, line TEXT NOT NULL, hash TEXT NOT NULL)"
SCHEMA = (TABLE, f"PRAGMA application_id = {APPLICATION_ID}", f"PRAGMA user_version = {VERSION}")
LOCK_TIMEOUT = 120.0  # seconds to wait for another process, which may be computing its budget


class AuditError(FedstillError):
    """An audit log is damaged or cannot be used; nothing is charged to it, so nothing is released."""

    def __init__(self, location: object, fault: str) -> None:
        super().__init__(f"{location}: {fault}")


class Database:
    """Connection to a file, which is created if missing; None: in memory.

    All methods raise :class:`AuditError` if the file cannot be used.

    Args:
        path: the file, or None.
        durable: wait at the end of each transaction until the data are on disk. False survives a kill, but
            not a power failure.
        read_only: the file must exist and is not changed.
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
        self._data_version = -1  # changes when another connection commits
        self._inode = 0 if path is None else os.stat(path).st_ino

    def _connect(self, durable: bool, read_only: bool) -> sqlite3.Connection:
        target = ":memory:" if self._path is None else self._path.resolve().as_uri()
        mode = "?mode=ro" if read_only and self._path is not None else ""
        try:
            if self._path is not None and not read_only:
                if not self._path.exists():
                    _create_atomically(self._path.resolve())
                # SQLite copies these rights to its own further files.
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
            connection.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone leaves data in the disk's cache
            # Keep bytes that are not UTF-8, so that the entry counts as damaged and not the file.
            connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
            return connection
        except sqlite3.Error as error:
            connection.close()
            raise self._audit_error(error) from error

    def require_format(self) -> None:
        """Refuse files that are not audit logs, or that have additional tables or triggers; an empty file
        becomes an audit log.

        Call it within a transaction.
        """
        (application_id,) = self.execute("PRAGMA application_id").fetchone()
        (version,) = self.execute("PRAGMA user_version").fetchone()
        objects = self.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
        if application_id != APPLICATION_ID and (objects or self._read_only):
            raise AuditError(self.location, "is not an audit log")
        if application_id != APPLICATION_ID:
            for statement in SCHEMA:
                self.execute(statement)
        elif version != VERSION:
            message = f"was written by another version of fedstill: format {version}, not {VERSION}"
            raise AuditError(self.location, message)
        elif objects != [("table", "entries", TABLE)]:
            message = "holds unknown tables, indexes or triggers: restore it"
            raise AuditError(self.location, f"{message}, or move it away and run `fedstill audit accept`")

    def write_transaction(self) -> AbstractContextManager[None]:
        """Return a context manager: an exclusive write transaction, rolled back on an exception."""
        return self._transaction("IMMEDIATE")

    def read_transaction(self) -> AbstractContextManager[None]:
        """Return a context manager: a transaction with one consistent view of the file."""
        return self._transaction("DEFERRED")

    def has_changed(self) -> bool:
        """Return whether another connection has written since the last call; True at the first call."""
        try:
            (version,) = self.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error as error:
            raise self._audit_error(error) from error
        known, self._data_version = self._data_version, version
        return bool(version != known)

    def was_replaced(self) -> bool:
        """Return whether the path now leads to another file or to none; writes to this one would be lost."""
        try:
            return self._path is not None and os.stat(self._path).st_ino != self._inode
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """Close the connection. A simulation's log is left as a single file, which is readable without
        write access.
        """
        with self.lock:
            if self._remove_wal:
                with suppress(sqlite3.Error):  # another reader, or already closed
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
        if type(error) is not sqlite3.DatabaseError:  # DatabaseError itself: not a SQLite file
            return AuditError(self.location, f"cannot be used: {error}")
        message = f"cannot be read any more ({error}): move it away and run `fedstill audit accept`"
        return AuditError(self.location, message)


def _create_atomically(path: Path) -> None:
    """Create an audit log under another name and link it, so that no process sees half of it."""
    if any(path.with_name(path.name + suffix).exists() for suffix in ("-wal", "-journal")):
        return  # leftovers of a lost log: SQLite would apply them to a new file of that name
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
        with suppress(OSError):  # it exists by now, or the disk has no links: then SQLite creates it
            os.link(temporary, path)


def _retry_while_locked(action: Callable[[], object]) -> None:
    """Retry while another process locks the file: SQLite does not always wait by itself."""
    end = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            action()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.02)
