"""Co-Dream: inputs are optimized with the sum of the nodes' gradients, and a student trains on their labels.

Singh, Gupta, Shi, Dang, Kapila, Shankar, Ehab, Raskar: "Co-Dream: Collaborative Dream Synthesis over
Decentralized Models", AAAI 2025 (arXiv:2402.15968, "CoDream"). Nodes' models are f_k, the student is f_S, and
dreams are inputs x. From noise they descend, over all nodes, the entropy of f_k(x), the distance R_bn to
f_k's batch norm statistics, and R_adv, minus the divergence of f_k and f_S. Then the nodes label them
together, and the student trains on the labels.

There is no generator: dreams are a batch of numbers with their own optimizer. The nodes' models are trained
to completion first. Dreams receive the sum of the nodes' gradients only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from fedstill.core.options import NonNegativeFloat, PositiveFloat, PositiveInt, PositiveOrInf
from fedstill.methods import (
    LabelHistogram,
    Needs,
    Responses,
    Server,
    descend,
    torch_generator,
)
from fedstill.methods._public_data import NodeWeightingMethod
from fedstill.methods._student import Student
from fedstill.methods._teacher_queries import TeacherQueryMethod
from fedstill.tasks import Ensemble


@dataclass
class CoDreamState:
    """Server state of the method."""

    student: Student  # f_S, with the dreams that it remembers
    histogram: LabelHistogram = field(default_factory=LabelHistogram)  # who counts how much in a label


@dataclass(frozen=True, kw_only=True)
class CoDream(NodeWeightingMethod, TeacherQueryMethod):
    """Co-Dream's options."""

    title: ClassVar[str] = "Co-Dream"
    paper: ClassVar[str] = "Singh et al., AAAI 2025"
    length_options: ClassVar[tuple[str, ...]] = ("steps", "dream_steps")

    steps: PositiveInt = 40
    """Batches of dreams; the student trains after each."""
    dream_steps: PositiveInt = 20
    """Steps of a batch of dreams, each a query to all nodes (published: 2,000); one more query labels it."""
    dream_lr: PositiveFloat = 0.05
    """Adam's learning rate for dreams, in units of the normalized inputs."""
    bn: NonNegativeFloat = 10.0
    """Weight of the batch norm regularizer (R_bn); 0: nodes release nothing about their batch norm."""
    adversary: NonNegativeFloat = 1.0
    """Weight of R_adv."""
    weights: Literal["counts", "equal"] = "equal"
    """Weights of the nodes in a label: equal, as published, or their shares of each class's examples, which
    are then released."""
    ensemble: Ensemble = "logits"
    """Combination of the logits in a label: logits, as published, log_probs, probs, consensus, or a custom
    one."""
    tau: PositiveOrInf = 1.0
    """Temperature of the distillation."""
    student_steps: PositiveInt = 50
    """Training steps of the student after each batch."""

    def needs(self) -> Needs:
        return Needs(images=True, single_label=True)

    @property
    def queries_per_step(self) -> int:
        return self.dream_steps + 1

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> CoDreamState:
        return CoDreamState(Student(self, server))

    def step(self, server: Server, state: CoDreamState, t: int) -> Mapping[str, float]:
        """Optimize a batch of dreams from noise, label it, and train the student on it."""
        self.fetch_weights(server, state)
        names = state.histogram.names or None
        draw = torch_generator(server.seed, "dreams", t)
        x = torch.randn(self.batch, *server.shape, generator=draw).to(server.device).requires_grad_()
        adam = torch.optim.Adam([x], self.dream_lr)
        low, high = pixel_range(server)
        for step in range(self.dream_steps):
            with server.compute.step(server.seed, "dream", t, step):
                responses = self.query_teachers(server, names, x)
                losses = self.dream_losses(server, state, responses, x)
                L = losses["entropy"] + self.adversary * losses.get("adversary", 0.0)
                if self.bn:
                    losses["statistics"] = responses["statistics"].mean()  # R_bn
                    L = L + self.bn * losses["statistics"]
            descend(adam, L)
            with torch.no_grad():
                x.copy_(torch.maximum(torch.minimum(x, high), low))
        with torch.no_grad(), server.compute.step(server.seed, "labels", t):
            responses = self.query_teachers(server, names, x.detach())
            omega = self.omega(server, state, responses.nodes)
            y = server.task.ensemble(responses["logits"], omega, self.ensemble)
        state.student.replay.add(x.detach(), y)
        losses["student"] = state.student.train(t, self.steps, [])
        return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))

    def query_teachers(self, server: Server, names: Sequence[str] | None, x: torch.Tensor) -> Responses:
        """Return the nodes' responses to dreams."""
        return server.query("predict_logits", nodes=names, x=x)

    def dream_losses(
        self, server: Server, state: CoDreamState, responses: Responses, x: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the entropy, and R_adv: the negative divergence of the nodes' from the student's outputs."""
        z, K = responses["logits"], len(responses.nodes)
        uniform = torch.full((K,), 1 / K, device=z.device)
        return {
            "entropy": server.task.confidence_loss(z, uniform),
            "adversary": -divergence(z, state.student.evaluate(x)).mean(),  # R_adv
        }

    def preview_samples(self, server: Server, state: Any, count: int) -> torch.Tensor | None:
        """Return some dreams of the replay memory."""
        replay = state.student.replay
        return replay.sample(count, "imagine")[0] if len(replay) else None


def divergence(z: torch.Tensor, z_S: torch.Tensor) -> torch.Tensor:
    """Return the Jensen-Shannon divergence of the nodes' logits ``(K, B, C)`` and the student's ``(B, C)``:
    ``(K, B)``.

    >>> divergence(torch.tensor([[[100.0, 0.0]]]), torch.tensor([[0.0, 100.0]]))  # nothing in common: log 2
    tensor([[0.6931]])
    """
    log_p, log_q = z.log_softmax(-1), z_S.log_softmax(-1).expand_as(z)
    log_m = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).log()
    terms = log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)
    return 0.5 * terms.sum(-1)


def pixel_range(server: Server) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest and highest normalized value of a pixel: ``(channels, 1, 1)`` each."""
    mean, std = (
        torch.tensor(each, device=server.device).view(-1, 1, 1) for each in (server.mean, server.std)
    )
    return (0 - mean) / std, (1 - mean) / std
