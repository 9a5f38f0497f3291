"""The nodes' ensemble: no central model, all nodes are asked each time that it is used.

What distillation from outputs can at best reach without seeing data. It is no model that one could
take home: every prediction sends its input to all nodes, so the bytes of a run, which are the label
counts only, are not its cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedstill.methods import HistogramState, NodeGroup, Server, Tensors, query
from fedstill.methods._public_data import WeightsNodes
from fedstill.protocol.payload_kinds import INPUTS, LOGITS
from fedstill.tasks import Ensemble


@dataclass(frozen=True, kw_only=True)
class NodeEnsemble(WeightsNodes):
    """The ensemble's options."""

    title: ClassVar[str] = "Ensemble"
    paper: ClassVar[str] = "outputs of all nodes, each time"
    evaluated_model: ClassVar[Literal["ensemble"]] = "ensemble"
    total_steps: ClassVar[int] = 1
    weights = "counts"  # no option: FedKD Eq. 1

    ensemble: Ensemble = "consensus"
    """How answers are ensembled: logits (class-count weights, as in FedKD Eq. 1), log_probs, probs,
    consensus, which listens to those who know the classes that an input shows, or one of your own."""

    @query(sends={"x": INPUTS}, releases={"logits": LOGITS}, depends_on_records=())
    def predict(self, nodes: NodeGroup, x: torch.Tensor) -> Tensors:
        """Logits of any inputs: what a use of the ensemble asks, and costs."""
        return {"logits": nodes.module("model")(x)}

    def init_state(self, server: Server) -> HistogramState:
        return HistogramState()

    def step(self, server: Server, state: HistogramState, t: int) -> Mapping[str, float]:
        """QueryCall for the label counts; the rest is asking."""
        self.fetch_weights(server, state)
        return {}
