"""A run's files as a report reads them: torn last lines passed over, anything else broken named."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstill.core.errors import RunFolderError
from fedstill.core.words import number, words
from fedstill.node.audit import AuditLog
from fedstill.node.entries import RELEASES
from fedstill.protocol.kinds import INPUTS
from fedstill.report.png import MOST_PIXELS, indexed, picture

MOST_STEPS, MOST_SAMPLES = 8, 12  # rows and columns of generated inputs
# Fewer and larger ones where they were made from label maps, to see whether they show what they should.
TO_ORDER = (4, 6, 128)  # rows, columns and pixels of the longer side
MAPS = ".maps"  # after a step's name: what its inputs were made from
# Of the codes of a label map, for any number of them; neighbours differ in brightness too.
CODES = np.tile(
    np.array(
        [(16, 16, 20), (86, 180, 233), (255, 217, 47), (213, 94, 0), (0, 158, 115), (240, 240, 240)], np.uint8
    ),
    (43, 1),
)[:256]


@dataclass
class Metrics:
    """What ``metrics.jsonl`` holds, by step. A step written again, after a resume, replaces the first."""

    central: dict[float, float] = field(
        default_factory=dict
    )  # the metric in percent, of what a run is judged by
    own: dict[float, float] = field(default_factory=dict)  # the same, the mean of the nodes' own models
    losses: dict[str, dict[float, float | None]] = field(default_factory=dict)  # None: not finite
    local: dict[str, dict[float, float | None]] = field(default_factory=dict)
    centralised: dict[float, float | None] = field(default_factory=dict)


@dataclass
class Traffic:
    """What the audit log says of one node."""

    up: Counter[str] = field(default_factory=Counter)  # bytes that left the node, by kind
    down: Counter[str] = field(default_factory=Counter)  # bytes that came to it, by kind
    questions: set[int] = field(default_factory=set)  # numbers: a question in several parts is one
    price: Counter[str] = field(default_factory=Counter)  # what its releases cost: events, how often each
    bare: int = 0  # releases without any guarantee


@dataclass
class Audited:
    """The sums of a run's audit log."""

    nodes: dict[str, Traffic] = field(default_factory=dict)
    about_inputs: set[str] = field(default_factory=set)  # questions that came with inputs
    mechanisms: set[str] = field(default_factory=set)

    def total(self, way: str) -> Counter[str]:
        """Bytes by kind over all nodes; ``way`` is "up" or "down"."""
        total: Counter[str] = Counter()
        for traffic in self.nodes.values():
            total.update(getattr(traffic, way))
        return total


def read_stacks(path: Path, most: int) -> dict[str, npt.NDArray[np.uint8]] | None:
    """The first ``most`` pictures of each stack ``(N, C, H, W)`` in a file of pictures, by name.

    None where there is no file. Stacks of other than one or three channels cannot be shown and are left out.
    Raises RunFolderError where the file is broken, or holds other than such stacks.
    """
    if not path.exists():
        return None
    from safetensors import SafetensorError, safe_open

    stacks = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name in sorted(file.keys()):
                stack = file.get_slice(name)
                kind, shape = stack.get_dtype(), stack.get_shape()
                if kind != "U8" or len(shape) != 4 or 0 in shape:
                    raise RunFolderError(f"{path}: {name} is {kind} {shape}: allowed is U8 [N, C, H, W]")
                if shape[1] in (1, 3):
                    stacks[str(name)] = stack[: min(most, shape[0])]
    except SafetensorError as error:
        raise RunFolderError(f"{path} cannot be read as safetensors: {error}") from None
    return stacks


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    """The JSON objects of a file, one a line, without holding more than a line."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for place, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                if not line.endswith("\n"):  # the run was stopped while it wrote its last line
                    return
                raise RunFolderError(f"{path}, line {place} cannot be read as JSON") from None
            if isinstance(record, Mapping):
                yield record


def read_metrics(path: Path, metric: str = "accuracy") -> Metrics:
    """What a run measured on its way; ``metric`` is the key of what models are judged by."""
    metrics = Metrics()
    if not path.exists():
        return metrics
    for record in _records(path):
        step = number(record, "step")
        if step is None:
            continue
        phase = record.get("phase")
        if phase == "local":
            node = metrics.local.setdefault(words(record, "node") or "node", {})
            if "loss" in record:
                node[step] = number(record, "loss")
        elif phase == "centralised" and "loss" in record:
            metrics.centralised[step] = number(record, "loss")
        elif phase == "distillation":
            central = number(record, metric)
            if central is not None:
                metrics.central[step] = central
            own = number(record, f"local_{metric}")
            if own is not None:
                metrics.own[step] = own
            losses = record.get("losses")
            for name in losses if isinstance(losses, Mapping) else ():
                metrics.losses.setdefault(str(name), {})[step] = number(losses, name)
    return metrics


def read_audit(path: Path) -> Audited | None:
    """The sums of an audit log; None where there is none.

    Raises:
        AuditError: it cannot be read.
    """
    if not path.exists():
        return None
    audited = Audited()
    with closing(AuditLog(path, read_only=True)) as audit:
        for entry in audit.entries():
            traffic = audited.nodes.setdefault(entry["node"], Traffic())
            traffic.price.update(entry["price"])
            traffic.bare += entry["bare"]
            if entry["part"] not in RELEASES:
                continue
            traffic.questions.add(entry["number"])
            traffic.up.update(entry["up"])
            traffic.down.update(entry["down"])
            if INPUTS in entry["down"]:
                audited.about_inputs.add(entry["question"])
            audited.mechanisms.add(entry["mechanism"])
    return audited


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Rows of generated inputs, first and last among them.

    Each is ``{"step": int, "pictures": [data address], "maps": [data address]}``; maps are what a generator
    was told to fill, none where it was told nothing.
    """
    if not path.exists():
        return []
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names = set(file.keys())
            keys = sorted(filter(str.isdecimal, names), key=int)
            made_to_order = any(f"{key}{MAPS}" in names for key in keys)
            rows, columns, side = TO_ORDER if made_to_order else (MOST_STEPS, MOST_SAMPLES, MOST_PIXELS)
            if len(keys) > rows:
                stride = (len(keys) - 1) / (rows - 1)
                keys = [keys[round(row * stride)] for row in range(rows)]
            stacks = {int(key): file.get_tensor(key)[:columns] for key in keys}
            told = [key for key in keys if f"{key}{MAPS}" in names]
            maps = {int(key): file.get_tensor(f"{key}{MAPS}")[:columns] for key in told}
    except SafetensorError as error:
        raise RunFolderError(f"{path} cannot be read as safetensors: {error}") from None
    # Inputs of other tasks (rows of a table, sequences) are not pictures: nothing to show.
    return [
        {
            "step": step,
            "pictures": [picture(image, side) for image in images],
            "maps": [indexed(label_map, CODES) for label_map in maps.get(step, ())],
        }
        for step, images in stacks.items()
        if images.dtype == "uint8" and images.ndim == 4 and images.shape[1] in (1, 3) and images.size
    ]
