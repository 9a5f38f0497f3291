"""The server's link over FLARE's proxies of nodes: delivery of messages, and each kind of failure."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

from nvflare.apis.fl_constant import RunProcessKey
from nvflare.collab.api.exceptions import CollabCallError, RunAborted
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.private.defs import CellChannelTopic, CellMessageHeaderKeys

from fedstill.core.errors import DeployError, FedstillError
from fedstill.federation.flare import FlareLink
from fedstill.federation.flare_component import LostNodeMonitor, subscribe_to_lost_nodes
from fedstill.federation.transport import LinkError, ReplyTimeout, Unreachable


class Client:
    """Replaces FLARE's proxy of a node."""

    def __init__(self, name: str, does: Any) -> None:
        self.name, self.does, self.patience = name, does, 0.0

    def __call__(self, timeout: float) -> Client:
        self.patience = timeout
        return self

    def serve(self, message: bytes) -> bytes:
        if isinstance(self.does, Exception):
            raise self.does
        return message + bytes(self.does)


def test_message_is_sent_with_remaining_timeout() -> None:
    clients = [Client("node-10", b"!"), Client("node-2", b"?")]
    link = FlareLink(clients, ["node-1", "node-2"])
    assert link.nodes == ["node-1", "node-2", "node-10"]
    assert link.call("node-2", b"so", 3.5) == b"so?"
    assert [client.patience for client in clients] == [0.0, 3.5]


@pytest.mark.parametrize(
    ("fails", "kind", "line"),
    [
        (CollabCallError("node-0", "serve", TimeoutError("late")), ReplyTimeout, "no answer in time"),
        (CollabCallError("node-0", "serve", ValueError("no\n  such thing")), LinkError, "no such thing"),
        (RunAborted("stopped"), DeployError, "its job was aborted"),
    ],
)
def test_converts_flare_errors(fails: Exception, kind: type[FedstillError], line: str) -> None:
    with pytest.raises(kind, match=line) as caught:
        FlareLink([Client("node-0", fails)]).call("node-0", b"", 1.0)
    assert type(caught.value) is kind


def test_node_missing_at_start_is_unreachable() -> None:
    with pytest.raises(Unreachable, match="not connected"):
        FlareLink([Client("node-0", b"")], ["node-1"]).call("node-1", b"", 1.0)


def test_does_not_wait_for_dropped_node() -> None:
    began = threading.Event()

    def silent(timeout: float) -> Any:
        began.set()
        time.sleep(timeout)
        raise CollabCallError("node-0", "serve", TimeoutError("late"))

    client = Client("node-0", b"")
    client.__class__ = type("Silent", (Client,), {"__call__": lambda self, timeout: silent(timeout)})
    link = FlareLink([client, Client("node-1", b"!")])

    def drop() -> None:
        began.wait(60)
        link.drop_node("nobody")
        link.drop_node("node-0")

    threading.Thread(target=drop, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(Unreachable, match="has ended"):
        link.call("node-0", b"", 60.0)
    assert time.monotonic() - start < 30
    with pytest.raises(Unreachable):
        link.call("node-0", b"", 60.0)
    assert link.call("node-1", b"so", 1.0) == b"so!"


class Cell:
    """Replaces FLARE's connection."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, str, Any]] = []
        self.filters: list[Any] = []

    def add_incoming_request_filter(self, channel: str, topic: str, hear: Any) -> None:
        self.filters.append((channel, hear))

    def fire_and_forget(self, channel: str, topic: str, target: str, message: Any) -> None:
        self.sent.append((channel, topic, target, message.payload))

    def register_request_cb(self, channel: str, topic: str, hear: Any) -> None:
        self.filters.append((channel, hear))


def engine_of(jobs: dict[str, Any]) -> tuple[Any, Cell]:
    cell = Cell()
    return SimpleNamespace(run_processes=jobs, get_cell=lambda: SimpleNamespace(core_cell=cell)), cell


@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        ([("north", "new", [])], ["north"]),  # restarted
        ([("north", "new", [])] * 3, ["north"]),  # notified once
        ([("north", "new", ["job"])], []),  # its connection was cut, its process continues
        ([("north", "old", [])], []),  # the job has not reached it yet
        ([("north", "old", ["job"]), ("north", "old", [])], ["north"]),  # its process has ended
        ([("east", "old 2", ["job"]), ("north", "old", [])], []),
        ([("south", "new", [])], []),  # not part of the job
    ],
)
def test_monitor_notifies_job_of_lost_node(
    signs: list[tuple[str, str, list[str]]], expected: list[str]
) -> None:
    taking_part = {"old": Client("north", b""), "old 2": Client("east", b"")}
    engine, cell = engine_of({"job": {RunProcessKey.PARTICIPANTS: taking_part}})
    LostNodeMonitor(engine)
    ((channel, hear),) = cell.filters
    assert channel == CellChannel.SERVER_MAIN
    for node, token, at_work in signs:
        for topic in ("quit", CellChannelTopic.HEART_BEAT):
            keys = CellMessageHeaderKeys
            headers = {keys.CLIENT_NAME: node, keys.TOKEN: token, keys.JOB_IDS: at_work}
            assert hear(new_cell_message({MessageHeaderKey.TOPIC: topic, **headers}, None)) is None
    assert cell.sent == [("fedstill", "lost", "server.job", {"node": node}) for node in expected]


def test_job_accepts_lost_nodes_from_server_only() -> None:
    engine, cell = engine_of({})
    lost: list[str] = []
    subscribe_to_lost_nodes(engine, lost.append)
    ((_, hear),) = cell.filters
    for origin in ("north", "server", "server.other"):
        hear(new_cell_message({MessageHeaderKey.ORIGIN: origin}, {"node": f"of {origin}"}))
    assert lost == ["of server"]
