"""Centralised training: every node hands over its data. What all the other methods exist to avoid.

The ceiling of a comparison, with the local training's own optimiser and as many passes over the data. With
``public`` it has the labelled public data too: "Centralized" of FedKD's Table 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedstill.core.dataset import TensorData
from fedstill.methods.public import labelled
from fedstill.methods.server import Server, ServerSetting
from fedstill.node import training
from fedstill.node.gate import Gate
from fedstill.node.group import Group, stack
from fedstill.node.ledger import Ledger
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.kinds import PRIVATE_DATA
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide, Question
from fedstill.protocol.schedule import Span

TURNS = 20  # between two of which a run can be stopped and looked at


@dataclass(frozen=True)
class CentralisedConfig:
    """Centralised training shares the options of local training."""

    name: ClassVar[str] = "centralised"

    public: bool = False
    """Learn from labelled public data too, as methods do that read its labels."""


def node_side(config: CentralisedConfig, setting: NodeSetting) -> NodeSide:
    """The data themselves."""

    def hand_over(group: Group, number: int) -> Mapping[str, torch.Tensor]:
        return {
            "inputs": stack([node.data.inputs for node in group.nodes]),
            "targets": stack([node.data.targets for node in group.nodes]),
        }

    given = {"inputs": PRIVATE_DATA, "targets": PRIVATE_DATA}
    question = Question("hand_over", hand_over, releases=given, times=1, constant=True)
    return NodeSide({question.name: question}, first=None, learns=False)


class CentralisedServer(Server):
    """Trains the student on what the nodes handed over."""

    def __init__(self, config: Any, setting: ServerSetting) -> None:
        super().__init__(setting)
        self.config, self.public = config, setting.public
        self.total, self.local = TURNS, setting.local
        self.trainee: Node | None = None

    def step(self) -> Mapping[str, float]:
        """One part of the training."""
        trainee = self.trainee or self._gather()
        seen: list[float] = []
        training.train(
            [trainee],
            self.task,
            self.local,
            self.compute,
            span=Span(self.done, self.done + 1, TURNS),
            report=lambda nodes, step, losses: seen.append(losses.item()),
        )
        self.done += 1
        return {"loss": sum(seen) / len(seen)}

    def state(self) -> dict[str, Any]:
        """See :class:`Server`. The data are asked for again, which the ledger counts once."""
        trained = {} if self.trainee is None else self.trainee.optimisers["model"].state_dict()
        return {**super().state(), "optimiser": trained}

    def load(self, state: Mapping[str, Any]) -> None:
        """See :class:`Server`."""
        super().load(state)
        if state["optimiser"]:
            self.federation.number = 0
            none = {"modules": {}, "answered": "", "origin": "", "teachers": []}
        self._gather().load({**none, "optimisers": {"model": state["optimiser"]}})

    def _gather(self) -> Node:
        """One node at the server, which has everything."""
        gate = Gate(self.config.name, PolicyConfig(), Ledger())
        self.trainee = Node(self.config.name, self._data(), self.student, gate, self.seed)
        training.prepare([self.trainee], self.local)
        return self.trainee

    def _data(self) -> TensorData:
        """What it trains on: everybody's data."""
        # One after the other, as answers of different length do not stack.
        asked = [self.federation.ask("hand_over", of=[name]) for name in self.federation.nodes]
        parts = [(answer["inputs"][0], answer["targets"][0]) for answer in asked]
        if self.config.public:
            public = labelled(self.public)
            parts.append((public.inputs, public.targets))
        inputs, targets = zip(*parts, strict=True)
        return TensorData(torch.cat(inputs), torch.cat(targets))


METHOD = Method(
    name="centralised",
    title="Centralised",
    paper="all data in one place",
    config=CentralisedConfig,
    node_side=node_side,
    server=CentralisedServer,
    needs=lambda config: Needs(public=config.public, public_labels=config.public),
)
