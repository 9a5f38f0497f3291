"""Nodes that are there and have no process for a job any more: FLARE lets them into no job that runs.

The server's own process notices, by their signs of life, and tells that of the job, which waits for them no
longer. A node that is only silent may be back when its network is, and is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvflare.apis.fl_constant import RunProcessKey
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.private.defs import CellChannelTopic, CellMessageHeaderKeys

CHANNEL, TOPIC = "fedstill", "lost"  # of what a job is told


class LostNodeMonitor:
    """Which jobs have lost which nodes, by what the server's process hears.

    Args:
        engine: FLARE's, with its jobs.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._cell = engine, engine.get_cell().core_cell
        self._at_work: set[tuple[str, str]] = set()  # jobs and nodes that were seen at work on them
        self._told: set[tuple[str, str]] = set()
        self._cell.add_incoming_request_filter(CellChannel.SERVER_MAIN, "*", self.hear)

    def hear(self, message: Any) -> None:
        """Look at one message; FLARE has checked whose it is."""
        if message.get_header(MessageHeaderKey.TOPIC) != CellChannelTopic.HEART_BEAT:
            return
        keys = CellMessageHeaderKeys
        node, token, at_work = map(message.get_header, (keys.CLIENT_NAME, keys.TOKEN, keys.JOB_IDS))
        for job, process in list(self._engine.run_processes.items()):
            taking_part = process.get(RunProcessKey.PARTICIPANTS) or {}
            tokens = {client.name: known for known, client in taking_part.items()}
            if job in (at_work or ()):
                self._at_work.add((job, node))
            # At its beginning a job has not reached a node yet; one that was started anew has another token.
            elif node in tokens and (tokens[node] != token or (job, node) in self._at_work):
                self._tell(job, node)

    def _tell(self, job: str, node: str) -> None:
        if (job, node) not in self._told:
            self._told.add((job, node))
            place = FQCN.join([FQCN.ROOT_SERVER, job])
            self._cell.fire_and_forget(CHANNEL, TOPIC, place, new_cell_message({}, {"node": node}))


def listen(engine: Any, lose: Callable[[str], None]) -> None:
    """Have the process of a job at the server hear which nodes it has lost.

    Args:
        engine: FLARE's.
        lose: is called with the name of each.
    """

    def told(message: Any) -> Any:
        if message.get_header(MessageHeaderKey.ORIGIN) == FQCN.ROOT_SERVER:
            lose(str(message.payload["node"]))
        return make_reply("ok")

    engine.get_cell().core_cell.register_request_cb(CHANNEL, TOPIC, told)
