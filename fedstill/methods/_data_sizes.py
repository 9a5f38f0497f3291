"""Query for each node's number of examples n_k, and the server's record of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedstill.node.node_view import NodeView
from fedstill.protocol.payload_kinds import DATA_SIZES
from fedstill.protocol.queries import Query

Tensors = Mapping[str, torch.Tensor]


def count_samples_query() -> Query:
    """Return the query for each node's number of examples n_k."""
    return Query(
        count_samples,
        releases={"sizes": DATA_SIZES},
        times=1,
        depends_on_records=("sizes",),
        sums={"sizes": "sum"},
    )


def count_samples(node: NodeView) -> Tensors:
    """Return n_k, the node's number of examples, as ``sizes`` ()."""
    return {"sizes": torch.tensor(float(len(node.data)), device=node.device)}


def fetch_sizes(server: Any) -> dict[str, float]:
    """Query every node's number of examples; return them by node.

    Args:
        server: the :class:`fedstill.methods._server.Server`, which imports this module.
    """
    return {name: n_k.item() for name, n_k in server.query("count_samples").by_node("sizes").items()}
