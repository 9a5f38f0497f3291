"""A run as its files tell it, each loaded once: result, metrics, audit log, pictures.

A torn last line is passed over; anything else that is broken is named.
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
from fedstill.core.text_format import number_at
from fedstill.node.audit_entries import RELEASES
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.protocol.payload_kinds import INPUTS
from fedstill.report.result import Result

Array = npt.NDArray[Any]
Losses = dict[str, dict[float, float | None]]  # by name, by step; None is not finite


@dataclass(frozen=True)
class MetricsLog:
    """What ``metrics.jsonl`` holds, by step. A step written again, after a resume, replaces the first.

    Args:
        central: what the run is judged by, in percent.
        own: the same of the nodes' own models, their mean.
        losses: of the server, by name.
        local: of local training, by node.
        centralized: of the centralized model.
        link: what messages to nodes elsewhere have cost by now, as a result has it of the whole run.
    """

    central: dict[float, float] = field(default_factory=dict)
    own: dict[float, float] = field(default_factory=dict)
    losses: Losses = field(default_factory=dict)
    local: Losses = field(default_factory=dict)
    centralized: dict[float, float | None] = field(default_factory=dict)
    link: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, metric: str = "accuracy") -> MetricsLog:
        """From a file, which need not exist; ``metric`` is the key of what models are judged by."""
        metrics = cls()
        _each(path, lambda record: metrics._take(record, metric))
        return metrics

    def _take(self, record: Mapping[str, Any], metric: str) -> None:
        step, phase = float(record["step"]), record["phase"]
        if phase == "local":
            self.local.setdefault(record["node"], {})[step] = number_at(record, "loss")
        elif phase == "centralized":
            self.centralized[step] = number_at(record, "loss")
        elif phase == "distillation":
            for kept, key in ((self.central, metric), (self.own, f"local_{metric}")):
                if (value := number_at(record, key)) is not None:
                    kept[step] = value
            for name in record:
                if name.startswith("link_") and (value := number_at(record, name)) is not None:
                    self.link[name.removeprefix("link_")] = value
            for name in record.get("losses", {}):
                self.losses.setdefault(name, {})[step] = number_at(record, "losses", name)


@dataclass
class NodeTraffic:
    """What the audit log says of one node: bytes by kind, numbers of queries, what its releases cost."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    queries: set[int] = field(default_factory=set)  # a query in several parts is one
    price: Counter[str] = field(default_factory=Counter)  # events, how often each
    bare: int = 0  # releases without any guarantee


@dataclass
class AuditTotals:
    """The sums of a run's audit log."""

    nodes: dict[str, NodeTraffic] = field(default_factory=dict)
    queries_with_inputs: set[str] = field(default_factory=set)  # queries that came with inputs
    mechanisms: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> AuditTotals | None:
        """From a file; None where there is none.

        Raises:
            AuditError: it cannot be read.
        """
        if not path.exists():
            return None
        audit = cls()
        with closing(AuditLog(path, read_only=True)) as log:
            for entry in log.entries():
                audit._take(entry)
        return audit

    def _take(self, entry: Mapping[str, Any]) -> None:
        traffic = self.nodes.setdefault(entry["node"], NodeTraffic())
        traffic.price.update(entry["cost"])
        traffic.bare += entry["no_guarantee"]
        if entry["part"] not in RELEASES:
            return
        traffic.queries.add(entry["number"])
        traffic.up.update(entry["up"])
        traffic.down.update(entry["down"])
        if INPUTS in entry["down"]:
            self.queries_with_inputs.add(entry["query"])
        self.mechanisms.add(entry["mechanism"])

    def total(self, way: str) -> Counter[str]:
        """Bytes by kind over all nodes; ``way`` is "up" or "down"."""
        total: Counter[str] = Counter()
        for traffic in self.nodes.values():
            total.update(getattr(traffic, way))
        return total


@dataclass(frozen=True)
class RunFiles:
    """A finished run: its folder, and what came out."""

    folder: Path
    result: Result

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """The run in a folder, of which only ``result.json`` must exist; other files are read when asked for.

        Raises:
            RunFolderError: a file is missing or spoilt; each property may raise it too.
        """
        return cls(folder, Result.read(folder))

    @cached_property
    def metrics(self) -> MetricsLog:
        """What was measured on its way."""
        return MetricsLog.read(self.folder / "metrics.jsonl", self.result.metric.key)

    @cached_property
    def resamples(self) -> npt.NDArray[np.float64] | None:
        """What the run is judged by in each draw of test cases, ``(R,)``; None without the file."""
        kept = read_tensors(self.folder / RESAMPLES_FILE) or {}
        return kept["judged"].astype(np.float64) if "judged" in kept else None

    @cached_property
    def audit(self) -> AuditTotals | None:
        """What left the nodes; None where there is no such file."""
        return AuditTotals.read(self.folder / FILE)


def read_tensors(path: Path) -> dict[str, Array] | None:
    """A file of safetensors; None where there is none.

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
    """Whether an array is pictures ``(N, 1 or 3, H, W)`` of bytes: other inputs cannot be shown."""
    return stack.dtype == np.uint8 and stack.ndim == 4 and stack.shape[1] in (1, 3) and bool(stack.size)


def _each(path: Path, take: Callable[[Mapping[str, Any]], None]) -> None:
    """Hand on the JSON objects of a file, one a line, without holding more than one; none without a file."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for place, line in enumerate(file, start=1):
            try:
                take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if not line.endswith("\n"):  # the run was stopped while it wrote its last line
                    return
                raise RunFolderError(f"{path}, line {place} is not what a run writes: {error!r}") from None
