"""Whether the server is there and lets a node in, as the node's own log says it.

FLARE tries for ever, and at INFO it says little or the same again and again. What counts is what the server
replies to its own messages: the first ones, and a sign of life every few seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from fedstill.core.text_format import human_seconds

SLOW = 6.0  # seconds that the server may take for its reply to a sign of life, until it counts as gone
FIRST_WORD, RARELY = 60.0, 3600.0  # seconds: until it is said again that nobody answers, and at most later
TRIED = "it is tried every 10 s, until it answers or this process is ended"

logger = logging.getLogger("fedstill.site")


class ServerConnection:
    """A node's link to its server; a line is logged where it changes, and now and then while it is down.

    ``barred`` is told why, where the server does not let the node in.
    """

    def __init__(
        self,
        server: str,
        clock: Callable[[], float] = time.monotonic,
        barred: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._barred = barred
        self._server, self._clock = server, clock
        self._state, self._was_in = "", False  # "", "in", "gone" or "refused"
        self._since, self._next = clock(), 0.0

    def answered(self) -> None:
        """The server has answered as to a node of its own."""
        if self._state == "in":
            return
        after = f", after {human_seconds(self._clock() - self._since)}" if self._state else ""
        again = " again" if self._was_in else ""
        logger.info("connected to the server at %s%s%s", self._server, again, after)
        self._state, self._was_in = "in", True

    def silent(self) -> None:
        """There is no way to the server, or it did not answer in time."""
        now = self._clock()
        if self._state == "gone":
            if now >= self._next:
                waited = now - self._since
                self._next = now + min(max(waited, FIRST_WORD), RARELY)
                logger.warning("no answer from %s for %s; %s", self._server, human_seconds(waited), TRIED)
            return
        if self._state:
            logger.warning("the server at %s is gone, or the way to it; %s", self._server, TRIED)
        else:
            why = "is the server up, may this machine reach it, and is the kit from this federation?"
            logger.warning("no answer from %s; %s. %s", self._server, TRIED, why.capitalize())
        self._state, self._since, self._next = "gone", now, now + FIRST_WORD

    def refused(self, reason: str) -> None:
        """The server has answered that it does not let this node in, and why."""
        if self._state != "refused":
            revoked = "it has revoked this node" if "is disabled" in reason else reason
            logger.warning("the server at %s does not let this node in: %s", self._server, revoked)
            self._state, self._since = "refused", self._clock()
            self._barred(revoked)


def watch(contact: ServerConnection, cell: Any, every: float, leave: Callable[[], None]) -> None:
    """Let a contact hear what the server replies in this process of FLARE (``cell``), and that it replies no
    more.

    ``leave`` ends a node that is not let in; FLARE would end it too, with a traceback.
    """
    from nvflare.fuel.f3.cellnet.defs import CellChannelTopic, MessageHeaderKey, ReturnCode

    last = time.monotonic()

    def heard(reply: Any) -> None:
        nonlocal last
        topic = reply.get_header(MessageHeaderKey.TOPIC)
        if topic in (CellChannelTopic.Register, CellChannelTopic.HEART_BEAT):
            last = time.monotonic()
            code = reply.get_header(MessageHeaderKey.RETURN_CODE)
            if code == ReturnCode.UNAUTHENTICATED:
                contact.refused(str(reply.get_header(MessageHeaderKey.ERROR)))
                if topic == CellChannelTopic.Register:
                    leave()
            elif code == ReturnCode.OK:
                contact.answered()

    def listen() -> None:
        while True:
            time.sleep(1.0)
            if time.monotonic() - last > every + SLOW:
                contact.silent()

    cell.add_incoming_reply_filter("*", "*", heard)
    threading.Thread(target=listen, daemon=True).start()
