"""Ensemble of the nodes: no global model; all nodes are queried for each prediction.

Upper bound for distillation from outputs without data. It is not a model to export: every prediction sends
its input to all nodes, so that the bytes of a run, which are those of the label counts, are not its cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedstill.methods import HistogramState, NodeGroup, Server, Tensors, query
from fedstill.methods._public_data import NodeWeightingMethod
from fedstill.protocol.payload_kinds import INPUTS, LOGITS
from fedstill.tasks import Ensemble


@dataclass(frozen=True, kw_only=True)
class NodeEnsemble(NodeWeightingMethod):
    """The nodes' ensemble."""

    title: ClassVar[str] = "Ensemble"
    paper: ClassVar[str] = "outputs of all nodes, each time"
    evaluated_model: ClassVar[Literal["ensemble"]] = "ensemble"
    total_steps: ClassVar[int] = 1
    weights = "counts"  # no option: FedKD Eq. 1

    ensemble: Ensemble = "consensus"
    """Combination of the responses: logits (class-count weights, as in FedKD Eq. 1), log_probs, probs,
    consensus, which follows the nodes that know the classes an input shows, or a custom one.
    """

    @query(sends={"x": INPUTS}, releases={"logits": LOGITS}, depends_on_records=())
    def predict(self, nodes: NodeGroup, x: torch.Tensor) -> Tensors:
        """Return logits of any inputs; each use of the ensemble costs such a query."""
        return {"logits": nodes.module("model")(x)}

    def init_state(self, server: Server) -> HistogramState:
        return HistogramState()

    def step(self, server: Server, state: HistogramState, t: int) -> Mapping[str, float]:
        """Fetch the label counts."""
        self.fetch_weights(server, state)
        return {}
