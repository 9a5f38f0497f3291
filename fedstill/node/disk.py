"""How much of the disk the runs at a node may take: what they have left, and whether more has room."""

from __future__ import annotations

import os
from pathlib import Path

from fedstill.core.errors import QuestionRefused
from fedstill.node import own_audit
from fedstill.node.node_file import NodeFile

RUNS, PUBLIC = "runs", "public"  # folders of a node in which a server's messages leave something
CURE = "the node's owner moves folders of finished runs out of runs/"


class Disk:
    """The part of a node's folder that its runs fill.

    Args:
        folder: of the node.
        file: what its owner says.
        run: the run that is at work; all others do not grow meanwhile.

    Raises:
        QuestionRefused: it would be a new run, and there are too many, or too large ones, already.
    """

    def __init__(self, folder: Path, file: NodeFile, run: str) -> None:
        self.node, self.policy, self.own = file.name, file.policy, folder / RUNS / run
        self._audit = own_audit.audit_file(file, folder)
        runs = [path for path in (folder / RUNS).glob("*") if path.is_dir()]
        self._others = sum(_size(path) for path in (*runs, folder / PUBLIC) if path != self.own)
        if not self.own.exists():
            if file.policy.most_runs and len(runs) >= file.policy.most_runs:
                rule = f"most_runs: {file.policy.most_runs}, and {len(runs)} are in runs/; {CURE}"
                raise QuestionRefused(file.name, "join", rule)
            self.require("join")

    def require(self, question: str, more: int = 0) -> None:
        """Refuse what would write to a disk on which there is no room.

        Args:
            question: for which it would be written.
            more: bytes that will be.

        Raises:
            QuestionRefused: there is none.
        """
        most = self.policy.most_disk
        logged = self._audit.stat().st_size if self._audit.exists() else 0
        if most and self._others + _size(self.own) + logged + more >= most:
            rule = f"most_disk: {most}, which runs/, public/ and the audit log have reached; {CURE}"
            raise QuestionRefused(self.node, question, rule)


def _size(folder: Path) -> int:
    """Bytes of all files in a folder and those below it; of a file that is deleted meanwhile none."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except FileNotFoundError:
                continue
    return total
