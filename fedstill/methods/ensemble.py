"""Ensemble of the nodes: no global model; all nodes are queried for each prediction.

Upper bound for distillation from outputs without data. It is not a model to export: every prediction sends
its input to all nodes, so that the bytes of a run, which are those of the label counts, are not its cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedstill.methods import (
    LabelHistogramState,
    Method,
    NodeSetting,
    NodeView,
    Query,
    Responses,
    Server,
    Tensors,
    count_labels_query,
)
from fedstill.protocol.payload_kinds import INPUTS, LOGITS
from fedstill.tasks import Ensemble


@dataclass(frozen=True, kw_only=True)
class NodeEnsemble(Method):
    """The nodes' ensemble."""

    title: ClassVar[str] = "Ensemble"
    paper: ClassVar[str] = "outputs of all nodes, each time"
    query_names: ClassVar[tuple[str, ...]] = ("count_labels", "predict")
    evaluated_model: ClassVar[Literal["ensemble"]] = "ensemble"
    has_ensemble: ClassVar[bool] = True
    total_steps: ClassVar[int] = 1

    ensemble: Ensemble = "consensus"
    """Combination of the responses: logits (class-count weights, as in FedKD Eq. 1), log_probs, probs,
    consensus, which follows the nodes that know the classes an input shows, a robust one (median and
    others), or a custom one.
    """

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield count_labels_query(setting)
        yield Query(
            self.predict,
            sends={"x": INPUTS},
            releases={"logits": LOGITS},
            depends_on_records=(),
            stackable=True,
        )

    def predict(self, node: NodeView, x: torch.Tensor) -> Tensors:
        """Return logits of any inputs; each use of the ensemble costs such a query."""
        return {"logits": node.model(x)}

    def preview_response(self, node: NodeView, x: torch.Tensor, z: torch.Tensor) -> Tensors:
        return {"logits": z}

    def init_state(self, server: Server) -> LabelHistogramState:
        return LabelHistogramState()

    def step(self, server: Server, state: LabelHistogramState, t: int) -> Mapping[str, float]:
        """Fetch the label counts."""
        state.histogram.fetch(server)
        return {}

    def ensemble_responses(
        self, server: Server, state: LabelHistogramState, responses: Responses
    ) -> torch.Tensor:
        omega = state.histogram.weights(server.task, responses.nodes)
        return server.task.ensemble(responses["logits"], omega, self.ensemble)
