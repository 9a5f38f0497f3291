"""What nodes tell about the size of their data: releases like any other."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedstill.node.group import Group
from fedstill.node.questions import Question
from fedstill.tasks import Task

LABEL_COUNTS, DATA_SIZES = "label counts", "data sizes"


def sizes(group: Group) -> torch.Tensor:
    """How many examples each node holds: ``(G,)``."""
    return torch.tensor([float(len(node.data)) for node in group.nodes], device=group.device)


def count_labels(task: Task) -> Question:
    """The question how many examples a node holds, ``counts`` (K, C) by class and ``sizes`` (K,) in all."""

    def handler(group: Group, number: int) -> Mapping[str, torch.Tensor]:
        return {
            "counts": torch.stack([task.counts(node.data) for node in group.nodes]),
            "sizes": sizes(group),
        }

    told = {"counts": LABEL_COUNTS, "sizes": LABEL_COUNTS}
    return Question("count_labels", handler, releases=told, times=1)


def tell_size() -> Question:
    """The question how many examples a node holds, ``sizes`` (K,)."""

    def handler(group: Group, number: int) -> Mapping[str, torch.Tensor]:
        return {"sizes": sizes(group)}

    return Question("tell_size", handler, releases={"sizes": DATA_SIZES}, times=1)
