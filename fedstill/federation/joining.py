"""How a node enters a run: it joins, with the public data if it has none, and does the training before it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fedstill.core.errors import NodeFault
from fedstill.core.text_format import human_seconds
from fedstill.data.public import PublicData
from fedstill.federation import transport
from fedstill.federation.replies import read, read_about
from fedstill.federation.transport import MessageSender
from fedstill.node.replies import NodeStatus, NodeVersions, TrainingProgress
from fedstill.protocol.messages import IdentifyNode, JoinRun, TrainLocally
from fedstill.protocol.run_plan import PROTOCOL, RunPlan, public_tensors

LEARN = 2.0  # seconds of local training between two looks at how far it has come


@dataclass
class NodeProgress:
    """How far a node has come in its local training, and seconds that it was at work since without result."""

    node: str
    percent: int = -1
    seconds: float = 0.0


class NodeJoiner:
    """The messages before a node's first query in one run.

    Args:
        public: public data, for nodes that do not have them yet.
        patience: seconds after which local training that does not come further counts as stuck.
    """

    def __init__(
        self, send: MessageSender, plan: RunPlan, public: PublicData | None, patience: float
    ) -> None:
        self._send, self._plan, self._public, self._patience = send, plan, public, patience

    def join(self, node: str) -> About:
        """Have one node join.

        Raises:
            NodeFault: it speaks another protocol, or does not take the public data.
        """
        hello = read(Hello, self._send.tell(node, IdentifyNode()))
        if hello.protocol != PROTOCOL:
            raise NodeFault(node, "identify", f"it speaks protocol {hello.protocol}, the server {PROTOCOL}")
        joining = JoinRun(self._plan.to_dict())
        about = read_about(self._send.tell(node, joining), hello.versions)
        if about.wants_public and self._public is not None:
            told = self._send.tell(node, joining, public_tensors(self._public))
            about = read_about(told, hello.versions)
        if about.wants_public:
            raise NodeFault(node, "join", "it does not take the run's public data")
        return about

    def learn(self, coming: NodeProgress) -> Progress:
        """Have one node go on with its local training for a while.

        Raises:
            NodeFault: it has not come further for too long.
        """
        start = time.monotonic()
        come = read(Progress, self._send.tell(coming.node, TrainLocally(LEARN)))
        if come.learned or come.percent > coming.percent:
            coming.percent, coming.seconds = come.percent, 0.0
            return come
        if time.monotonic() - start < LEARN / 2:  # it was asked to be at work for longer
            self._send.over.wait(transport.PAUSE)
        coming.seconds += time.monotonic() - start
        if coming.seconds > self._patience:
            waited = human_seconds(coming.seconds)
            stuck = f"its local training stays at {coming.percent}%, after {waited} more"
            raise NodeFault(coming.node, "train_locally", stuck)
        return come
