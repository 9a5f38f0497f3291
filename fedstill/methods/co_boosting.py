"""Co-CoBoostingState: hard inputs better the ensemble, which makes better inputs.

Dai, Zhang, Li, Liu, Yang, Han: "Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting",
ICLR 2024. Symbols are the paper's: nodes' models f_k, their weights w_k and ensemble A_w(x) =
sum_k w_k f_k(x), generator G, labels y, inputs x and their perturbed form x~, step mu of the weights, length
epsilon of the perturbation. Inputs that the ensemble finds hard count for more in G's loss; the weights learn
from G's inputs; the student learns from inputs that are moved to where the ensemble's answers differ.

The nodes' models are trained to completion first. As published they are given to the server, once; here they
stay where they are and answer (``models``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from fedstill.core.options import NonNegativeFloat, PositiveOrInf
from fedstill.methods import Needs, Responses, Server, torch_generator
from fedstill.methods._class_conditional_generator import ClassConditionalGeneration, ClassConditionalState
from fedstill.methods._student import LabeledBatch
from fedstill.tasks import Ensemble

DECAY = 0.99  # of mu, from batch to batch


@dataclass(kw_only=True)
class CoBoostingState(ClassConditionalState):
    """Co-Boosting's state: the shared one, and the nodes' weights."""

    w: torch.Tensor  # (K,), in the order of the federation's nodes


@dataclass(frozen=True, kw_only=True)
class CoBoosting(ClassConditionalGeneration):
    """Co-Boosting's options."""

    title: ClassVar[str] = "Co-Boosting"
    paper: ClassVar[str] = "Dai et al., ICLR 2024"

    ensemble: Ensemble = "logits"
    """How A_w is made: of logits, as in the paper, log_probs, probs, by consensus, or one of your own."""
    hardness: NonNegativeFloat = 1.0
    """Power of 1 - p_y(x), by which inputs count in G's loss; 0: all alike."""
    mu: NonNegativeFloat = 0.01
    """Step of the ensemble's weights w, which lie in 0..1, after each batch, falling by 1 % a
    batch; 0: they stay equal."""
    epsilon: NonNegativeFloat = 8 / 255
    """How far inputs are moved before the student learns from them, of a pixel's range; 0: not at all."""
    tau: PositiveOrInf = 4.0
    """Temperature of the distance of student and ensemble, and of the answers along which inputs move."""

    def needs(self) -> Needs:
        return replace(super().needs(), images=True)

    @property
    def queries_per_step(self) -> int:
        """Two more than G takes steps: about the batch, and about the batch as it was moved."""
        return self.generator_steps + 1 + (self.epsilon > 0)

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> CoBoostingState:
        K = len(server.federation.nodes)
        return CoBoostingState(**self.base_state(server), w=torch.full((K,), 1 / K, device=server.device))

    def ensemble_responses(
        self, server: Server, state: CoBoostingState, responses: Responses
    ) -> torch.Tensor:
        return self.ensemble_logits(server, state, responses["logits"], responses.nodes)

    def ensemble_logits(
        self, server: Server, state: Any, z: torch.Tensor, nodes: Sequence[str]
    ) -> torch.Tensor:
        places = [server.federation.nodes.index(name) for name in nodes]
        return self.weighed(server, z, state.w[places])

    def weighed(self, server: Server, z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """A_w(x) ``(B, C)``: weights ``(K,)`` need not sum to 1."""
        total = w.sum().clamp_min(1e-6)
        shares = (w / total).view(-1, 1, 1).expand(-1, 1, z.shape[2])
        return total * server.task.ensemble(z, shares, self.ensemble)

    def recognition_loss(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Cross-entropy, weighed by how hard an input is: (1 - p_y)^hardness."""
        hard = 1 - z.detach().softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)
        return (hard**self.hardness * F.cross_entropy(z, y, reduction="none")).mean()

    def disagreement_reward(self, apart: torch.Tensor, z: torch.Tensor, z_S: torch.Tensor) -> torch.Tensor:
        """The divergence of ensemble and student, everywhere."""
        return apart.mean()

    def replay_batch(
        self, server: Server, state: Any, x: torch.Tensor, z: torch.Tensor, y: torch.Tensor
    ) -> LabeledBatch:
        """The batch betters w; then x~ = x + epsilon sign(d/dx v A_w(x)), v random, and A_w(x~)."""
        t, x = server.completed_steps, x.detach().requires_grad_(self.epsilon > 0)
        with server.compute.step(server.seed, "moving", t):
            told = self.responses(server, state, x)
            z_k = told["logits"]  # (K, B, C)
            self.boost(server, state, z_k.detach(), y, told.nodes, t)
            z = self.ensemble_logits(server, state, z_k, told.nodes)
        if not self.epsilon:
            return x, z.detach()
        v = 2 * torch.rand(z.shape, generator=torch_generator(server.seed, "v", t)) - 1
        (slope,) = torch.autograd.grad((v.to(z.device) * (z / self.tau).softmax(1)).sum(), x)
        std = torch.tensor(server.std, device=x.device).view(-1, 1, 1)
        x = x.detach() + self.epsilon / std * slope.sign()
        with torch.no_grad(), server.compute.step(server.seed, "moved", t):
            told = self.responses(server, state, x)
            return x, self.ensemble_logits(server, state, told["logits"], told.nodes)

    def boost(
        self, server: Server, state: Any, z: torch.Tensor, y: torch.Tensor, nodes: Sequence[str], t: int
    ) -> None:
        """w <- w - mu sign(d/dw CE(A_w(x), y)), within 0..1, of the nodes that answered."""
        places = [server.federation.nodes.index(name) for name in nodes]
        w = state.w[places].requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(F.cross_entropy(self.weighed(server, z, w), y), w)
        state.w[places] = (w.detach() - self.mu * DECAY**t * slope.sign()).clamp(0, 1)
