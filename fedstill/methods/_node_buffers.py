"""What nodes remember from one query to the next, beside their networks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fedstill.methods import Node


class BufferModule(nn.Module):
    """Tensors by name, in the form of a network without parameters: they are kept as a node's networks are,
    so a run that goes on after a stop finds them."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def add_buffers(node: Node, role: str, **tensors: torch.Tensor) -> None:
    """Give a node room for tensors, with what is in them before the first query."""
    node.modules[role] = BufferModule(**tensors).to(node.data.inputs.device)
    node.frozen[role] = frozenset()


def get_buffers(node: Node, role: str) -> Mapping[str, torch.Tensor]:
    """What a node remembers, to be read and written in place."""
    return dict(node.modules[role].named_buffers())
