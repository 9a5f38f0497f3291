"""Files of a run, checked when they are read, and one list of records of everything that was measured.

:class:`Result` is the content of ``result.json``, with fields named as in the file. None, or a missing key of
a mapping, means not measured. Fields that a run from Python does not record keep their defaults.
``Result.records`` lists its values as :class:`Record`; tables, pages and files are made from them. The values
of single test cases (``Result.cases``) are not in the list.

Each file is loaded once. An incomplete last line is skipped. Any other broken file raises an error that names
it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstill.core.config_tables import read_received_dataclass
from fedstill.core.errors import RunFolderError
from fedstill.core.run_writer import RESAMPLES_FILE, read_result
from fedstill.core.table_schema import NO_SCHEMA, TableSchema
from fedstill.core.text_format import finite_number_at_keys
from fedstill.node.audit_entries import RELEASES
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.privacy.statement import NO_GUARANTEE, format_epsilon_bound
from fedstill.protocol.payload_kinds import INPUTS, KNOWN_KINDS, PayloadKind
from fedstill.tasks.task import Metric


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measured value of a run.

    Args:
        setting: setting of a comparison.
        method: name of the method; in a comparison its label.
        seed: seed of the run.
        model: measured model: "main" (the one that the method is evaluated by), "standalone", "local",
            "ensemble", "centralized" or "majority"; target of an attack; "run" for costs of the run.
        node: node of a local model; empty for the mean over nodes and for models of the server.
        site: site of the test examples; empty for all of them, :data:`OWN_SHARE` for each node's own share.
        finding: finding of a multi-label task; empty for the metric over all.
        attack: attack that the value is of.
        metric: key of the metric, name of the cost, or column of the attack.
        value: in the metric's unit.
        std: standard deviation over nodes.
        interval: ends of a 95% interval, over test cases or as the attack says.
    """

    setting: str = ""
    method: str = ""
    seed: int | None = None
    model: str
    node: str = ""
    site: str = ""
    finding: str = ""
    attack: str = ""
    metric: str
    value: float
    std: float | None = None
    interval: tuple[float, float] | None = None


MAIN, STANDALONE, LOCAL, ENSEMBLE = "main", "standalone", "local", "ensemble"
CENTRALIZED, MAJORITY, RUN = "centralized", "majority", "run"
OWN_SHARE = "own share"  # random share of the test data that each node is evaluated on


def find_record(
    records: Sequence[Record], model: str, metric: str, *, node: str = "", site: str = "", finding: str = ""
) -> Record | None:
    """Return the record of a model's metric, over all nodes, sites and findings unless they are named.

    None means that it was not measured.
    """
    wanted = (model, metric, node, site, finding)
    for record in records:
        if (record.model, record.metric, record.node, record.site, record.finding) == wanted:
            return record
    return None


def find_value(
    records: Sequence[Record], model: str, metric: str, *, node: str = "", site: str = "", finding: str = ""
) -> float | None:
    """Return the value of :func:`find_record`."""
    record = find_record(records, model, metric, node=node, site=site, finding=finding)
    return None if record is None else record.value


def node_values(records: Sequence[Record], model: str, metric: str) -> list[float]:
    """Return a metric of each node's own model on all test data, of the nodes that have it."""
    return [
        record.value
        for record in records
        if record.node
        and (record.model, record.metric, record.site, record.finding) == (model, metric, "", "")
    ]


# --- parts of result.json -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    name: str | None = None
    note: str | None = None
    classes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    train: int | None = None
    test: int | None = None
    test_cases: int | None = None  # number of units that test examples belong to, such as patients
    case: str = "case"
    schema: TableSchema = NO_SCHEMA


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    name: str | None = None
    about: str | None = None
    nodes: int | None = None
    column: str | None = None
    values: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PublicDataInfo:
    name: str | None = None
    examples: int | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class ByteSums:
    """Bytes sent by nodes (``up``) and to nodes (``down``)."""

    up: int = 0
    down: int = 0


@dataclass(frozen=True, kw_only=True)
class BytesInfo:
    up: int | None = None
    down: int | None = None
    by_kind: Mapping[str, ByteSums] | None = None


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    name: str
    site: str | None = None
    model: str | None = None
    parameters: int | None = None
    examples: int | None = None
    label_counts: tuple[int | None, ...] | None = None
    bytes: BytesInfo = field(default_factory=BytesInfo)


@dataclass(frozen=True, kw_only=True)
class StudentInfo:
    model: str | None = None
    parameters: int | None = None


@dataclass(frozen=True, kw_only=True)
class MetricOverNodes:
    """Mean and standard deviation of a metric over the nodes' local models; one model has a mean only.

    Args:
        mean: mean over nodes; None if not measured.
        std: standard deviation over nodes.
        per_node: value of each node.
        nodes: names of the nodes that the mean is over, if not all.
    """

    mean: float | None = None
    std: float | None = None
    per_node: tuple[float | None, ...] = ()
    nodes: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    backend: str | None = None
    batching: str | None = None
    device: str | None = None
    precision: str | None = None
    threads: int | None = None
    groups: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SecondsInfo:
    total: float | None = None
    local_training: float | None = None
    centralized: float | None = None
    distillation: float | None = None


@dataclass(frozen=True, kw_only=True)
class NodePrivacy:
    """Privacy of one node's releases: their cost, the mechanism, and the assumptions of the guarantee."""

    name: str
    mechanism: str = "none"
    guarantee: bool = False
    epsilon: float | None = None  # None with a guarantee means infinity
    delta: float | None = None
    budget: float | None = None
    left: float | None = None
    releases_without_guarantee: int = 0
    events: Mapping[str, int] = field(default_factory=dict)
    says: str = ""
    unit: str = ""
    accountant: str = ""
    randomness: str = ""
    noise: Mapping[str, float | None] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    assumes: tuple[str, ...] = ()

    @property
    def bound(self) -> tuple[float, float] | None:
        """Epsilon (possibly infinite) and delta; None without a guarantee."""
        if not self.guarantee or self.delta is None:
            return None
        return math.inf if self.epsilon is None else self.epsilon, self.delta

    @property
    def guarantee_text(self) -> str:
        """The guarantee in words: "epsilon 3.21 at delta 1e-05" or "no guarantee"."""
        return (
            f"epsilon {format_epsilon_bound(self.bound[0])} at delta {self.delta:g}"
            if self.bound
            else NO_GUARANTEE
        )


@dataclass(frozen=True, kw_only=True)
class PrivacyInfo:
    text: str | None = None
    nodes: tuple[NodePrivacy, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExclusionEvent:
    """Exclusion or return of a node at a query."""

    node: str
    number: int
    event: str
    reason: str = ""

    @property
    def text(self) -> str:
        """The event in words."""
        return f"{self.event} at query {self.number:,}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, kw_only=True)
class SiteMetrics:
    """Metrics by site and key, of the main model, the centralized model and each node's local model."""

    names: tuple[str, ...]
    global_model: Mapping[str, Mapping[str, float | None]] | None = None
    centralized: Mapping[str, Mapping[str, float | None]] | None = None
    nodes: Mapping[str, Mapping[str, Mapping[str, float | None]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FindingScores:
    """Main metric of each finding of a multi-label task, by model."""

    names: tuple[str, ...]
    global_model: tuple[float | None, ...] | None = None
    centralized: tuple[float | None, ...] | None = None
    nodes: Mapping[str, tuple[float | None, ...] | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CaseScores:
    """Main metric of each test case (patient or image), by model."""

    names: tuple[str, ...]
    global_model: tuple[float | None, ...] | None = None
    ensemble: tuple[float | None, ...] | None = None
    centralized: tuple[float | None, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class IntervalsInfo:
    """Bootstrap interval of the main metric over test cases, by model; ``level`` is in percent."""

    level: int = 95
    cases: int = 0
    global_model: tuple[float, float] | None = None
    nodes: tuple[float, float] | None = None
    ensemble: tuple[float, float] | None = None
    centralized: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class ConfidenceBin:
    """Bin of a reliability diagram: mean confidence and accuracy in percent, number of predictions."""

    confidence: float
    accuracy: float
    examples: int


@dataclass(frozen=True, kw_only=True)
class ModelScore:
    name: str
    score: float | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """Test case whose images are stored.

    Args:
        window: shown part of the image: top, left, height, width.
        size: height and width of the whole image.
    """

    kind: str
    case: str = ""
    site: str = ""
    rank: str = ""
    models: tuple[ModelScore, ...] = ()
    part: int | None = None
    parts: int | None = None
    window: tuple[int, int, int, int] | None = None
    size: tuple[int, int] | None = None

    @property
    def is_cropped(self) -> bool:
        """True if the images show only a part of the case."""
        return self.window is not None and self.size is not None and self.window[2:] != self.size


@dataclass(frozen=True, kw_only=True)
class QueriesFile:
    """File of queries of an offline run."""

    bytes: int = 0
    public_inputs: int = 0
    sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class ResponsesFile:
    """File of one node's responses in an offline run."""

    node: str
    bytes: int
    signed_by: str
    key_known: bool = False
    asker_known: bool | None = None


@dataclass(frozen=True, kw_only=True)
class FilesInfo:
    queries: QueriesFile = field(default_factory=QueriesFile)
    responses: tuple[ResponsesFile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class KindInfo:
    """Description of a payload kind by the method that declared it."""

    description: str = ""
    category: str = ""
    from_label_maps: bool = False


# --- the result -----------------------------------------------------------------------------------------


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
    kinds: Mapping[str, KindInfo] = field(default_factory=dict)
    data: DataInfo = field(default_factory=DataInfo)
    split: SplitInfo = field(default_factory=SplitInfo)
    public: PublicDataInfo = field(default_factory=PublicDataInfo)
    bytes: BytesInfo = field(default_factory=BytesInfo)
    nodes: tuple[NodeInfo, ...] = ()
    student: StudentInfo = field(default_factory=StudentInfo)
    metric_values: Mapping[str, float | None] = field(default_factory=dict)
    local: Mapping[str, MetricOverNodes] = field(default_factory=dict)
    standalone: Mapping[str, MetricOverNodes] = field(default_factory=dict)
    ensemble: Mapping[str, Any] = field(default_factory=dict)
    centralized: Mapping[str, float | None] = field(default_factory=dict)
    cases: CaseScores | None = None
    majority: Mapping[str, float | None] = field(default_factory=dict)
    intervals: IntervalsInfo | None = None
    confusion: tuple[tuple[int, ...], ...] = ()
    calibration: tuple[ConfidenceBin, ...] = ()
    sites: SiteMetrics | None = None
    labels: FindingScores | None = None
    pictures: tuple[Case, ...] = ()
    seconds: SecondsInfo = field(default_factory=SecondsInfo)
    peak_memory_mb: float | None = None
    engine: EngineInfo = field(default_factory=EngineInfo)
    privacy: PrivacyInfo | None = None
    link: Mapping[str, float | None] = field(default_factory=dict)
    events: tuple[ExclusionEvent, ...] = ()
    files: FilesInfo | None = None
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
        result._check_shapes(path)
        return replace(result, metrics=metrics, metric_values=metric_values, absent_keys=absent_keys)

    def _check_shapes(self, path: Path) -> None:
        """Refuse values of the right type that do not fit each other.

        Raises:
            RunFolderError: naming the first of them.
        """
        size, ensemble_nodes = len(self.confusion), self.ensemble.get("nodes") or []
        by_finding = [] if self.labels is None else [*self.labels.nodes.values(), self.labels.global_model]
        by_finding += [] if self.labels is None else [self.labels.centralized]
        by_case = [] if self.cases is None else [self.cases.global_model, self.cases.ensemble]
        by_case += [] if self.cases is None else [self.cases.centralized]
        findings = 0 if self.labels is None else len(self.labels.names)
        cases = 0 if self.cases is None else len(self.cases.names)
        expected = {
            "confusion": (all(len(row) == size for row in self.confusion), "as many rows as columns"),
            "labels": (
                all(len(row) == findings for row in by_finding if row is not None),
                "a value per name",
            ),
            "cases": (all(len(row) == cases for row in by_case if row is not None), "a value per name"),
            "calibration": (all(each.examples > 0 for each in self.calibration), "bins with examples"),
            "ensemble.nodes": (
                isinstance(ensemble_nodes, list) and all(isinstance(name, str) for name in ensemble_nodes),
                "a list of names",
            ),
        }
        for key, (fits, what) in expected.items():
            if not fits:
                raise RunFolderError(f"{path}: invalid {key} (expected {what})")

    @cached_property
    def records(self) -> list[Record]:
        """All measured values; a value that was not measured has no record."""
        values = [
            *self._model_records(),
            *self._site_records(),
            *self._finding_records(),
            *self._cost_records(),
        ]
        return [replace(record, method=self.method or "", seed=self.seed) for record in values]

    def _model_records(self) -> Iterator[Record]:
        """Yield each metric of each model on all test data."""
        intervals = self.intervals or IntervalsInfo()
        is_local = self.evaluated_model == "nodes"  # then the main model is the mean of the local models
        for metric in self.metrics:
            over_nodes = self.local.get(metric.key, MetricOverNodes()) if is_local else MetricOverNodes()
            single = {
                MAIN: (
                    self.metric_values.get(metric.key),
                    intervals.nodes if is_local else intervals.global_model,
                ),
                ENSEMBLE: (finite_number_at_keys(self.ensemble, metric.key), intervals.ensemble),
                CENTRALIZED: (self.centralized.get(metric.key), intervals.centralized),
                MAJORITY: (self.majority.get(metric.key), None),
            }
            for model, (value, interval) in single.items():
                if value is not None:
                    std = over_nodes.std if model == MAIN else None
                    ends = interval if metric == self.metric else None
                    yield Record(model=model, metric=metric.key, value=value, std=std, interval=ends)
            for model, by_metric in ((STANDALONE, self.standalone), (LOCAL, self.local)):
                ends = intervals.nodes if metric == self.metric else None
                yield from self._node_records(model, metric.key, by_metric.get(metric.key), ends)
        if (share := self.local.get("share")) is not None and share.mean is not None:
            key = self.metric.key
            yield Record(model=LOCAL, site=OWN_SHARE, metric=key, value=share.mean, std=share.std)

    def _node_records(
        self, model: str, metric: str, stats: MetricOverNodes | None, interval: tuple[float, float] | None
    ) -> Iterator[Record]:
        """Yield the mean of a metric over nodes, and each node's value."""
        if stats is None:
            return
        if stats.mean is not None:
            yield Record(model=model, metric=metric, value=stats.mean, std=stats.std, interval=interval)
        for index, value in enumerate(stats.per_node):
            if value is not None:
                node = self.nodes[index].name if index < len(self.nodes) else f"node {index}"
                yield Record(model=model, node=node, metric=metric, value=value)

    def _site_records(self) -> Iterator[Record]:
        if self.sites is None:
            return
        by_model = [
            (MAIN, "", self.sites.global_model or {}),
            (CENTRALIZED, "", self.sites.centralized or {}),
        ]
        by_model += [(LOCAL, node, by_site) for node, by_site in self.sites.nodes.items()]
        for model, node, by_site in by_model:
            for site in self.sites.names:
                for key, value in by_site.get(site, {}).items():
                    if value is not None:
                        yield Record(model=model, node=node, site=site, metric=key, value=value)

    def _finding_records(self) -> Iterator[Record]:
        if self.labels is None:
            return
        by_model = [(MAIN, "", self.labels.global_model), (CENTRALIZED, "", self.labels.centralized)]
        by_model += [(LOCAL, node, values) for node, values in self.labels.nodes.items()]
        for model, node, values in by_model:
            for finding, value in zip(self.labels.names, values or (), strict=False):
                if value is not None:
                    yield Record(model=model, node=node, finding=finding, metric=self.metric.key, value=value)

    def _cost_records(self) -> Iterator[Record]:
        epsilon, delta = self.guarantee or (None, None)
        costs = {
            "bytes up": self.bytes.up,
            "bytes down": self.bytes.down,
            "queries": self.queries,
            "iterations": self.iterations,
            "seconds": self.seconds.total,
            "epsilon": epsilon,
            "delta": delta,
        }
        for name, value in costs.items():
            if value is not None:
                yield Record(model=RUN, metric=name, value=value)

    @property
    def guarantee(self) -> tuple[float, float] | None:
        """Epsilon and delta that hold at every node; None if a node has no guarantee."""
        return weakest_guarantee([node.bound for node in self.node_privacy])

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
    def node_privacy(self) -> tuple[NodePrivacy, ...]:
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


def weakest_guarantee(bounds: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    """Return the largest epsilon and delta; None without any, or if one has no guarantee."""
    known = [bound for bound in bounds if bound is not None]
    if not known or len(known) < len(bounds):
        return None
    return max(epsilon for epsilon, _ in known), max(delta for _, delta in known)


# --- rows of models -------------------------------------------------------------------------------------


# Name and description of each baseline and upper bound; the main model's are in MAIN_MODELS.
REFERENCE_MODELS: Mapping[str, tuple[str, str]] = {
    STANDALONE: ("standalone mean", "baseline: each node trains alone on its own data"),
    LOCAL: ("local models (mean)", "each node's local model at the end"),
    ENSEMBLE: ("teachers' ensemble", "upper bound: ensemble of the nodes' models"),
    CENTRALIZED: ("centralized", "upper bound: one model trained on the pooled data"),
    MAJORITY: ("majority class", "baseline: always the most frequent class of the test data"),
}


@dataclass(frozen=True)
class ModelRow:
    """One model of a run with its metrics, as tables show it.

    Args:
        model: model of the records.
        name: name of the row.
        description: the model in a few words.
        records: one entry per metric of the task, the main metric first; None if not measured.
        node_values: main metric of each node's model.
    """

    model: str
    name: str
    description: str
    records: tuple[Record | None, ...]
    node_values: Sequence[float] = ()

    @property
    def is_main(self) -> bool:
        """True for the model that the method is evaluated by."""
        return self.model == MAIN

    @property
    def main_record(self) -> Record | None:
        """Record of the main metric."""
        return self.records[0]

    @property
    def value(self) -> float | None:
        """Value of the main metric, or its mean over nodes."""
        return None if self.records[0] is None else self.records[0].value

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of the main metric over test cases."""
        return None if self.records[0] is None else self.records[0].interval


def model_rows(result: Result) -> list[ModelRow]:
    """Return the main model with baselines and upper bounds, in the order of the papers' tables.

    A model that the method does not have (for example no ensemble) is null in the result and has no row. A
    model that the result does not mention was not measured, and its row has no values.
    """
    is_local, absent = result.evaluated_model == "nodes", result.absent_keys
    models = {
        STANDALONE: "standalone" not in absent and not is_local,
        LOCAL: "standalone" in absent and not is_local and result.metric.key in result.local,
        MAIN: True,
        ENSEMBLE: "ensemble" not in absent and result.evaluated_model != "ensemble",
        CENTRALIZED: True,
        MAJORITY: bool(result.majority),
    }
    return [_model_row(result, model) for model, is_shown in models.items() if is_shown]


def _model_row(result: Result, model: str) -> ModelRow:
    is_local = model == MAIN and result.evaluated_model == "nodes"
    if model == MAIN:
        name = f"{result.main_model_name} ({result.method_title})"
        description = MAIN_MODELS[result.evaluated_model][1]
    else:
        name, description = REFERENCE_MODELS[model]
    measured = {
        STANDALONE: result.standalone.get(result.metric.key, MetricOverNodes()).nodes,
        LOCAL: result.local.get(result.metric.key, MetricOverNodes()).nodes,
        ENSEMBLE: result.ensemble.get("nodes"),
    }.get(LOCAL if is_local else model)
    if measured is not None:
        description += f" (only {', '.join(map(result.node_display_name, measured))})"
    return ModelRow(
        model,
        name,
        description,
        tuple(find_record(result.records, model, metric.key) for metric in result.metrics),
        node_values(result.records, LOCAL if is_local else model, result.metric.key),
    )


# --- files of a run -------------------------------------------------------------------------------------


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
