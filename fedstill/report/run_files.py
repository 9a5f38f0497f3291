"""Files of a run, each loaded once: result, metrics, audit log and tensors.

An incomplete last line is skipped. Any other broken file raises an error that names it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstill.core.errors import RunFolderError
from fedstill.core.run_writer import RESAMPLES_FILE
from fedstill.core.text_format import finite_number_at_keys
from fedstill.node.audit_entries import RELEASES
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.protocol.payload_kinds import INPUTS
from fedstill.report.result import Result

Array = npt.NDArray[Any]
Losses = dict[str, dict[float, float | None]]  # by name, by step; None is not finite


@dataclass(frozen=True)
class MetricsLog:
    """Content of ``metrics.jsonl`` by step. A step that is written again after a resume replaces the first.

    Args:
        main_model: main metric of the main model, in percent.
        local_models: mean of the main metric over the nodes' local models.
        server_losses: losses at the server, by name.
        local_losses: losses of local training, by node.
        centralized_losses: loss of the centralized model.
        link: communication time and size so far, with the keys of ``link`` in the result.
    """

    main_model: dict[float, float] = field(default_factory=dict)
    local_models: dict[float, float] = field(default_factory=dict)
    server_losses: Losses = field(default_factory=dict)
    local_losses: Losses = field(default_factory=dict)
    centralized_losses: dict[float, float | None] = field(default_factory=dict)
    link: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, metric: str = "accuracy") -> MetricsLog:
        """Read a file, which need not exist; ``metric`` is the key of the main metric."""
        log = cls()
        _read_records(path, lambda record: log._add(record, metric))
        return log

    def _add(self, record: Mapping[str, Any], metric: str) -> None:
        step, phase = float(record["step"]), record["phase"]
        if phase == "local":
            self.local_losses.setdefault(record["node"], {})[step] = finite_number_at_keys(record, "loss")
        elif phase == "centralized":
            self.centralized_losses[step] = finite_number_at_keys(record, "loss")
        elif phase == "distillation":
            for series, key in ((self.main_model, metric), (self.local_models, f"local_{metric}")):
                if (value := finite_number_at_keys(record, key)) is not None:
                    series[step] = value
            for name in record:
                if name.startswith("link_") and (value := finite_number_at_keys(record, name)) is not None:
                    self.link[name.removeprefix("link_")] = value
            for name in record.get("losses", {}):
                self.server_losses.setdefault(name, {})[step] = finite_number_at_keys(record, "losses", name)


@dataclass
class NodeTraffic:
    """Totals of one node in the audit log: bytes by payload kind, queries, and charged privacy events."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    queries: set[int] = field(default_factory=set)  # numbers of queries; a query in several parts counts once
    charges: Counter[str] = field(default_factory=Counter)  # privacy events and their counts
    without_guarantee: int = 0  # releases


@dataclass
class AuditTotals:
    """Totals of a run's audit log."""

    nodes: dict[str, NodeTraffic] = field(default_factory=dict)
    queries_with_inputs: set[str] = field(default_factory=set)  # names of queries
    mechanisms: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> AuditTotals | None:
        """Read a file; None if it does not exist.

        Raises:
            AuditError: the file cannot be read.
        """
        if not path.exists():
            return None
        audit = cls()
        with closing(AuditLog(path, read_only=True)) as log:
            for entry in log.entries():
                audit._add(entry)
        return audit

    def _add(self, entry: Mapping[str, Any]) -> None:
        traffic = self.nodes.setdefault(entry["node"], NodeTraffic())
        traffic.charges.update(entry["cost"])
        traffic.without_guarantee += entry["no_guarantee"]
        if entry["part"] not in RELEASES:
            return
        traffic.queries.add(entry["number"])
        traffic.up.update(entry["up"])
        traffic.down.update(entry["down"])
        if INPUTS in entry["down"]:
            self.queries_with_inputs.add(entry["query"])
        self.mechanisms.add(entry["mechanism"])

    def bytes_by_kind(self, direction: str) -> Counter[str]:
        """Return bytes by payload kind over all nodes; ``direction`` is "up" or "down"."""
        total: Counter[str] = Counter()
        for traffic in self.nodes.values():
            total.update(getattr(traffic, direction))
        return total


@dataclass(frozen=True)
class RunFiles:
    """Files of a finished run."""

    folder: Path
    result: Result

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Read the run in a folder. Only ``result.json`` is required; other files are read on first use.

        Raises:
            RunFolderError: a file is missing or broken; the properties may raise it too.
        """
        return cls(folder, Result.read(folder))

    @cached_property
    def metrics(self) -> MetricsLog:
        """Metrics and losses during the run."""
        return MetricsLog.read(self.folder / "metrics.jsonl", self.result.metric.key)

    @cached_property
    def resampled_metric(self) -> npt.NDArray[np.float64] | None:
        """Main metric in each bootstrap resample of the test cases, ``(R,)``; None without the file."""
        tensors = read_tensors(self.folder / RESAMPLES_FILE) or {}
        return tensors["judged"].astype(np.float64) if "judged" in tensors else None

    @cached_property
    def audit(self) -> AuditTotals | None:
        """Totals of the audit log; None without the file."""
        return AuditTotals.read(self.folder / FILE)


def read_tensors(path: Path) -> dict[str, Array] | None:
    """Read a safetensors file; None if it does not exist.

    Raises:
        RunFolderError: the file is broken.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not path.exists():
        return None
    try:
        return load_file(path)
    except SafetensorError as error:
        raise RunFolderError(f"{path} cannot be read as safetensors: {error}") from None


def is_image_stack(stack: Array) -> bool:
    """Return whether an array holds images ``(N, 1 or 3, H, W)`` uint8; other inputs cannot be shown."""
    return stack.dtype == np.uint8 and stack.ndim == 4 and stack.shape[1] in (1, 3) and bool(stack.size)


def _read_records(path: Path, add: Callable[[Mapping[str, Any]], None]) -> None:
    """Pass each JSON object of a file, one per line, to ``add``; the file need not exist."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line_number, line in enumerate(file, start=1):
            try:
                add(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if not line.endswith("\n"):  # the run was stopped while it wrote its last line
                    return
                raise RunFolderError(f"invalid line {line_number} of {path}: {error!r}") from None
