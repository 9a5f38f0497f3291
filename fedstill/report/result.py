"""What ``result.json`` says of a run, checked once: whoever has it trusts it.

Fields are named as in the file. None, or nothing in a mapping, is what was not measured; what a run from
Python does not tell has its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedstill.core.config_tables import load_record
from fedstill.core.errors import RunFolderError
from fedstill.core.run_writer import read_result
from fedstill.core.text_format import number_at
from fedstill.protocol.payload_kinds import KNOWN_KINDS, PayloadKind
from fedstill.report import result_parts as parts
from fedstill.report.result_parts import OverNodes
from fedstill.tasks.task import Metric

__all__ = ["ACCURACY", "MAIN_MODELS", "OverNodes", "Result"]

FILE = "result.json"
ACCURACY = Metric("accuracy", "Accuracy")

# What a method is judged by: what to call it, and what it is.
MAIN_MODELS: Mapping[str, tuple[str, str]] = {
    "student": ("student", "the central model that the server trained"),
    "virtual": ("average", "the nodes' models averaged, weighed by their data: made only to be measured"),
    "ensemble": ("ensemble", "all nodes' models answering together; there is no central model"),
    "nodes": ("nodes' mean", "the mean over the nodes' own models; there is no central model"),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run's result.

    Args:
        reached: what the run is judged by, by figure.
        missing: names of what the run does not have at all, which its file holds as null.
    """

    fedstill: str | None = None
    name: str | None = None
    command: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    machine: str | None = None
    date: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    method: str | None = None
    title: str | None = None
    kind: str = ""
    central: str = "student"
    turn: str = "step"
    turns: int | None = None
    queries: int | None = None
    queries_by_name: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    kinds: Mapping[str, parts.KindRecord] = field(default_factory=dict)
    data: parts.Data = field(default_factory=parts.Data)
    split: parts.SplitRecord = field(default_factory=parts.SplitRecord)
    public: parts.PublicData = field(default_factory=parts.PublicData)
    bytes: parts.BytesRecord = field(default_factory=parts.BytesRecord)
    nodes: tuple[parts.NodeRecord, ...] = ()
    student: parts.StudentRecord = field(default_factory=parts.StudentRecord)
    metric_values: Mapping[str, float | None] = field(default_factory=dict)
    local: Mapping[str, OverNodes] = field(default_factory=dict)
    standalone: Mapping[str, OverNodes] = field(default_factory=dict)
    ensemble: Mapping[str, Any] = field(default_factory=dict)
    centralized: Mapping[str, float | None] = field(default_factory=dict)
    cases: parts.CaseScores | None = None
    majority: Mapping[str, float | None] = field(default_factory=dict)
    intervals: parts.Intervals | None = None
    confusion: tuple[tuple[int, ...], ...] = ()
    calibration: tuple[parts.ConfidenceBin, ...] = ()
    sites: parts.Sites | None = None
    labels: parts.FindingScores | None = None
    pictures: tuple[parts.Case, ...] = ()
    seconds: parts.Seconds = field(default_factory=parts.Seconds)
    peak_memory_mb: float | None = None
    engine: parts.Engine = field(default_factory=parts.Engine)
    privacy: parts.Privacy | None = None
    link: Mapping[str, float | None] = field(default_factory=dict)
    events: tuple[parts.EventRecord, ...] = ()
    files: parts.FilesRecord | None = None
    metrics: tuple[Metric, ...] = (ACCURACY,)
    absent_keys: frozenset[str] = frozenset()

    @classmethod
    def read(cls, folder: Path) -> Result:
        """Of the run in a folder.

        Raises:
            RunFolderError: there is no finished run in it, or its file is spoilt.
        """
        return cls.from_record(read_result(folder / FILE), folder / FILE)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], path: Path = Path(FILE)) -> Result:
        """From what the file holds, or is to hold.

        Raises:
            RunFolderError: a part of it is not what it should be.

        >>> Result.from_record({"accuracy": 90, "student": None}).metric_values
        {'accuracy': 90.0}
        """
        told = {key: value for key, value in record.items() if value is not None}
        made = load_record(cls, told, path)
        if made.central not in MAIN_MODELS:
            raise RunFolderError(f"{path}: central is {made.central!r} (expected {', '.join(MAIN_MODELS)})")
        by_key = {metric.key: metric for metric in made.metrics}
        first = told.get("metric", next(iter(by_key), None))
        if not isinstance(first, str):
            what = "metric" if by_key else "metrics"
            allowed = "a text" if by_key else "one figure or more"
            raise RunFolderError(f"{path}: {what} is {told[what]!r} (expected {allowed})")
        judged = by_key.pop(first, None) or (ACCURACY if first == ACCURACY.key else Metric(first, first))
        metrics = (judged, *by_key.values())
        reached = {
            metric.key: value if (value := number_at(told, metric.key)) is not None
            else number_at(told, "student", metric.key)
            for metric in metrics
        }  # fmt: skip
        return replace(
            made, metrics=metrics, metric_values=reached, absent_keys=frozenset(record) - frozenset(told)
        )

    @property
    def metric(self) -> Metric:
        """What models are judged by: in percent, and higher is better."""
        return self.metrics[0]

    @property
    def value(self) -> float | None:
        """What the run is judged by reaches of it."""
        return self.metric_values[self.metric.key]

    @property
    def main_model(self) -> str:
        """What the run is judged by: "student"."""
        return MAIN_MODELS[self.central][0]

    @property
    def method_title(self) -> str:
        """The method as people write it ("FedIOD"), or its name in the code where no title is given."""
        return self.title or self.method or "method not measured"

    @property
    def bytes_down(self) -> int | None:
        """Bytes that came to the nodes: all that queries are about too, where a file carried both."""
        if self.files is None:
            return self.bytes.down
        return self.files.queries.bytes * len(self.files.responses)

    @property
    def is_distributed(self) -> bool:
        """Whether nodes were elsewhere: neither in a simulation nor in a rehearsal, which read nodes'
        figures past their gates.
        """
        return self.files is not None or (bool(self.link) and not (self.standalone or self.local))

    @property
    def node_privacy(self) -> tuple[parts.NodePrivacy, ...]:
        """What each node's releases cost, as far as it is told."""
        return self.privacy.nodes if self.privacy else ()

    @property
    def note_sentences(self) -> list[str]:
        """What the nodes' side of a method tells of the run, such as what was switched off."""
        return [note if note.endswith(".") else f"{note}." for note in self.notes if note]

    @cached_property
    def display_names(self) -> Mapping[str, str]:
        """By name, how a node is written: with its site, if all its examples are known to be from one."""
        return {
            node.name: f"{node.name} \u00b7\u00a0{node.site}" if node.site else node.name
            for node in self.nodes
        }

    def display_name(self, name: str) -> str:
        """The name of a node or of another model, as reports write it."""
        return self.display_names.get(name, name)

    def payload_kinds(self) -> Mapping[str, PayloadKind]:
        """What is known of each kind of release, as the method that released it told."""
        return {**{name: PayloadKind(name, **vars(said)) for name, said in self.kinds.items()}, **KNOWN_KINDS}
