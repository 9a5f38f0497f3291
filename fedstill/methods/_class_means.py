"""Shared parts of methods whose nodes share a mean vector of each class: FD, FedProto and FedTGP.

Nodes keep their own models, of any architecture. There is no model at the server.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fedstill.core.errors import ArgumentError
from fedstill.methods import NodeView


def class_means(values: torch.Tensor, targets: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the mean of vectors ``(N, p)`` for each class: ``(C, p)``, 0 for a class without examples.

    >>> class_means(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([2, 2, 0]), 3).flatten()
    tensor([5., 0., 2.])
    """
    held = F.one_hot(targets, classes).to(values.dtype)  # (N, C)
    return held.T @ values / held.sum(0).clamp_min(1).unsqueeze(1)


def check_class_vectors(name: str, sent: torch.Tensor | float, classes: int, width: int = 0) -> None:
    """Check that a server sent one float32 vector for each class, ``(C, p)``.

    Args:
        name: name of the tensor.
        sent: the received tensor or number.
        classes: C.
        width: values p of a vector; 0: any.

    Raises:
        ArgumentError: another type or shape.
    """
    expected = f"torch.float32 ({classes}, {width or 'p'}), a vector for each class"
    if not isinstance(sent, torch.Tensor):  # one number
        raise ArgumentError(name, sent, expected)
    is_sound = sent.ndim == 2 and len(sent) == classes and sent.dtype == torch.float32
    if not is_sound or sent.shape[1] != (width or sent.shape[1]):
        raise ArgumentError(name, f"{sent.dtype} {tuple(sent.shape)}", expected)


def vectors_of_labels(node: NodeView, vectors: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return, from a node's vectors ``(C, p)``, those of its examples' labels y ``(B,)``: ``(B, p)``."""

    def run(vectors: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack([own[labels] for own, labels in zip(vectors, y, strict=True)])

    chosen: torch.Tensor = node.on_group(run, vectors, y)
    return chosen
