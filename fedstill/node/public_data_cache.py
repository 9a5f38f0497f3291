"""Cache of a run's public data in a node's folder, so that they need not be sent again after a stop."""

from __future__ import annotations

from pathlib import Path

from fedstill.core import private_files
from fedstill.core.checkpoint import load_state, save_state
from fedstill.data.public import PublicData
from fedstill.node.node_file import NodeFile
from fedstill.node.run_folder import RunFolder
from fedstill.protocol.run_plan import RunPlan, read_public
from fedstill.protocol.wire_format import Tensors, tensor_bytes


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
