"""What carries messages to nodes, whatever it is made of, and how it fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class LinkError(Exception):
    """A message found no way, or no answer came in time."""


class Silent(LinkError):
    """No answer came in time; nothing else is known of why."""


class Unreachable(LinkError):
    """There is no way to this node, and there will be none as long as this link lasts."""


class Link(Protocol):
    """What carries messages to nodes."""

    nodes: Sequence[str]

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        """What a node replies.

        Raises:
            Silent: no reply within so many seconds.
            LinkError: no way there.
        """
        ...
