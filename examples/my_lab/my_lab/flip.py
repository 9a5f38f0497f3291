"""Randomized response (Warner, 1965): of each row of scores only a class is released, usually the best one.

The class is the best of C with probability e^eps / (e^eps + C - 1), and else one of the others at random. One
record makes no response more than e^eps times as likely: each row costs an epsilon of eps at delta 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F

from fedstill.privacy import (
    COUNTED,
    DeclaredRelease,
    Event,
    NoiseSampler,
    PrivacyConfig,
    PrivacyCost,
    Query,
    ReleaseRule,
    Task,
)


@dataclass(frozen=True)
class FlipConfig:
    noise: float | None = None
    """1 / epsilon of a row; None: calibrated to privacy.epsilon."""
    share: float = 1.0


@dataclass(frozen=True)
class Flipped(ReleaseRule):
    noise_table: ClassVar[str] = "flip"  # option table of Flip that sets the level
    level: float

    @property
    def text(self) -> str:
        return f"the best class of each row by randomized response, 1/epsilon {self.level:.4g}"

    def bound(self, tensor: torch.Tensor) -> torch.Tensor:  # (B, C) scores: 10 for the best class, else 0
        return 10.0 * F.one_hot(tensor.nan_to_num().argmax(1), tensor.shape[1])

    def noise(self, tensor: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
        best, C = tensor.argmax(1).cpu(), tensor.shape[1]
        keep, other = sampler.uniform((2, len(tensor)))
        flipped = keep * (1 + (C - 1) * math.exp(-1 / self.level) if self.level else 0) > 1
        return 10.0 * F.one_hot((best + flipped * (1 + (other * (C - 1)).long())) % C, C).to(tensor.device)

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        return PrivacyCost({Event("pure", self.level): shape[0]}) if self.level else None


@dataclass(frozen=True, kw_only=True)
class Flip(PrivacyConfig):
    about: ClassVar[str] = "the predicted class is released by randomized response"
    assumes: ClassVar[tuple[str, ...]] = ("the model releases nothing but flipped classes", COUNTED)
    flip: FlipConfig = field(default_factory=FlipConfig)

    def refusal(self, query: Query, task: Task) -> str | None:
        return None if task.kind == "class" else f"task {task.name} does not have one class for each input"

    def rule(self, release: DeclaredRelease, levels: Mapping[str, float]) -> ReleaseRule:
        scores = (
            release.kind.category == "scores"
            and not release.is_input_gradient
            and not release.depends_on_records
        )
        return Flipped(levels["flip"]) if scores else super().rule(release, levels)  # Exact: no guarantee
