"""Nodes on NVIDIA FLARE, through its Collab API: the program at a node, and the server's link to it.

A job names this program and the server's, and carries the server's configuration; it carries no code, and
nothing about a node. A node's program is its owner's folder with a way in for messages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any

from nvflare.collab import collab
from nvflare.collab.api.exceptions import CollabCallError, RunAborted

from fedstill.core.errors import DeployError, FedstillError
from fedstill.core.startup_kit import KIT, StartupKit
from fedstill.federation.node_order import natural_sort_key
from fedstill.federation.transport import LinkError, ReplyTimeout, Unreachable

# Environment variables: the server's folder, a node's, and that of all nodes of a simulation.
SERVER_FOLDER, NODE, NODES = "FEDSTILL_SERVER", "FEDSTILL_NODE", "FEDSTILL_NODES"
RUNS = "runs"  # in a server's folder
LOOKS = 0.5  # seconds between two looks whether a node is still waited for


class NodeProgram:
    """One node, as FLARE's job runs it: its folder is where its owner started it, whatever a job says."""

    def __init__(self) -> None:
        self._host: Any = None
        self._trouble = b""  # what is said to every message while the owner's folder lets none be served

    @collab.init  # type: ignore[untyped-decorator,unused-ignore]
    def begin(self) -> None:
        """Read the owner's folder."""
        from fedstill.federation.flare_component import guard_job
        from fedstill.node.node_service import Host, out_of_order

        folder = os.environ.get(NODE)
        if folder is None:  # all nodes of a simulation have the same environment
            folder = str(Path(environment(NODES)) / str(collab.site_name))
        guard_job(str(collab.site_name), Path(folder))
        try:
            self._host = Host(Path(folder))
        except FedstillError as error:
            self._trouble = out_of_order(error)
            return
        self._host.limit_process()
        self._host.asker = StartupKit(Path(folder) / KIT).authority_fingerprint
        if self._host.name != collab.site_name:
            raise DeployError(f"{folder} is node {self._host.name!r}, and the kit is {collab.site_name!r}'s")

    @collab.publish  # type: ignore[untyped-decorator,unused-ignore]
    def serve(self, message: bytes) -> bytes:
        """Answer one message of the server; nodes do not talk to each other."""
        if collab.caller != "server":
            raise DeployError(f"a message from {collab.caller!r} (expected the server)")
        reply: bytes = self._trouble or self._host.serve(message)
        return reply


class FlareLink:
    """Carries messages to FLARE's proxies of the nodes of a job; ``nodes`` of the run may be more."""

    def __init__(self, clients: Sequence[Any], nodes: Sequence[str] = ()) -> None:
        self._clients = {str(client.name): client for client in clients}
        self.nodes: Sequence[str] = sorted({*self._clients, *nodes}, key=natural_sort_key)
        self._lost = {name: Event() for name in self._clients}

    def lose(self, node: str) -> None:
        """A node has ended its part of this job, and FLARE does not let it back in: nobody waits for it."""
        if node in self._lost:
            self._lost[node].set()

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        """See :class:`fedstill.federation.remote.Link`."""
        if node not in self._clients:
            raise Unreachable("it was not connected when this part of the run began")
        reply: Queue[bytes | Exception] = Queue()
        # FLARE waits until the time is over, whatever it knows: so it waits beside, and is not waited for.
        Thread(target=self._ask, args=(node, message, seconds, reply), daemon=True).start()
        while not self._lost[node].is_set():
            try:
                told = reply.get(timeout=LOOKS)
            except Empty:
                continue
            if isinstance(told, Exception):
                raise told
            return told
        raise Unreachable("its process for this run has ended, and FLARE lets it back into a new job only")

    def _ask(self, node: str, message: bytes, seconds: float, reply: Queue[bytes | Exception]) -> None:
        try:
            reply.put(self._clients[node](timeout=seconds).serve(message))
        except CollabCallError as error:
            late = isinstance(error.cause, TimeoutError)
            why = ReplyTimeout("no answer in time") if late else LinkError(" ".join(str(error.cause).split()))
            reply.put(why)
        except RunAborted:
            reply.put(DeployError("its job was ended, by whoever began the run or by FLARE"))
        except Exception as error:
            reply.put(error)


def environment(name: str) -> str:
    if name not in os.environ:
        raise DeployError(f"{name} is not set: `fedstill server start` and `fedstill node start` set it")
    return os.environ[name]
