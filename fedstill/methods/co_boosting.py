"""Co-Boosting: hard inputs improve the ensemble, which makes better inputs.

Dai, Zhang, Li, Liu, Yang, Han: "Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting",
ICLR 2024. Symbols are the paper's: nodes' models f_k, their weights w_k and ensemble A_w(x) = sum_k w_k
f_k(x), generator G, labels y, inputs x and their perturbed form x~, step mu of the weights, length epsilon of
the perturbation. Inputs that are hard for the ensemble count more in G's loss; the weights train on G's
inputs; the student trains on inputs that are moved to where the ensemble's members differ.

The nodes' models are trained to completion first. As published they are uploaded once; here they stay at the
nodes and are queried (``models``).
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
    """Server state: the shared one, and the nodes' weights."""

    w: torch.Tensor  # (K,), in the order of the federation's nodes


@dataclass(frozen=True, kw_only=True)
class CoBoosting(ClassConditionalGeneration):
    """Co-Boosting's options."""

    title: ClassVar[str] = "Co-Boosting"
    paper: ClassVar[str] = "Dai et al., ICLR 2024"

    ensemble: Ensemble = "logits"
    """Combination of the logits in A_w: logits, as in the paper, log_probs, probs, consensus, or a custom
    one."""
    hardness: NonNegativeFloat = 1.0
    """Power of 1 - p_y(x) that weights inputs in G's loss; 0: all equal."""
    mu: NonNegativeFloat = 0.01
    """Step of the ensemble's weights w in 0..1 after each batch, decreasing by 1 % a batch; 0: equal weights.
    """
    epsilon: NonNegativeFloat = 8 / 255
    """Length of the perturbation of inputs before the student trains on them, of a pixel's range; 0: none."""
    tau: PositiveOrInf = 4.0
    """Temperature of the distance of student and ensemble, and of the logits along which inputs move."""

    def needs(self) -> Needs:
        return replace(super().needs(), images=True)

    @property
    def queries_per_step(self) -> int:
        """Two more queries than steps of G: for the batch, and for the perturbed batch."""
        return self.generator_steps + 1 + (self.epsilon > 0)

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> CoBoostingState:
        K = len(server.federation.nodes)
        return CoBoostingState(
            **self.base_state_fields(server), w=torch.full((K,), 1 / K, device=server.device)
        )

    def ensemble_responses(
        self, server: Server, state: CoBoostingState, responses: Responses
    ) -> torch.Tensor:
        return self.ensemble_logits(server, state, responses["logits"], responses.nodes)

    def ensemble_logits(
        self, server: Server, state: Any, z: torch.Tensor, nodes: Sequence[str]
    ) -> torch.Tensor:
        indices = [server.federation.nodes.index(name) for name in nodes]
        return self.weighted_ensemble(server, z, state.w[indices])

    def weighted_ensemble(self, server: Server, z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Return A_w(x) ``(B, C)``; weights ``(K,)`` need not sum to 1."""
        total = w.sum().clamp_min(1e-6)
        shares = (w / total).view(-1, 1, 1).expand(-1, 1, z.shape[2])
        return total * server.task.ensemble(z, shares, self.ensemble)

    def recognition_loss(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy, weighted by the hardness of an input: (1 - p_y)^hardness."""
        hard = 1 - z.detach().softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)
        return (hard**self.hardness * F.cross_entropy(z, y, reduction="none")).mean()

    def disagreement_reward(self, distance: torch.Tensor, z: torch.Tensor, z_S: torch.Tensor) -> torch.Tensor:
        """Return the mean divergence of ensemble and student."""
        return distance.mean()

    def make_replay_batch(
        self, server: Server, state: Any, x: torch.Tensor, z: torch.Tensor, y: torch.Tensor
    ) -> LabeledBatch:
        """Improve w on the batch; return x~ = x + epsilon sign(d/dx v A_w(x)), v random, and A_w(x~)."""
        t, x = server.completed_steps, x.detach().requires_grad_(self.epsilon > 0)
        with server.compute.step(server.seed, "moving", t):
            responses = self.responses(server, state, x)
            z_k = responses["logits"]  # (K, B, C)
            self.update_node_weights(server, state, z_k.detach(), y, responses.nodes, t)
            z = self.ensemble_logits(server, state, z_k, responses.nodes)
        if not self.epsilon:
            return x, z.detach()
        v = 2 * torch.rand(z.shape, generator=torch_generator(server.seed, "v", t)) - 1
        (gradient,) = torch.autograd.grad((v.to(z.device) * (z / self.tau).softmax(1)).sum(), x)
        std = torch.tensor(server.std, device=x.device).view(-1, 1, 1)
        x = x.detach() + self.epsilon / std * gradient.sign()
        with torch.no_grad(), server.compute.step(server.seed, "moved", t):
            responses = self.responses(server, state, x)
            return x, self.ensemble_logits(server, state, responses["logits"], responses.nodes)

    def update_node_weights(
        self, server: Server, state: Any, z: torch.Tensor, y: torch.Tensor, nodes: Sequence[str], t: int
    ) -> None:
        """Update w <- w - mu sign(d/dw CE(A_w(x), y)), within 0..1, for the nodes that responded."""
        indices = [server.federation.nodes.index(name) for name in nodes]
        w = state.w[indices].requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(F.cross_entropy(self.weighted_ensemble(server, z, w), y), w)
        state.w[indices] = (w.detach() - self.mu * DECAY**t * gradient.sign()).clamp(0, 1)
