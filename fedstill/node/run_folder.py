"""A node's files of one run: its setup, its salt and its checkpoints; public data, and the disk space of all
runs.
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
from fedstill.core.errors import RunFolderError
from fedstill.core.run_writer import read_object
from fedstill.data.public import PublicData
from fedstill.node import folder_log
from fedstill.node.admission import refuse
from fedstill.node.node_file import NodeFile
from fedstill.protocol.run_plan import PLAN_FILE, RunPlan, read_public
from fedstill.protocol.wire_format import Tensors, tensor_bytes

RUNS, PUBLIC = "runs", "public"  # folders that a server's messages can fill
FREE_SPACE_ADVICE = "the node's owner moves folders of finished runs out of runs/"
TRAINING_STATE, RELEASED_COUNTS, SALT = "training.safetensors", "released_counts.safetensors", "salt"
MAX_CHECKPOINTS = 2  # a server stopped between its nodes' checkpoints and its own returns to the previous one


class RunFolder:
    """Folder of one run at a node; other runs do not grow meanwhile.

    Args:
        folder: the node's folder.
        file: its ``node.toml``.
        run: name of the run.

    Attributes:
        path: folder of the run.
        saved_at: time of the last saved state.

    Raises:
        QueryRefused: it would be a new run, and there are too many, or too large ones, already.
    """

    def __init__(self, folder: Path, file: NodeFile, run: str) -> None:
        self.path, self.saved_at = folder / RUNS / run, time.monotonic()
        self._salt = secrets.token_hex(16)  # for a new run
        self._folder, self._node, self._policy = folder, file.name, file.policy
        self._audit = folder_log.audit_path(file, folder)
        runs = [path for path in (folder / RUNS).glob("*") if path.is_dir()]
        self._other_bytes = sum(
            _bytes_on_disk(path) for path in (*runs, folder / PUBLIC) if path != self.path
        )
        if not self.path.exists():
            if file.policy.max_runs and len(runs) >= file.policy.max_runs:
                rule = f"max_runs: {file.policy.max_runs}, and {len(runs)} are in runs/; {FREE_SPACE_ADVICE}"
                refuse(file.name, "join", rule)
            self.require_space("join")

    def is_full(self, extra_bytes: int = 0) -> bool:
        """Return whether the disk is full for further ``extra_bytes``, by the owner's limit."""
        limit, logged = self._policy.max_disk, folder_log.log_size_bytes(self._audit)
        return 0 < limit <= self._other_bytes + _bytes_on_disk(self.path) + logged + extra_bytes

    def require_space(self, query: str, extra_bytes: int = 0) -> None:
        """Refuse a query that would write ``extra_bytes`` to a full disk, with QueryRefused."""
        if self.is_full(extra_bytes):
            reached = "which runs/, public/ and the node's audit log have reached"
            rule = f"max_disk: {self._policy.max_disk}, {reached}; {FREE_SPACE_ADVICE}"
            refuse(self._node, query, rule)

    @property
    def has_begun(self) -> bool:
        """True if the run has begun here."""
        return (self.path / PLAN_FILE).exists()

    def salt(self) -> str:
        """Return the run's secret part of its noise names: generated once, stored by :meth:`bind`.

        The nodes of a rehearsal have one salt for all runs in their folder, so that they reproduce a
        simulation's metrics.

        Raises:
            RunFolderError: the run's salt is damaged: its noise would differ, or be predictable.
        """
        path = self._folder / SALT
        if not path.exists():
            path = self.path / SALT
            if not path.exists():
                return self._salt
            salt = _read_text(path).strip()
            if not re.fullmatch(r"[0-9a-f]{32}", salt):
                raise RunFolderError(f"{path} is not a salt of a run (expected 32 hexadecimal digits)")
            return salt
        return _read_text(path).strip()

    @property
    def begun_by(self) -> str | None:
        """Identity of the server that began the run; None: it has not begun, or that was not recorded.

        Raises:
            RunFolderError: the record is damaged.
        """
        server = read_object(self.path / PLAN_FILE).get("server") if self.has_begun else None
        return None if server is None else str(server)

    def bind(self, facts: Mapping[str, Any], has_released: bool, server: str = "") -> str | None:
        """Record the setup of a run. With other options, data or model the same query would have another
        response, which the audit log takes for the earlier one.

        Before the first release the owner may change options; states trained with the old ones are deleted.

        Args:
            facts: plan, data, model and options, as texts or hashes.
            has_released: whether anything was released.
            server: identity of the server that begins the run; a known run keeps its first one.

        Returns:
            The names of changed facts if anything was released; else None.

        Raises:
            RunFolderError: the record is damaged.
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
                *self.path.glob("checkpoint-*.safetensors"),
            ):
                path_.unlink(missing_ok=True)
        record = {**facts, "server": server if first_server is None else first_server}
        private_files.replace_file(path, json.dumps(record, sort_keys=True).encode(), sync=True)
        return None

    def save_state(self, name: str, state: Any) -> None:
        """Save a state; :class:`QueryRefused` if the disk is full."""
        self.require_space("save_checkpoint", _state_bytes(state))
        save_state(self.path / name, state)
        self.saved_at = time.monotonic()

    def load_state(self, name: str) -> Any:
        """Return a saved state; None if there is none."""
        path = self.path / name
        return load_state(path) if path.exists() else None

    # --- checkpoints: states before a query ---------------------------------------------------------------

    def checkpoints(self) -> list[int]:
        """Return the query numbers of all checkpoints; :class:`RunFolderError` if a file has another name."""
        return checkpoint_query_numbers(self.path)

    def save_checkpoint(self, query_number: int, state: Any) -> None:
        """Save the state before a query; keep the last :data:`MAX_CHECKPOINTS`."""
        self.save_state(checkpoint_name(query_number), state)
        for old in self.checkpoints()[:-MAX_CHECKPOINTS]:
            (self.path / checkpoint_name(old)).unlink()

    def delete_checkpoints_after(self, query_number: int) -> None:
        """Delete the checkpoints of later queries."""
        for later in self.checkpoints():
            if later > query_number:
                (self.path / checkpoint_name(later)).unlink()


def checkpoint_query_numbers(folder: Path) -> list[int]:
    """Return the query numbers of the checkpoints in a run's folder; see :meth:`RunFolder.checkpoints`."""
    numbers = []
    for path in folder.glob("checkpoint-*.safetensors"):
        if (match := re.fullmatch(r"checkpoint-([0-9]{1,10})\.safetensors", path.name)) is None:
            raise RunFolderError(f"{path} is not a checkpoint (expected checkpoint-NUMBER.safetensors)")
        numbers.append(int(match[1]))
    return sorted(numbers)


def checkpoint_name(query_number: int) -> str:
    """Return the file name of a checkpoint."""
    return f"checkpoint-{query_number}.safetensors"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RunFolderError(f"{path} is not UTF-8 text") from error


def _state_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return tensor_bytes(state)
    if isinstance(state, Mapping):
        return sum(map(_state_bytes, state.values()))
    return sum(map(_state_bytes, state)) if isinstance(state, list | tuple) else 0


def _bytes_on_disk(folder: Path) -> int:
    """Return the bytes of all files below a folder, without files deleted meanwhile."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size
            except FileNotFoundError:
                continue
    return total


# --- public data ------------------------------------------------------------------------------------


class PublicDataCache:
    """Public data in a node's folder, of one run or of several with the same data."""

    def __init__(self, folder: Path, file: NodeFile) -> None:
        self._folder, self._file = folder, file

    def read(self, plan: RunPlan, tensors: Tensors) -> PublicData | None:
        """Return a plan's public data: received, or from the cache; None if the plan has none, or none are
        here.

        Raises:
            DataError: the received data are not the plan's, or malformed.
        """
        if not plan.public:
            return None
        if not tensors:
            path = self._path(plan)
            if not path.exists():
                return None
            tensors = load_state(path)
        return read_public(plan, tensors, self._file.policy.max_rows)

    def store(self, plan: RunPlan, tensors: Tensors) -> None:
        """Store a plan's public data in place of other ones.

        Raises:
            QueryRefused: the owner's policy leaves no space for them.
        """
        path = self._path(plan)
        stored = {name: tensors[name] for name in ("inputs", "labels") if name in tensors}
        RunFolder(self._folder, self._file, plan.run).require_space(
            "join", sum(map(tensor_bytes, stored.values()))
        )
        private_files.make_folder(path.parent)
        for old_file in path.parent.glob("*.safetensors"):  # one set only: a server could fill the disk
            old_file.unlink()
        save_state(path, stored)

    def _path(self, plan: RunPlan) -> Path:
        return self._folder / "public" / f"{plan.public}.safetensors"
