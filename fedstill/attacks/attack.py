"""Base class of attacks on a run: their options, results, metrics and texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from fedstill.attacks.attack_results import ComparisonColumn, ImageStrip, ImageTable, LeakageMetric
from fedstill.attacks.transcript import ObservedRelease, ObservedSimulation, ReplayedRun, ServerTranscript
from fedstill.core.options import check_fields
from fedstill.core.registry import Registrable, Registry
from fedstill.node.node import Node
from fedstill.protocol.node_side import NodeSide
from fedstill.runs.spec import RunSpec

__all__ = [
    "ATTACKS",
    "Attack",
    "AttackResult",
    "ComparisonColumn",
    "ImageStrip",
    "ImageTable",
    "LeakageMetric",
    "Target",
]


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
    },
    base=Attack,
)


Attack.registry = ATTACKS
