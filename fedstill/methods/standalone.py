"""Standalone: every node trains alone and nothing is shared. The floor of every comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedstill.methods.server import Server, ServerSetting
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide


@dataclass(frozen=True)
class StandaloneConfig:
    """Standalone training has no options beside those of the nodes."""

    name: ClassVar[str] = "standalone"


def node_side(config: StandaloneConfig, setting: NodeSetting) -> NodeSide:
    """No question at all."""

    return NodeSide({})


class StandaloneServer(Server):
    """A server with nothing to do."""

    def __init__(self, config: StandaloneConfig, setting: ServerSetting) -> None:
        super().__init__(setting)
        self.total = 0

    def step(self) -> Mapping[str, float]:
        """A turn in which nothing happens."""
        self.done += 1
        return {}


METHOD = Method(
    name="standalone",
    title="Standalone",
    paper="local training only",
    config=StandaloneConfig,
    node_side=node_side,
    server=StandaloneServer,
    needs=lambda config: Needs(),
    central="nodes",
)
