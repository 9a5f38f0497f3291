"""Files and folders that their owner alone may read: made so, whatever the process's umask allows others.

The rights are given as a file is made, never after, so that nobody can open it in between.

Locks of files and folders, which the system lets go however the process ends that holds one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from typing import BinaryIO

FILE_MODE, FOLDER_MODE = 0o600, 0o700


def private_opener(path: str, flags: int) -> int:
    """For ``open(path, mode, private_opener=private_opener)``: a file that is made is its owner's alone."""
    return os.open(path, flags, FILE_MODE)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing; one that is there stays as it is."""
    if not path.is_dir():
        make_folder(path.parent)
        with contextlib.suppress(FileExistsError):  # made by another process meanwhile
            path.mkdir(FOLDER_MODE)


def create_empty(path: Path) -> None:
    """Make an empty file where there is none, for libraries that would make it for everybody to read."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))


def open_new(path: Path) -> BinaryIO:
    """A new file to write, in the place of what somebody who was stopped has left there."""
    path.unlink(missing_ok=True)
    return open(path, "xb", opener=private_opener)


def replace_file(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Write a file in one move: whoever is stopped in between leaves the old one.

    Args:
        path: of the file; its new content is its owner's alone, whatever rights the old one had.
        sync: wait until the disk has it.

    Raises:
        OSError: it cannot be written; the old file stays.
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
    """Wait until the disk has what was made, renamed or deleted in a folder.

    Where a file system cannot say so of a folder (EINVAL: some that are mounted from afar), nothing waits:
    the change itself is made.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(opened)


def lock_file(file: int) -> None:
    """Lock a file or folder that is open, for this process alone; BlockingIOError where another has it.

    Whoever asks whether it is locked (:func:`is_locked`) holds it for a moment, which is waited for.
    """
    end = time.monotonic() + 0.5
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def is_locked(path: Path) -> bool:
    """Whether a process holds a file or folder; one that is not there is held by none."""
    try:
        held = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(held)
    return False
