"""Interface of a link that carries messages to nodes, its errors, and sending with retries."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fedstill.federation.replies import ReplyHeader, parse_release_cost, parse_reply
from fedstill.node.replies import ReleaseCost
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
