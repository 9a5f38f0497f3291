"""How a server deals with its nodes: what travels in which form, how long it waits, whom it believes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedstill.core.choices import check_choices
from fedstill.core.errors import ArgumentError
from fedstill.protocol.messages import WireConfig


@dataclass(frozen=True)
class LinkConfig(WireConfig):
    """The link between server and nodes. What it says of forms and faults holds on every engine."""

    wait: float = 600.0
    """Seconds that a node has for one answer; then it counts as away. A round of training is one answer, and
    so is each percent of the local training before the first question."""
    quorum: float = 1.0
    """Share of the nodes without which a run stops, to be resumed. Below 1 it goes on without nodes that
    stay away or answer nonsense, their weight taken over by the others."""
    outlier: float = 100.0
    """A node whose logits, critic's scores or parameters are so many times larger than the others' median is
    faulty, and one whose gradients are the square of it; inf: none is. Of two that differ so much neither
    is known to be right: the run stops."""

    def __post_init__(self) -> None:
        check_choices(self, "link")
        if not self.wait > 0:
            raise ArgumentError("link.wait", self.wait, "above 0")
        if not 0 < self.quorum <= 1:
            raise ArgumentError("link.quorum", self.quorum, "above 0, up to 1")
        if not self.outlier > 1:
            raise ArgumentError("link.outlier", self.outlier, "above 1, or inf")

    def least(self, nodes: int) -> int:
        """How many of so many nodes a run needs.

        >>> LinkConfig(quorum=0.5).least(5)
        3
        """
        return max(math.ceil(self.quorum * nodes - 1e-9), 1)
