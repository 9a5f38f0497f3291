"""Logging of a node's connection to its server.

FLARE retries for ever, and its own log repeats itself. This log follows the server's replies to FLARE's
registration and heartbeat messages, and has one line for each change.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from fedstill.core.text_format import format_seconds

REPLY_SECONDS = 6.0  # seconds that the server may take for its reply to a heartbeat
FIRST_REMINDER, MAX_REMINDER_INTERVAL = 60.0, 3600.0  # seconds between warnings while it is unreachable
RETRYING = "retrying every 10 s until it answers or this process is ended"

logger = logging.getLogger("fedstill.site")


class ServerConnection:
    """State of a node's connection to its server, with a log line for each change and reminders while it is
    down.

    Args:
        server: its address.
        clock: returns seconds.
        on_refused: called with the reason when the server refuses the node.
    """

    def __init__(
        self,
        server: str,
        clock: Callable[[], float] = time.monotonic,
        on_refused: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._on_refused = on_refused
        self._server, self._clock = server, clock
        self._state, self._was_connected = "", False  # "", "in", "gone" or "refused"
        self._since, self._next = clock(), 0.0

    def set_connected(self) -> None:
        """Record that the server accepted this node."""
        if self._state == "in":
            return
        after = f", after {format_seconds(self._clock() - self._since)}" if self._state else ""
        again = " again" if self._was_connected else ""
        logger.info("connected to the server at %s%s%s", self._server, again, after)
        self._state, self._was_connected = "in", True

    def set_unreachable(self) -> None:
        """Record that the server cannot be reached or did not reply in time."""
        now = self._clock()
        if self._state == "gone":
            if now >= self._next:
                waited = now - self._since
                self._next = now + min(max(waited, FIRST_REMINDER), MAX_REMINDER_INTERVAL)
                logger.warning("no answer from %s for %s; %s", self._server, format_seconds(waited), RETRYING)
            return
        if self._state:
            logger.warning("lost the connection to the server at %s; %s", self._server, RETRYING)
        else:
            why = "is the server up, may this machine reach it, and is the kit from this federation?"
            logger.warning("no answer from %s; %s. %s", self._server, RETRYING, why.capitalize())
        self._state, self._since, self._next = "gone", now, now + FIRST_REMINDER

    def set_refused(self, reason: str) -> None:
        """Record that the server refused this node, and why."""
        if self._state != "refused":
            revoked = "it has revoked this node" if "is disabled" in reason else reason
            logger.warning("the server at %s refuses this node: %s", self._server, revoked)
            self._state, self._since = "refused", self._clock()
            self._on_refused(revoked)


def update_connection_on_replies(
    contact: ServerConnection, cell: Any, heartbeat: float, leave: Callable[[], None]
) -> None:
    """Update a connection from the server's replies in this process of FLARE.

    Args:
        contact: the connection.
        cell: FLARE's communication endpoint.
        heartbeat: seconds between two heartbeats.
        leave: ends the process of a node that is refused. FLARE would end it too, with a traceback.
    """
    from nvflare.fuel.f3.cellnet.defs import CellChannelTopic, MessageHeaderKey, ReturnCode

    last = time.monotonic()

    def on_reply(reply: Any) -> None:
        nonlocal last
        topic = reply.get_header(MessageHeaderKey.TOPIC)
        if topic in (CellChannelTopic.Register, CellChannelTopic.HEART_BEAT):
            last = time.monotonic()
            code = reply.get_header(MessageHeaderKey.RETURN_CODE)
            if code == ReturnCode.UNAUTHENTICATED:
                contact.set_refused(str(reply.get_header(MessageHeaderKey.ERROR)))
                if topic == CellChannelTopic.Register:
                    leave()
            elif code == ReturnCode.OK:
                contact.set_connected()

    def listen() -> None:
        while True:
            time.sleep(1.0)
            if time.monotonic() - last > heartbeat + REPLY_SECONDS:
                contact.set_unreachable()

    cell.add_incoming_reply_filter("*", "*", on_reply)
    threading.Thread(target=listen, daemon=True).start()
