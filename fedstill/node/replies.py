"""What a node replies: a form for each reply, which the node fills in and the server reads.

How a server reads them, as nobody vouches for a node's word, is in :mod:`fedstill.federation.replies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Interval, MaxLen

from fedstill.core.options import CheckedOptions, NonNegativeInt
from fedstill.privacy.statement import Statement

MAX_ITEMS = 1000  # entries that a list or table of a reply may have


@dataclass(frozen=True)
class NodeVersions(CheckedOptions):
    """Who a node is: versions of its software for the report, and the protocol that it speaks."""

    versions: Mapping[str, str]
    protocol: NonNegativeInt


@dataclass(frozen=True)
class NodeStatus(CheckedOptions):
    """A node that has joined: what it says of itself, and where it is.

    Args:
        refused_queries: the rule by which each query will be refused, by the query's name.
        max_queries: that it answers in this run, with those that it has answered; None: no limit.
        checkpoints: that it could go back to.
        last_query: number of the last query that it answered, -1 before the first.
        architecture: a fingerprint of its model's.
        needs_public_data: it cannot join before it gets the public data; then nothing else is known.
        versions: of its software, as it said before.
        privacy: how it says that it protects its records.
        notes: what is switched off there, and why.
    """

    refused_queries: Mapping[str, str]
    max_queries: NonNegativeInt | None
    is_trained: bool
    checkpoints: tuple[NonNegativeInt, ...]
    last_query: Annotated[int, Ge(-1)]
    model: str | None = None
    parameters: NonNegativeInt | None = None
    architecture: str = ""
    is_frozen: bool = False
    needs_public_data: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    privacy: Statement = field(default_factory=Statement)
    notes: Annotated[tuple[str, ...], MaxLen(10)] = ()


NOT_JOINED = NodeStatus({}, None, False, (), -1)  # is known of a node that has not joined


@dataclass(frozen=True)
class TrainingProgress(CheckedOptions):
    """How far a node's local training has come."""

    percent: Annotated[int, Interval(ge=0, le=100)]
    is_trained: bool


@dataclass(frozen=True)
class ReleaseCost(CheckedOptions):
    """Under which mechanism a release left, and at which price, as far as the node says it.

    Args:
        mechanism: its name; empty: not said.
        cost: events as text and how often each; None: no guarantee.
        history_hash: a fingerprint of what the node had answered before: the same query after something else is
            another release.
        release_hash: of what left, before masks, sealed by the node's secret; empty: it is not told apart.
    """

    mechanism: str = ""
    cost: Annotated[Mapping[str, int], MaxLen(100)] | None = None
    history_hash: str = ""
    release_hash: str = ""


@dataclass(frozen=True)
class ReleaseReply:
    """What a node tells with a release: how that left."""

    privacy: ReleaseCost = field(default_factory=ReleaseCost)


@dataclass(frozen=True)
class AgreementCodes(CheckedOptions):
    """What a node tells each other survivor of a sum, or reveals to the server: digits, by name."""

    codes: Annotated[Mapping[str, str], MaxLen(MOST)]


ReplyPayload = (
    NodeVersions | NodeStatus | TrainingProgress | ReleaseReply | AgreementCodes | None
)  # None: nothing, beside what leaves
