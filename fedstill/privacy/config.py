"""What a node's owner says about privacy: the mechanism, its noise, and the budget that it may spend."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from fedstill.core.choices import check_choices
from fedstill.core.errors import ArgumentError

Accountant = Literal["pld", "rdp"]


@dataclass(frozen=True)
class StepsConfig:
    """DP-SGD of one network: Poisson sampling, per-example clipping, Gaussian noise."""

    noise: float | None = None
    """Noise multiplier: standard deviation of the noise on a sum of clipped gradients over their clip; none:
    as much as privacy.epsilon asks for."""
    clip: float = 1.0
    """Largest L2 norm of one example's gradient; longer ones are shortened."""
    share: float = 1.0
    """Of the epsilon that is divided among all whose noise is none, in parts."""

    def __post_init__(self) -> None:
        _noise(self.noise)
        _positive(self, "clip", "share")


@dataclass(frozen=True)
class PateConfig:
    """PATE at the node: teachers on disjoint parts of its data, and noisy votes."""

    teachers: int = 10
    """How many; each has its own part of the records."""
    noise: float | None = None
    """Standard deviation of the Gaussian noise on the votes for each class; none: as much as
    privacy.epsilon asks for."""
    release: Literal["votes", "label"] = "votes"
    """What leaves: all noisy votes, or only the class with the most (GNMax). They cost the same."""
    threshold: float = 0.0
    """Answer only where the most votes, with noise of their own, reach this number (Confident-GNMax);
    elsewhere nothing is said of any class. 0: answer everywhere."""
    threshold_noise: float = 10.0
    """Standard deviation of that noise, in votes."""
    sharpness: float = 10.0
    """Votes are told as logits: this number times their share."""
    data_dependent: bool = False
    """Also compute what the labels have cost by the votes themselves (release = "label"). For your eyes only:
    that figure tells of the votes. No budget goes by it."""
    share: float = 1.0
    """Of the epsilon that is divided among all whose noise is none, in parts."""

    def __post_init__(self) -> None:
        check_choices(self, "pate")
        _noise(self.noise)
        _positive(self, "sharpness", "threshold_noise", "share")
        if self.data_dependent and self.release != "label":
            raise ArgumentError("pate.data_dependent", True, 'false, unless pate.release = "label"')
        if self.teachers < 1:
            raise ArgumentError("pate.teachers", self.teachers, "1 or more")
        if not 0 <= self.threshold < math.inf:
            raise ArgumentError("pate.threshold", self.threshold, "0 (answer everywhere) or more")


@dataclass(frozen=True)
class GradientsConfig:
    """Sanitised gradients with respect to a question's inputs."""

    noise: float | None = None
    """Standard deviation of the Gaussian noise over the clip; none: as much as privacy.epsilon asks for."""
    clip: float = 1.0
    """Largest L2 norm of the gradient of one input."""
    share: float = 1.0
    """Of the epsilon that is divided among all whose noise is none, in parts."""

    def __post_init__(self) -> None:
        _noise(self.noise)
        _positive(self, "clip", "share")


@dataclass(frozen=True)
class OutputsConfig:
    """Noise on the outputs of a model that was trained without protection."""

    how: Literal["laplace", "gaussian"] = "laplace"
    """Which noise."""
    noise: float | None = None
    """Its scale (Laplace) or standard deviation (Gaussian), in units of the outputs; none: as much as
    privacy.epsilon asks for."""
    bound: float = 0.0
    """Outputs are limited to this: each value (Laplace), or the L2 norm of a row (Gaussian). 0: no bound,
    and then no guarantee, whatever the noise."""
    share: float = 1.0
    """Of the epsilon that is divided among all whose noise is none, in parts."""

    def __post_init__(self) -> None:
        check_choices(self, "outputs")
        _noise(self.noise)
        _positive(self, "share")
        if not 0 <= self.bound < math.inf:
            raise ArgumentError("outputs.bound", self.bound, "0 (none: no guarantee) or more")


@dataclass(frozen=True)
class PrivacyConfig:
    """How a node protects its records, and how much of their privacy it may spend.

    Raises:
        ArgumentError: a value outside its range.

    >>> PrivacyConfig("dp-sgd", epsilon=3.0, training=StepsConfig(clip=0.5)).training.clip
    0.5
    """

    mechanism: Literal["none", "dp-sgd", "pate", "noisy-outputs"] = "none"
    """none: releases leave as they are, without any guarantee. dp-sgd: its networks learn with DP-SGD, and
    what follows from them is free. pate: noisy votes of teachers on disjoint parts of the data.
    noisy-outputs: noise on each answer."""
    epsilon: float = math.inf
    """The most that one run may cost, at delta; what would cost more is refused. inf: no budget."""
    delta: float = 1e-5
    """Of that epsilon; well below one over the number of records."""
    total_epsilon: float | None = None
    """The most that all runs about these data may cost together, at total_delta; none: as epsilon. More lets
    further runs be paid for; inf lets every run cost epsilon anew, and it is the server that names runs."""
    total_delta: float | None = None
    """Of that epsilon; none: as delta."""
    accountant: Accountant = "pld"
    """pld is tighter; rdp holds too where the server chooses what to ask next by what it was told."""
    group_size: int = 1
    """Records of one protected unit at most: 1 protects each record, more each group of data.group, of which
    further records are left out."""
    randomness: Literal["secure", "seeded"] = "secure"
    """Of all noise: a cryptographic generator keyed with the node's secret, or a faster one, for simulations,
    whose noise can be found by trying all seeds."""
    ledger: str = "ledger.sqlite"
    """Where all that these data have cost is kept, over all runs; from the folder of this file."""
    counts_noise: float = 10.0
    """Scale of the Laplace noise on each count of records (under a mechanism); 0: exact, no guarantee."""
    training: StepsConfig = field(default_factory=StepsConfig)
    """How the node's model learns (dp-sgd)."""
    critic: StepsConfig = field(default_factory=StepsConfig)
    """How its critic learns, where a method has one (all mechanisms)."""
    pate: PateConfig = field(default_factory=PateConfig)
    """Teachers and votes (pate)."""
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    """What is pulled back to a question's inputs (pate, noisy-outputs)."""
    outputs: OutputsConfig = field(default_factory=OutputsConfig)
    """Noise on answers (noisy-outputs)."""

    def __post_init__(self) -> None:
        check_choices(self, "privacy")
        most, delta = self.over_all
        for name, value in (("epsilon", self.epsilon), ("total_epsilon", most)):
            if not value > 0:
                raise ArgumentError(f"privacy.{name}", value, "above 0, or inf (no budget)")
        for name, value in (("delta", self.delta), ("total_delta", delta)):
            if not 0 < value < 1:
                raise ArgumentError(f"privacy.{name}", value, "above 0 and below 1")
        if self.group_size < 1:
            raise ArgumentError("privacy.group_size", self.group_size, "1 or more")
        if not 0 <= self.counts_noise < math.inf:
            raise ArgumentError("privacy.counts_noise", self.counts_noise, "0 (exact) or more")
        if not self.ledger:
            raise ArgumentError("privacy.ledger", self.ledger, "the name of a file")

    @property
    def over_all(self) -> tuple[float, float]:
        """The epsilon and delta that all runs about these data may cost together.

        >>> PrivacyConfig(epsilon=3.0).over_all, PrivacyConfig(epsilon=3.0, total_epsilon=8.0).over_all
        ((3.0, 1e-05), (8.0, 1e-05))
        """
        most = self.epsilon if self.total_epsilon is None else self.total_epsilon
        return most, self.delta if self.total_delta is None else self.total_delta


def _noise(value: float | None) -> None:
    if value is not None and not 0 <= value < math.inf:
        raise ArgumentError("noise", value, "0 (none at all) or more, or none (from privacy.epsilon)")


def _positive(config: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(config, name) < math.inf:
            raise ArgumentError(name, getattr(config, name), "above 0")
