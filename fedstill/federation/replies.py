"""Parsing and validation of nodes' replies as soon as they arrive.

Values from nodes end up in checkpoints, audit logs, reports and terminals. A reply with values of a wrong
type, out of range or too long is rejected as the node's fault. The dataclasses of
:mod:`fedstill.node.replies` define the valid types and ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from fedstill.core.config_tables import read_received_dataclass
from fedstill.core.errors import (
    ArgumentError,
    DataError,
    FedstillError,
    NodeFault,
    QueryMismatch,
    QueryRefused,
    RunFolderError,
)
from fedstill.core.text_format import to_printable_line
from fedstill.node.audit_entries import MAX_COUNT
from fedstill.node.replies import MAX_ITEMS, NOT_JOINED, NodeStatus, ReleaseCost, ReleaseReply
from fedstill.privacy.events import cost_from_dict, cost_to_dict

MAX_TEXT = 300  # characters that are kept of a text
MAX_DEPTH = 20  # lists and tables within each other

T = TypeVar("T")


def parse_node_status(body: Mapping[str, Any], versions: Mapping[str, str]) -> NodeStatus:
    """Parse a node's reply to ``join``.

    Args:
        body: JSON values of the reply.
        versions: versions of the node's software.

    Raises:
        DataError: the reply is malformed.
    """
    if body.get("needs_public_data") is True:
        return replace(NOT_JOINED, needs_public_data=True, versions=versions)
    return parse_reply(NodeStatus, {**body, "versions": versions})


def parse_release_cost(body: Mapping[str, Any]) -> ReleaseCost:
    """Parse the entry ``privacy`` of a reply: the mechanism and the privacy cost of a release.

    Raises:
        DataError: it is malformed.

    >>> parse_release_cost({"privacy": {"mechanism": "pate", "cost": {"gaussian(2.0)": 1}}}).cost
    {'gaussian(2.0)': 1}
    """
    release = parse_reply(ReleaseReply, body).privacy
    try:
        return (
            release
            if release.cost is None
            else replace(release, cost=cost_to_dict(cost_from_dict(release.cost)))
        )
    except ArgumentError as error:
        raise DataError(f"cost: {error}") from error


@dataclass(frozen=True)
class Failure:
    """An error at a node, as the node reports it.

    Args:
        kind: name of the error's class.
        text: its message.
        rule: policy rule by which a query was refused.
        number: number of a query that was reused with other content.
    """

    kind: str
    text: str = ""
    rule: str = ""
    number: int = -1

    def error(self, node: str, query: str) -> FedstillError:
        """Return the exception to raise at the server."""
        if self.kind == "QueryRefused":
            return QueryRefused(node, query, self.rule)
        if self.kind == "QueryMismatch":
            return QueryMismatch(node, query, self.number)
        return NodeFault(node, query, self.text)


@dataclass(frozen=True)
class ReplyHeader:
    """Header of a reply: JSON values or an error, and the seconds that the node computed."""

    body: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: Failure | None = None


def parse_reply(kind: type[T], body: Mapping[str, Any]) -> T:
    """Parse a node's JSON values as a dataclass; unknown keys are ignored.

    Args:
        kind: the dataclass.

    Raises:
        DataError: a value is missing, of a wrong type or out of range.

    >>> from fedstill.node.replies import TrainingProgress
    >>> parse_reply(TrainingProgress, {"percent": 40, "is_trained": False, "mood": "good"})
    TrainingProgress(percent=40, is_trained=False)
    >>> parse_reply(TrainingProgress, {"percent": 140, "is_trained": False})
    Traceback (most recent call last):
    ...
    fedstill.core.errors.DataError: its reply: percent is 140 (expected 0 or more and up to 100)
    """
    try:
        return read_received_dataclass(
            kind, _truncate_or_refuse(body, "all of it", MAX_DEPTH), Path("its reply")
        )
    except RunFolderError as error:
        raise DataError(to_printable_line(str(error))) from error


def _truncate_or_refuse(value: Any, name: str, deep: int) -> Any:
    """Truncate texts; refuse too many entries, too deep nesting and too large numbers."""
    if isinstance(value, str):
        return to_printable_line(value, MAX_TEXT)
    if isinstance(value, Mapping | list):
        if len(value) > MAX_ITEMS:
            raise DataError(f"its reply: {name} has {len(value)} entries (expected {MAX_ITEMS})")
        if not deep:
            raise DataError(f"its reply: {name} lies deeper than {MAX_DEPTH} lists and tables")
    if isinstance(value, Mapping):
        return {
            to_printable_line(key, MAX_TEXT): _truncate_or_refuse(each, to_printable_line(key, 40), deep - 1)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_truncate_or_refuse(each, name, deep - 1) for each in value]
    if isinstance(value, int | float) and not abs(value) <= MAX_COUNT:  # NaN too is not below anything
        raise DataError(
            f"its reply: {name} is {to_printable_line(repr(value), 60)} (expected numbers up to {MAX_COUNT})"
        )
    return value
