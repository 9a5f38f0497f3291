"""What a node's log says of its server: each change once, and a reminder now and then."""

from __future__ import annotations

import itertools
import logging

import pytest

from fedstill.federation.connection_log import Contact


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_change_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    contact = Contact("here:1", clock)
    tried = "it is tried every 10 s, until it answers or this process is ended"

    def said() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return lines

    contact.answered()
    contact.answered()
    assert said() == ["connected to the server at here:1"]
    contact.silent()
    contact.silent()
    assert said() == [f"the server at here:1 is gone, or the way to it; {tried}"]
    clock.now = 34.0
    contact.answered()
    assert said() == ["connected to the server at here:1 again, after 34.0 s"]
    contact.refused("Client 'a' is disabled")
    contact.refused("Client 'a' is disabled")
    assert said() == ["the server at here:1 does not let this node in: it has revoked this node"]
    clock.now = 94.0
    contact.answered()
    assert said() == ["connected to the server at here:1 again, after 1 min 0 s"]


def test_a_server_that_never_answers_is_said_at_once_and_seldom_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    contact = Contact("here:1", clock)
    times = []
    for second in range(0, 4 * 3600, 2):  # as FLARE tries
        clock.now = float(second)
        contact.silent()
        times += [second] * len(caplog.records)
        caplog.clear()
    assert times[:8] == [0, 60, 120, 240, 480, 960, 1920, 3840]
    assert {later - earlier for earlier, later in itertools.pairwise(times[7:])} == {3600}
