"""Nodes on NVIDIA FLARE, through its Collab API: the program at a node, and the server's link to it.

A job names this program and the server's program, and contains the server's configuration. It contains no
code and nothing about a node. The node's program serves messages from its owner's folder.
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
from fedstill.core.startup_kit import KIT_FOLDER, StartupKit
from fedstill.federation.node_order import natural_sort_key
from fedstill.federation.transport import LinkError, ReplyTimeout, Unreachable

# Environment variables: the server's folder, a node's, and that of all nodes of a simulation.
SERVER_FOLDER, NODE, NODES = "FEDSTILL_SERVER", "FEDSTILL_NODE", "FEDSTILL_NODES"
RUNS = "runs"  # in a server's folder
POLL_SECONDS = 0.5  # seconds between two checks whether a node was lost


class NodeProgram:
    """Program of one node in FLARE's job. Its folder is the one that its owner started it in."""

    def __init__(self) -> None:
        self._host: Any = None
        self._error_reply = b""  # reply to every message if the owner's folder is not in order

    @collab.init  # type: ignore[untyped-decorator,unused-ignore]
    def begin(self) -> None:
        """Read the owner's folder."""
        from fedstill.federation.flare_component import install_job_request_filter
        from fedstill.node.node_service import NodeService, unavailable_reply

        folder = os.environ.get(NODE)
        if folder is None:  # all nodes of a simulation have the same environment
            folder = str(Path(read_environment_variable(NODES)) / str(collab.site_name))
        install_job_request_filter(str(collab.site_name), Path(folder))
        try:
            self._host = NodeService(Path(folder))
        except FedstillError as error:
            self._error_reply = unavailable_reply(error)
            return
        self._host.limit_process_memory()
        self._host.server_fingerprint = StartupKit(Path(folder) / KIT_FOLDER).authority_fingerprint
        if self._host.name != collab.site_name:
            raise DeployError(f"{folder} is node {self._host.name!r}, and the kit is {collab.site_name!r}'s")

    @collab.publish  # type: ignore[untyped-decorator,unused-ignore]
    def serve(self, message: bytes) -> bytes:
        """Reply to one message of the server; other senders are refused."""
        if collab.caller != "server":
            raise DeployError(f"a message from {collab.caller!r} (expected the server)")
        reply: bytes = self._error_reply or self._host.serve(message)
        return reply


class FlareLink:
    """Link over FLARE.

    Args:
        clients: FLARE's proxies of the nodes of a job.
        nodes: names of all nodes of the run, also of those that are not in this job.
    """

    def __init__(self, clients: Sequence[Any], nodes: Sequence[str] = ()) -> None:
        self._clients = {str(client.name): client for client in clients}
        self.nodes: Sequence[str] = sorted({*self._clients, *nodes}, key=natural_sort_key)
        self._lost = {name: Event() for name in self._clients}

    def drop_node(self, node: str) -> None:
        """Stop waiting for a node whose process for this job has ended, as FLARE does not let it back in."""
        if node in self._lost:
            self._lost[node].set()

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        """See :class:`fedstill.federation.remote.Link`."""
        if node not in self._clients:
            raise Unreachable("it was not connected when this part of the run began")
        reply: Queue[bytes | Exception] = Queue()
        # FLARE waits until the time is over even for a lost node, so it waits in another thread.
        Thread(target=self._call_into_queue, args=(node, message, seconds, reply), daemon=True).start()
        while not self._lost[node].is_set():
            try:
                outcome = reply.get(timeout=POLL_SECONDS)
            except Empty:
                continue
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        raise Unreachable("its process for this run has ended, and FLARE lets it back into a new job only")

    def _call_into_queue(
        self, node: str, message: bytes, seconds: float, reply: Queue[bytes | Exception]
    ) -> None:
        try:
            reply.put(self._clients[node](timeout=seconds).serve(message))
        except CollabCallError as error:
            late = isinstance(error.cause, TimeoutError)
            cause = (
                ReplyTimeout("no answer in time") if late else LinkError(" ".join(str(error.cause).split()))
            )
            reply.put(cause)
        except RunAborted:
            reply.put(DeployError("its job was aborted, by the person who started the run or by FLARE"))
        except Exception as error:
            reply.put(error)


def read_environment_variable(name: str) -> str:
    if name not in os.environ:
        raise DeployError(f"{name} is not set: `fedstill server start` and `fedstill node start` set it")
    return os.environ[name]
