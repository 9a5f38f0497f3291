"""Queries for the nodes' data sizes, by class or in all, and the server's record of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedstill.core.text_format import brief_repr
from fedstill.federation.federation import Federation
from fedstill.methods._server import Server
from fedstill.node.node_group import NodeGroup
from fedstill.protocol.payload_kinds import DATA_SIZES, LABEL_COUNTS
from fedstill.protocol.queries import NodeSetting, query

Tensors = Mapping[str, torch.Tensor]


def sample_counts(nodes: NodeGroup) -> torch.Tensor:
    """Return the number of examples of each node: ``(G,)``."""
    return torch.tensor([float(len(node.data)) for node in nodes.nodes], device=nodes.device)


class SampleCountQuery:
    """Declares a query for each node's number of examples."""

    @query(
        releases={"sizes": DATA_SIZES},
        times=1,
        depends_on_records=("sizes",),
        sealed=True,
        sums={"sizes": "sum"},
    )
    def count_samples(self, nodes: NodeGroup) -> Tensors:
        """Return n_k as ``sizes`` (K,)."""
        return {"sizes": sample_counts(nodes)}


def _is_multi_label(setting: NodeSetting) -> bool:
    """Return whether an example may count in several classes or in none, so that counts give no sizes."""
    return setting.task.count_sensitivity > 1


def _response_with_sizes(method: Any, response: Tensors, sent: Tensors) -> Tensors:
    """Return counts and sizes; without released sizes the sum of the counts, at no further cost.

    Noise may leave no examples at all, and a node that responds has at least one.
    """
    counts = response["counts"].float()
    return {
        "counts": counts,
        "sizes": response["sizes"] if "sizes" in response else counts.sum().clamp(min=1),
    }


class LabelCountQuery:
    """Declares a query for each node's number of examples of each class.

    If counts give no sizes, sizes are released too, at their own privacy cost.
    """

    @query(
        releases=lambda self, setting: {
            "counts": LABEL_COUNTS,
            "sizes": DATA_SIZES if _is_multi_label(setting) else LABEL_COUNTS,
        },
        times=1,
        depends_on_records=lambda self, setting: (
            ("counts", "sizes") if _is_multi_label(setting) else ("counts",)
        ),
        postprocess=_response_with_sizes,
        sealed=True,
        sums={"counts": "sum", "sizes": "sum"},
    )
    def count_labels(self, nodes: NodeGroup) -> Tensors:
        """Return the number of examples of each node, ``counts`` (K, C) by class and ``sizes`` (K,) in
        all."""
        counts = torch.stack([nodes.setting.task.counts(node.data) for node in nodes.nodes])
        return {
            "counts": counts,
            **({"sizes": sample_counts(nodes)} if _is_multi_label(nodes.setting) else {}),
        }


@dataclass(eq=False)
class LabelHistogram:
    """Nodes' numbers of examples, by class ``(K, C)`` and in all ``(K,)``; empty until nodes are queried.

    For nodes that release sizes only, C is 0.
    """

    names: tuple[str, ...] = ()
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    sizes: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    __repr__ = brief_repr

    @classmethod
    def uniform(cls, names: Sequence[str], classes: int, device: torch.device) -> LabelHistogram:
        """Return one example of each class for each node, for methods that weight nodes equally."""
        ones = torch.ones(len(names), classes, device=device)
        return cls(tuple(names), ones, ones.sum(1))

    @staticmethod
    def find_in(state: Any) -> LabelHistogram | None:
        """Return the histogram among the attributes of a server's state, or None."""
        return next((each for each in vars(state).values() if isinstance(each, LabelHistogram)), None)

    def fetch(self, server: Server) -> None:
        """Query every node, unless that is done."""
        if not self.names:
            by_class = "count_labels" in server.federation.queries
            responses = server.query("count_labels" if by_class else "count_samples")
            self.names, self.sizes = responses.nodes, responses["sizes"]
            self.counts = (
                responses["counts"] if by_class else responses["sizes"].new_zeros(len(responses.nodes), 0)
            )

    def present_nodes(self, federation: Federation) -> list[str]:
        """Return the known nodes that are not excluded. A node that joins later is unknown and not
        queried."""
        present = set(federation.response_sources)
        return [name for name in self.names if name in present]

    def select(self, nodes: Sequence[str]) -> LabelHistogram:
        """Return the part of some nodes, in their order."""
        if tuple(nodes) == self.names:
            return self
        places = {name: place for place, name in enumerate(self.names)}
        rows = [places[name] for name in nodes]
        return LabelHistogram(tuple(nodes), self.counts[rows], self.sizes[rows])

    def state_dict(self) -> dict[str, Any]:
        return {"names": self.names, "counts": self.counts, "sizes": self.sizes}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.names = tuple(state["names"])
        self.counts, self.sizes = state["counts"].to(device), state["sizes"].to(device)


@dataclass
class HistogramState:
    """Server state of methods that need no more than the nodes' data sizes."""

    histogram: LabelHistogram = field(default_factory=LabelHistogram)  # empty until the first turn
