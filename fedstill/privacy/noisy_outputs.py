"""Noisy outputs: each answer of a network that learned without protection is bounded, and gets noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, ClassVar, Literal

from annotated_types import Interval

from fedstill.core.errors import ArgumentError
from fedstill.core.options import Checked, PositiveFloat
from fedstill.privacy.config import (
    COUNTED,
    Noise,
    Release,
    ResponsesConfig,
)
from fedstill.privacy.release_rules import NoisyRows, Rule, SanitizedGradients
from fedstill.protocol.queries import Query
from fedstill.tasks import Task


@dataclass(frozen=True)
class OutputsConfig(Checked):
    """Noise on the outputs of a model that was trained without protection."""

    under: ClassVar[str] = "outputs"

    distribution: Literal["laplace", "gaussian"] = "laplace"
    """Which noise."""
    noise: Noise = None
    """Its scale (Laplace) or standard deviation (Gaussian), in units of the outputs; none: as much as
    privacy.epsilon asks for."""
    bound: Annotated[float, Interval(ge=0, lt=inf), "0 (none: no guarantee) or more"] = 0.0
    """Outputs are limited to this: each value (Laplace), or the L2 norm of a row (Gaussian). 0: no bound,
    and then no guarantee, whatever the noise."""
    share: PositiveFloat = 1.0
    """Of the epsilon that is divided among all whose noise is none, in parts."""


@dataclass(frozen=True, kw_only=True)
class NoisyOutputs(ResponsesConfig):
    """Noise on each answer."""

    about: ClassVar[str] = "its network learned without protection, and each answer has noise"
    assumes: ClassVar[tuple[str, ...]] = (
        "nothing of the model but its bounded, noisy outputs leaves",
        COUNTED,
    )

    outputs: OutputsConfig = field(default_factory=OutputsConfig)
    """Noise on answers."""

    def refusal(self, query: Query, task: Task) -> str | None:
        """Pictures."""
        scores = any(kind.category == "scores" for kind in query.releases.values())
        if scores and task.kind in ("map", "image"):
            return f"outputs of task {task.name} are pictures, and noise would hide them: take dp-sgd"
        return None

    def rule(self, release: Release, levels: Mapping[str, float]) -> Rule:
        """Scores, and other rows whatever they are computed from: a bound holds for either."""
        if release.is_input_gradient:
            return SanitizedGradients(self.gradients.clip, levels["gradients"])
        if release.kind.category == "rows" or (
            release.kind.category == "scores" and not release.depends_on_records
        ):
            return NoisyRows(self.outputs.distribution, levels["outputs"], self.outputs.bound)
        return super().rule(release, levels)

    def faults(self) -> list[ArgumentError]:
        """A budget without a bound."""
        if self.outputs.bound or math.isinf(self.budget):
            return []
        expected = "above 0, where a budget is set: without a bound noise guarantees nothing"
        return [ArgumentError("privacy.outputs.bound", self.outputs.bound, expected)]
