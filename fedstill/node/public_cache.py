"""Keeps the public data of a run in a node's folder, so that they need not come again after a stop."""

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
    """The public data in a node's folder: those of one run, or of several that have the same."""

    def __init__(self, folder: Path, file: NodeFile) -> None:
        self._folder, self._file = folder, file

    def read(self, plan: RunPlan, tensors: Tensors) -> PublicData | None:
        """A plan's public data: given, or kept from an earlier time; None where it has none, or none is here.

        Raises:
            DataError: what was given is not the plan's, or such as no sound server sends.
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
        """Keep a plan's public data for a later time, in place of another's.

        Raises:
            QueryRefused: the owner's policy leaves no room for them.
        """
        path = self._path(plan)
        stored = {name: tensors[name] for name in ("inputs", "labels") if name in tensors}
        RunFolder(self._folder, self._file, plan.run).require_space(
            "join", sum(map(tensor_bytes, stored.values()))
        )
        private_files.make_folder(path.parent)
        for other in path.parent.glob("*.safetensors"):  # a server could fill the disk with them
            other.unlink()
        save_state(path, stored)

    def _path(self, plan: RunPlan) -> Path:
        return self._folder / "public" / f"{plan.public}.safetensors"
