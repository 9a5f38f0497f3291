"""Records of ``result.json``, with fields named as in the file; None means not measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedstill.core.table_schema import NO_SCHEMA, Schema
from fedstill.privacy.statement import NO_GUARANTEE, format_epsilon_bound


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    name: str | None = None
    note: str | None = None
    classes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    train: int | None = None
    test: int | None = None
    test_cases: int | None = None  # number of units that test examples belong to, such as patients
    case: str = "case"
    schema: Schema = NO_SCHEMA


@dataclass(frozen=True, kw_only=True)
class SplitRecord:
    name: str | None = None
    about: str | None = None
    nodes: int | None = None
    column: str | None = None
    values: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PublicDataRecord:
    name: str | None = None
    examples: int | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class ByteSums:
    """Bytes sent by nodes (``up``) and to nodes (``down``)."""

    up: int = 0
    down: int = 0


@dataclass(frozen=True, kw_only=True)
class BytesRecord:
    up: int | None = None
    down: int | None = None
    by_kind: Mapping[str, ByteSums] | None = None


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    name: str
    site: str | None = None
    model: str | None = None
    parameters: int | None = None
    examples: int | None = None
    label_counts: tuple[int | None, ...] | None = None
    bytes: BytesRecord = field(default_factory=BytesRecord)


@dataclass(frozen=True, kw_only=True)
class StudentRecord:
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

    @property
    def measured_values(self) -> list[float]:
        """Values of the nodes that have one."""
        return [value for value in self.per_node if value is not None]


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    backend: str | None = None
    batching: str | None = None
    device: str | None = None
    precision: str | None = None
    threads: int | None = None
    groups: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SecondsRecord:
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
class PrivacyRecord:
    text: str | None = None
    nodes: tuple[NodePrivacy, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExclusionRecord:
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
class IntervalsRecord:
    """Bootstrap interval of the main metric over test cases, by model; ``level`` is in percent."""

    level: int = 95
    cases: int = 0
    global_model: tuple[float, ...] | None = None
    nodes: tuple[float, ...] | None = None
    ensemble: tuple[float, ...] | None = None
    centralized: tuple[float, ...] | None = None


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
    window: tuple[int, ...] | None = None
    size: tuple[int, ...] | None = None

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
class FilesRecord:
    queries: QueriesFile = field(default_factory=QueriesFile)
    responses: tuple[ResponsesFile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class KindRecord:
    """Description of a payload kind by the method that declared it."""

    description: str = ""
    category: str = ""
    from_label_maps: bool = False
