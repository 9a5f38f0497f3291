"""PrivacyConfig, the base of all mechanisms, with the noise and the budget that a node's owner says.

A mechanism is a frozen dataclass below :class:`PrivacyConfig`: its fields are what an owner says, its methods
what it does to what leaves. The owner names it, never a server; docs/own-mechanism.md says how to write one.
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
from fedstill.core.options import Checked, Fraction, PositiveFloat, PositiveInt
from fedstill.core.registry import Registered, Registry
from fedstill.privacy.release_rules import Exact, Rule
from fedstill.protocol.payload_kinds import PayloadKind
from fedstill.protocol.queries import Query
from fedstill.tasks import Task

Accountant = Literal["pld", "rdp"]
Epsilon = Annotated[float, Gt(0), "above 0, or inf (no budget)"]
Noise = Annotated[float, Interval(ge=0, lt=math.inf), "0 (none at all) or more"] | None
P = TypeVar("P", bound="PrivacyConfig")

# What guarantees rest on, as mechanisms say it.
POISSON = "each training step draws each record by itself, and nobody learns which ones (Poisson sampling)"
COUNTED = "how many records the node has is taken as known"
NOT_CHOSEN = "first weights, architecture and options were not chosen by looking at the records"


class NoiseOptions(Protocol):
    """A table of a mechanism: noise that is given, or found from epsilon."""

    @property
    def noise(self) -> float | None:
        """As it is drawn; 0 is none; None: as much as epsilon asks for."""
        ...

    @property
    def share(self) -> float:
        """Of the epsilon that is divided among all whose noise is to be found, in parts."""
        ...


@dataclass(frozen=True)
class Release:
    """A tensor that would leave a node, as its query declares it.

    Args:
        kind: what it is of.
        is_input_gradient: it is a gradient that was pulled back to the query's inputs.
        depends_on_records: it is computed from the node's records themselves (or, pulled back, from what is), and not from
            its networks alone.
    """

    kind: PayloadKind
    is_input_gradient: bool
    depends_on_records: bool


@dataclass(frozen=True)
class DPTrainingConfig(Checked):
    """DP-SGD of one network: Poisson sampling, per-example clipping, Gaussian noise."""

    noise: Noise = None
    """Noise multiplier: standard deviation of the noise on a sum of clipped gradients over their clip; none:
    as much as privacy.epsilon asks for."""
    clip: PositiveFloat = 1.0
    """Largest L2 norm of one example's gradient; longer ones are shortened."""
    share: PositiveFloat = 1.0
    """Of the epsilon that is divided among all whose noise is none, in parts."""


@dataclass(frozen=True)
class GradientsConfig(Checked):
    """Sanitized gradients with respect to a query's inputs."""

    noise: Noise = None
    """Standard deviation of the Gaussian noise over the clip; none: as much as privacy.epsilon asks for."""
    clip: PositiveFloat = 1.0
    """Largest L2 norm of the gradient of one input."""
    share: PositiveFloat = 1.0
    """Of the epsilon that is divided among all whose noise is none, in parts."""


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig(Registered):
    """How a node protects its records, and how much of their privacy it may spend.

    Attributes:
        about: what the mechanism does, in words, for reports.
        assumes: on what its guarantee rests.
        dp_trained: the networks that learn with DP-SGD, by role ("model", "critic"), each with the field (a
            :class:`DPTrainingConfig`) that says how. All that follows from them alone is free; that they learn is
            paid for.
        protects: whether anything is done at all.

    Raises:
        ArgumentError: a value outside its range.
    """

    under: ClassVar[str] = "privacy"
    key: ClassVar[str] = "mechanism"
    default: ClassVar[str | None] = "none"
    alike: ClassVar[bool] = True  # tables of one name mean the same in all
    about: ClassVar[str]
    assumes: ClassVar[tuple[str, ...]] = ()
    dp_trained: ClassVar[Mapping[str, str]] = {}
    protects: ClassVar[bool] = True

    epsilon: Epsilon = math.inf
    """The most that one run may cost, at delta; what would cost more is refused. inf: no budget."""
    delta: Fraction = 1e-5
    """Of that epsilon; well below one over the number of records."""
    total_epsilon: Epsilon | None = None
    """The most that all runs about these data may cost together, at total_delta; none: as epsilon. More lets
    further runs be paid for; inf lets every run cost epsilon anew, and it is the server that names runs."""
    total_delta: Fraction | None = None
    """Of that epsilon; none: as delta."""
    accountant: Accountant = "pld"
    """pld is tighter; rdp holds too where the server chooses what to ask next by what it was told."""
    group_size: PositiveInt = 1
    """Records of one protected unit at most: 1 protects each record, more each group of data.group, of which
    further records are left out."""
    randomness: Literal["secure", "seeded"] = "secure"
    """Of all noise: a cryptographic generator keyed with the node's secret, or a faster one, for simulations,
    whose noise can be found by trying all seeds."""
    audit_log: Annotated[str, MinLen(1), "the name of a file"] = "audit.sqlite"
    """Where all that left these data, and what it cost, is written down, over all runs; from the folder of
    this file."""
    counts_noise: Annotated[float, Interval(ge=0, lt=math.inf), "0 (exact) or more"] = 10.0
    """Scale of the Laplace noise on each count of records (under a mechanism); 0: exact, no guarantee."""
    sums_noise: Annotated[float, Interval(ge=0, lt=math.inf), "0 (exact) or more"] = 4.0
    """Standard deviation of the Gaussian noise on sums of a table's columns, over how far one record can move
    all of them together, in L2 (under a mechanism); 0: exact, no guarantee."""

    @property
    def total_budget(self) -> tuple[float, float]:
        """The epsilon and delta that all runs about these data may cost together.

        >>> NoPrivacy(epsilon=3.0).total_budget, NoPrivacy(epsilon=3.0, total_epsilon=8.0).total_budget
        ((3.0, 1e-05), (8.0, 1e-05))
        """
        limit = self.epsilon if self.total_epsilon is None else self.total_epsilon
        return limit, self.delta if self.total_delta is None else self.total_delta

    def unit(self, group: str = "") -> str:
        """What is protected as one, in few words.

        Args:
            group: the column that says whose a record is.

        >>> NoPrivacy().unit("patient"), NoPrivacy(group_size=4).unit("patient")
        ('a record', '4 records of one patient')
        """
        one = self.group_size == 1
        return "a record" if one else f"{self.group_size} records of one {group or 'group'}"

    @staticmethod
    def lacks(kind: Any) -> str | None:
        """As of all that have a name; and its tables must be such as noise is found for."""
        if problem := Registered.lacks(kind):
            return problem
        if not kind.about or not kind.protects:
            return "one that protects, with about: ClassVar[str], what it does in words"
        try:
            tables = {name: table for name, table in get_type_hints(kind).items() if is_dataclass(table)}
        except NameError as error:
            return f"one whose fields have types that are known: {error}"
        for name, table in tables.items():
            if not {"noise", "share"} <= {part.name for part in fields(table)}:
                return f"one whose table {name} has fields noise and share"
        if kind.shards is not PrivacyConfig.shards and kind.ensemble is PrivacyConfig.ensemble:
            return "one with a method ensemble, as it has shards"
        for role, name in kind.dp_trained.items():
            if role not in ("model", "critic") or tables.get(name) is not DPTrainingConfig:
                return (
                    f"one whose model or critic learns as a DPTrainingConfig says, and not {role} as {name}"
                )
        return None

    # --- what a mechanism does ------------------------------------------------------------------------

    def refusal(self, query: Query, task: Task) -> str | None:
        """Why it cannot protect a query, whatever the noise, or None."""
        return None

    def rule(self, release: Release, levels: Mapping[str, float]) -> Rule:
        """How a tensor is bounded and noised, and what that costs; :class:`Exact`: it has no guarantee.

        Never asked for what is the same under every mechanism: counts of records and sums of columns, which
        get ``counts_noise`` and ``sums_noise``, and what follows from networks that learn with DP-SGD alone.

        Args:
            release: what would leave.
            levels: of noise, by table.
        """
        return Exact()

    @property
    def needs_training(self) -> bool:
        """Whether it protects by how the node's model learns, or copies of it on parts of records: then a
        model that is not trained here, and may know every record, is refused."""
        return "model" in self.dp_trained or type(self).shards is not PrivacyConfig.shards

    def shards(self, data: TensorData) -> Sequence[torch.Tensor]:
        """The records (int64 indices) that each of several copies of the node's model learns from, by itself;
        empty: there is one model, and it learns from all."""
        return ()

    def ensemble(self, networks: Sequence[nn.Module]) -> nn.Module:
        """What takes the place of the node's model, made of such copies; whoever has shards says it."""
        return networks[0]

    # --- what is said of it ---------------------------------------------------------------------------

    def faults(self) -> list[ArgumentError]:
        """What keeps it from protecting anything, though each value by itself is allowed."""
        return []

    def facts(self, levels: Mapping[str, float]) -> Mapping[str, str]:
        """What an owner should know of the noise that a plan came to, by a word for it."""
        return {}

    # --- of every mechanism ---------------------------------------------------------------------------

    @property
    def noise_tables(self) -> Mapping[str, NoiseOptions]:
        """Its tables by name: what noise is given for. The first is what it lives by.

        >>> list(NoPrivacy().noise_tables)
        []
        """
        table_names = {field_.name for field_ in fields(self) if is_dataclass(getattr(self, field_.name))}
        names = (name for cls in type(self).__mro__ for name in get_annotations(cls))
        return {name: getattr(self, name) for name in names if name in table_names}

    def with_noise(self: P, levels: Mapping[str, float]) -> P:
        """The same with other noise in some of its tables."""
        noise_tables: Mapping[str, Any] = self.noise_tables
        changed: dict[str, Any] = {
            name: replace(noise_tables[name], noise=level) for name, level in levels.items()
        }
        return replace(self, **changed)

    @property
    def budget(self) -> float:
        """The epsilon that limits a run, its own or that of all runs; inf: nothing does."""
        return min(self.epsilon, self.total_budget[0])


@dataclass(frozen=True, kw_only=True)
class NoPrivacy(PrivacyConfig):
    """Releases leave as they are, without any guarantee."""

    about: ClassVar[str] = "releases leave as they are"
    protects: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class ResponsesConfig(PrivacyConfig):
    """What mechanisms share that protect the answers of networks, and not how these learned."""

    dp_trained: ClassVar[Mapping[str, str]] = {"critic": "critic"}

    critic: DPTrainingConfig = field(default_factory=DPTrainingConfig)
    """How the node's critic learns, where a method has one."""
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    """What is pulled back to a query's inputs."""


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
