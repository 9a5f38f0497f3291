"""DENSE: a generator makes inputs that the nodes' ensemble recognizes and the student does not.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu: "DENSE: Data-Free One-Shot Federated Learning", NeurIPS 2022.
Symbols are the paper's, except noise, which is w here, as z are logits: nodes' models f_k, their ensemble D,
generator G, student f_S, labels y, losses L_CE (similarity), L_BN (stability) and L_div (transferability)
with weights 1, lambda_1 and lambda_2.

The nodes' models are trained to completion first. As published they are uploaded once; here they stay at the
nodes and are queried (``models``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from fedstill.core.options import NonNegativeFloat, PositiveOrInf
from fedstill.methods import LabelHistogram, Server
from fedstill.methods._class_conditional_generator import ClassConditionalGeneration, ClassConditionalState
from fedstill.methods._public_data import NodeWeightingMethod
from fedstill.tasks import Ensemble


@dataclass(kw_only=True)
class DENSEState(ClassConditionalState):
    """Server state: the shared one, and the nodes' label counts."""

    histogram: LabelHistogram


@dataclass(frozen=True, kw_only=True)
class DENSE(NodeWeightingMethod, ClassConditionalGeneration):
    """DENSE's options."""

    title: ClassVar[str] = "DENSE"
    paper: ClassVar[str] = "Zhang et al., NeurIPS 2022"

    weights: Literal["counts", "equal"] = "equal"
    """Weights of the nodes in D: equal, as in the paper, or their shares of each class's examples, which are
    then released."""
    ensemble: Ensemble = "logits"
    """Combination of the logits in D: logits, as in the paper, log_probs, probs, consensus, or a custom one.
    """
    bn: NonNegativeFloat = 1.0
    """Weight of the stability loss (lambda_1, L_BN); 0: nodes release nothing about their batch norm."""
    adversary: NonNegativeFloat = 0.5
    """Weight of the transferability loss (lambda_2, L_div)."""
    tau: PositiveOrInf = 1.0
    """Temperature of the transferability loss (L_div) and of the distillation."""

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> DENSEState:
        return DENSEState(**self.base_state_fields(server), histogram=LabelHistogram())

    def prepare_nodes(self, server: Server, state: Any) -> None:
        self.fetch_weights(server, state)
        super().prepare_nodes(server, state)

    def names_with_known_weights(self, state: Any) -> Sequence[str]:
        return tuple(state.histogram.names)

    def ensemble_logits(
        self, server: Server, state: Any, z: torch.Tensor, nodes: Sequence[str]
    ) -> torch.Tensor:
        """Return D(x) = 1 / K sum_k f_k(x), or the weighted mean."""
        return server.task.ensemble(z, self.omega(server, state, nodes), self.ensemble)

    def recognition_loss(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return L_CE = CE(D(x), y)."""
        return F.cross_entropy(z, y)

    def disagreement_reward(self, distance: torch.Tensor, z: torch.Tensor, z_S: torch.Tensor) -> torch.Tensor:
        """Return -L_div: the divergence where D and f_S predict different classes."""
        return ((z.argmax(1) != z_S.argmax(1)) * distance).mean()
