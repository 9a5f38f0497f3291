"""What a link costs: time and bytes, by whose they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class LinkCosts:
    """What a link costs: seconds of the run by whose they were, and bytes.

    Of a query's time the slowest node's own work is ``nodes``, of which ``waiting`` is what the others
    wait for it on average; ``absent`` is what was waited after that for nodes that failed; the rest is
    ``link``.
    """

    queries: int = 0
    seconds: float = 0.0
    nodes: float = 0.0
    waiting: float = 0.0
    bytes: int = 0
    absent: float = 0.0

    def add(self, seconds: float, own: Sequence[float], bytes: int, absent: float = 0.0) -> None:
        """One round of messages: the seconds that it took; of these, what each node that replied took itself;
        bytes; and, of the seconds, from the last reply until those without one were given up."""
        self.queries += 1
        self.seconds += seconds
        self.nodes += max(own, default=0.0)
        self.waiting += max(own, default=0.0) - sum(own) / max(len(own), 1)
        self.bytes += bytes
        self.absent += absent

    def costs(self, total: float, training: float) -> dict[str, float]:
        """For the report: of ``total`` seconds of a run, ``training`` came before the first query."""
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
