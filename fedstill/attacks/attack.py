"""Attacks on a run: their base class, and their results as reports show them.

:class:`Attack` is the base class, with the options of an attack. A run's ``leakage.json`` holds metrics,
columns of comparisons and images ready to be shown, so that a report does not need the code of an attack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from fedstill.attacks.transcript import ObservedRelease, ObservedSimulation, ReplayedRun, ServerTranscript
from fedstill.core.config_tables import read_received_dataclass
from fedstill.core.options import check_fields
from fedstill.core.registry import Registrable, Registry
from fedstill.core.run_writer import read_result
from fedstill.node.node import Node
from fedstill.protocol.node_side import NodeSide
from fedstill.runs.spec import RunSpec

LEAKAGE_FILE = "leakage.json"


@dataclass(frozen=True, eq=False)
class Target:
    """The run that is attacked.

    The adversary may use :attr:`transcript`, :attr:`releases`, :attr:`student` and the configuration of the
    run. The nodes' data serve to judge the attack, and as a reference for held-out data.

    Args:
        replay: parts of the run; ``replay.experiment()`` is the run before its start.
        experiment: the replayed run after its end.
        transcript: queries, responses and label counts as sent between nodes and server.
        releases: releases that the attack asked for with :meth:`Attack.keeps_release`, in order.
        seed: seed of every random number of the attack.
    """

    replay: ReplayedRun
    experiment: ObservedSimulation
    transcript: ServerTranscript
    releases: Sequence[ObservedRelease] = ()
    seed: int = 0

    @property
    def config(self) -> RunSpec:
        """Configuration of the run, which is public."""
        return self.replay.config

    @property
    def node_side(self) -> NodeSide:
        """Queries to the nodes, and the payload kinds of their releases."""
        return self.experiment.side

    @property
    def nodes(self) -> Sequence[Node]:
        """Nodes with ``name`` and ``data``: the truth, to judge the attack."""
        return self.experiment.nodes

    @property
    def student(self) -> nn.Module | None:
        """Final model of the run; None if its method has none."""
        return self.experiment.student if self.experiment.has_student else None


@dataclass(frozen=True, eq=False)
class AttackResult:
    """Result of an attack.

    Args:
        part: record for ``leakage.json``, of JSON values.
        pictures: stacks of images ``(N, C, H, W)`` uint8 for ``leakage.safetensors``, by name.
        skipped: parts of the attack that were not possible, each with the reason.
    """

    part: Any
    pictures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    skipped: Sequence[tuple[str, str]] = ()


class Attack(Registrable, ABC):
    """An attack: a frozen dataclass whose fields are its options.

    :meth:`run` attacks and returns a record. All methods below it turn that record of ``leakage.json`` into
    metrics and texts; only :meth:`rows` must be implemented.

    Attributes:
        title: title of its section on the page.
        columns: columns for comparisons of runs.
        notes: explanations of its metrics, for the page.
        user_errors: names of arguments whose rejection is the caller's mistake. Any other error means that
            the attack does not apply to the run, and is reported as skipped.
    """

    key: ClassVar[str] = ""
    title: ClassVar[str]
    columns: ClassVar[tuple[ComparisonColumn, ...]] = ()
    notes: ClassVar[tuple[str, ...]] = ()
    user_errors: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Check the options; call it from an override with further checks.

        Raises:
            ArgumentError: a value that the type of its field does not allow.
        """
        check_fields(self, self.registered_name)

    # --- input --------------------------------------------------------------------------------------------

    def refusal(self, side: NodeSide) -> str | None:
        """Return the reason why the attack cannot use any release of the run, or None.

        ``side.released_kinds()`` are the :class:`~fedstill.protocol.payload_kinds.PayloadKind` of all
        releases.
        """
        return None

    @property
    def transcript_rows(self) -> int:
        """Number of last rows of queries and responses that the attack needs."""
        return 0

    def keeps_release(self, release: ObservedRelease) -> bool:
        """Return whether the attack needs a release as a whole, in :attr:`Target.releases`."""
        return False

    # --- attack and report --------------------------------------------------------------------------------

    @abstractmethod
    def run(self, target: Target) -> AttackResult:
        """Attack a run.

        Raises:
            FedstillError: the attack does not apply to this run; the message is reported as the reason.
        """

    @abstractmethod
    def rows(self, part: Any) -> Iterable[LeakageMetric]:
        """Yield the metrics of the record from :meth:`run`, in the order of the report."""

    def sentence(self, part: Any) -> str:
        """Summarize the result for data owners, in one sentence with a full stop."""
        parts = [
            f"{' '.join(name for name in (row.attack, row.metric) if name)} of {row.target} {row.written}"
            + (f" (by chance {row.baseline})" if row.baseline else "")
            for row in self.rows(part)
            if not row.detail
        ]
        return f"{self.title}: {'; '.join(parts)}."

    def describe_strength(self, part: Any) -> str:
        """Describe the tried attacks and their strength in a few words."""
        variants = dict.fromkeys(row.attack for row in self.rows(part) if row.attack)
        return self.registered_name + (
            f" by {', '.join(variant.replace(', ', ' ') for variant in variants)}" if variants else ""
        )

    def explanations(self, part: Any) -> Sequence[tuple[str, str]]:
        """Return terms and explanations that the page shows before the metrics."""
        return ()

    def pictures(self, part: Any) -> Sequence[ImageTable]:
        """Return the images of :attr:`AttackResult.pictures` that the page shows."""
        return ()


ATTACKS: Registry[type[Attack]] = Registry(
    "attack",
    {
        "inversion": "fedstill.attacks.gradient_inversion:GradientInversion",
        "membership": "fedstill.attacks.membership_inference:MembershipInference",
        "memorization": "fedstill.attacks.memorization:Memorization",
        "counts": "fedstill.attacks.label_counts:LabelCounts",
        "labels": "fedstill.attacks.label_inference:LabelInference",
        "properties": "fedstill.attacks.property_inference:PropertyInference",
    },
    base=Attack,
)

Attack.registry = ATTACKS


# --- results ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LeakageMetric:
    """One metric of an attack; metrics with equal ``attack`` and ``target`` form one line of a table.

    Args:
        attack: variant of the attack; may be empty.
        target: name of a node, or "student".
        metric: name of the metric, such as "AUC".
        value: in the unit in which it is shown; None if only text describes it.
        interval: ends of its confidence interval, in the same unit.
        text: value as shown, with its unit; empty: the value with four digits.
        baseline: result without an attack, such as by guessing.
        note: small print.
        column: name of its :class:`ComparisonColumn` in comparisons.
        detail: shown on the page only, and not in terminals.
    """

    target: str
    metric: str
    attack: str = ""
    value: float | None = None
    interval: tuple[float, float] | None = None
    text: str = ""
    baseline: str = ""
    note: str = ""
    column: str = ""
    detail: bool = False

    @property
    def written(self) -> str:
        """The metric's value as text, without its note.

        >>> LeakageMetric(target="node-0", metric="right", value=0.51236).written
        '0.5124'
        """
        return self.text or ("-" if self.value is None else f"{self.value:.4g}")


@dataclass(frozen=True, kw_only=True)
class ComparisonColumn:
    """A metric that compares methods, for the strongest of the tried attacks.

    Args:
        name: in CSV files, and in :class:`LeakageMetric`.
        head: heading in terminals and Markdown, such as "membership AUC".
        title: heading on the page, with its unit: "Membership AUC %"; empty: same as ``head``.
        description: explanation in one sentence.
        digits: after the decimal point.
        lower_is_stronger: the smallest value is that of the strongest attack, as with p-values.
        guess: result of guessing in percent, drawn as a reference.
        axis: axis label of a figure of methods against this metric; empty: no figure.
    """

    name: str
    head: str
    title: str = ""
    description: str = ""
    digits: int = 1
    lower_is_stronger: bool = False
    guess: float | None = None
    axis: str = ""

    @property
    def heading(self) -> str:
        """Heading on the page."""
        return self.title or f"{self.head[:1].upper()}{self.head[1:]}"


@dataclass(frozen=True, kw_only=True)
class ImageStrip:
    """One row of images: its head, the name of its stack ``(N, C, H, W)`` uint8, and a caption below each."""

    head: str
    stack: str
    below: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImageTable:
    """Rows of images with one column for each of ``heads``; ``note`` is a warning to the reader."""

    title: str
    heads: tuple[str, ...]
    strips: tuple[ImageStrip, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class AttackReport:
    """Result of one attack; its fields have the meaning of those of
    :class:`fedstill.attacks.attack.Attack`.
    """

    name: str
    title: str = ""
    strength: str = ""
    about: tuple[tuple[str, str], ...] = ()
    rows: tuple[LeakageMetric, ...] = ()
    columns: tuple[ComparisonColumn, ...] = ()
    notes: tuple[str, ...] = ()
    pictures: tuple[ImageTable, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SkippedAttack:
    """An attack that was not possible, and the reason."""

    attack: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Leakage:
    """Results of all attacks on a run.

    Args:
        audit: difference between the replay and the run's audit log; None: none.
        epsilon: privacy guarantee of each node; None: there is none.
        config: attacks with their options, as a table.
    """

    audit: str | None
    attacks: tuple[AttackReport, ...] = ()
    skipped: tuple[SkippedAttack, ...] = ()
    sentence: str = ""
    releases: tuple[str, ...] = ()
    epsilon: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    machine: str = ""
    seconds: float | None = None

    @classmethod
    def read(cls, folder: Path) -> Leakage | None:
        """Read the results in a run's folder; None if the run was not attacked.

        Raises:
            RunFolderError: the file is damaged.
        """
        path = folder / LEAKAGE_FILE
        return read_received_dataclass(cls, read_result(path), path) if path.exists() else None


@dataclass(frozen=True)
class AttackMetricsLine:
    """Metrics of one attack on one target, by name."""

    attack: str
    target: str
    metrics: Mapping[str, LeakageMetric]


def group_metrics_into_lines(rows: Iterable[LeakageMetric]) -> list[AttackMetricsLine]:
    """Group metrics of one attack on one target into lines, in the order of their first ones."""
    metrics: dict[tuple[str, str], dict[str, LeakageMetric]] = {}
    for row in rows:
        metrics.setdefault((row.attack, row.target), {})[row.metric] = row
    return [AttackMetricsLine(attack, target, metrics) for (attack, target), metrics in metrics.items()]


def group_tables(lines: Sequence[AttackMetricsLine]) -> list[list[AttackMetricsLine]]:
    """Group consecutive lines with common metrics into tables.

    >>> right, auc = (LeakageMetric(target="student", metric=name) for name in ("right", "AUC"))
    >>> metrics = {"AUC": auc}, {"AUC": auc, "right": right}, {"right": right}, {}
    >>> lines = [AttackMetricsLine("LiRA", "student", each) for each in metrics]
    >>> [len(table) for table in group_tables(lines)]
    [3, 1]
    """
    tables: list[list[AttackMetricsLine]] = []
    for line in lines:
        if tables and any(line.metrics.keys() & previous.metrics.keys() for previous in tables[-1]):
            tables[-1].append(line)
        else:
            tables.append([line])
    return tables


def skipped_texts(leakage: Leakage) -> list[str]:
    """Return one text for each reason, with the attacks that were not possible for it."""
    reasons: dict[str, list[str]] = {}
    for part in leakage.skipped:
        reasons.setdefault(part.reason, []).append(part.attack)
    return [f"{', '.join(attacks)}: {reason}" for reason, attacks in reasons.items()]


def format_percent(value: float | None) -> str:
    """Format a share of 1 in percent.

    >>> format_percent(0.6141), format_percent(None)
    ('61.4%', '-')
    """
    return "-" if value is None else f"{100 * value:.1f}%"


def percent_fields(value: float, low: float, high: float) -> dict[str, Any]:
    """Return value, interval and text of a :class:`LeakageMetric` from shares of 1.

    >>> percent_fields(0.614, 0.58, 0.64)["text"]
    '61.4% (58.0 to 64.0)'
    """
    text = f"{format_percent(value)} ({100 * low:.1f} to {100 * high:.1f})"
    return {"value": 100 * value, "interval": (100 * low, 100 * high), "text": text}
