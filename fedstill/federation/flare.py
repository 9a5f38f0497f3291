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
from fedstill.core.name_normalization import natural_sort_key
from fedstill.core.startup_kit import KIT_FOLDER, StartupKit
from fedstill.federation.provision import NODE_CLASSES, SERVER_CLASSES, write_json
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

    @collab.final  # type: ignore[untyped-decorator,unused-ignore]
    def end(self) -> None:
        """Write the refusals that were only counted: the server may not have ended the run."""
        from fedstill.federation.flare_component import record_repeats

        if self._host is not None:
            self._host.record_repeats()
            record_repeats(self._host.folder)  # requests to this process itself

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


# --- job files ------------------------------------------------------------------------------------------

# Seconds without a node until FLARE ends a job. Long, as the run itself handles missing nodes.
MAX_ABSENCE = 7 * 86400.0
# Seconds within which each node's process for a job must start; FLARE's default of 60 is short on two cores.
START_TIMEOUT = 180
UNFILTERED: dict[str, Any] = {"format_version": 2, "task_data_filters": [], "task_result_filters": []}


def write_job(folder: Path, nodes: Sequence[str], server: dict[str, Any], name: str = "fedstill") -> Path:
    """Write a job for :mod:`fedstill.federation.flare` into a folder and return the folder.

    The job begins once all its nodes are connected. FLARE's ``CollabRecipe`` and ``FedJob`` are not used, as
    they copy the source of classes into the job, which makes it custom code that sites refuse.

    Args:
        folder: of the job.
        nodes: names of the nodes that take part.
        server: arguments of :class:`~fedstill.runs.flare_server.ServerProgram`.
        name: of the job.
    """
    everyone = {"min_clients": len(nodes), "mandatory_clients": list(nodes)}
    deploy = {"name": name, "resource_spec": {}, "deploy_map": {"app": ["server", *nodes]}}
    write_json(folder / "meta.json", {**deploy, **everyone})
    (controller, program), app = SERVER_CLASSES, folder / "app" / "config"
    controller_args = {"server_obj_id": "program", "sync_task_timeout": START_TIMEOUT}
    at_server = {
        **UNFILTERED,
        "server": {"task_request_interval": 0.5},
        "dead_client_grace_period": MAX_ABSENCE,
        "workflows": [{"id": "controller", "path": controller, "args": controller_args}],
        "components": [{"id": "program", "path": program, "args": server}],
    }
    write_json(app / "config_fed_server.json", at_server)
    executor, program = NODE_CLASSES
    executor_config = {"path": executor, "args": {"client_obj_id": "program"}}
    at_node = {
        **UNFILTERED,
        "executors": [{"tasks": ["*"], "executor": executor_config}],
        "components": [{"id": "program", "path": program, "args": {}}],
    }
    write_json(app / "config_fed_client.json", at_node)
    return folder
