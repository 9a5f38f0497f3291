"""Noisy outputs: each output of a network trained without protection is bounded, and noise is added."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, ClassVar, Literal

from annotated_types import Interval

from fedstill.core.errors import ArgumentError
from fedstill.core.options import CheckedOptions, PositiveFloat
from fedstill.privacy.config import (
    COUNTED,
    DeclaredRelease,
    Noise,
    ResponseMechanism,
)
from fedstill.privacy.release_rules import BoundedNoisyRows, ReleaseRule, SanitizedGradients
from fedstill.protocol.queries import Query
from fedstill.tasks import Task


@dataclass(frozen=True)
class OutputsConfig(CheckedOptions):
    """Noise on the outputs of a model that was trained without protection."""

    section: ClassVar[str] = "outputs"

    distribution: Literal["laplace", "gaussian"] = "laplace"
    """Distribution of the noise."""
    noise: Noise = None
    """Scale (Laplace) or standard deviation (Gaussian), in units of the outputs; none: calibrated to
    privacy.epsilon.
    """
    bound: Annotated[float, Interval(ge=0, lt=inf), "0 (none: no guarantee) or more"] = 0.0
    """Largest magnitude of each value (Laplace), or largest L2 norm of a row (Gaussian). 0: no bound, and
    no guarantee whatever the noise.
    """
    share: PositiveFloat = 1.0
    """Relative share of the epsilon that is divided among all tables whose noise is none."""


@dataclass(frozen=True, kw_only=True)
class NoisyOutputs(ResponseMechanism):
    """Noise on each output of a network that was trained without protection."""

    about: ClassVar[str] = "its network learned without protection, and each output has noise"
    assumes: ClassVar[tuple[str, ...]] = (
        "the model releases nothing but its bounded, noisy outputs",
        COUNTED,
    )

    outputs: OutputsConfig = field(default_factory=OutputsConfig)
    """Noise on outputs."""

    def refusal(self, query: Query, task: Task) -> str | None:
        """Refuse the outputs of tasks with images or maps."""
        scores = any(kind.category == "scores" for kind in query.releases.values())
        if scores and task.kind in ("map", "image"):
            return f"outputs of task {task.name} are images, and noise would hide them: use dp-sgd"
        return None

    def rule(self, release: DeclaredRelease, levels: Mapping[str, float]) -> ReleaseRule:
        """Add noise to scores, and to other rows whatever they are computed from, as a bound holds for
        both.
        """
        if release.is_input_gradient:
            return SanitizedGradients(self.gradients.clip, levels["gradients"])
        if release.kind.category == "rows" or (
            release.kind.category == "scores" and not release.depends_on_records
        ):
            return BoundedNoisyRows(self.outputs.distribution, levels["outputs"], self.outputs.bound)
        return super().rule(release, levels)

    def faults(self) -> list[ArgumentError]:
        """Reject a budget without a bound on the outputs."""
        if self.outputs.bound or math.isinf(self.tightest_epsilon_budget):
            return []
        expected = "above 0 if a budget is set, as noise without a bound guarantees nothing"
        return [ArgumentError("privacy.outputs.bound", self.outputs.bound, expected)]
