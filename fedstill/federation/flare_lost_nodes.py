"""Detection of nodes whose process for a job has ended, which FLARE does not let back into a running job.

The server's main process detects them by their heartbeats and notifies the process of the job, which stops
waiting for them. A node without heartbeats may come back with its network, and is still awaited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvflare.apis.fl_constant import RunProcessKey
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.private.defs import CellChannelTopic, CellMessageHeaderKeys

CHANNEL, TOPIC = "fedstill", "lost"  # of the notification to a job


class LostNodeMonitor:
    """Watches heartbeats in the server's main process and notifies jobs of lost nodes.

    Args:
        engine: FLARE's engine with its jobs.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._cell = engine, engine.get_cell().core_cell
        self._active: set[tuple[str, str]] = set()  # (job, node) that were seen working
        self._notified: set[tuple[str, str]] = set()
        self._cell.add_incoming_request_filter(CellChannel.SERVER_MAIN, "*", self.check_heartbeat)

    def check_heartbeat(self, message: Any) -> None:
        """Check one message; FLARE has authenticated its sender."""
        if message.get_header(MessageHeaderKey.TOPIC) != CellChannelTopic.HEART_BEAT:
            return
        keys = CellMessageHeaderKeys
        node, token, active_jobs = map(message.get_header, (keys.CLIENT_NAME, keys.TOKEN, keys.JOB_IDS))
        for job, process in list(self._engine.run_processes.items()):
            participants = process.get(RunProcessKey.PARTICIPANTS) or {}
            tokens = {client.name: known for known, client in participants.items()}
            if job in (active_jobs or ()):
                self._active.add((job, node))
            # A new job may not have reached the node yet; a restarted node has another token.
            elif node in tokens and (tokens[node] != token or (job, node) in self._active):
                self._notify(job, node)

    def _notify(self, job: str, node: str) -> None:
        if (job, node) not in self._notified:
            self._notified.add((job, node))
            target = FQCN.join([FQCN.ROOT_SERVER, job])
            self._cell.fire_and_forget(CHANNEL, TOPIC, target, new_cell_message({}, {"node": node}))


def subscribe_to_lost_nodes(engine: Any, on_lost: Callable[[str], None]) -> None:
    """Call a function in the process of a job at the server for each node that the job has lost.

    Args:
        engine: FLARE's engine.
        on_lost: called with the name of the node.
    """

    def on_message(message: Any) -> Any:
        if message.get_header(MessageHeaderKey.ORIGIN) == FQCN.ROOT_SERVER:
            on_lost(str(message.payload["node"]))
        return make_reply("ok")

    engine.get_cell().core_cell.register_request_cb(CHANNEL, TOPIC, on_message)
