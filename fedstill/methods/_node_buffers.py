"""Tensors that nodes keep from one query to the next, besides their networks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fedstill.methods import Node


class BufferModule(nn.Module):
    """Tensors by name, as a module without parameters, so that a node saves and restores them with its
    networks."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def add_buffers(node: Node, role: str, **tensors: torch.Tensor) -> None:
    """Add tensors with their initial values to a node."""
    node.modules[role] = BufferModule(**tensors).to(node.data.inputs.device)
    node.frozen[role] = frozenset()


def get_buffers(node: Node, role: str) -> Mapping[str, torch.Tensor]:
    """Return a node's tensors by name; they can be changed in place."""
    return dict(node.modules[role].named_buffers())
