"""The parts of ``result.json``, named as in the file; None is what was not measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedstill.core.table_schema import NO_SCHEMA, Schema
from fedstill.privacy.statement import NO_GUARANTEE, format_epsilon_bound


@dataclass(frozen=True, kw_only=True)
class Data:
    name: str | None = None
    note: str | None = None
    classes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    train: int | None = None
    test: int | None = None
    test_cases: int | None = None  # what test examples are parts of, such as patients
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
class PublicData:
    name: str | None = None
    examples: int | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class ByteSums:
    """Bytes that left nodes and came to them."""

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
class OverNodes:
    """A figure of nodes' own models, or of one model, which has a mean alone."""

    mean: float | None = None
    std: float | None = None
    per_node: tuple[float | None, ...] = ()
    nodes: tuple[str, ...] | None = None  # which ones, where it is not of all

    @property
    def each(self) -> list[float]:
        """Those that were measured."""
        return [value for value in self.per_node if value is not None]


@dataclass(frozen=True, kw_only=True)
class Engine:
    name: str | None = None
    device: str | None = None
    precision: str | None = None
    threads: int | None = None
    groups: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Seconds:
    total: float | None = None
    local_training: float | None = None
    centralized: float | None = None
    distillation: float | None = None


@dataclass(frozen=True, kw_only=True)
class NodePrivacy:
    """What one node's releases cost, how they were protected, and on what that rests."""

    name: str
    mechanism: str = "none"
    guarantee: bool = False
    epsilon: float | None = None  # with a guarantee: beyond all bounds
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
        """Its epsilon, inf where that is beyond all bounds, and delta; None: no guarantee."""
        if not self.guarantee or self.delta is None:
            return None
        return math.inf if self.epsilon is None else self.epsilon, self.delta

    @property
    def price(self) -> str:
        """In words: "epsilon 3.21 at delta 1e-05" or "no guarantee"."""
        return (
            f"epsilon {format_epsilon_bound(self.bound[0])} at delta {self.delta:g}"
            if self.bound
            else NO_GUARANTEE
        )


@dataclass(frozen=True, kw_only=True)
class Privacy:
    text: str | None = None
    nodes: tuple[NodePrivacy, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """A node that was left out, or came back, at a query."""

    node: str
    number: int
    event: str
    reason: str = ""

    @property
    def text(self) -> str:
        """It in words."""
        return f"{self.event} at query {self.number:,}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, kw_only=True)
class Sites:
    """Figures by site, by key; of nodes by their names."""

    names: tuple[str, ...]
    central: Mapping[str, Mapping[str, float | None]] | None = None
    centralized: Mapping[str, Mapping[str, float | None]] | None = None
    nodes: Mapping[str, Mapping[str, Mapping[str, float | None]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FindingScores:
    """What models are judged by, finding by finding."""

    names: tuple[str, ...]
    central: tuple[float | None, ...] | None = None
    centralized: tuple[float | None, ...] | None = None
    nodes: Mapping[str, tuple[float | None, ...] | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CaseScores:
    """What models reach of each patient or picture of the test part."""

    names: tuple[str, ...]
    central: tuple[float | None, ...] | None = None
    ensemble: tuple[float | None, ...] | None = None
    centralized: tuple[float | None, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Between which values the leading figure lies by the choice of test cases, by model."""

    level: int = 95
    cases: int = 0
    central: tuple[float, ...] | None = None
    nodes: tuple[float, ...] | None = None
    ensemble: tuple[float, ...] | None = None
    centralized: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ConfidenceBin:
    """One point of a reliability curve: answers of like confidence, in percent, and how many they are."""

    confidence: float
    accuracy: float
    examples: int


@dataclass(frozen=True, kw_only=True)
class ModelScore:
    name: str
    score: float | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A test case whose pictures are kept; ``window`` is the part of its ``size`` that they show."""

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
    def is_cut(self) -> bool:
        """Whether the pictures show a part of it only."""
        return self.window is not None and self.size is not None and self.window[2:] != self.size


@dataclass(frozen=True, kw_only=True)
class QueriesFile:
    """The file of queries, where they were carried by hand."""

    bytes: int = 0
    public_inputs: int = 0
    sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class ResponsesFile:
    """One node's file of answers."""

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
    """Declaration of a payload kind by the method that released it."""

    description: str = ""
    category: str = ""
    from_label_maps: bool = False
    package: str = ""
