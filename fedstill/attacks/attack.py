"""An attack: its options, what it gets of a finished run, and that in figures and words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from fedstill.attacks.leakage import ImageStrip, ImageTable, LeakageColumn, LeakageMetric
from fedstill.attacks.transcript import ObservedRelease, ObservedSimulation, ReplayedRun, ServerTranscript
from fedstill.core.options import check_fields
from fedstill.core.registry import Registrable, Registry
from fedstill.node.node import Node
from fedstill.protocol.queries import NodeSide
from fedstill.runs.config import RunConfig

__all__ = [
    "ATTACKS",
    "Attack",
    "AttackResult",
    "LeakageColumn",
    "LeakageMetric",
    "ImageTable",
    "ImageStrip",
    "Target",
]


@dataclass(frozen=True, eq=False)
class Target:
    """What an attack has of a run.

    What its adversary may know is :attr:`transcript`, :attr:`releases`, :attr:`student` and how the run was
    configured; the nodes' data are there to judge by, and to hold test data against.

    Args:
        replay: what the run was made of; ``replay.experiment()`` is it once more, before its start.
        experiment: it, at its end.
        transcript: queries and answers, and label counts, as they crossed the wire.
        releases: those that the attack keeps, in order.
        seed: of every random draw of the attack.
    """

    replay: ReplayedRun
    experiment: ObservedSimulation
    transcript: ServerTranscript
    releases: Sequence[ObservedRelease] = ()
    seed: int = 0

    @property
    def config(self) -> RunConfig:
        """How the run was configured: what everybody knows."""
        return self.replay.config

    @property
    def side(self) -> NodeSide:
        """What nodes were asked, and which kinds left."""
        return self.experiment.side

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes, with ``name`` and ``data``: the truth, to judge by."""
        return self.experiment.nodes

    @property
    def student(self) -> nn.Module | None:
        """The model that the run came to; None where its method has none."""
        return self.experiment.student if self.experiment.has_student else None


@dataclass(frozen=True, eq=False)
class AttackResult:
    """What an attack got.

    Args:
        part: of ``leakage.json``: whatever JSON can hold.
        pictures: stacks ``(N, C, H, W)`` uint8 for ``leakage.safetensors``, by name.
        skipped: what of it could not be tried, each with the reason.
    """

    part: Any
    pictures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    skipped: Sequence[tuple[str, str]] = ()


class Attack(Registrable, ABC):
    """An attack: a frozen dataclass whose fields are its options.

    :meth:`run` attacks; everything below it puts what was got into figures and words, from its part of
    ``leakage.json`` alone. Of these only :meth:`rows` must be written.

    Attributes:
        title: of its section on the page.
        columns: of comparisons.
        notes: how to read its figures, for the page.
        user_errors: arguments whose refusal is a mistake of whoever attacks, and no property of the run; any
            other refusal is written down as an attack that was not tried.
    """

    key: ClassVar[str] = ""
    title: ClassVar[str]
    columns: ClassVar[tuple[LeakageColumn, ...]] = ()
    notes: ClassVar[tuple[str, ...]] = ()
    user_errors: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Checks options; an attack that checks more calls this, too.

        Raises:
            ArgumentError: a value that the type of its field does not allow.
        """
        check_fields(self, self.registered_name)

    # --- what it hears ------------------------------------------------------------------------------------

    def refusal(self, side: NodeSide) -> str | None:
        """Why it cannot use anything of what leaves, or None.

        ``side.released_kinds()`` are the :class:`~fedstill.protocol.payload_kinds.PayloadKind` of all that leaves.
        """
        return None

    @property
    def transcript_rows(self) -> int:
        """Of queries about inputs and their answers, how many rows it looks at, the last ones."""
        return 0

    def keeps_release(self, release: ObservedRelease) -> bool:
        """Whether it wants a release as a whole; it then stands in :attr:`Target.releases`."""
        return False

    # --- what it does -------------------------------------------------------------------------------------

    @abstractmethod
    def run(self, target: Target) -> AttackResult:
        """Attack.

        Raises:
            FedstillError: it does not apply to this run; the line is the reason that is told.
        """

    @abstractmethod
    def rows(self, part: Any) -> Iterable[LeakageMetric]:
        """The figures, in the order of the report, of what :meth:`run` found."""

    def sentence(self, part: Any) -> str:
        """What was got, for whoever is in charge of the data, in a sentence with its full stop."""
        parts = [
            f"{' '.join(name for name in (row.attack, row.metric) if name)} of {row.target} {row.written}"
            + (f" (without it {row.baseline})" if row.baseline else "")
            for row in self.rows(part)
            if not row.detail
        ]
        return f"{self.title}: {'; '.join(parts)}."

    def strength(self, part: Any) -> str:
        """What was tried, and how strong it was, in a few words."""
        variants = dict.fromkeys(row.attack for row in self.rows(part) if row.attack)
        return self.registered_name + (
            f" by {', '.join(variant.replace(', ', ' ') for variant in variants)}" if variants else ""
        )

    def about(self, part: Any) -> Sequence[tuple[str, str]]:
        """What the page says before the figures: terms, and each in words."""
        return ()

    def pictures(self, part: Any) -> Sequence[ImageTable]:
        """What the page shows of the stacks of :attr:`Found.pictures`."""
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
