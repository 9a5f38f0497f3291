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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch

from fedstill.core.optimizers import Adam
from fedstill.core.options import NonNegativeFloat, PositiveFloat, PositiveInt, PositiveOrInf
from fedstill.methods import (
    LabelHistogram,
    Method,
    Needs,
    NodeSetting,
    NodeView,
    Query,
    Responses,
    Server,
    Tensors,
    count_labels_query,
    descend,
    torch_generator,
)
from fedstill.methods._replay_training import ReplayTraining, Student
from fedstill.methods._teachers import teacher_query
from fedstill.tasks import Ensemble


@dataclass
class CoDreamState:
    """Server state of the method."""

    student: Student  # f_S, with dreams in its replay memory
    histogram: LabelHistogram  # weights of the nodes in a label


@dataclass(frozen=True, kw_only=True)
class CoDream(Method):
    """Co-Dream's options."""

    title: ClassVar[str] = "Co-Dream"
    paper: ClassVar[str] = "Singh et al., AAAI 2025"
    query_names: ClassVar[tuple[str, ...]] = ("count_labels", "predict_logits")
    unit: ClassVar[Literal["step"]] = "step"
    has_ensemble: ClassVar[bool] = True
    length_options: ClassVar[tuple[str, ...]] = ("steps", "dream_steps")
    batch_options: ClassVar[tuple[str, ...]] = ("batch", "student.batch")

    steps: PositiveInt = 40
    """Batches of dreams; the student trains after each."""
    batch: PositiveInt = 64
    """Dreams in a batch."""
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
    """Combination of the logits in a label: logits, as published, log_probs, probs, consensus, a
    robust one (median and others), or a custom one."""
    tau: PositiveOrInf = 1.0
    """Temperature of the distillation."""
    student: ReplayTraining = field(default_factory=partial(ReplayTraining, steps=50))
    """The training of the student f_S."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.student.check_memory(self.batch)

    @property
    def total_steps(self) -> int:
        return self.steps

    def needs(self) -> Needs:
        return Needs(images=True, single_label=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        if self.weights == "counts":
            yield count_labels_query(setting)
        yield teacher_query(bn=self.bn, times=self.steps * (self.dream_steps + 1), rows=self.batch)

    def preview_response(self, node: NodeView, x: torch.Tensor, z: torch.Tensor) -> Tensors:
        return {"logits": z}

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> CoDreamState:
        histogram = LabelHistogram(equal=self.weights == "equal")
        return CoDreamState(Student(self.student, server, self.tau), histogram)

    def step(self, server: Server, state: CoDreamState, t: int) -> Mapping[str, float]:
        """Optimize a batch of dreams from noise, label it, and train the student on it."""
        state.histogram.fetch(server)
        names = state.histogram.names
        draw = torch_generator(server.seed, "dreams", t)
        x = torch.randn(self.batch, *server.shape, generator=draw).to(server.device).requires_grad_()
        adam = Adam([x], self.dream_lr)
        low, high = pixel_range(server)
        for step in range(self.dream_steps):
            with server.compute.step(server.seed, "dream", t, step):
                responses = server.query("predict_logits", nodes=names, x=x)
                losses = self.dream_losses(server, state, responses, x)
                L = losses["entropy"] + self.adversary * losses.get("adversary", 0.0)
                if self.bn:
                    losses["statistics"] = responses["statistics"].mean()  # R_bn
                    L = L + self.bn * losses["statistics"]
            descend(adam, L)
            with torch.no_grad():
                x.copy_(torch.maximum(torch.minimum(x, high), low))
        with torch.no_grad(), server.compute.step(server.seed, "labels", t):
            responses = server.query("predict_logits", nodes=names, x=x.detach())
            y = self.ensemble_responses(server, state, responses)
        state.student.replay.add(x.detach(), y)
        losses["student"] = state.student.train(t, self.steps, [])
        return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))

    def ensemble_responses(self, server: Server, state: CoDreamState, responses: Responses) -> torch.Tensor:
        """Return the label of dreams, as logits ``(B, C)``."""
        omega = state.histogram.weights(server.task, responses.nodes)
        return server.task.ensemble(responses["logits"], omega, self.ensemble)

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

    def preview_samples(self, server: Server, state: CoDreamState, count: int) -> torch.Tensor | None:
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
