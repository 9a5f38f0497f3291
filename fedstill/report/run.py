"""A run as its files tell it, loaded once for page, table and figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.core.records import read_result
from fedstill.report.files import Metrics, read_metrics
from fedstill.report.metrics import figures_of


@dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        folder: with its files.
        result: what came out.
        metrics: what was measured on its way.
    """

    folder: Path
    result: Mapping[str, Any]
    metrics: Metrics

    @classmethod
    def read(cls, folder: Path) -> Run:
        """The run in a folder, of which only ``result.json`` must exist.

        Raises:
            RunFolderError: a file is missing or spoilt.
        """
        result = read_result(folder / "result.json")
        return cls(folder, result, read_metrics(folder / "metrics.jsonl", figures_of(result)[0].key))
