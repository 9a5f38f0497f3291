"""Training on labeled public data alone: "Public-only" of FedKD's Table 4, the baseline without nodes.

As centralized training, with the local training's optimizer and as many passes, but over the public data. No
node is queried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedstill.methods import Method, Needs, Server
from fedstill.methods._public_data import require_labeled, require_public
from fedstill.methods.centralized import CentralizedState, CentralTrainer


@dataclass(frozen=True)
class PublicOnly(Method):
    """Training on public data, with the options of local training."""

    title: ClassVar[str] = "Public-only"
    paper: ClassVar[str] = "labeled public data only"
    total_steps: ClassVar[int] = 20
    initial_training: ClassVar[None] = None
    trains_models: ClassVar[bool] = False

    def needs(self) -> Needs:
        return Needs(public=True, public_labels=True)

    def init_state(self, server: Server) -> CentralizedState:
        """Return the initial state.

        Raises:
            ArgumentError: no public data.
        """
        require_public(server.public)
        return CentralizedState(CentralTrainer("public-only"))

    def step(self, server: Server, state: CentralizedState, t: int) -> Mapping[str, float]:
        return state.trainer.train(server, t, lambda: require_labeled(server.public))
