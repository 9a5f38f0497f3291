"""Nodes of this process behind real messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence


class Loopback:
    """Nodes of this process behind real messages.

    Args:
        serve: by node, what replies to a message.
    """

    def __init__(self, serve: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self.nodes: Sequence[str] = list(serve)
        self._serve = serve
        self._alone = threading.Lock()  # nodes of one process share torch's global generator

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        with self._alone:
            return self._serve[node](message)
