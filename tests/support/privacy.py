"""Mechanisms by name, and the information that releases leave undetermined."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from fedstill.privacy.config import MECHANISMS, PrivacyConfig
from fedstill.privacy.events import Event, PrivacyCost


def make_mechanism(mechanism: str, **options: Any) -> PrivacyConfig:
    """Return a mechanism with those of the options that it has."""
    kind = MECHANISMS[mechanism]
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in options.items() if name in known})


def free_directions(jacobian: torch.Tensor, node: int, nodes: int, classes: int) -> int:
    """Return the dimension in which the response of one node can change while no sum changes.

    Constants added to all class scores of a node are not counted, since they do not change predictions. The
    result is ``(classes - 1) * values`` if the sums do not restrict the response, and 0 if they determine it.

    Args:
        jacobian: derivatives of all sums with respect to the nodes' responses, ``(sums, K * C * values)``.

    >>> free_directions(torch.eye(4), 0, 2, 2), free_directions(torch.cat([torch.eye(2)] * 2, 1), 0, 2, 2)
    (0, 1)
    """
    _, singular, V = torch.linalg.svd(jacobian.double(), full_matrices=True)
    rank = int((singular > 1e-3 * singular[0]).sum())
    values = len(V) // (nodes * classes)
    null = V[rank:].T.reshape(nodes, classes, values, -1 if rank < len(V) else 0)[node]  # (C, values, free)
    moved = (null - null.mean(0)).flatten(0, 1)
    return int((torch.linalg.svdvals(moved) > 1e-3).sum()) if moved.shape[1] else 0


def single_event(cost: PrivacyCost | None) -> tuple[Event, int]:
    """Return the only event of a cost, and its count."""
    assert cost is not None
    (event,) = cost.items()
    return event
