"""Training on labelled public data alone: "Public-only" of FedKD's Table 4, above which is what nodes add.

As centralised training, with the local training's optimiser and as many passes, but over the public data; no
node is asked anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstill.core.dataset import TensorData
from fedstill.methods.centralised import CentralisedServer
from fedstill.methods.public import known, labelled
from fedstill.methods.server import ServerSetting
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide


@dataclass(frozen=True)
class PublicOnlyConfig:
    """Training on public data has no options beside those of local training, which it shares."""

    name: ClassVar[str] = "public-only"


def node_side(config: PublicOnlyConfig, setting: NodeSetting) -> NodeSide:
    """No question at all, and nothing that is learned."""
    return NodeSide({}, first=None, learns=False)


class PublicOnlyServer(CentralisedServer):
    """Trains the student on labelled public data.

    Raises:
        ArgumentError: public data have no labels.
    """

    def __init__(self, config: PublicOnlyConfig, setting: ServerSetting) -> None:
        super().__init__(config, setting)
        known(setting.public)

    def _data(self) -> TensorData:
        """What it trains on: the public data."""
        return labelled(self.public)


METHOD = Method(
    name="public-only",
    title="Public-only",
    paper="labelled public data only",
    config=PublicOnlyConfig,
    node_side=node_side,
    server=PublicOnlyServer,
    needs=lambda config: Needs(public=True, public_labels=True),
)
