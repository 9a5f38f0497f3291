"""FedAvg: rounds of local training, and the average of what comes back.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, Algorithm 1. Buffers, as batch norm's running statistics, are
averaged with the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstill.methods import parameters
from fedstill.methods.parameters import AveragingServer, RoundsConfig
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide


@dataclass(frozen=True, kw_only=True)
class FedAvgConfig(RoundsConfig):
    """FedAvg's options."""

    name: ClassVar[str] = "fedavg"


def node_side(config: FedAvgConfig, setting: NodeSetting) -> NodeSide:
    """What a node answers: its data's size, and its model after a round of training."""
    return parameters.node_side(setting, parameters.questions(config, setting))


METHOD = Method(
    name="fedavg",
    title="FedAvg",
    paper="McMahan et al., AISTATS 2017",
    config=FedAvgConfig,
    node_side=node_side,
    server=AveragingServer,  # w = sum_k (n_k / n) w_k
    needs=lambda config: Needs(trainable=True, same_architecture=True),
)
