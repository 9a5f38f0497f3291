"""PrivacyConfig, the base class of all privacy mechanisms, with the noise and budget options of a node's
owner.

A mechanism is a frozen dataclass below :class:`PrivacyConfig`. Its fields are the owner's options; its
methods define how releases are protected. The node's owner chooses the mechanism, never a server.
docs/custom-mechanism.md shows how to write one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from inspect import get_annotations
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar, get_type_hints

import torch
from annotated_types import Gt, Interval, MinLen
from torch import nn

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.core.options import CheckedOptions, Fraction, PositiveFloat, PositiveInt
from fedstill.core.registry import Registrable, Registry
from fedstill.privacy.release_rules import Exact, ReleaseRule
from fedstill.protocol.payload_kinds import PayloadKind
from fedstill.protocol.queries import Query
from fedstill.tasks import Task

Accountant = Literal["pld", "rdp"]
Epsilon = Annotated[float, Gt(0), "above 0, or inf (no budget)"]
Noise = Annotated[float, Interval(ge=0, lt=math.inf), "0 (none at all) or more"] | None
P = TypeVar("P", bound="PrivacyConfig")

# Assumptions that guarantees share, for reports.
POISSON = "each training step samples each record independently and in secret (Poisson sampling)"
COUNTED = "the number of records at the node counts as known"
NOT_CHOSEN = "initial weights, architecture and options were chosen without looking at the records"


class NoiseOptions(Protocol):
    """Option table of a mechanism whose noise is given, or calibrated to epsilon."""

    @property
    def noise(self) -> float | None:
        """Noise level; 0: no noise; None: calibrated to epsilon."""
        ...

    @property
    def share(self) -> float:
        """Relative share of the epsilon that is divided among all tables with calibrated noise."""
        ...


@dataclass(frozen=True)
class DeclaredRelease:
    """A tensor that a node would release, as its query declares it.

    Args:
        kind: payload kind of the tensor.
        is_input_gradient: it is a gradient with respect to the query's inputs.
        depends_on_records: it is computed from the node's records themselves (or is the gradient of such a
            tensor), and not from its networks alone.
        from_plugin: the method is a plug-in, which may compute the tensor in any way from what its category
            describes.
    """

    kind: PayloadKind
    is_input_gradient: bool
    depends_on_records: bool
    from_plugin: bool


@dataclass(frozen=True)
class DPTrainingConfig(CheckedOptions):
    """DP-SGD options of one network: Poisson sampling, per-example clipping, Gaussian noise."""

    noise: Noise = None
    """Noise multiplier: standard deviation of the noise on a sum of clipped gradients, divided by the clip;
    none: calibrated to privacy.epsilon.
    """
    clip: PositiveFloat = 1.0
    """Largest L2 norm of one example's gradient; longer ones are scaled down."""
    share: PositiveFloat = 1.0
    """Relative share of the epsilon that is divided among all tables whose noise is none."""


@dataclass(frozen=True)
class GradientsConfig(CheckedOptions):
    """Noise options of sanitized input gradients."""

    noise: Noise = None
    """Standard deviation of the Gaussian noise, divided by the clip; none: calibrated to privacy.epsilon."""
    clip: PositiveFloat = 1.0
    """Largest L2 norm of the gradient of one input."""
    share: PositiveFloat = 1.0
    """Relative share of the epsilon that is divided among all tables whose noise is none."""


@dataclass(frozen=True)
class SumsConfig(CheckedOptions):
    """Noise options of sums over records, such as those of a table's columns or of features."""

    noise: Noise = None
    """Standard deviation of the Gaussian noise, divided by the L2 sensitivity of all sums together (under a
    mechanism); 0: exact, no guarantee; none: calibrated to privacy.epsilon, and 4 without a budget."""
    share: PositiveFloat = 1.0
    """Relative share of the epsilon that is divided among all tables whose noise is none."""


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig(Registrable):
    """Privacy mechanism of a node, with its budgets.

    Attributes:
        about: description of the mechanism, for reports.
        assumes: assumptions of its guarantee.
        dp_trained: networks trained with DP-SGD, by role ("model", "critic"), each with the name of its
            :class:`DPTrainingConfig` field. Their training is charged; outputs that follow from them alone
            are free.
        protects: False if releases leave unprotected.

    Raises:
        ArgumentError: a value outside its range.
    """

    section: ClassVar[str] = "privacy"
    key: ClassVar[str] = "mechanism"
    default: ClassVar[str | None] = "none"
    same_meaning: ClassVar[bool] = True  # a table has the same meaning in all mechanisms that have it
    about: ClassVar[str]
    assumes: ClassVar[tuple[str, ...]] = ()
    dp_trained: ClassVar[Mapping[str, str]] = {}
    protects: ClassVar[bool] = True

    epsilon: Epsilon = math.inf
    """Epsilon that one run may spend, at delta; a query that would exceed it is refused. inf: no budget."""
    delta: Fraction = 1e-5
    """Delta of epsilon; choose it well below one over the number of records."""
    total_epsilon: Epsilon | None = None
    """Budget of all runs on these data together, at total_delta; none: same as epsilon. A larger one allows
    further runs. inf gives each run its own epsilon, although it is the server that names runs.
    """
    total_delta: Fraction | None = None
    """Delta of total_epsilon; none: same as delta."""
    accountant: Accountant = "pld"
    """pld is tighter; rdp also holds if the server chooses its queries from earlier responses."""
    group_size: PositiveInt = 1
    """Largest number of records of one protected unit: 1 protects each record; more protects each group of
    data.group, and further records of a group are left out.
    """
    randomness: Literal["secure", "seeded"] = "secure"
    """Generator of all noise. secure: cryptographic, keyed with the node's secret. seeded: faster, for
    simulations; its noise can be found by trying all seeds.
    """
    isolate_rounding: bool = False
    """Harden DP-SGD against a server that chooses parameters which amplify rounding errors. Examples are then
    computed so that no last bit of one depends on the others, which takes a test of each architecture and, if
    a network fails it, more time. false: the guarantee assumes that rounding carries nothing over.
    """
    audit_log: Annotated[str, MinLen(1), "the name of a file"] = "audit.sqlite"
    """Path of the audit log of all releases of these data and their costs, over all runs, relative to the
    folder of this file.
    """
    counts_noise: Annotated[float, Interval(ge=0, lt=math.inf), "0 (exact) or more"] = 10.0
    """Scale of the Laplace noise on each count of records (under a mechanism); 0: exact, no guarantee."""
    sums: SumsConfig = field(default_factory=SumsConfig)
    """Noise options of sums over records, which are the same in all mechanisms."""

    @property
    def total_budget(self) -> tuple[float, float]:
        """Epsilon and delta of the budget for all runs on these data together.

        >>> NoPrivacy(epsilon=3.0).total_budget, NoPrivacy(epsilon=3.0, total_epsilon=8.0).total_budget
        ((3.0, 1e-05), (8.0, 1e-05))
        """
        limit = self.epsilon if self.total_epsilon is None else self.total_epsilon
        return limit, self.delta if self.total_delta is None else self.total_delta

    def unit(self, group: str = "") -> str:
        """Describe the protected unit in a few words.

        Args:
            group: column with the group of each record.

        >>> NoPrivacy().unit("patient"), NoPrivacy(group_size=4).unit("patient")
        ('a record', '4 records of one patient')
        """
        one = self.group_size == 1
        return "a record" if one else f"{self.group_size} records of one {group or 'group'}"

    @staticmethod
    def validate_class(kind: Any) -> str | None:
        """Describe the class that is expected instead, or return None; option tables must support noise."""
        if problem := Registrable.validate_class(kind):
            return problem
        if not kind.about or not kind.protects:
            return "one that protects, with about: ClassVar[str], a description"
        try:
            tables = {name: table for name, table in get_type_hints(kind).items() if is_dataclass(table)}
        except NameError as error:
            return f"one whose fields have known types: {error}"
        for name, table in tables.items():
            if not {"noise", "share"} <= {part.name for part in fields(table)}:
                return f"one whose table {name} has fields noise and share"
        if kind.shard_indices is not PrivacyConfig.shard_indices and kind.ensemble is PrivacyConfig.ensemble:
            return "one with a method ensemble, because it has shards"
        for role, name in kind.dp_trained.items():
            if role not in ("model", "critic") or tables.get(name) is not DPTrainingConfig:
                return (
                    f"one whose model or critic learns as a DPTrainingConfig says, and not {role} as {name}"
                )
        return None

    # --- protection, defined by each mechanism --------------------------------------------------------

    def refusal(self, query: Query, task: Task) -> str | None:
        """Return the reason why the mechanism cannot protect a query, whatever the noise, or None."""
        return None

    def rule(self, release: DeclaredRelease, levels: Mapping[str, float]) -> ReleaseRule:
        """Return the rule that bounds and noises a tensor; :class:`Exact` gives no guarantee.

        Some releases are the same under every mechanism and never come here: counts of records and sums of
        columns (see ``counts_noise`` and ``sums``), and outputs of networks that are trained with
        DP-SGD.

        Args:
            release: tensor to release.
            levels: noise levels by option table.
        """
        return Exact()

    @property
    def protects_through_training(self) -> bool:
        """True if the protection depends on how the node's model, or an ensemble of it, is trained. If so,
        a model that was trained elsewhere is refused, as it may know every record.
        """
        return "model" in self.dp_trained or type(self).shard_indices is not PrivacyConfig.shard_indices

    def shard_indices(self, data: TensorData) -> Sequence[torch.Tensor]:
        """Return the records (int64 indices) of each model of an ensemble; empty: one model learns from all
        records.
        """
        return ()

    def ensemble(self, networks: Sequence[nn.Module]) -> nn.Module:
        """Combine the networks trained on the shards to the node's model. A mechanism with shards must
        override it.
        """
        return networks[0]

    # --- checks and facts, for reports ----------------------------------------------------------------

    def faults(self) -> list[ArgumentError]:
        """Return errors of option combinations that protect nothing, though each value by itself is
        allowed.
        """
        return []

    def facts(self, levels: Mapping[str, float]) -> Mapping[str, str]:
        """Return facts about the noise levels of a plan that the owner should know, by topic."""
        return {}

    # --- shared by all mechanisms ---------------------------------------------------------------------

    @property
    def noise_option_tables(self) -> Mapping[str, NoiseOptions]:
        """Option tables that have a noise level, by name. The first one is the mechanism's main table.

        >>> list(ResponseMechanism().noise_option_tables)
        ['critic', 'gradients', 'sums']
        """
        table_names = {field_.name for field_ in fields(self) if is_dataclass(getattr(self, field_.name))}
        names = (name for cls in type(self).__mro__ for name in get_annotations(cls))
        return {name: getattr(self, name) for name in names if name in table_names}

    def with_noise(self: P, levels: Mapping[str, float]) -> P:
        """Return a copy with other noise levels in some option tables."""
        noise_option_tables: Mapping[str, Any] = self.noise_option_tables
        changed: dict[str, Any] = {
            name: replace(noise_option_tables[name], noise=level) for name, level in levels.items()
        }
        return replace(self, **changed)

    @property
    def tightest_epsilon_budget(self) -> float:
        """Smaller epsilon of the two budgets, of a run and of all runs; inf: no budget."""
        return min(self.epsilon, self.total_budget[0])


@dataclass(frozen=True, kw_only=True)
class NoPrivacy(PrivacyConfig):
    """No protection: releases leave unchanged, without a guarantee."""

    about: ClassVar[str] = "releases leave as they are"
    protects: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class ResponseMechanism(PrivacyConfig):
    """Base class of mechanisms that protect the responses of networks, and not their training."""

    dp_trained: ClassVar[Mapping[str, str]] = {"critic": "critic"}

    critic: DPTrainingConfig = field(default_factory=DPTrainingConfig)
    """DP-SGD options of the node's critic, for methods that have one."""
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    """Noise options of gradients with respect to a query's inputs."""


MECHANISMS: Registry[type[PrivacyConfig]] = Registry(
    "mechanism",
    {
        "none": "fedstill.privacy.config:NoPrivacy",
        "dp-sgd": "fedstill.privacy.dpsgd:DPSGD",
        "pate": "fedstill.privacy.pate:PATE",
        "noisy-outputs": "fedstill.privacy.noisy_outputs:NoisyOutputs",
    },
    base=PrivacyConfig,
)

PrivacyConfig.registry = MECHANISMS
