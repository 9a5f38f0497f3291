"""Options of the link between server and nodes: wire formats, timeout, quorum, outliers, secure
aggregation."""

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
    """Options of the link between server and nodes, for every engine.

    Example:
        >>> LinkConfig(quorum=0.5, wait=60.0).min_nodes(4)
        2
    """

    section: ClassVar[str] = "link"

    wait: PositiveOrInf = 600.0
    """Seconds that a node has for one response; then it counts as unreachable. A round of training is one
    response, and so is each percent of the local training before the first query."""
    quorum: Share = 1.0
    """Share of the nodes that a run needs, above 0 and up to 1; with fewer it stops and can be resumed. Below
    1 the run excludes nodes that are unreachable or send invalid data, and the others take over their
    weight."""
    outlier: Annotated[float, Gt(1), "above 1, or inf"] = 100.0
    """Exclude a node whose logits, critic scores or parameters are more than this many times larger than the
    median of the others, or whose gradients are larger by the square of it; inf: never. With two nodes it is
    unknown which one is wrong, and the run stops."""

    secure_aggregation: bool = False
    """Secure aggregation (experimental, not reviewed from outside): the server sees only sums of the
    nodes' responses. Remote nodes mask their responses so that the masks cancel in the sum (a variation
    on Bonawitz et al. 2017); in one process responses are added without masks. It needs a method whose
    responses can be added and three nodes or more; outliers are not detected. With a quorum below 1 the
    sum can be read without nodes that fail, at the cost of two more messages, if the nodes' owners allow
    that."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.secure_aggregation and self.gradients != "float32":
            raise ArgumentError("link.gradients", self.gradients, "float32 where link.secure_aggregation")

    def min_nodes(self, node_count: int) -> int:
        """Return the smallest number of nodes that a run needs.

        >>> LinkConfig(quorum=0.5).min_nodes(5)
        3
        """
        return max(math.ceil(self.quorum * node_count - 1e-9), 1)
