"""What methods whose nodes tell a mean of each class share: Jeong et al.'s FD, FedProto and FedTGP.

Nodes keep models of their own, of any architectures, and there is none at the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from fedstill.core.errors import ArgumentError
from fedstill.methods import Needs
from fedstill.methods._averaging import Rounds
from fedstill.node.node_group import NodeGroup, stack_tensors


@dataclass(frozen=True, kw_only=True)
class ClassMeans(Rounds):
    """What such methods have."""

    evaluated_model: ClassVar[Literal["nodes"]] = "nodes"

    def needs(self) -> Needs:
        return Needs(trainable=True, single_label=True)

    @property
    def needs_initial_weights(self) -> bool:
        """Nodes begin with what they have."""
        return False


def class_means(values: torch.Tensor, targets: torch.Tensor, classes: int) -> torch.Tensor:
    """The mean of vectors ``(N, p)`` for each class: ``(C, p)``, 0 where a class has none.

    >>> class_means(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([2, 2, 0]), 3).flatten()
    tensor([5., 0., 2.])
    """
    held = F.one_hot(targets, classes).to(values.dtype)  # (N, C)
    return held.T @ values / held.sum(0).clamp_min(1).unsqueeze(1)


def check_class_vectors(
    name: str, sent: torch.Tensor | float, nodes: int, classes: int, width: int = 0
) -> None:
    """Refuse what a server sends in place of one float32 vector a class, ``(G, C, p)``, before it is used.

    Args:
        width: numbers in each; 0: any.

    Raises:
        ArgumentError: it has another form.
    """
    expected = f"torch.float32 ({classes}, {width or 'p'}), a vector for each class"
    if not isinstance(sent, torch.Tensor):  # one number
        raise ArgumentError(name, sent, expected)
    sound = sent.ndim == 3 and tuple(sent.shape[:2]) == (nodes, classes) and sent.dtype == torch.float32
    if not sound or sent.shape[2] != (width or sent.shape[2]):
        raise ArgumentError(name, f"{sent.dtype} {tuple(sent.shape[1:])}", expected)


def vectors_of_classes(of: dict[str, torch.Tensor], group: NodeGroup, y: torch.Tensor) -> torch.Tensor:
    """Of each node's vectors ``(C, p)``, by its name, those of its examples' classes y ``(G, B)``."""
    return stack_tensors([of[node.name][mine] for node, mine in zip(group.nodes, y, strict=False)])
