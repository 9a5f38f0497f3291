"""A student that learns at the server as a node's model does: on data that are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fedstill.core.dataset import TensorData
from fedstill.methods.server import Server
from fedstill.node import training
from fedstill.node.audit import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.schedule import Span


class Trainee:
    """One node at the server, with the student as its model; of what it has only the optimiser is kept."""

    def __init__(self) -> None:
        self._node: Node | None = None
        self._optimiser: dict[str, Any] = {}  # as it was kept

    def learn(self, server: Server, t: int, data: Callable[[], TensorData]) -> Mapping[str, float]:
        """One part of the training, of as many as the run has turns.

        Args:
            server: whose student learns.
            t: which part.
            data: gives what it learns from, when that is not there yet.
        """
        node = self._node or self._made(server, data())
        seen: list[float] = []
        training.train(
            [node],
            server.task,
            server.local,
            server.compute,
            span=Span(t, t + 1, server.total),
            report=lambda nodes, step, losses: seen.append(losses.item()),
        )
        return {"loss": sum(seen) / len(seen)}

    def state(self) -> dict[str, Any]:
        """For a run to go on."""
        return {"optimiser": self._node.optimisers["model"].state_dict() if self._node else self._optimiser}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Take up what :meth:`state` kept."""
        self._optimiser = state["optimiser"]

    def _made(self, server: Server, data: TensorData) -> Node:
        """The node, with the optimiser as it was kept, if it was."""
        name = server.name
        self._node = Node(name, data, server.student, Gate(name, PolicyConfig(), AuditLog()), server.seed)
        training.prepare([self._node], server.local)
        if self._optimiser:
            before = {"modules": {}, "answered": "", "origin": "", "teachers": []}
            self._node.load({**before, "optimisers": {"model": self._optimiser}})
        return self._node
