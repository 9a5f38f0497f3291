"""Rules: how one kind of tensor is bounded and noised before it leaves a node, and what that costs.

The unit is one record (or one group of records) of the node, added or removed. A rule's ``bound`` makes sure
that it cannot move what leaves any further than is charged, whatever the networks answer: what is no number
is taken as 0, what is infinite as very large. So an answer's NaN does not leave either, and tells nothing.

A price holds whatever was asked and answered before. Where a server chooses how much to ask by what it was
told, or less is paid by what was told (the votes of a threshold), a budget that nothing may pass is sound
under accountant "rdp" (Feldman, Zrnic, "Individual Privacy Accounting via a Renyi Filter", NeurIPS 2021),
and for Gaussian noise alone under any exact one (Smith, Thakurta, "Fully Adaptive Composition for Gaussian
Differential Privacy", 2022).

The rule of votes is in ``pate.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

from fedstill.core.options import Checked, NonNegativeFloat, PositiveFloat, PositiveInt
from fedstill.privacy.clipping import CLIP_MARGIN, MAX_FLOAT32, clip_rows, count_rows, to_finite
from fedstill.privacy.events import Event, PrivacyCost
from fedstill.privacy.noise import NoiseSampler, add_noise


class Rule(Protocol):
    """What is done to one tensor of a release.

    Attributes:
        noise_table: the mechanism's table whose noise this is; "counts" and "other" have none.
    """

    noise_table: ClassVar[str] = "other"

    @property
    def text(self) -> str:
        """What is done, in one line for the audit log and the report."""
        ...

    def bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor such that one record can move it no further than is charged: float32, its shape."""
        ...

    def noise(self, tensor: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
        """A bounded tensor as it leaves: float32 on its device, its shape."""
        ...

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """The most that a tensor of this shape can cost, before it is known; None: no guarantee."""
        ...

    def actual_cost(self, shape: Sequence[int], noised: torch.Tensor) -> PrivacyCost | None:
        """What it has cost, by its shape and what leaves: no more than :meth:`cost`, and mostly that."""
        return self.cost(shape)


class _Unchanged(Rule, Protocol):
    """Nothing is done to the tensor."""

    def bound(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def noise(self, tensor: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
        return tensor


@dataclass(frozen=True)
class Exact(_Unchanged):
    """What leaves as it is, without any guarantee."""

    @property
    def text(self) -> str:
        return "exact: no guarantee"

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """None: no guarantee, which is not the same as nothing."""
        return None


@dataclass(frozen=True)
class Derived(_Unchanged):
    """What follows from something that is paid for already, and from nothing else of the records.

    Post-processing (Dwork, Roth, "The Algorithmic Foundations of Differential Privacy", 2014, Prop. 2.1).

    Args:
        of: what it follows from, as in "a model trained with DP-SGD".
    """

    of: str

    @property
    def text(self) -> str:
        return f"follows from {self.of}, paid for there"

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """Nothing more."""
        return PrivacyCost()


@dataclass(frozen=True)
class NoisyCounts(Checked, Rule):
    """Numbers of records, in all or by class, with Laplace noise, as whole numbers from ``minimum`` up.

    Assumes that one record moves the tensor by ``sensitivity`` in L1 at most: by 1 where it is counted once, or in
    parts that sum to 1 (an image's share of pixels of each class); by the number of labels where it may have
    all of them. Then noise of this scale costs an epsilon of moves / scale (Dwork, Roth 2014, Thm. 3.6), and
    a group of records costs as many times that. Rounding what is noisy, and leaving out what is below 0, is
    post-processing. Nothing is rounded before: of parts, that could move every count by a whole one. At scale
    0 there is no noise, and no guarantee.
    """

    under: ClassVar[str] = "counts"
    noise_table: ClassVar[str] = "counts"

    scale: NonNegativeFloat
    group: PositiveInt = 1
    sensitivity: PositiveFloat = 1.0
    minimum: int = 0

    @property
    def text(self) -> str:
        if self.scale == 0:
            return Exact().text
        several = f", a record counting in {self.sensitivity:g}" if self.sensitivity > 1 else ""
        return f"Laplace noise of scale {self.scale:g} on each count{several}"

    def bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Numbers from 0 up, in float64: rounded to float32, sums of parts move further than is charged."""
        return tensor.detach().double().nan_to_num(nan=0.0, posinf=MAX_FLOAT32, neginf=0.0).clamp(min=0)

    def noise(self, tensor: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
        """Whole numbers: servers refuse a number of examples that is none."""
        if self.scale == 0:
            return tensor.float()
        return add_noise(tensor, sampler.laplace(tensor.shape), self.scale).round().clamp(min=self.minimum)

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """One event, however many classes."""
        if self.scale == 0:
            return None
        return PrivacyCost({Event("laplace", self.scale / (self.group * self.sensitivity)): 1})


@dataclass(frozen=True)
class NoisySums(Checked, Rule):
    """Sums over records, with Gaussian noise.

    Assumes that one record moves each of the M numbers by 1 at most, so all together by sqrt(M) in L2 and a
    group of records by as many times that. The noise on each number has a standard deviation of ``noise``
    times what one record moves: a Gaussian mechanism of that noise over its sensitivity, whatever M is
    (Dwork, Roth 2014, App. A). At noise 0 there is none, and no guarantee.
    """

    under: ClassVar[str] = "sums"

    noise_multiplier: NonNegativeFloat
    group: PositiveInt = 1

    @property
    def text(self) -> str:
        if self.noise_multiplier == 0:
            return Exact().text
        return (
            f"Gaussian noise of {self.noise_multiplier:g} times the root of how many sums there are, on each"
        )

    def bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Float64: rounded to float32 before the noise, long sums would move by more than a record does."""
        return tensor.detach().double().nan_to_num()

    def noise(self, tensor: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
        """With noise on each number."""
        return add_noise(
            tensor, sampler.normal(tensor.shape), self.noise_multiplier * math.sqrt(tensor.numel())
        )

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """One event, however many sums."""
        return (
            None
            if self.noise_multiplier == 0
            else PrivacyCost({Event("gaussian", self.noise_multiplier / self.group): 1})
        )


@dataclass(frozen=True)
class NoisyRows(Checked, Rule):
    """Answers of a network that was trained without protection, bounded and with noise.

    Nothing is known of how far one record (or any number of them) moves such a network, so a row is taken to
    move as far as its bound lets it: each of n values by 2 bound, or the row by 2 bound in L2.

    - laplace: L1 sensitivity 2 bound n a row. Each row is an event of its own; a row's noise is no worse than
      that of one number that moves as far (let its values move one after another: Dong, Roth, Su,
      "Gaussian Differential Privacy", JRSS-B 2022, on groups; for Laplace noise the steps add up exactly).
    - gaussian: all B rows are one statistic that moves by 2 bound sqrt(B) in L2.

    Assumes nothing of data or network; the queries may be chosen by who asks.

    Args:
        distribution: laplace or gaussian.
        scale: of the noise: scale or standard deviation, in units of the answers; 0: none, no guarantee.
        limit: of each value's magnitude (laplace), or of each row's L2 norm (gaussian); 0: no bound, and
            no guarantee whatever the noise.
    """

    under: ClassVar[str] = "outputs"
    noise_table: ClassVar[str] = "outputs"

    distribution: Literal["laplace", "gaussian"]
    scale: NonNegativeFloat
    limit: NonNegativeFloat

    @property
    def text(self) -> str:
        bounded = "each value" if self.distribution == "laplace" else "each row's L2 norm"
        noise = f"{self.distribution.title()} noise of scale {self.scale:g}" if self.scale else "no noise"
        bound = f"{bounded} at most {self.limit:g}" if self.limit else "no bound"
        return f"{noise}, {bound}" + ("" if self._has_guarantee else ": no guarantee")

    @property
    def _has_guarantee(self) -> bool:
        return self.scale > 0 and self.limit > 0

    def bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Values or rows within the bound."""
        if self.limit == 0:
            return tensor.detach().float()
        if self.distribution == "laplace":
            limit = self.limit * CLIP_MARGIN
            return to_finite(tensor).clamp(-limit, limit)
        return clip_rows(tensor, self.limit)

    def noise(self, tensor: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
        """With noise on each value."""
        standard = sampler.laplace if self.distribution == "laplace" else sampler.normal
        return add_noise(tensor, standard(tensor.shape), self.scale)

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """An event for each row (laplace), or one for all of them (gaussian)."""
        rows, values = count_rows(shape)
        if not self._has_guarantee:
            return None
        if rows * values == 0:
            return PrivacyCost()
        if self.distribution == "laplace":
            return PrivacyCost({Event("laplace", self.scale / (2 * self.limit * values)): rows})
        return PrivacyCost({Event("gaussian", self.scale / (2 * self.limit * math.sqrt(rows))): 1})


@dataclass(frozen=True)
class SanitizedGradients(Checked, Rule):
    """Gradients with respect to each input of a query, clipped and with Gaussian noise.

    Chen, Orekondy, Fritz, "GS-WGAN: A Gradient-Sanitized Approach for Learning Differentially Private
    Generators", NeurIPS 2020, Thm. 4.1: (lambda, 2 B lambda / sigma^2)-RDP for B inputs. A record may turn
    an input's whole gradient round, by 2 clip; all B, as one statistic, by 2 clip sqrt(B) in L2. Gaussian
    noise of sigma clip on that is just this: lambda (2 clip sqrt(B))^2 / (2 (sigma clip)^2).
    Nothing is gained by sampling: every gradient is of a network that has seen every record.

    For m > 1 teachers on disjoint parts of the records, assumes the tensor to be the mean of their
    gradients, each of them clipped for each input: one record moves one teacher's, and the mean by
    2 clip / m. Clipping the mean once more moves no two gradients apart (a projection on a ball).

    Args:
        clip: largest L2 norm of an input's gradient, above 0.
        sigma: standard deviation of the noise on each number, over the clip; 0: none, no guarantee.
        teachers: m; 1: a network that was trained without protection.
    """

    under: ClassVar[str] = "gradients"
    noise_table: ClassVar[str] = "gradients"

    clip: PositiveFloat
    sigma: NonNegativeFloat
    teachers: PositiveInt = 1

    @property
    def text(self) -> str:
        mean = f"mean of {self.teachers} teachers' gradients, " if self.teachers > 1 else ""
        noise = f"Gaussian noise {self.sigma:g} x clip" if self.sigma else "no noise: no guarantee"
        return f"{mean}each input's clipped to {self.clip:g}, {noise}"

    def bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Each input's gradient within the clip: ``(B, ...)``."""
        return clip_rows(tensor, self.clip)

    def noise(self, tensor: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
        """With Gaussian noise on each number."""
        return add_noise(tensor, sampler.normal(tensor.shape), self.sigma * self.clip)

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """One event for all inputs."""
        rows, values = count_rows(shape)
        if self.sigma == 0:
            return None
        if rows * values == 0:
            return PrivacyCost()
        return PrivacyCost({Event("gaussian", self.sigma * self.teachers / (2 * math.sqrt(rows))): 1})
