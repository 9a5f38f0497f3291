"""How a server deals with its nodes: what travels in which form, how long it waits, whom it believes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Gt

from fedstill.core.errors import ArgumentError
from fedstill.core.options import PositiveOrInf, Share
from fedstill.protocol.wire_format import WireConfig


@dataclass(frozen=True)
class LinkConfig(WireConfig):
    """The link between server and nodes. What it says of forms and faults holds on every engine."""

    under: ClassVar[str] = "link"

    wait: PositiveOrInf = 600.0
    """Seconds that a node has for one answer; then it counts as away. A round of training is one answer, and
    so is each percent of the local training before the first query."""
    quorum: Share = 1.0
    """Share of the nodes without which a run stops, to be resumed. Below 1 it goes on without nodes that
    stay away or answer nonsense, their weight taken over by the others."""
    outlier: Annotated[float, Gt(1), "above 1, or inf"] = 100.0
    """A node whose logits, critic's scores or parameters are so many times larger than the others' median is
    faulty, and one whose gradients are the square of it; inf: none is. Of two that differ so much neither
    is known to be right: the run stops."""

    secure_aggregation: bool = False
    """Let the server see sums of all nodes' answers only: of nodes elsewhere under masks that cancel in the
    sum (Bonawitz et al. 2017), in one process as they are. Of methods whose answers can be added, with three
    nodes or more; no answer is compared with another then (outlier). With a quorum below 1 a sum can be read
    without nodes that fail, at two more messages, where the nodes' owners allow that."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.secure_aggregation and self.gradients != "float32":
            raise ArgumentError("link.gradients", self.gradients, "float32 where link.secure_aggregation")

    def min_nodes(self, node_count: int) -> int:
        """How many of so many nodes a run needs.

        >>> LinkConfig(quorum=0.5).min_nodes(5)
        3
        """
        return max(math.ceil(self.quorum * node_count - 1e-9), 1)
