"""Locks of files and folders, which the system lets go however the process ends that holds one."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path


def lock(file: int) -> None:
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
