"""Replies of a node to the server's messages.

The server does not trust these values; it checks them in :mod:`fedstill.federation.transport`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Interval, MaxLen

from fedstill.core.options import CheckedOptions, NonNegativeInt
from fedstill.privacy.statement import PrivacyStatement

MAX_ITEMS = 1000  # entries of a list or table


@dataclass(frozen=True)
class NodeVersions(CheckedOptions):
    """Versions of a node's software and of its protocol."""

    versions: Mapping[str, str]
    protocol: NonNegativeInt


@dataclass(frozen=True)
class NodeStatus(CheckedOptions):
    """Status of a node that has joined a run.

    Args:
        refused_queries: the rule that refuses a query, by the query's name.
        max_queries: number of queries that it accepts in this run, including past ones; None: no limit.
        is_trained: whether local training before the first query is done.
        checkpoints: query numbers of its checkpoints.
        last_query: number of the last query, -1 before the first.
        model: class of its model.
        parameters: number of the model's parameters.
        architecture: fingerprint of the model's architecture.
        is_frozen: whether no parameter is trained.
        needs_public_data: whether it cannot join before it gets the public data; then nothing else is
            known.
        versions: versions of its software.
        privacy: statement of its privacy mechanism.
        notes: features that are switched off there, and why.
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
    privacy: PrivacyStatement = field(default_factory=PrivacyStatement)
    notes: Annotated[tuple[str, ...], MaxLen(10)] = ()


NOT_JOINED = NodeStatus({}, None, False, (), -1)  # status before joining


@dataclass(frozen=True)
class TrainingProgress(CheckedOptions):
    """Progress of a node's local training, in percent."""

    percent: Annotated[int, Interval(ge=0, le=100)]
    is_trained: bool


@dataclass(frozen=True)
class ReleaseCost(CheckedOptions):
    """Mechanism and privacy cost of a release, as the node states them.

    Args:
        mechanism: name of the mechanism; empty: not stated.
        cost: number of uses of each event, by the event's text; None: no guarantee.
        history_hash: hash of the node's history before the release. The same query after another history is
            another release.
        release_hash: sealed hash of the release before masks; empty: not given.
    """

    mechanism: str = ""
    cost: Annotated[Mapping[str, int], MaxLen(100)] | None = None
    history_hash: str = ""
    release_hash: str = ""


@dataclass(frozen=True)
class ReleaseReply:
    """Reply to a query or to output gradients, in addition to the released tensors."""

    privacy: ReleaseCost = field(default_factory=ReleaseCost)


@dataclass(frozen=True)
class AgreementCodes(CheckedOptions):
    """Codes of secure aggregation by node name: confirmations for other survivors, or revealed keys."""

    codes: Annotated[Mapping[str, str], MaxLen(MAX_ITEMS)]


ReplyPayload = (
    NodeVersions | NodeStatus | TrainingProgress | ReleaseReply | AgreementCodes | None
)  # None: only released tensors
