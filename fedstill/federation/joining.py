"""Messages before a node's first query: join the run, send the public data, train its local model."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fedstill.core.errors import NodeFault
from fedstill.core.text_format import format_seconds
from fedstill.data.public import PublicData
from fedstill.federation import transport
from fedstill.federation.replies import parse_node_status, parse_reply
from fedstill.federation.transport import MessageSender
from fedstill.node.replies import NodeStatus, NodeVersions, TrainingProgress
from fedstill.protocol.messages import IdentifyNode, JoinRun, TrainLocally
from fedstill.protocol.run_plan import PROTOCOL, RunPlan, public_tensors

TRAINING_SECONDS = 2.0  # seconds of local training per message


@dataclass
class NodeProgress:
    """Progress of a node's local training.

    Args:
        node: its name.
        percent: progress so far; -1 before the first message.
        seconds: seconds since the last progress.
    """

    node: str
    percent: int = -1
    seconds: float = 0.0


class NodeJoiner:
    """Sends the messages before a node's first query in one run.

    Args:
        send: sends messages to nodes.
        plan: the run's plan.
        public: public data, for nodes that do not have them yet.
        patience: seconds after which local training without progress counts as stuck.
    """

    def __init__(
        self, send: MessageSender, plan: RunPlan, public: PublicData | None, patience: float
    ) -> None:
        self._send, self._plan, self._public, self._patience = send, plan, public, patience

    def join(self, node: str) -> NodeStatus:
        """Make one node join the run.

        Raises:
            NodeFault: it speaks another protocol, or does not take the public data.
        """
        versions = parse_reply(NodeVersions, self._send.send(node, IdentifyNode()))
        if versions.protocol != PROTOCOL:
            raise NodeFault(
                node, "identify", f"it speaks protocol {versions.protocol}, the server {PROTOCOL}"
            )
        message = JoinRun(self._plan.to_dict())
        status = parse_node_status(self._send.send(node, message), versions.versions)
        if status.needs_public_data and self._public is not None:
            body = self._send.send(node, message, public_tensors(self._public))
            status = parse_node_status(body, versions.versions)
        if status.needs_public_data:
            raise NodeFault(node, "join", "it does not take the run's public data")
        return status

    def train(self, node_progress: NodeProgress) -> TrainingProgress:
        """Continue one node's local training for a few seconds.

        Raises:
            NodeFault: it made no progress for too long.
        """
        start = time.monotonic()
        reply = parse_reply(
            TrainingProgress, self._send.send(node_progress.node, TrainLocally(TRAINING_SECONDS))
        )
        if reply.is_trained or reply.percent > node_progress.percent:
            node_progress.percent, node_progress.seconds = reply.percent, 0.0
            return reply
        if time.monotonic() - start < TRAINING_SECONDS / 2:  # it replied earlier than it was asked to
            self._send.ended.wait(transport.PAUSE)
        node_progress.seconds += time.monotonic() - start
        if node_progress.seconds > self._patience:
            waited = format_seconds(node_progress.seconds)
            reason = f"its local training stays at {node_progress.percent}%, after {waited} more"
            raise NodeFault(node_progress.node, "train_locally", reason)
        return reply
