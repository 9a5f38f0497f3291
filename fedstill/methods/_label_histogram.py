"""Query for the nodes' numbers of examples by class, and the server's record of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedstill.core.text_format import brief_repr
from fedstill.federation.secure_aggregation import AnyFederation
from fedstill.methods._data_sizes import Tensors, count_samples
from fedstill.node.node_view import NodeView
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.payload_kinds import DATA_SIZES, LABEL_COUNTS
from fedstill.protocol.queries import Query, QueryDetails
from fedstill.tasks import Task


def _is_multi_label(setting: NodeSetting) -> bool:
    """Return whether an example may count in several classes or in none, so that counts give no sizes."""
    return setting.task.count_sensitivity > 1


def _add_sizes(response: Tensors, sent: Tensors) -> Tensors:
    """Return counts and sizes; without released sizes the sum of the counts, at no further cost.

    Noise may leave no examples at all, and a node that responds has at least one.
    """
    counts = response["counts"].float()
    sizes = response["sizes"] if "sizes" in response else counts.sum().clamp(min=1)
    return {"counts": counts, "sizes": sizes}


def count_labels(node: NodeView) -> Tensors:
    """Return the node's number of examples of each class, as ``counts`` (C,)."""
    return {"counts": node.task.counts(node.data)}


def count_labels_and_sizes(node: NodeView) -> Tensors:
    """Return ``counts`` (C,), and ``sizes`` (), which they do not give."""
    return {**count_labels(node), **count_samples(node)}


def count_labels_query(setting: NodeSetting) -> Query:
    """Return the query for each node's number of examples of each class.

    If counts give no sizes, sizes are released too, at their own privacy cost.
    """
    releases_sizes = _is_multi_label(setting)
    return Query(
        count_labels_and_sizes if releases_sizes else count_labels,
        releases={"counts": LABEL_COUNTS, "sizes": DATA_SIZES if releases_sizes else LABEL_COUNTS},
        times=1,
        depends_on_records=("counts", "sizes") if releases_sizes else ("counts",),
        sums={"counts": "sum", "sizes": "sum"},
        name="count_labels",
        details=QueryDetails(postprocess=_add_sizes),
    )


@dataclass(eq=False)
class LabelHistogram:
    """Nodes' numbers of examples, by class ``(K, C)`` and in all ``(K,)``; empty until nodes are queried.

    Args:
        equal: count one example of each class at each node, without a query, so that all have equal weights.
    """

    names: tuple[str, ...] = ()
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    sizes: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    equal: bool = False

    __repr__ = brief_repr

    @classmethod
    def uniform(cls, names: Sequence[str], classes: int, device: torch.device) -> LabelHistogram:
        """Return one example of each class for each node, for methods that weight nodes equally."""
        ones = torch.ones(len(names), classes, device=device)
        return cls(tuple(names), ones, ones.sum(1), equal=True)

    @staticmethod
    def find_in(state: Any) -> LabelHistogram | None:
        """Return the histogram among the attributes of a server's state, or None."""
        return next((each for each in vars(state).values() if isinstance(each, LabelHistogram)), None)

    def fetch(self, server: Any) -> None:
        """Query every node, unless that is done or not needed.

        Args:
            server: the :class:`fedstill.methods._server.Server`, which imports this module.
        """
        if not self.names and self.equal:
            names = server.federation.sources
            even = self.uniform(names, server.task.classes, server.device)
            self.names, self.counts, self.sizes = even.names, even.counts, even.sizes
        if not self.names:
            responses = server.query("count_labels")
            self.names, self.counts, self.sizes = responses.nodes, responses["counts"], responses["sizes"]

    def present_nodes(self, federation: AnyFederation) -> list[str]:
        """Return the known nodes that are not excluded. A node that joins later is unknown and not
        queried."""
        present = set(federation.present_sources)
        return [name for name in self.names if name in present]

    def select(self, nodes: Sequence[str]) -> LabelHistogram:
        """Return the part of some nodes, in their order."""
        if tuple(nodes) == self.names:
            return self
        places = {name: place for place, name in enumerate(self.names)}
        rows = [places[name] for name in nodes]
        return LabelHistogram(tuple(nodes), self.counts[rows], self.sizes[rows], self.equal)

    def weights(self, task: Task, nodes: Sequence[str]) -> torch.Tensor:
        """Return the weights of some nodes by class: ``(K, 1, C)``, summing to 1 over the nodes."""
        return task.importance_weights(self.select(nodes).counts)

    def state_dict(self) -> dict[str, Any]:
        return {"names": self.names, "counts": self.counts, "sizes": self.sizes}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.names = tuple(state["names"])
        self.counts, self.sizes = state["counts"].to(device), state["sizes"].to(device)


@dataclass
class LabelHistogramState:
    """Server state of methods that need no more than the nodes' label counts."""

    histogram: LabelHistogram = field(default_factory=LabelHistogram)  # empty until the first step
