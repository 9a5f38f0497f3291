"""PATE: noisy votes of teachers on disjoint parts of the records.

Papernot et al., "Scalable Private Learning with PATE", ICLR 2018: GNMax, and with a
threshold Confident-GNMax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Interval
from torch import nn

from fedstill.core.checked import Checked, PositiveFloat, PositiveInt
from fedstill.core.dataset import TensorData
from fedstill.privacy.config import (
    COUNTED,
    NOT_CHOSEN,
    AnswersConfig,
    Noise,
    Release,
)
from fedstill.privacy.rules import Rule, Sanitised
from fedstill.privacy.teachers import Teachers, shards
from fedstill.privacy.votes import Votes
from fedstill.protocol.questions import Question
from fedstill.tasks import Task

DROWNED = (
    "the votes are almost all noise: more records and teachers, fewer questions, a larger epsilon, or dp-sgd"
)


@dataclass(frozen=True)
class PateConfig(Checked):
    """PATE at the node: teachers on disjoint parts of its data, and noisy votes."""

    under: ClassVar[str] = "pate"

    teachers: PositiveInt = 10
    """How many; each has its own part of the records."""
    noise: Noise = None
    """Standard deviation of the Gaussian noise on the votes for each class; none: as much as
    privacy.epsilon asks for."""
    release: Literal["votes", "label"] = "votes"
    """What leaves: all noisy votes, or only the class with the most (GNMax). They cost the same."""
    threshold: Annotated[float, Interval(ge=0, lt=inf), "0 (answer everywhere) or more"] = 0.0
    """Answer only where the most votes, with noise of their own, reach this number (Confident-GNMax);
    elsewhere nothing is said of any class. 0: answer everywhere."""
    threshold_noise: PositiveFloat = 10.0
    """Standard deviation of that noise, in votes."""
    sharpness: PositiveFloat = 10.0
    """Votes are told as logits: this number times their share."""
    share: PositiveFloat = 1.0
    """Of the epsilon that is divided among all whose noise is none, in parts."""


@dataclass(frozen=True, kw_only=True)
class PATE(AnswersConfig):
    """Noisy votes of teachers on disjoint parts of the data."""

    about: ClassVar[str] = "noisy votes of teachers, each of whom learned from its own part of the records"
    assumes: ClassVar[tuple[str, ...]] = (
        "each record belongs to one teacher, which nobody else's records decide",
        f"{COUNTED}: where a critic learns, the rate at which it draws them tells it",
        NOT_CHOSEN,
    )

    pate: PateConfig = field(default_factory=PateConfig)
    """Teachers and votes."""

    def refusal(self, question: Question, task: Task) -> str | None:
        """Training in rounds, and tasks in which there is nothing to vote for."""
        if question.span is not None:
            return "teachers learn once, before the first question, and this one trains the model"
        if task.kind != "class" and any(kind.of != "counts" for kind in question.releases.values()):
            return f"teachers vote for one class an input, which task {task.name} has not: take dp-sgd"
        return None

    def rule(self, release: Release, levels: Mapping[str, float]) -> Rule:
        """Votes, and the mean of the teachers' gradients."""
        pate = self.pate
        if release.pulled:
            # One that carries records carries all of them, whoever's they are.
            teachers = 1 if release.reads else pate.teachers
            return Sanitised(self.gradients.clip, levels["gradients"], teachers)
        if release.kind.of == "scores" and not release.reads:
            threshold = pate.threshold, pate.threshold_noise
            return Votes(pate.teachers, levels["pate"], pate.release, *threshold, pate.sharpness)
        return super().rule(release, levels)

    def shards(self, data: TensorData) -> Sequence[torch.Tensor]:
        """By a hash of what a record is."""
        return shards(data, self.pate.teachers)

    def ensemble(self, networks: Sequence[nn.Module]) -> nn.Module:
        """Teachers, who vote."""
        return Teachers(networks, self.pate.sharpness, self.gradients.clip)

    def facts(self, levels: Mapping[str, float]) -> Mapping[str, str]:
        """Whether anything is left of the votes."""
        noise, teachers = levels["pate"], self.pate.teachers
        told = f"noise {noise:.4g} on the votes of {teachers} teachers"
        return {"votes": f"{told}: {DROWNED}" if noise >= teachers / 2 else told} if noise else {}
