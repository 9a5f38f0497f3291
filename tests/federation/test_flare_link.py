"""The server's link over FLARE's proxies of nodes: what becomes of a message, and of each way to fail."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("nvflare")

from nvflare.collab.api.exceptions import CollabCallError, RunAborted

from fedstill.core.errors import DeployError, FedstillError
from fedstill.federation.flare import FlareLink
from fedstill.federation.transport import LinkError, Silent, Unreachable


class Client:
    """Stands for FLARE's proxy of a node."""

    def __init__(self, name: str, does: Any) -> None:
        self.name, self.does, self.patience = name, does, 0.0

    def __call__(self, timeout: float) -> Client:
        self.patience = timeout
        return self

    def serve(self, message: bytes) -> bytes:
        if isinstance(self.does, Exception):
            raise self.does
        return message + bytes(self.does)


def test_a_message_goes_to_its_node_with_the_patience_that_is_left() -> None:
    clients = [Client("node-10", b"!"), Client("node-2", b"?")]
    link = FlareLink(clients, ["node-1", "node-2"])
    assert link.nodes == ["node-1", "node-2", "node-10"]
    assert link.call("node-2", b"so", 3.5) == b"so?"
    assert [client.patience for client in clients] == [0.0, 3.5]


@pytest.mark.parametrize(
    ("fails", "kind", "line"),
    [
        (CollabCallError("node-0", "serve", TimeoutError("late")), Silent, "no answer in time"),
        (CollabCallError("node-0", "serve", ValueError("no\n  such thing")), LinkError, "no such thing"),
        (RunAborted("stopped"), DeployError, "FLARE ended the job"),
    ],
)
def test_what_flare_says_becomes_an_error_of_ours(
    fails: Exception, kind: type[FedstillError], line: str
) -> None:
    with pytest.raises(kind, match=line) as caught:
        FlareLink([Client("node-0", fails)]).call("node-0", b"", 1.0)
    assert type(caught.value) is kind


def test_who_was_not_there_when_it_began_is_out_of_reach() -> None:
    with pytest.raises(Unreachable, match="not connected when this part of the run began"):
        FlareLink([Client("node-0", b"")], ["node-1"]).call("node-1", b"", 1.0)
