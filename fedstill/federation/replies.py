"""What nodes reply, read as soon as it arrives: of the right kind, in range, and no longer than it need be.

A node's word ends up in the run's state, its audit log and its report, and on a terminal. What is not of its
form is that node's fault, and goes no further. The forms, whose types say what is allowed, are the node's
(:mod:`fedstill.node.replies`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from fedstill.core.config_tables import load
from fedstill.core.errors import (
    ArgumentError,
    DataError,
    FedstillError,
    NodeFault,
    QueryMismatch,
    QueryRefused,
    RunFolderError,
)
from fedstill.core.text_format import clip
from fedstill.node.audit_entries import MAX_COUNT
from fedstill.node.replies import MAX_ITEMS, NOT_JOINED, NodeStatus, ReleaseCost, ReleaseReply
from fedstill.privacy.events import cost_from_dict, cost_to_dict

LONGEST = 300  # characters that are kept of a text
DEEPEST = 20  # lists and tables within each other

T = TypeVar("T")


def read_about(told: Mapping[str, Any], versions: Mapping[str, str]) -> About:
    """A reply to ``join`` of a node that runs these versions of its software.

    Raises:
        DataError: it is none.
    """
    if told.get("wants_public") is True:
        return replace(NOTHING, wants_public=True, versions=versions)
    return read(About, {**told, "versions": versions})


def read_paid(told: Mapping[str, Any]) -> Paid:
    """What a node says under ``privacy`` of how a release left.

    Raises:
        DataError: it says it in another form.

    >>> read_paid({"privacy": {"mechanism": "pate", "price": {"gaussian(2.0)": 1}}}).price
    {'gaussian(2.0)': 1}
    """
    paid = read(Released, told).privacy
    try:
        return paid if paid.price is None else replace(paid, price=cost_to_dict(cost_from_dict(paid.price)))
    except ArgumentError as error:
        raise DataError(f"price: {error}") from error


@dataclass(frozen=True)
class Failure:
    """An error at a node: its class, its text, by which rule a query was refused, or which number was
    reused."""

    kind: str
    text: str = ""
    rule: str = ""
    number: int = -1

    def error(self, node: str, query: str) -> FedstillError:
        """As it is raised at the server."""
        if self.kind == "QueryRefused":
            return QueryRefused(node, query, self.rule)
        if self.kind == "QueryMismatch":
            return QueryMismatch(node, query, self.number)
        return NodeFault(node, query, self.text)


@dataclass(frozen=True)
class Header:
    """What stands beside the tensors of a reply: what is told, or the error, and the node's own seconds."""

    told: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: Failure | None = None


def read(kind: type[T], told: Mapping[str, Any]) -> T:
    """A node's words (JSON values) as one of the forms; more than the form has is let go.

    Raises:
        DataError: they are not of that form.

    >>> from fedstill.node.replies import Progress
    >>> read(Progress, {"percent": 40, "learned": False, "mood": "good"})
    Progress(percent=40, learned=False)
    >>> read(Progress, {"percent": 140, "learned": False})
    Traceback (most recent call last):
    ...
    fedstill.core.errors.DataError: its reply: invalid percent = 140 (expected 0 or more and up to 100)
    """
    try:
        return load(kind, _cut(told, "all of it", DEEPEST), Path("its reply"))
    except RunFolderError as error:
        raise DataError(clip(str(error))) from error


def _cut(value: Any, name: str, deep: int) -> Any:
    """JSON values with texts cut to a length; what is beyond all measure is refused."""
    if isinstance(value, str):
        return clip(value, LONGEST)
    if isinstance(value, Mapping | list):
        if len(value) > MOST:
            raise DataError(f"its reply: {name} has {len(value)} entries (expected {MOST})")
        if not deep:
            raise DataError(f"its reply: {name} lies deeper than {DEEPEST} lists and tables")
    if isinstance(value, Mapping):
        return {clip(key, LONGEST): _cut(each, clip(key, 40), deep - 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_cut(each, name, deep - 1) for each in value]
    if isinstance(value, int | float) and not abs(value) <= LARGEST:  # NaN too is not below anything
        raise DataError(f"its reply: {name} is {clip(repr(value), 60)} (expected numbers up to {LARGEST})")
    return value
