"""What nodes tell about the size of their data: releases like any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedstill.federation.contract import Answers, Federation
from fedstill.node.group import Group
from fedstill.protocol.questions import Question
from fedstill.tasks import Task

LABEL_COUNTS, DATA_SIZES = "label counts", "data sizes"


def sizes(group: Group) -> torch.Tensor:
    """How many examples each node holds: ``(G,)``."""
    return torch.tensor([float(len(node.data)) for node in group.nodes], device=group.device)


def count_labels(task: Task) -> Question:
    """The question how many examples a node holds, ``counts`` (K, C) by class and ``sizes`` (K,) in all.

    Where an example may be counted in several classes, or in none, sizes do not follow from counts: they are
    told beside them, and under a budget paid for by themselves.
    """

    def count(group: Group, number: int) -> Mapping[str, torch.Tensor]:
        return {"counts": torch.stack([task.counts(node.data) for node in group.nodes])}

    def count_both(group: Group, number: int) -> Mapping[str, torch.Tensor]:
        return {**count(group, number), "sizes": sizes(group)}

    def in_all(
        told: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Each example is counted in one class: the sum of what leaves costs nothing more. Noise may leave
        none of them, and who answers has at least one."""
        return {"counts": told["counts"], "sizes": told["counts"].sum().clamp(min=1)}

    if task.counted > 1:
        apart = {"counts": LABEL_COUNTS, "sizes": DATA_SIZES}
        return Question("count_labels", count_both, releases=apart, times=1, reads=("counts", "sizes"))
    told = {"counts": LABEL_COUNTS, "sizes": LABEL_COUNTS}
    return Question("count_labels", count, releases=told, times=1, reads=("counts",), finish=in_all)


def tell_size() -> Question:
    """The question how many examples a node holds, ``sizes`` (K,)."""

    def handler(group: Group, number: int) -> Mapping[str, torch.Tensor]:
        return {"sizes": sizes(group)}

    return Question("tell_size", handler, releases={"sizes": DATA_SIZES}, times=1, reads=("sizes",))


@dataclass(frozen=True)
class Census:
    """Who holds how many examples of which class, as the nodes told.

    Args:
        names: of the nodes that told.
        counts: examples by class ``(K, C)``.
        sizes: in all ``(K,)``.
    """

    names: tuple[str, ...]
    counts: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def take(cls, federation: Federation) -> Census:
        """Ask every node."""
        return cls.of_answers(federation.ask("count_labels"))

    @classmethod
    def of_answers(cls, told: Answers) -> Census:
        """What the nodes answered to :func:`count_labels`."""
        return cls(told.nodes, told["counts"], told["sizes"])

    @classmethod
    def even(cls, names: Sequence[str], classes: int, device: torch.device) -> Census:
        """As if each node held one example of each class: for methods that weigh nodes equally."""
        ones = torch.ones(len(names), classes, device=device)
        return cls(tuple(names), ones, ones.sum(1))

    def present(self, federation: Federation) -> list[str]:
        """Those who told and have not been left out since; who came later is not known, and not asked."""
        return [name for name in self.names if name in federation.present]

    def of(self, nodes: Sequence[str]) -> Census:
        """The part of some nodes, in their order: of those that answered a later question."""
        if tuple(nodes) == self.names:
            return self
        rows = [self.names.index(name) for name in nodes]
        return Census(tuple(nodes), self.counts[rows], self.sizes[rows])

    def state(self) -> dict[str, Any]:
        """For a run to go on."""
        return {"names": self.names, "counts": self.counts, "sizes": self.sizes}

    @classmethod
    def load(cls, state: Mapping[str, Any] | None, device: torch.device) -> Census | None:
        """What :meth:`state` kept, if anything."""
        if state is None:
            return None
        return cls(tuple(state["names"]), state["counts"].to(device), state["sizes"].to(device))
