"""A run as its files tell it, each loaded once: result, metrics, ledger, pictures.

A torn last line is passed over; anything else that is broken is named.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstill.core.errors import RunFolderError
from fedstill.core.words import number
from fedstill.report.result import Result

Pictures = npt.NDArray[np.uint8]  # (N, C, H, W)
Array = npt.NDArray[Any]
Losses = dict[str, dict[float, float | None]]  # by name, by step; None is not finite


@dataclass(frozen=True)
class Metrics:
    """What ``metrics.jsonl`` holds, by step. A step written again, after a resume, replaces the first.

    Args:
        central: what the run is judged by, in percent.
        own: the same of the nodes' own models, their mean.
        losses: of the server, by name.
        local: of local training, by node.
        centralised: of the centralised model.
    """

    central: dict[float, float] = field(default_factory=dict)
    own: dict[float, float] = field(default_factory=dict)
    losses: Losses = field(default_factory=dict)
    local: Losses = field(default_factory=dict)
    centralised: dict[float, float | None] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, metric: str = "accuracy") -> Metrics:
        """From a file, which need not exist; ``metric`` is the key of what models are judged by."""
        metrics = cls()
        _each(path, lambda record: metrics._take(record, metric))
        return metrics

    def _take(self, record: Mapping[str, Any], metric: str) -> None:
        step, phase = float(record["step"]), record["phase"]
        if phase == "local":
            self.local.setdefault(record["node"], {})[step] = number(record, "loss")
        elif phase == "centralised":
            self.centralised[step] = number(record, "loss")
        elif phase == "distillation":
            for kept, key in ((self.central, metric), (self.own, f"local_{metric}")):
                if (value := number(record, key)) is not None:
                    kept[step] = value
            for name in record.get("losses", {}):
                self.losses.setdefault(name, {})[step] = number(record, "losses", name)


@dataclass
class Traffic:
    """What the ledger says of one node: bytes by kind, numbers of questions, what its releases cost."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    questions: set[int] = field(default_factory=set)  # a question in several parts is one
    price: Counter[str] = field(default_factory=Counter)  # events, how often each
    bare: int = 0  # releases without any guarantee


@dataclass
class Ledger:
    """The sums of the nodes' ledger."""

    nodes: dict[str, Traffic] = field(default_factory=dict)
    about_inputs: set[str] = field(default_factory=set)  # questions that came with inputs
    mechanisms: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> Ledger | None:
        """From a file; None where there is none."""
        if not path.exists():
            return None
        ledger = cls()
        _each(path, ledger._take)
        return ledger

    def _take(self, record: Mapping[str, Any]) -> None:
        if "refused" in record or "held" in record:
            return
        traffic, privacy = self.nodes.setdefault(record["node"], Traffic()), record["privacy"]
        traffic.questions.add(record["number"])
        traffic.up.update(record["up"])
        traffic.down.update(record["down"])
        if record["down"].get("inputs"):
            self.about_inputs.add(record["question"])
        if privacy["price"] is None:
            traffic.bare += 1
        else:
            traffic.price.update(privacy["price"])
        self.mechanisms.add(privacy["mechanism"])

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
    def metrics(self) -> Metrics:
        """What was measured on its way."""
        return Metrics.read(self.folder / "metrics.jsonl", self.result.metric.key)

    @cached_property
    def ledger(self) -> Ledger | None:
        """What left the nodes; None where there is no such file."""
        return Ledger.read(self.folder / "ledger.jsonl")


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


def is_shown(stack: Array) -> bool:
    """Whether an array is pictures ``(N, 1 or 3, H, W)`` of bytes: other inputs cannot be shown."""
    return stack.dtype == np.uint8 and stack.ndim == 4 and stack.shape[1] in (1, 3) and bool(stack.size)


def _each(path: Path, take: Callable[[Mapping[str, Any]], None]) -> None:
    """Hand on the JSON objects of a file, one a line, without holding more than a line; none without a file.

    Raises:
        RunFolderError: a line is not what a run writes.
    """
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
