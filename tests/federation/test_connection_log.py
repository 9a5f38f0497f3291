"""A node's log about its server: one entry per change, and rare reminders."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fedstill.federation import flare_component
from fedstill.federation.flare_component import ServerConnection


class Reply(dict[str, str]):
    get_header = dict.get


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_logs_each_connection_change_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    contact = ServerConnection("here:1", clock)
    tried = "retrying every 10 s until it answers or this process is ended"

    def log_lines() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return lines

    contact.set_connected()
    contact.set_connected()
    assert log_lines() == ["connected to the server at here:1"]
    contact.set_unreachable()
    contact.set_unreachable()
    assert log_lines() == [f"lost the connection to the server at here:1; {tried}"]
    clock.now = 34.0
    contact.set_connected()
    assert log_lines() == ["connected to the server at here:1 again, after 34.0 s"]
    contact.set_refused("Client 'a' is disabled")
    contact.set_refused("Client 'a' is disabled")
    assert log_lines() == ["the server at here:1 refuses this node: it has revoked this node"]
    clock.now = 94.0
    contact.set_connected()
    assert log_lines() == ["connected to the server at here:1 again, after 1 min 0 s"]


def test_logs_unreachable_server_with_rare_reminders(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    contact = ServerConnection("here:1", clock)
    times = []
    for second in range(0, 4 * 3600, 2):  # FLARE's retry interval
        clock.now = float(second)
        contact.set_unreachable()
        times += [second] * len(caplog.records)
        caplog.clear()
    assert times[:8] == [0, 60, 120, 240, 480, 960, 1920, 3840]
    assert {later - earlier for earlier, later in itertools.pairwise(times[7:])} == {3600}


def test_only_heartbeat_replies_change_connection_state(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is refused at registration ends; one that was connected stays, and logs the refusal."""
    defs = pytest.importorskip("nvflare.fuel.f3.cellnet.defs")
    caplog.set_level(logging.INFO)
    callbacks: list[Any] = []

    class Idle:
        def __init__(self, **given: Any) -> None: ...
        def start(self) -> None: ...

    class Cell:
        def add_incoming_reply_filter(self, channel: str, topic: str, cb: Any) -> None:
            callbacks.append(cb)

    monkeypatch.setattr(flare_component.threading, "Thread", Idle)
    calls: list[str] = []
    flare_component.update_connection_on_replies(
        ServerConnection("here:1", Clock()), Cell(), 10.0, lambda: calls.append("left")
    )

    def reply(topic: str, code: str) -> list[str]:
        keys = defs.MessageHeaderKey
        caplog.clear()
        callbacks[0](Reply({keys.TOPIC: topic, keys.RETURN_CODE: code, keys.ERROR: "it is full"}))
        return [record.getMessage() for record in caplog.records]

    topics, codes = defs.CellChannelTopic, defs.ReturnCode
    assert reply("a job's", codes.OK) == reply("a job's", codes.UNAUTHENTICATED) == []
    assert reply(topics.Register, codes.TIMEOUT) == []
    assert reply(topics.Register, codes.OK) == ["connected to the server at here:1"]
    assert reply(topics.HEART_BEAT, codes.UNAUTHENTICATED) == [
        "the server at here:1 refuses this node: it is full"
    ]
    assert calls == []
    reply(topics.Register, codes.UNAUTHENTICATED)
    assert calls == ["left"]


def test_slow_logging_of_refusal_does_not_lose_connection(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first record of a process loads torch, which can take longer than a heartbeat."""
    defs = pytest.importorskip("nvflare.fuel.f3.cellnet.defs")
    keys, clock = defs.MessageHeaderKey, Clock()
    callbacks: list[Any] = []
    listeners: list[Callable[[], None]] = []
    threads: list[threading.Thread] = []
    thread_class = threading.Thread

    class Cell:
        def add_incoming_reply_filter(self, channel: str, topic: str, cb: Any) -> None:
            callbacks.append(cb)

    class Listener:
        def __init__(self, *, target: Callable[[], None], daemon: bool) -> None:
            listeners.append(target)

        def start(self) -> None: ...

    sleeps = iter([None])
    # the second check ends the loop
    patched = SimpleNamespace(monotonic=clock, sleep=lambda seconds: next(sleeps))

    def listen() -> None:
        with contextlib.suppress(StopIteration):
            listeners[0]()

    def record(reason: str) -> None:
        clock.now += 60
        threads.append(thread_class(target=listen, daemon=True))
        threads[0].start()
        threads[0].join(0.3)

    monkeypatch.setattr(flare_component, "time", patched)
    monkeypatch.setattr(flare_component.threading, "Thread", Listener)
    flare_component.update_connection_on_replies(
        ServerConnection("here:1", clock, on_refused=record), Cell(), 2.0, lambda: None
    )
    code = defs.ReturnCode.UNAUTHENTICATED
    callbacks[0](
        Reply({keys.TOPIC: defs.CellChannelTopic.HEART_BEAT, keys.RETURN_CODE: code, keys.ERROR: "full"})
    )
    threads[0].join()
    assert [each.getMessage() for each in caplog.records] == ["the server at here:1 refuses this node: full"]
