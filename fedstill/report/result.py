"""A run's ``result.json``, checked when it is read.

Fields are named as in the file. None, or a missing key of a mapping, means not measured. Fields that a run
from Python does not record keep their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedstill.core.config_tables import read_received_dataclass
from fedstill.core.errors import RunFolderError
from fedstill.core.run_writer import read_result
from fedstill.core.text_format import finite_number_at_keys
from fedstill.protocol.payload_kinds import KNOWN_KINDS, PayloadKind
from fedstill.report import result_records as parts
from fedstill.report.result_records import MetricOverNodes
from fedstill.tasks.task import Metric

__all__ = ["ACCURACY", "MAIN_MODELS", "MetricOverNodes", "Result"]

RESULT_FILE = "result.json"
ACCURACY = Metric("accuracy", "Accuracy")

# The model that a method is evaluated by: its name and a description, by ``central`` of the result.
MAIN_MODELS: Mapping[str, tuple[str, str]] = {
    "student": ("student", "the global model trained by the server"),
    "virtual": (
        "average",
        "the average of the nodes' models weighted by data size, computed only for evaluation",
    ),
    "ensemble": ("ensemble", "the ensemble of the nodes' models; there is no global model"),
    "nodes": ("local models", "the mean over the nodes' local models; there is no global model"),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a finished run.

    Args:
        metric_values: metrics of the main model, by key.
        absent_keys: keys that are null in the file, because the method has no such model.
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
    evaluated_model: str = "student"
    iteration_unit: str = "step"
    iterations: int | None = None
    queries: int | None = None
    queries_by_name: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    kinds: Mapping[str, parts.KindRecord] = field(default_factory=dict)
    data: parts.DataRecord = field(default_factory=parts.DataRecord)
    split: parts.SplitRecord = field(default_factory=parts.SplitRecord)
    public: parts.PublicDataRecord = field(default_factory=parts.PublicDataRecord)
    bytes: parts.BytesRecord = field(default_factory=parts.BytesRecord)
    nodes: tuple[parts.NodeRecord, ...] = ()
    student: parts.StudentRecord = field(default_factory=parts.StudentRecord)
    metric_values: Mapping[str, float | None] = field(default_factory=dict)
    local: Mapping[str, MetricOverNodes] = field(default_factory=dict)
    standalone: Mapping[str, MetricOverNodes] = field(default_factory=dict)
    ensemble: Mapping[str, Any] = field(default_factory=dict)
    centralized: Mapping[str, float | None] = field(default_factory=dict)
    cases: parts.CaseScores | None = None
    majority: Mapping[str, float | None] = field(default_factory=dict)
    intervals: parts.IntervalsRecord | None = None
    confusion: tuple[tuple[int, ...], ...] = ()
    calibration: tuple[parts.ConfidenceBin, ...] = ()
    sites: parts.SiteMetrics | None = None
    labels: parts.FindingScores | None = None
    pictures: tuple[parts.Case, ...] = ()
    seconds: parts.SecondsRecord = field(default_factory=parts.SecondsRecord)
    peak_memory_mb: float | None = None
    engine: parts.EngineRecord = field(default_factory=parts.EngineRecord)
    privacy: parts.PrivacyRecord | None = None
    link: Mapping[str, float | None] = field(default_factory=dict)
    events: tuple[parts.ExclusionRecord, ...] = ()
    files: parts.FilesRecord | None = None
    metrics: tuple[Metric, ...] = (ACCURACY,)
    absent_keys: frozenset[str] = frozenset()

    @classmethod
    def read(cls, folder: Path) -> Result:
        """Read the result of the run in a folder.

        Raises:
            RunFolderError: the folder holds no finished run, or its file is broken.
        """
        return cls.from_record(read_result(folder / RESULT_FILE), folder / RESULT_FILE)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], path: Path = Path(RESULT_FILE)) -> Result:
        """Check the content of the file.

        Args:
            record: the content, as parsed from JSON.
            path: file named in errors.

        Raises:
            RunFolderError: a value has the wrong type or is not allowed.

        >>> Result.from_record({"accuracy": 90, "student": None}).metric_values
        {'accuracy': 90.0}
        """
        values = {key: value for key, value in record.items() if value is not None}
        result = read_received_dataclass(cls, values, path)
        if result.evaluated_model not in MAIN_MODELS:
            raise RunFolderError(
                f"{path}: invalid evaluated_model = {result.evaluated_model!r} "
                f"(expected {', '.join(MAIN_MODELS)})"
            )
        by_key = {metric.key: metric for metric in result.metrics}
        main_key = values.get("metric", next(iter(by_key), None))
        if not isinstance(main_key, str):
            key, expected = ("metric", "a string") if by_key else ("metrics", "at least one metric")
            raise RunFolderError(f"{path}: invalid {key} = {values[key]!r} (expected {expected})")
        main_metric = by_key.pop(main_key, None) or (
            ACCURACY if main_key == ACCURACY.key else Metric(main_key, main_key)
        )
        metrics = (main_metric, *by_key.values())
        metric_values = {
            metric.key: value if (value := finite_number_at_keys(values, metric.key)) is not None
            else finite_number_at_keys(values, "student", metric.key)
            for metric in metrics
        }  # fmt: skip
        absent_keys = frozenset(record) - frozenset(values)
        return replace(result, metrics=metrics, metric_values=metric_values, absent_keys=absent_keys)

    @property
    def metric(self) -> Metric:
        """Main metric of the task: in percent, higher is better."""
        return self.metrics[0]

    @property
    def value(self) -> float | None:
        """Main metric of the main model."""
        return self.metric_values[self.metric.key]

    @property
    def main_model_name(self) -> str:
        """Name of the model that the method is evaluated by, such as "student"."""
        return MAIN_MODELS[self.evaluated_model][0]

    @property
    def method_title(self) -> str:
        """Title of the method, such as "FedIOD"; its name if it has no title."""
        return self.title or self.method or "method not measured"

    @property
    def bytes_down(self) -> int | None:
        """Bytes sent to the nodes; in an offline run the whole file of queries for each node."""
        if self.files is None:
            return self.bytes.down
        return self.files.queries.bytes * len(self.files.responses)

    @property
    def is_distributed(self) -> bool:
        """True if nodes ran as separate parties.

        Simulations and rehearsals measure the nodes' models without their gates; distributed runs cannot.
        """
        return self.files is not None or (bool(self.link) and not (self.standalone or self.local))

    @property
    def node_privacy(self) -> tuple[parts.NodePrivacy, ...]:
        """Privacy of each node's releases, as far as it is recorded."""
        return self.privacy.nodes if self.privacy else ()

    @property
    def note_sentences(self) -> list[str]:
        """Notes of the nodes' side of the method as sentences, such as disabled features."""
        return [note if note.endswith(".") else f"{note}." for note in self.notes if note]

    @cached_property
    def node_display_names(self) -> Mapping[str, str]:
        """Display name of each node, with its site if all its examples are known to come from one site."""
        return {
            node.name: f"{node.name} \u00b7\u00a0{node.site}" if node.site else node.name
            for node in self.nodes
        }

    def node_display_name(self, name: str) -> str:
        """Return the display name of a node; other names are returned unchanged."""
        return self.node_display_names.get(name, name)

    def declared_payload_kinds(self) -> Mapping[str, PayloadKind]:
        """Return the payload kinds that the run's method or this package declares, by name."""
        declared = {name: PayloadKind(name, **vars(record)) for name, record in self.kinds.items()}
        return {**declared, **KNOWN_KINDS}
