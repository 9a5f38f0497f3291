"""Centralised training: every node hands over its data. What all the other methods exist to avoid.

The ceiling of a comparison, with the local training's own optimiser and as many passes over the data. With
``public`` it has the labelled public data too: "Centralized" of FedKD's Table 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstill.core.dataset import TensorData
from fedstill.methods._histogram import Tensors
from fedstill.methods._public import labelled
from fedstill.methods._trainee import Trainee
from fedstill.methods.server import Server
from fedstill.node.group import Group, stack
from fedstill.protocol.kinds import PRIVATE_DATA
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import question


@dataclass
class Gathered:
    """What the server has: a node of its own, with everybody's data."""

    trainee: Trainee


@dataclass(frozen=True)
class Centralised(Method):
    """Centralised training shares the options of local training."""

    title: ClassVar[str] = "Centralised"
    paper: ClassVar[str] = "all data in one place"
    turns: ClassVar[int] = 20  # between two of which a run can be stopped and looked at
    before: ClassVar[None] = None
    learns: ClassVar[bool] = False

    public: bool = False
    """Learn from labelled public data too, as methods do that read its labels."""

    def needs(self) -> Needs:
        """Public labels, if it learns from them."""
        return Needs(public=self.public, public_labels=self.public)

    @question(releases={"inputs": PRIVATE_DATA, "targets": PRIVATE_DATA}, times=1, constant=True)
    def hand_over(self, nodes: Group) -> Tensors:
        """The data themselves."""
        return {
            "inputs": stack([node.data.inputs for node in nodes.nodes]),
            "targets": stack([node.data.targets for node in nodes.nodes]),
        }

    def begin(self, server: Server) -> Gathered:
        """Nothing has been handed over yet."""
        return Gathered(Trainee())

    def turn(self, server: Server, state: Gathered, t: int) -> Mapping[str, float]:
        """One part of the training."""
        return state.trainee.learn(server, t, lambda: self.data(server))

    def data(self, server: Server) -> TensorData:
        """What it trains on: everybody's data, which are asked for again after a stop, and counted once."""
        # One after the other, as answers of different length do not stack.
        server.federation.number = 0
        asked = [server.ask("hand_over", of=[name]) for name in server.federation.nodes]
        parts = [(answer["inputs"][0], answer["targets"][0]) for answer in asked]
        if self.public:
            public = labelled(server.public)
            parts.append((public.inputs, public.targets))
        inputs, targets = zip(*parts, strict=True)
        return TensorData(torch.cat(inputs), torch.cat(targets))
