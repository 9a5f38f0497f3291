"""Rules that bound and noise one kind of tensor before its release, and state its privacy cost.

The protected unit is one record (or one group of records) of the node, added or removed. A rule's ``bound``
ensures that the unit cannot move the release further than is charged, whatever the networks compute: NaN
becomes 0, and infinity becomes a very large number. NaN is therefore never released, and reveals nothing.

A cost holds whatever queries and responses came before. If a server chooses the amount of its queries from
earlier responses, or the charge depends on the response (votes with a threshold), a budget as a hard limit
is sound under accountant "rdp" (Feldman, Zrnic, "Individual Privacy Accounting via a Renyi Filter", NeurIPS
2021), and for Gaussian noise alone under any exact one (Smith, Thakurta, "Fully Adaptive Composition for
Gaussian Differential Privacy", 2022).

The rule of votes is in ``pate.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

from fedstill.core.options import CheckedOptions, NonNegativeFloat, PositiveFloat, PositiveInt
from fedstill.privacy.clipping import CLIP_MARGIN, MAX_FLOAT32, clip_rows, row_count_and_size, to_finite
from fedstill.privacy.events import Event, PrivacyCost
from fedstill.privacy.noise import NoiseSampler, add_noise


class ReleaseRule(Protocol):
    """Protection of one tensor of a release.

    A custom rule subclasses it and implements ``text``, ``bound``, ``noise`` and ``cost``
    (docs/custom-mechanism.md).

    Attributes:
        noise_table: option table of the mechanism with this noise; "counts" and "other" have none.
    """

    noise_table: ClassVar[str] = "other"

    @property
    def text(self) -> str:
        """One-line description for the audit log and the report."""
        ...

    def bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bound a tensor so that one record cannot move it further than is charged.

        Args:
            tensor: any shape.

        Returns:
            The same shape, float32 (float64 for sums, to avoid rounding before the noise).
        """
        ...

    def noise(self, tensor: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
        """Add noise to a bounded tensor, and return the released one: float32, same shape and device.

        Args:
            tensor: result of :meth:`bound`.
            sampler: source of all randomness.
        """
        ...

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """Return the largest cost of a tensor of this shape, before its values are known; None: no
        guarantee.
        """
        ...

    def actual_cost(self, shape: Sequence[int], noised: torch.Tensor) -> PrivacyCost | None:
        """Return the actual privacy cost of a released tensor. At most :meth:`cost`, usually equal."""
        return self.cost(shape)


class _Unchanged(ReleaseRule, Protocol):
    """Base class of rules that release the tensor unchanged."""

    def bound(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def noise(self, tensor: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
        return tensor


@dataclass(frozen=True)
class Exact(_Unchanged):
    """Release without noise and without a guarantee."""

    @property
    def text(self) -> str:
        return "exact: no guarantee"

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """None: no guarantee, as opposed to an empty cost."""
        return None


@dataclass(frozen=True)
class Derived(_Unchanged):
    """Post-processing: the tensor follows from results that are already charged, and from no other use of
    the records.

    Post-processing is free (Dwork, Roth, "The Algorithmic Foundations of Differential Privacy", 2014, Prop.
    2.1).

    Args:
        source: description of these results, such as "a model trained with DP-SGD".
    """

    source: str

    @property
    def text(self) -> str:
        return f"follows from {self.source}, charged there"

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """Empty: no further cost."""
        return PrivacyCost()


@dataclass(frozen=True)
class NoisyCounts(CheckedOptions, ReleaseRule):
    """Counts of records, in total or by class, with Laplace noise, rounded to whole numbers of at least
    ``minimum``.

    Assumes that one record moves the tensor by ``sensitivity`` in L1 at most. That is 1 if a record counts
    once, or in parts that sum to 1 (an image's share of pixels of each class), and the number of labels if
    a record may have all of them. Noise of this scale then costs an epsilon of sensitivity / scale (Dwork,
    Roth 2014, Thm. 3.6), and a group of records as many times that. Rounding and clamping after the noise
    is post-processing. Counts are not rounded before the noise, as that could move every partial count by a
    whole one. At scale 0 there is no noise and no guarantee.

    Args:
        scale: of the Laplace noise; 0: no noise.
        group: number of records of one protected unit.
        sensitivity: L1 sensitivity to one record.
        minimum: smallest released count.
    """

    section: ClassVar[str] = "counts"
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
        """Counts from 0 up in float64: in float32, rounding could move sums of parts further than is
        charged.
        """
        return tensor.detach().double().nan_to_num(nan=0.0, posinf=MAX_FLOAT32, neginf=0.0).clamp(min=0)

    def noise(self, tensor: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
        """Noisy whole numbers, as servers refuse other counts."""
        if self.scale == 0:
            return tensor.float()
        return add_noise(tensor, sampler.laplace(tensor.shape), self.scale).round().clamp(min=self.minimum)

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """One event, whatever the number of classes."""
        if self.scale == 0:
            return None
        return PrivacyCost({Event("laplace", self.scale / (self.group * self.sensitivity)): 1})


@dataclass(frozen=True)
class NoisySums(CheckedOptions, ReleaseRule):
    """Sums over records, with Gaussian noise.

    Assumes that one record moves the M sums together by sqrt(M) in L2 at most, for example each of them by 1,
    and a group of records by as many times that. The noise on each sum has a standard deviation of
    ``noise_multiplier`` times that sensitivity: a Gaussian mechanism, whatever M is (Dwork, Roth 2014, App.
    A). At 0 there is no noise and no guarantee.

    Args:
        noise_multiplier: standard deviation of the noise divided by the sensitivity.
        group: number of records of one protected unit.
    """

    section: ClassVar[str] = "sums"
    noise_table: ClassVar[str] = "sums"

    noise_multiplier: NonNegativeFloat
    group: PositiveInt = 1

    @property
    def text(self) -> str:
        if self.noise_multiplier == 0:
            return Exact().text
        return (
            f"Gaussian noise of {self.noise_multiplier:g} times the square root of their number on each sum"
        )

    def bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Float64: rounding long sums to float32 before the noise could move them by more than one record
        does.
        """
        return tensor.detach().double().nan_to_num()

    def noise(self, tensor: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
        """Add noise to each sum."""
        return add_noise(
            tensor, sampler.normal(tensor.shape), self.noise_multiplier * math.sqrt(tensor.numel())
        )

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """One event, whatever the number of sums."""
        return (
            None
            if self.noise_multiplier == 0
            else PrivacyCost({Event("gaussian", self.noise_multiplier / self.group): 1})
        )


@dataclass(frozen=True)
class BoundedNoisyRows(CheckedOptions, ReleaseRule):
    """Bounded, noisy outputs of a network that was trained without protection.

    The influence of one record (or any number of them) on such a network is unknown, so a row may move as
    far as its bound allows: each of n values by 2 bound, or the row by 2 bound in L2.

    - laplace: L1 sensitivity 2 bound n a row. Each row is a separate event. The noise of a row costs no
      more than that of one number that moves as far (move its values one after another: Dong, Roth, Su,
      "Gaussian Differential Privacy", JRSS-B 2022, on groups; for Laplace noise the steps add up exactly).
    - gaussian: all B rows are one statistic that moves by 2 bound sqrt(B) in L2.

    Assumes nothing about data or network; the server may choose its queries adaptively.

    Args:
        distribution: "laplace" or "gaussian".
        scale: scale or standard deviation of the noise, in units of the outputs; 0: no noise, no guarantee.
        limit: largest magnitude of each value (laplace), or largest L2 norm of each row (gaussian); 0: no
            bound, and no guarantee whatever the noise.
    """

    section: ClassVar[str] = "outputs"
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
        """Clamp the values, or clip the rows."""
        if self.limit == 0:
            return tensor.detach().float()
        if self.distribution == "laplace":
            limit = self.limit * CLIP_MARGIN
            return to_finite(tensor).clamp(-limit, limit)
        return clip_rows(tensor, self.limit)

    def noise(self, tensor: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
        """Add noise to each value."""
        standard = sampler.laplace if self.distribution == "laplace" else sampler.normal
        return add_noise(tensor, standard(tensor.shape), self.scale)

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """One event for each row (laplace), or one for all of them (gaussian)."""
        rows, values = row_count_and_size(shape)
        if not self._has_guarantee:
            return None
        if rows * values == 0:
            return PrivacyCost()
        if self.distribution == "laplace":
            return PrivacyCost({Event("laplace", self.scale / (2 * self.limit * values)): rows})
        return PrivacyCost({Event("gaussian", self.scale / (2 * self.limit * math.sqrt(rows))): 1})


@dataclass(frozen=True)
class SanitizedGradients(CheckedOptions, ReleaseRule):
    """Input gradients of a query, clipped for each input and with Gaussian noise.

    Chen, Orekondy, Fritz, "GS-WGAN: A Gradient-Sanitized Approach for Learning Differentially Private
    Generators", NeurIPS 2020, Thm. 4.1: (lambda, 2 B lambda / sigma^2)-RDP for B inputs. A record may
    reverse an input's whole gradient, which is a change of 2 clip; all B inputs, as one statistic, change
    by 2 clip sqrt(B) in L2. Gaussian noise of sigma clip on that gives lambda (2 clip sqrt(B))^2 / (2
    (sigma clip)^2). Sampling gains nothing, as every gradient is of a network that has learned from every
    record.

    For m > 1 teachers on disjoint parts of the records, the tensor must be the mean of their gradients,
    each of them clipped for each input. One record moves one teacher's gradient, and so the mean by 2 clip
    / m. Clipping the mean again moves no two gradients further apart (a projection on a ball).

    Args:
        clip: largest L2 norm of an input's gradient, above 0.
        sigma: standard deviation of the noise on each number, divided by the clip; 0: no noise, no guarantee.
        teachers: m; 1: a network that was trained without protection.
    """

    section: ClassVar[str] = "gradients"
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
        """Clip the gradient of each input: ``(B, ...)``."""
        return clip_rows(tensor, self.clip)

    def noise(self, tensor: torch.Tensor, sampler: NoiseSampler) -> torch.Tensor:
        """Add Gaussian noise to each number."""
        return add_noise(tensor, sampler.normal(tensor.shape), self.sigma * self.clip)

    def cost(self, shape: Sequence[int]) -> PrivacyCost | None:
        """One event for all inputs."""
        rows, values = row_count_and_size(shape)
        if self.sigma == 0:
            return None
        if rows * values == 0:
            return PrivacyCost()
        return PrivacyCost({Event("gaussian", self.sigma * self.teachers / (2 * math.sqrt(rows))): 1})
