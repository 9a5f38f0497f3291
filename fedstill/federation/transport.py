"""What carries messages to nodes, whatever it is made of, and how it fails; and one message on its way."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fedstill.federation.replies import Header, read, read_paid
from fedstill.node.replies import ReleaseCost
from fedstill.protocol.messages import Envelope, Message
from fedstill.protocol.wire_format import Tensors, pack, unpack

ATTEMPTS = 5  # at least so often is a message sent again while a node has time to answer
PAUSE = 0.5  # seconds between two attempts where nothing is connected


class LinkError(Exception):
    """A message found no way, or no answer came in time."""


class ReplyTimeout(LinkError):
    """No answer came in time; nothing else is known of why."""


class UnfinishedReply(LinkError):
    """A reply goes on arriving, and does not come to an end."""


class Unreachable(LinkError):
    """There is no way to this node, and there will be none as long as this link lasts."""


class Link(Protocol):
    """What carries messages to nodes."""

    nodes: Sequence[str]

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        """What a node replies.

        Raises:
            ReplyTimeout: no reply within so many seconds.
            LinkError: no way there.
        """
        ...


@dataclass(frozen=True)
class Reply:
    """What a node said to one message: beside its tensors, of that how these are protected, the tensors as
    they traveled, the seconds that it took itself, and those until the reply was there."""

    told: Mapping[str, Any]
    privacy: Paid
    tensors: Tensors
    own: float
    elapsed: float


class MessageSender:
    """One server process's messages of one run, over a link, with ``wait`` seconds for each reply."""

    def __init__(self, link: Link, run: str, wait: float) -> None:
        self._link, self._run, self._wait = link, run, wait
        self._process, self._messages = secrets.token_hex(8), itertools.count()
        self.over = threading.Event()  # nobody is waited for any more

    def pack(self, message: Message, tensors: Tensors | None = None) -> bytes:
        """A message with its number, which is the same when it is sent again."""
        envelope = Envelope(self._run, self._process, next(self._messages))
        return pack(message.header(envelope), tensors)

    def tell(self, node: str, message: Message, tensors: Tensors | None = None) -> Mapping[str, Any]:
        """One message that is no query, and what the node replied to it."""
        return self.deliver(node, message.operation, self.pack(message, tensors)).told

    def deliver(self, node: str, query: str, message: bytes) -> Reply:
        """A node's reply; asked again as long as it has time.

        Raises:
            LinkError: no reply in time.
            DataError: a reply that is none.
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
                if self.over.wait(PAUSE):
                    raise LinkError("the run is over") from error
        header, tensors = unpack(reply)
        said, elapsed = read(Header, header), time.monotonic() - start
        if said.error is not None:
            raise said.error.error(node, query)
        own = min(max(said.seconds, 0.0), elapsed)  # no more than went by
        return Reply(said.told, read_paid(said.told), tensors, own, elapsed)
