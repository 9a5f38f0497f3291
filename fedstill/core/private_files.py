"""Files and folders that only their owner may read, and file locks.

Permissions are set when a file is created, never afterwards, so that nobody can open it in between, whatever
the umask of the process. The operating system releases a lock however its process ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

FILE_MODE, FOLDER_MODE = 0o600, 0o700


def private_opener(path: str, flags: int) -> int:
    """Opener for ``open(path, mode, opener=private_opener)``: new files are accessible to the owner only."""
    return os.open(path, flags, FILE_MODE)


def make_folder(path: Path) -> None:
    """Create a private folder and its missing parents. An existing folder is unchanged."""
    if not path.is_dir():
        make_folder(path.parent)
        with contextlib.suppress(FileExistsError):  # made by another process meanwhile
            path.mkdir(FOLDER_MODE)


def create_empty(path: Path) -> None:
    """Create an empty private file if there is none, for libraries that would create a public one."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))


def open_new(path: Path) -> BinaryIO:
    """Open a new private file for writing. A leftover of an interrupted process is deleted."""
    path.unlink(missing_ok=True)
    return open(path, "xb", opener=private_opener)


def replace_file(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Write a file atomically: an interruption leaves the old file.

    Args:
        path: the file. It becomes private, whatever the permissions of the old file.
        content: the new content.
        sync: wait until the content is on the disk.

    Raises:
        OSError: the file cannot be written. The old file stays.
    """
    part = path.with_name(f"{path.name}.part")
    with open_new(part) as file:
        file.write(content)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    os.replace(part, path)
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until created, renamed and deleted entries of a folder are on the disk.

    Some network file systems do not support this (EINVAL). Then the function returns without waiting.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def lock_file(file: int) -> None:
    """Lock an open file or folder for this process.

    A process that only checks the lock (:func:`is_locked`) holds it for a moment, so the function retries for
    half a second.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    end = time.monotonic() + 0.5
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait for the lock of a folder, and hold it, to read a file there and replace it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file or folder; False if it does not exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
