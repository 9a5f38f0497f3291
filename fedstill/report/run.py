"""A run as its files tell it, loaded once for page, table and figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedstill.report.files import Metrics, read_metrics
from fedstill.report.result import Result


@dataclass(frozen=True)
class RunFiles:
    """A finished run.

    Args:
        folder: with its files.
        result: what came out.
        metrics: what was measured on its way.
    """

    folder: Path
    result: Result
    metrics: Metrics

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """The run in a folder, of which only ``result.json`` must exist.

        Raises:
            RunFolderError: a file is missing or spoilt.
        """
        result = Result.read(folder)
        return cls(folder, result, read_metrics(folder / "metrics.jsonl", result.metric.key))
