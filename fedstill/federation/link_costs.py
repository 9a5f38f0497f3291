"""Time and bytes that communication with the nodes costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class LinkCosts:
    """Accumulated time and bytes of a link.

    Attributes:
        queries: rounds of messages.
        seconds: total time of these rounds.
        nodes: seconds of the slowest node, added over rounds.
        waiting: part of ``nodes`` that the other nodes wait for the slowest one, on average.
        bytes: bytes in both directions.
        absent: seconds spent waiting for nodes that failed. The remaining time is the link's.
    """

    queries: int = 0
    seconds: float = 0.0
    nodes: float = 0.0
    waiting: float = 0.0
    bytes: int = 0
    absent: float = 0.0

    def add_round(
        self, seconds: float, node_seconds: Sequence[float], bytes: int, absent: float = 0.0
    ) -> None:
        """Add one round of messages.

        Args:
            seconds: duration of the round.
            node_seconds: computing time of each node that replied.
            bytes: bytes in both directions.
            absent: seconds from the last reply until nodes without one were given up.
        """
        self.queries += 1
        self.seconds += seconds
        self.nodes += max(node_seconds, default=0.0)
        self.waiting += max(node_seconds, default=0.0) - sum(node_seconds) / max(len(node_seconds), 1)
        self.bytes += bytes
        self.absent += absent

    def costs(self, total: float, training: float) -> dict[str, float]:
        """Return the costs as ``link`` in ``result.json``.

        Args:
            total: seconds of the run.
            training: seconds of local training before the first query.
        """
        link = max(self.seconds - self.nodes - self.absent, 0.0)
        return {
            "messages": self.queries,
            "seconds_each": self.seconds / max(self.queries, 1),
            "bytes_each": self.bytes / max(self.queries, 1),
            "link": link,
            "nodes": self.nodes - self.waiting,
            "waiting": self.waiting,
            "absent": self.absent,
            "training": training,
            "server": max(total - training - self.seconds, 0.0),
            "share": link / max(total, 1e-9),
        }
