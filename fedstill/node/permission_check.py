"""Who may read what fedstill keeps in a node's folder: its owner alone.

Files are made so (:mod:`fedstill.core.private_files`). Those of an earlier time, or of a copy, may lie
open. They are not closed in silence: whoever could read them may have done so, and their owner is to know.
Nor does the node stop for them, as it does for a secret or a key that others can read: refusing would take
back nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

OTHERS_RIGHTS = 0o077  # rights of the group and of everybody
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
AUDIT_SUFFIXES = ("", "-wal", "-shm", ".head", ".head.part")  # ends of the names of an audit log's files


def find_open_files(folder: Path, audit: Path) -> str | None:
    """What others of this machine may get at, with the command that ends it, in one line; None: nothing.

    What the folder holds of its owner's (node.toml, data, model) is the owner's to open.
    """
    files = [folder / name for name in PRIVATE_FILES] + sorted(folder.glob("security*"))
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
    except FileNotFoundError:  # there is none, or not any more: a node may be at work
        return False
