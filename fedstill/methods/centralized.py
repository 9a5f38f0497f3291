"""Centralized training: every node uploads its data. All other methods exist to avoid this.

Upper bound of a comparison, with the local training's optimizer and as many passes over the data. With
``public`` it trains on the labeled public data too: "Centralized" of FedKD's Table 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedstill.methods import (
    Method,
    Needs,
    Node,
    NodeSetting,
    NodeView,
    Query,
    QueryDetails,
    Server,
    Span,
    TensorData,
    Tensors,
)
from fedstill.methods._public_data import require_labeled
from fedstill.node import local_training
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.payload_kinds import PRIVATE_DATA


class CentralTrainer:
    """Training of the student at the server as the model of one node; only its optimizer is saved.

    Args:
        name: of that node, and so of its random streams. Recorded metrics depend on its spelling.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._node: Node | None = None
        self._optimizer: dict[str, Any] = {}  # saved state

    def train(self, server: Server, t: int, data: Callable[[], TensorData]) -> Mapping[str, float]:
        """Run part ``t`` of the training, of as many as the run has steps; ``data`` is called once."""
        node = self._node or self._make_node(server, data())
        step_losses: list[float] = []
        local_training.train(
            [node],
            server.task,
            server.local,
            server.compute,
            span=Span(t, t + 1, server.total_steps),
            report=lambda nodes, step, losses: step_losses.append(losses.item()),
        )
        return {"loss": sum(step_losses) / len(step_losses)}

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self._node.optimizers["model"].state_dict() if self._node else self._optimizer}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._optimizer = state["optimizer"]

    def _make_node(self, server: Server, data: TensorData) -> Node:
        name = self._name
        self._node = Node(name, data, server.student, Gate(name, PolicyConfig(), AuditLog()), server.seed)
        local_training.attach_optimizers([self._node], server.local)
        if self._optimizer:
            state = {**self._node.state_dict(), "modules": {}}
            self._node.load_state_dict({**state, "optimizers": {"model": self._optimizer}})
        return self._node


@dataclass
class CentralizedState:
    """Server state of the method."""

    trainer: CentralTrainer


@dataclass(frozen=True, kw_only=True)
class Centralized(Method):
    """Centralized training, with the options of local training."""

    title: ClassVar[str] = "Centralized"
    paper: ClassVar[str] = "all data in one place"
    query_names: ClassVar[tuple[str, ...]] = ("upload_data",)
    total_steps: ClassVar[int] = 20  # a run can stop and be evaluated between two steps
    initial_training: ClassVar[None] = None
    trains_models: ClassVar[bool] = False

    public: bool = False
    """Train on labeled public data too, as methods do that use its labels."""

    def needs(self) -> Needs:
        return Needs(public=self.public, public_labels=self.public)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield Query(
            upload_data,
            releases={"inputs": PRIVATE_DATA, "targets": PRIVATE_DATA},
            times=1,
            details=QueryDetails(constant=True),
        )

    def init_state(self, server: Server) -> CentralizedState:
        return CentralizedState(CentralTrainer("centralised"))

    def step(self, server: Server, state: CentralizedState, t: int) -> Mapping[str, float]:
        return state.trainer.train(server, t, lambda: self.data(server))

    def data(self, server: Server) -> TensorData:
        """Return the training data of all nodes. After a resume they are queried again, and counted once."""
        # One node at a time, as responses of different lengths do not stack.
        server.federation.restart_numbers()
        responses = [server.query("upload_data", nodes=[name]) for name in server.federation.nodes]
        parts = [(response["inputs"][0], response["targets"][0]) for response in responses]
        if self.public:
            public = require_labeled(server.public)
            parts.append((public.inputs, public.targets))
        inputs, targets = zip(*parts, strict=True)
        return TensorData(torch.cat(inputs), torch.cat(targets))


def upload_data(node: NodeView) -> Tensors:
    """Return the node's data."""
    return {"inputs": node.data.inputs, "targets": node.data.targets}
