"""Interface of a link that carries messages to nodes, its errors, and sending with retries."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

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
from fedstill.protocol.messages import Envelope, Message
from fedstill.protocol.wire_format import Tensors, pack, unpack

ATTEMPTS = 5  # smallest number of times that a message is sent within the time that a node has
PAUSE = 0.5  # seconds between two attempts while nothing is connected


class LinkError(Exception):
    """A message could not be delivered, or no reply came in time."""


class ReplyTimeout(LinkError):
    """No reply came in time, for an unknown reason."""


class EndlessReply(LinkError):
    """A reply keeps arriving and does not end."""


class Unreachable(LinkError):
    """The node cannot be reached for as long as this link exists."""


class Link(Protocol):
    """Carries messages to nodes."""

    nodes: Sequence[str]

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        """Send a message to a node and return its reply.

        Raises:
            ReplyTimeout: no reply within ``seconds``.
            LinkError: the node cannot be reached.
        """
        ...


@dataclass(frozen=True)
class Reply:
    """A node's reply to one message.

    Args:
        body: JSON values.
        privacy: mechanism and privacy cost of the released tensors.
        tensors: tensors in wire format.
        node_seconds: seconds that the node computed.
        elapsed: seconds until the reply arrived.
    """

    body: Mapping[str, Any]
    privacy: ReleaseCost
    tensors: Tensors
    node_seconds: float
    elapsed: float


class MessageSender:
    """Sends the messages of one run from one server process over a link.

    Args:
        wait: seconds for each reply.
    """

    def __init__(self, link: Link, run: str, wait: float) -> None:
        self._link, self._run, self._wait = link, run, wait
        self._process, self._messages = secrets.token_hex(8), itertools.count()
        self.ended = threading.Event()  # set when the run has ended and no reply is awaited

    def pack(self, message: Message, tensors: Tensors | None = None) -> bytes:
        """Serialize a message with its number, which stays the same when it is sent again."""
        envelope = Envelope(self._run, self._process, next(self._messages))
        return pack(message.header(envelope), tensors)

    def send(self, node: str, message: Message, tensors: Tensors | None = None) -> Mapping[str, Any]:
        """Send a message that is no query, and return the JSON values of the reply."""
        return self.deliver(node, message.operation, self.pack(message, tensors)).body

    def deliver(self, node: str, query: str, message: bytes) -> Reply:
        """Send a packed message until a node replies or its time is over; return the reply.

        Raises:
            LinkError: no reply in time.
            DataError: the reply is malformed.
            FedstillError: the node refused, or failed.
        """
        start = time.monotonic()
        until = start + self._wait
        while True:
            left = until - time.monotonic()
            try:
                reply = self._link.call(node, message, max(min(left, self._wait / ATTEMPTS), 0.1))
                break
            except Unreachable:
                raise
            except LinkError as error:
                if until - time.monotonic() < PAUSE:
                    why = "" if isinstance(error, ReplyTimeout) else f": {error}"
                    raise LinkError(f"no answer within {self._wait:g} s (link.wait){why}") from error
                if self.ended.wait(PAUSE):
                    raise LinkError("the run is over") from error
        header, tensors = unpack(reply)
        reply_header, elapsed = parse_reply(ReplyHeader, header), time.monotonic() - start
        if reply_header.error is not None:
            raise reply_header.error.error(node, query)
        node_seconds = min(max(reply_header.seconds, 0.0), elapsed)
        body = reply_header.body
        return Reply(body, parse_release_cost(body), tensors, node_seconds, elapsed)


# --- parsing and validation of nodes' replies -----------------------------------------------------------

MAX_TEXT = 300  # characters that are kept of a text
MAX_DEPTH = 20  # lists and tables within each other
REFUSAL_WITHOUT_RULE = "its reply: it refuses without a rule"

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
        rule: policy rule by which a query was refused; a refusal without one is a malformed reply.
        number: number of a query that was reused with other content.
    """

    kind: str
    text: str = ""
    rule: str = ""
    number: int = -1

    def error(self, node: str, query: str) -> FedstillError:
        """Return the exception to raise at the server."""
        if self.kind == "QueryRefused":
            return QueryRefused(node, query, self.rule) if self.rule else DataError(REFUSAL_WITHOUT_RULE)
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
