"""Check that only the owner can read fedstill's files in a node's folder.

Files are created so (:mod:`fedstill.core.private_files`). Older or copied files may be readable by others.
They are not closed silently: others may have read them already, and the owner should know. The node does
not stop for them, as it does for a secret or a key that others can read, since refusing would not undo
that.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

OTHERS_RIGHTS = 0o077  # rights of group and others
PRIVATE_FILES = (
    "node.key",
    "node.log",
    "node.pid",
    "node.pub",
    "public",
    "requests",
    "runs",
    "salt",
    "summed.json",
)
AUDIT_SUFFIXES = ("", "-wal", "-shm", ".head", ".head.part")  # suffixes of an audit log's files


def readable_files_warning(folder: Path, audit: Path) -> str | None:
    """Return files that others of this machine can read, and the command that closes them, in one line;
    None: none.

    The owner decides about ``node.toml``, data and model.
    """
    files = [folder / name for name in PRIVATE_FILES]
    files += [audit.with_name(audit.name + end) for end in AUDIT_SUFFIXES]
    open_paths = [path for path in files if any(map(_is_open, _walk(path)))]
    names, commands = [path.name for path in open_paths], []
    if _is_open(folder):
        names.insert(0, f"{folder}/")
        commands.append(shlex.join(["chmod", "go=", str(folder)]))
    if open_paths:
        commands.append(shlex.join(["chmod", "-R", "go=", *map(str, open_paths)]))
    return f"open to others of this machine: {', '.join(names)}; {' && '.join(commands)}" if names else None


def _walk(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink():
        yield from path.rglob("*")


def _is_open(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & OTHERS_RIGHTS)
    except FileNotFoundError:  # it does not exist, or not any more while a node works
        return False
