"""Co-Dream: inputs themselves descend the sum of the nodes' gradients, and a student learns their labels.

Singh, Gupta, Shi, Dang, Kapila, Shankar, Ehab, Raskar: "Co-Dream: Collaborative Dream Synthesis over
Decentralized Models", AAAI 2025 (arXiv:2402.15968, "CoDream"). Nodes' models are f_k, the student is f_S,
and dreams are inputs x: from noise they descend, over all nodes, the entropy of f_k(x), the distance R_bn to
what f_k's batch norm has kept, and R_adv, minus how far f_k and f_S are apart. Then the nodes label them
together, and the student learns the labels.

There is no generator: dreams are a batch of numbers with an optimizer of their own. The nodes' models are
trained to completion first and then only answer; what reaches a dream is the sum of their gradients.
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
from fedstill.methods._public_data import WeightsNodes
from fedstill.methods._student import Student
from fedstill.methods._teacher_queries import QueriesTeachers
from fedstill.tasks import Ensemble


@dataclass
class CoDreamState:
    """What changes from batch to batch."""

    student: Student  # f_S, with the dreams that it remembers
    histogram: LabelHistogram = field(default_factory=LabelHistogram)  # who counts how much in a label


@dataclass(frozen=True, kw_only=True)
class CoDream(WeightsNodes, QueriesTeachers):
    """Co-Dream's options."""

    title: ClassVar[str] = "Co-Dream"
    paper: ClassVar[str] = "Singh et al., AAAI 2025"
    length_options: ClassVar[tuple[str, ...]] = ("steps", "dream_steps")

    steps: PositiveInt = 40
    """Batches of dreams, from each of which the student learns."""
    dream_steps: PositiveInt = 20
    """Steps of a batch of dreams, each a query to all nodes (published: 2,000); one more labels it."""
    dream_lr: PositiveFloat = 0.05
    """Adam's learning rate for dreams, in units of the inputs as models get them."""
    bn: NonNegativeFloat = 10.0
    """Weight of R_bn; 0: nodes tell nothing of their batch norm."""
    adversary: NonNegativeFloat = 1.0
    """Weight of R_adv."""
    weights: Literal["counts", "equal"] = "equal"
    """How nodes are weighed in a label: equally, as published, or by their shares of each class's examples,
    which are then told."""
    ensemble: Ensemble = "logits"
    """How labels are made: of logits, as published, log_probs, probs, by consensus, or one of your own."""
    tau: PositiveOrInf = 1.0
    """Temperature of the distillation."""
    student_steps: PositiveInt = 50
    """Student steps after each batch."""

    def needs(self) -> Needs:
        return Needs(images=True, single_label=True)

    @property
    def queries_per_step(self) -> int:
        return self.dream_steps + 1

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> CoDreamState:
        return CoDreamState(Student(self, server))

    def step(self, server: Server, state: CoDreamState, t: int) -> Mapping[str, float]:
        """A batch of dreams: from noise, down the nodes' gradients, to labels that the student learns."""
        self.fetch_weights(server, state)
        names = state.histogram.names or None
        draw = torch_generator(server.seed, "dreams", t)
        x = torch.randn(self.batch, *server.shape, generator=draw).to(server.device).requires_grad_()
        adam = torch.optim.Adam([x], self.dream_lr)
        least, most = pixel_range(server)
        for step in range(self.dream_steps):
            with server.compute.step(server.seed, "dream", t, step):
                told = self.query_teachers(server, names, x)
                losses = self.dream_losses(server, state, told, x)
                L = losses["entropy"] + self.adversary * losses.get("adversary", 0.0)
                if self.bn:
                    losses["statistics"] = told["statistics"].mean()  # R_bn
                    L = L + self.bn * losses["statistics"]
            descend(adam, L)
            with torch.no_grad():
                x.copy_(torch.maximum(torch.minimum(x, most), least))
        with torch.no_grad(), server.compute.step(server.seed, "labels", t):
            told = self.query_teachers(server, names, x.detach())
            omega = self.omega(server, state, told.nodes)
            y = server.task.ensemble(told["logits"], omega, self.ensemble)
        state.student.replay.add(x.detach(), y)
        losses["student"] = state.student.train(t, self.steps, [])
        return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))

    def query_teachers(self, server: Server, names: Sequence[str] | None, x: torch.Tensor) -> Responses:
        """The nodes' answers about dreams."""
        return server.query("predict_logits", of=names, x=x)

    def dream_losses(
        self, server: Server, state: CoDreamState, told: Responses, x: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Entropy, and R_adv: how unlike the student's the nodes' answers are."""
        z, K = told["logits"], len(told.nodes)
        even = torch.full((K,), 1 / K, device=z.device)
        return {
            "entropy": server.task.confidence_loss(z, even),
            "adversary": -divergence(z, state.student.evaluate(x)).mean(),  # R_adv
        }

    def preview_samples(self, server: Server, state: Any, count: int) -> torch.Tensor | None:
        """Some of the dreams that are remembered."""
        remembered = state.student.replay
        return remembered.sample(count, "imagine")[0] if len(remembered) else None


def divergence(z: torch.Tensor, z_S: torch.Tensor) -> torch.Tensor:
    """The Jensen-Shannon divergence of answers ``(K, B, C)`` and the student's ``(B, C)``: ``(K, B)``.

    >>> divergence(torch.tensor([[[100.0, 0.0]]]), torch.tensor([[0.0, 100.0]]))  # nothing in common: log 2
    tensor([[0.6931]])
    """
    log_p, log_q = z.log_softmax(-1), z_S.log_softmax(-1).expand_as(z)
    log_m = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).log()
    apart = log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)
    return 0.5 * apart.sum(-1)


def pixel_range(server: Server) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the most that a pixel may be, as models get it: ``(channels, 1, 1)`` each."""
    mean, std = (
        torch.tensor(each, device=server.device).view(-1, 1, 1) for each in (server.mean, server.std)
    )
    return (0 - mean) / std, (1 - mean) / std
