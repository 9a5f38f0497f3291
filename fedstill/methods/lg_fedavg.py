"""LG-FedAvg: the head is shared, the extractor stays local.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: "Think Locally, Act Globally:
Federated Learning with Local and Global Representations", arXiv:2001.01523, Algorithm 1: global
parameters (the layers near the output) are averaged, local representations never leave a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstill.methods import parameters
from fedstill.methods.parameters import AveragingServer, RoundsConfig
from fedstill.methods.server import ServerSetting
from fedstill.models.split import HEAD
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide


@dataclass(frozen=True, kw_only=True)
class LGFedAvgConfig(RoundsConfig):
    """LG-FedAvg's options."""

    name: ClassVar[str] = "lg-fedavg"


def node_side(config: LGFedAvgConfig, setting: NodeSetting) -> NodeSide:
    """What a node answers: its data's size, and its head after a round of training."""
    return parameters.node_side(setting, parameters.questions(config, setting, part=HEAD))


def server(config: LGFedAvgConfig, setting: ServerSetting) -> AveragingServer:
    """FedAvg's server, of heads."""
    return AveragingServer(config, setting, HEAD)


METHOD = Method(
    name="lg-fedavg",
    title="LG-FedAvg",
    paper="Liang et al., arXiv:2001.01523",
    config=LGFedAvgConfig,
    node_side=node_side,
    server=server,
    needs=lambda config: Needs(trainable=True, same_architecture=True, split=True),
    central="virtual",
)
