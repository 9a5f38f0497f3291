"""What a node keeps on disk of one run: with what it was begun, its salt, and states to go back to.

And how much of the disk all runs may take.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedstill.core import private_files
from fedstill.core.checkpoint import load_state, save_state
from fedstill.core.errors import QueryRefused, RunFolderError
from fedstill.core.run_writer import read_object
from fedstill.node import audit_file
from fedstill.node.node_file import NodeFile
from fedstill.node.security_log import size as size_of_log
from fedstill.protocol.run_plan import PLAN_FILE
from fedstill.protocol.wire_format import tensor_bytes

RUNS, PUBLIC = "runs", "public"  # folders of a node in which a server's messages leave something
FREE_SPACE_ADVICE = "the node's owner moves folders of finished runs out of runs/"
TRAINING_STATE, RELEASED_COUNTS, SALT = "learning.safetensors", "told.safetensors", "salt"
MAX_CHECKPOINTS = 2  # kept: a server stopped between its nodes' marks and its own goes back to the one before


class RunFolder:
    """The folder of one run at a node; all other runs do not grow meanwhile. ``saved_at`` is when a state last
    was.

    Raises:
        QueryRefused: it would be a new run, and there are too many, or too large ones, already.
    """

    def __init__(self, folder: Path, file: NodeFile, run: str) -> None:
        self.path, self.saved_at = folder / RUNS / run, time.monotonic()
        self._salt = secrets.token_hex(16)  # of a run that has none yet
        self._folder, self._node, self._policy = folder, file.name, file.policy
        self._audit = audit_file.audit_path(file, folder)
        runs = [path for path in (folder / RUNS).glob("*") if path.is_dir()]
        self._other_bytes = sum(
            _bytes_on_disk(path) for path in (*runs, folder / PUBLIC) if path != self.path
        )
        if not self.path.exists():
            if file.policy.max_runs and len(runs) >= file.policy.max_runs:
                rule = f"max_runs: {file.policy.max_runs}, and {len(runs)} are in runs/; {FREE_SPACE_ADVICE}"
                raise QueryRefused(file.name, "join", rule)
            self.require_space("join")

    def require_space(self, query: str, extra_bytes: int = 0) -> None:
        """Refuse what would write ``extra_bytes`` bytes for a query to a disk without room: QueryRefused."""
        limit = self._policy.max_disk
        # What SQLite has not yet moved from its log of writes to the file is on the disk, too.
        files = (self._audit, self._audit.with_name(f"{self._audit.name}-wal"))
        logged = sum(file.stat().st_size for file in files if file.exists()) + size_of_log(self._folder)
        if limit and self._other_bytes + _bytes_on_disk(self.path) + logged + extra_bytes >= limit:
            rule = f"max_disk: {limit}, which runs/, public/ and the node's logs have reached; {FREE_SPACE_ADVICE}"
            raise QueryRefused(self._node, query, rule)

    @property
    def has_begun(self) -> bool:
        """Whether it has been begun here."""
        return (self.path / PLAN_FILE).exists()

    def salt(self) -> str:
        """A run's own part of what names its noise: made up once, kept here by :meth:`bind`, told to nobody.

        The nodes of a rehearsal have one for all runs in their folder: so it gives a simulation's figures.

        Raises:
            RunFolderError: the run's own is damaged: its noise would be another, or anybody's.
        """
        path = self._folder / SALT
        if not path.exists():
            path = self.path / SALT
            if not path.exists():
                return self._salt
            salt = _read_text(path).strip()
            if not re.fullmatch(r"[0-9a-f]{32}", salt):
                raise RunFolderError(f"{path} is no salt of a run (expected 32 hexadecimal digits)")
            return salt
        return _read_text(path).strip()

    @property
    def begun_by(self) -> str | None:
        """The identity of the server that began it; None: it has not begun, or that was not written down.

        Raises:
            RunFolderError: what was kept is damaged.
        """
        server = read_object(self.path / PLAN_FILE).get("server") if self.has_begun else None
        return None if server is None else str(server)

    def bind(self, facts: Mapping[str, Any], has_released: bool, server: str = "") -> str | None:
        """Keep what a run was begun with. With other options, data or model the same query would have
        another answer, which the audit log takes for one that has left already.

        What nothing has left of binds nothing: its owner may change options until the first answer. What was
        learned by then, under the old ones, goes.

        Args:
            server: the identity of the server that begins it; a run that is known keeps its first one.

        Returns:
            What is other than it was, where answers have left; else None.

        Raises:
            RunFolderError: what was kept is damaged.
        """
        path = self.path / PLAN_FILE
        first_server, text = self.begun_by, json.dumps(facts, sort_keys=True)
        private_files.make_folder(self.path)
        if not (self._folder / SALT).exists() and not (self.path / SALT).exists():
            private_files.replace_file(self.path / SALT, self._salt.encode(), sync=True)
        if path.exists():
            recorded = read_object(path)
            changed = [name for name, value in json.loads(text).items() if recorded.get(name) != value]
            if not changed:
                return None
            if has_released:
                return " and ".join(changed)
            for path_ in (
                self.path / TRAINING_STATE,
                self.path / RELEASED_COUNTS,
                *self.path.glob("mark-*.safetensors"),
            ):
                path_.unlink(missing_ok=True)
        record = {**facts, "server": server if first_server is None else first_server}
        private_files.replace_file(path, json.dumps(record, sort_keys=True).encode(), sync=True)
        return None

    def save_state(self, name: str, state: Any) -> None:
        """Keep a state; :class:`QueryRefused` where there is no room on the disk."""
        self.require_space("save_checkpoint", _state_bytes(state))
        save_state(self.path / name, state)
        self.saved_at = time.monotonic()

    def load_state(self, name: str) -> Any:
        """A state that was kept; None if it was not."""
        path = self.path / name
        return load_state(path) if path.exists() else None

    # --- marks: states before a query ----------------------------------------------------------------

    def checkpoints(self) -> list[int]:
        """Before which queries a state is kept; :class:`RunFolderError` where a file is of none."""
        return checkpoints_in(self.path)

    def save_checkpoint(self, query_number: int, state: Any) -> None:
        """Keep the state before a query, and of older ones only the last."""
        self.save_state(checkpoint_name(query_number), state)
        for old in self.checkpoints()[:-MAX_CHECKPOINTS]:
            (self.path / checkpoint_name(old)).unlink()

    def delete_checkpoints_after(self, query_number: int) -> None:
        """Delete the states of a time that is undone."""
        for later in self.checkpoints():
            if later > query_number:
                (self.path / checkpoint_name(later)).unlink()


def checkpoints_in(folder: Path) -> list[int]:
    """See :meth:`RunFolder.marks`, of a folder of that run."""
    numbers = []
    for path in folder.glob("mark-*.safetensors"):
        if (match := re.fullmatch(r"mark-([0-9]{1,10})\.safetensors", path.name)) is None:
            raise RunFolderError(f"{path} is no state of a run (expected mark-NUMBER.safetensors)")
        numbers.append(int(match[1]))
    return sorted(numbers)


def checkpoint_name(query_number: int) -> str:
    """The file of the state before a query."""
    return f"mark-{query_number}.safetensors"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RunFolderError(f"{path} is no UTF-8 text") from error


def _state_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return tensor_bytes(state)
    if isinstance(state, Mapping):
        return sum(map(_state_bytes, state.values()))
    return sum(map(_state_bytes, state)) if isinstance(state, list | tuple) else 0


def _bytes_on_disk(folder: Path) -> int:
    """Bytes of all files in a folder and those below it; of a file that is deleted meanwhile none."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size
            except FileNotFoundError:
                continue
    return total
