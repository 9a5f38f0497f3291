"""Responses of nodes to one query, as the server sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fedstill.core.errors import ArgumentError
from fedstill.core.text_format import brief_repr
from fedstill.protocol.wire_format import Tensors


@dataclass(frozen=True)
class Responses:
    """Responses of K nodes to one query: ``responses["logits"]`` is ``(K, B, ...)``, in the order of
    ``nodes``.

    Args:
        number: number of the query.
        nodes: names of the nodes that responded.
        tensors: stacked outputs by name.
        unstacked: outputs by name that are not stacked, one entry per node: ragged tensors and JSON values.
    """

    number: int
    nodes: tuple[str, ...]
    tensors: Tensors
    unstacked: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    __repr__ = brief_repr

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one stacked output of all nodes that responded, ``(K, B, ...)``.

        Raises:
            ArgumentError: the query has no such output, or its shape differs by node.
        """
        if name not in self.tensors:
            known = f"one of {', '.join(self.tensors) or 'none'}"
            by_node = f"an output that is stacked; responses.by_node({name!r}) returns it by node"
            raise ArgumentError("response", name, by_node if name in self.unstacked else known)
        return self.tensors[name]

    def by_node(self, name: str) -> dict[str, Any]:
        """Return one output by node name: ``(B, ...)`` tensors, or JSON values.

        Raises:
            ArgumentError: the query has no such output.
        """
        values = self.unstacked[name] if name in self.unstacked else self[name]
        return dict(zip(self.nodes, values, strict=True))
