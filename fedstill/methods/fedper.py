"""FedPer: the extractor is shared, the head stays personal.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers",
arXiv:1912.00818, Algorithms 1 and 2: base layers are averaged, personalisation layers never leave a
node and go on from round to round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstill.methods import parameters
from fedstill.methods.parameters import AveragingServer, RoundsConfig
from fedstill.methods.server import ServerSetting
from fedstill.models.split import EXTRACTOR
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide


@dataclass(frozen=True, kw_only=True)
class FedPerConfig(RoundsConfig):
    """FedPer's options."""

    name: ClassVar[str] = "fedper"


def node_side(config: FedPerConfig, setting: NodeSetting) -> NodeSide:
    """What a node answers: its data's size, and its extractor after a round of training."""
    return parameters.node_side(setting, parameters.questions(config, setting, part=EXTRACTOR))


def server(config: FedPerConfig, setting: ServerSetting) -> AveragingServer:
    """FedAvg's server, of extractors."""
    return AveragingServer(config, setting, EXTRACTOR)


METHOD = Method(
    name="fedper",
    title="FedPer",
    paper="Arivazhagan et al., arXiv:1912.00818",
    config=FedPerConfig,
    node_side=node_side,
    server=server,
    needs=lambda config: Needs(trainable=True, same_architecture=True, split=True),
    central="virtual",
)
