"""Shared parts of methods whose nodes share a mean vector of each class: FD, FedProto and FedTGP.

Nodes keep their own models, of any architecture. There is no model at the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from fedstill.core.errors import ArgumentError
from fedstill.methods import Needs
from fedstill.methods._averaging import RoundsMethod
from fedstill.node.node_group import NodeGroup, stack_tensors


@dataclass(frozen=True, kw_only=True)
class ClassMeansMethod(RoundsMethod):
    """Base class of these methods."""

    evaluated_model: ClassVar[Literal["nodes"]] = "nodes"

    def needs(self) -> Needs:
        return Needs(trainable=True, single_label=True)

    @property
    def needs_initial_weights(self) -> bool:
        """False: nodes keep their own weights."""
        return False


def class_means(values: torch.Tensor, targets: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the mean of vectors ``(N, p)`` for each class: ``(C, p)``, 0 for a class without examples.

    >>> class_means(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([2, 2, 0]), 3).flatten()
    tensor([5., 0., 2.])
    """
    held = F.one_hot(targets, classes).to(values.dtype)  # (N, C)
    return held.T @ values / held.sum(0).clamp_min(1).unsqueeze(1)


def check_class_vectors(
    name: str, sent: torch.Tensor | float, nodes: int, classes: int, width: int = 0
) -> None:
    """Check that a server sent one float32 vector for each class, ``(G, C, p)``.

    Args:
        name: name of the tensor.
        sent: the received tensor or number.
        nodes: G.
        classes: C.
        width: values p of a vector; 0: any.

    Raises:
        ArgumentError: another type or shape.
    """
    expected = f"torch.float32 ({classes}, {width or 'p'}), a vector for each class"
    if not isinstance(sent, torch.Tensor):  # one number
        raise ArgumentError(name, sent, expected)
    sound = sent.ndim == 3 and tuple(sent.shape[:2]) == (nodes, classes) and sent.dtype == torch.float32
    if not sound or sent.shape[2] != (width or sent.shape[2]):
        raise ArgumentError(name, f"{sent.dtype} {tuple(sent.shape[1:])}", expected)


def vectors_of_classes(of: dict[str, torch.Tensor], group: NodeGroup, y: torch.Tensor) -> torch.Tensor:
    """Return, from each node's vectors ``(C, p)`` by name, those of its examples' classes y ``(G, B)``."""
    return stack_tensors([of[node.name][mine] for node, mine in zip(group.nodes, y, strict=False)])
