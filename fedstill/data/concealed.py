"""Nodes that know only some of the findings that a federation is about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError


def conceal(parts: Sequence[TensorData], findings: int, generator: np.random.Generator) -> list[TensorData]:
    """Nodes that know only ``findings`` of the labels: the others become -1, unknown, in their data; 0 is
    all.

    The labels are laid on a circle in a drawn order. Node k of K knows those from place ``k C / K`` on, so
    that together they know all C and neighbours share some; a number that does not give this is refused.

    >>> part = TensorData(torch.zeros(1, 1, 4, 4), torch.ones(1, 4, dtype=torch.int64))
    >>> both = conceal([part, part], 3, np.random.default_rng(0))
    >>> [part.targets.tolist() for part in both]
    [[[1, 1, 1, -1]], [[-1, 1, 1, 1]]]
    """
    if findings == 0:
        return list(parts)
    if any(part.targets.ndim != 2 or part.targets.is_floating_point() for part in parts):
        raise ArgumentError("split.findings", findings, "0, as only findings can be unknown")
    labels, nodes = parts[0].targets.shape[1], len(parts)
    least = min(math.ceil(labels / nodes) + 1, labels)
    if not least <= findings <= labels:
        some = f"from {least} to {labels}" if least < labels else str(labels)
        raise ArgumentError(
            "split.findings",
            findings,
            f"{some}, with which {nodes} nodes know all {labels} labels and overlap; or set "
            "split.findings 0 (all)",
        )
    circle = generator.permutation(labels)
    known = []
    for node, part in enumerate(parts):
        places = (node * labels // nodes + np.arange(findings)) % labels
        unknown = torch.from_numpy(np.setdiff1d(circle, circle[places]))
        targets = part.targets.clone()
        targets[:, unknown] = -1
        known.append(replace(part, targets=targets))
    return known
