"""What ``result.json`` says of a run, checked once: whoever has it trusts it.

Fields are named as in the file. None is what was not measured; what a run from Python or an attack's tests
leave out has its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedstill.core.errors import RunFolderError
from fedstill.core.loading import load
from fedstill.core.records import read_result
from fedstill.core.words import number
from fedstill.protocol.kinds import KNOWN, Kind
from fedstill.tasks.task import Figure

FILE = "result.json"
ACCURACY = Figure("accuracy", "Accuracy")

# What a method is judged by: what to call it, and what it is.
CENTRAL: Mapping[str, tuple[str, str]] = {
    "student": ("student", "the central model that the server trained"),
    "virtual": ("average", "the nodes' models averaged, weighed by their data: made only to be measured"),
    "ensemble": ("ensemble", "all nodes' models answering together; there is no central model"),
    "nodes": ("nodes' mean", "the mean over the nodes' own models; there is no central model"),
}


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


@dataclass(frozen=True, kw_only=True)
class Split:
    how: str | None = None
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
class Sums:
    """Bytes that left nodes and came to them."""

    up: int = 0
    down: int = 0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    up: int | None = None
    down: int | None = None
    by_kind: Mapping[str, Sums] | None = None


@dataclass(frozen=True, kw_only=True)
class Node:
    name: str
    site: str | None = None
    model: str | None = None
    parameters: int | None = None
    examples: int | None = None
    label_counts: tuple[int | None, ...] | None = None
    bytes: Traffic = Traffic()


@dataclass(frozen=True, kw_only=True)
class Student:
    model: str | None = None
    parameters: int | None = None


@dataclass(frozen=True, kw_only=True)
class OverNodes:
    """A figure of nodes' own models."""

    mean: float | None = None
    std: float | None = None
    per_node: tuple[float | None, ...] = ()
    nodes: tuple[str, ...] | None = None  # which ones, where it is not of all


@dataclass(frozen=True, kw_only=True)
class Engine:
    name: str | None = None
    device: str | None = None
    precision: str | None = None
    threads: int | None = None
    groups: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    stacked_over_one_by_one: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Seconds:
    total: float | None = None
    local_training: float | None = None
    centralised: float | None = None
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


@dataclass(frozen=True, kw_only=True)
class Privacy:
    text: str | None = None
    nodes: tuple[NodePrivacy, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Event:
    """A node that was left out, or came back, at a question."""

    node: str
    number: int
    event: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Sites:
    """Figures by site, by key; of nodes by their names."""

    names: tuple[str, ...]
    central: Mapping[str, Mapping[str, float | None]] | None = None
    centralised: Mapping[str, Mapping[str, float | None]] | None = None
    nodes: Mapping[str, Mapping[str, Mapping[str, float | None]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What models are judged by, finding by finding."""

    names: tuple[str, ...]
    central: tuple[float | None, ...] | None = None
    centralised: tuple[float | None, ...] | None = None
    nodes: Mapping[str, tuple[float | None, ...] | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scored:
    name: str
    score: float | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A test case whose pictures are kept; ``window`` is the part of its ``size`` that they show."""

    kind: str
    case: str = ""
    site: str = ""
    rank: str = ""
    models: tuple[Scored, ...] = ()
    part: int | None = None
    parts: int | None = None
    window: tuple[int, ...] | None = None
    size: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The file of questions, where they were carried by hand."""

    bytes: int = 0
    public_inputs: int = 0
    sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One node's file of answers."""

    node: str
    bytes: int
    signed_by: str
    key_known: bool = False
    asker_known: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Files:
    questions: Asked = Asked()
    answers: tuple[Answered, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Said:
    """What is said of a kind of release, by the method that released it."""

    says: str = ""
    of: str = ""
    of_maps: bool = False
    package: str = ""


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
    machine: str | None = None
    date: str | None = None
    versions: Mapping[str, str] | None = None
    seed: int | None = None
    method: str | None = None
    title: str | None = None
    kind: str = ""
    central: str = "student"
    turn: str = "step"
    turns: int | None = None
    questions: int | None = None
    questions_by_name: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    kinds: Mapping[str, Said] = field(default_factory=dict)
    data: Data = Data()
    split: Split = Split()
    public: PublicData = PublicData()
    bytes: Traffic = Traffic()
    nodes: tuple[Node, ...] | None = None
    student: Student = Student()
    reached: Mapping[str, float | None] = field(default_factory=dict)
    local: Mapping[str, OverNodes] | None = None
    standalone: Mapping[str, OverNodes] | None = None
    ensemble: Mapping[str, Any] | None = None
    centralised: Mapping[str, Any] | None = None
    sites: Sites | None = None
    labels: Findings | None = None
    pictures: tuple[Case, ...] = ()
    seconds: Seconds = Seconds()
    peak_memory_mb: float | None = None
    engine: Engine = Engine()
    privacy: Privacy | None = None
    link: Mapping[str, float | None] | None = None
    events: tuple[Event, ...] = ()
    files: Files | None = None
    figures: tuple[Figure, ...] = (ACCURACY,)
    missing: frozenset[str] = frozenset()

    @classmethod
    def read(cls, folder: Path) -> Result:
        """Of the run in a folder.

        Raises:
            RunFolderError: there is no finished run in it, or its file is spoilt.
        """
        return cls.of(read_result(folder / FILE), folder / FILE)

    @classmethod
    def of(cls, record: Mapping[str, Any], path: Path = Path(FILE)) -> Result:
        """From what the file holds, or is to hold.

        Raises:
            RunFolderError: a part of it is not what it should be.

        >>> Result.of({"accuracy": 90, "student": None}).reached
        {'accuracy': 90.0}
        """
        told = {key: value for key, value in record.items() if value is not None}
        made = load(cls, told, path)
        if made.central not in CENTRAL:
            raise RunFolderError(f"{path}: central is {made.central!r}: allowed is {', '.join(CENTRAL)}")
        by_key = {figure.key: figure for figure in made.figures}
        first = told.get("metric", next(iter(by_key)))
        judged = by_key.pop(first, None) or (ACCURACY if first == ACCURACY.key else Figure(first, first))
        figures = (judged, *by_key.values())
        reached = {
            figure.key: value if (value := number(told, figure.key)) is not None
            else number(told, "student", figure.key)
            for figure in figures
        }  # fmt: skip
        return replace(made, figures=figures, reached=reached, missing=frozenset(record) - frozenset(told))

    @property
    def metric(self) -> Figure:
        """What models are judged by: in percent, and higher is better."""
        return self.figures[0]

    @property
    def value(self) -> float | None:
        """What the run is judged by reaches of it."""
        return self.reached[self.metric.key]

    @property
    def came_down(self) -> int | None:
        """Bytes that came to the nodes: all that questions are about too, where a file carried both.

        >>> answer = {"node": "a", "bytes": 1, "signed_by": "k"}
        >>> asked = {"bytes": 514000, "public_inputs": 1, "sha256": ""}
        >>> Result.of({"files": {"questions": asked, "answers": [answer, answer]}}).came_down
        1028000
        """
        if self.files is None:
            return self.bytes.down
        return self.files.questions.bytes * len(self.files.answers)

    @property
    def sentences(self) -> list[str]:
        """What the nodes' side of a method tells of the run, such as what was switched off."""
        return [note if note.endswith(".") else f"{note}." for note in self.notes if note]

    @property
    def each(self) -> tuple[Node, ...]:
        """The nodes; none where the file names none."""
        return self.nodes or ()

    def kind_of(self) -> Mapping[str, Kind]:
        """What is known of each kind of release, as the method that released it told."""
        return {**{name: Kind(name, **vars(said)) for name, said in self.kinds.items()}, **KNOWN}
