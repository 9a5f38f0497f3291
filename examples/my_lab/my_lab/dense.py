"""The core of DENSE: a student learns from the nodes' responses to inputs that a generator makes.

Zhang et al.: "DENSE: Data-Free One-Shot Federated Learning", NeurIPS 2022, Algorithm 1, without the loss on
batch norm statistics, which nodes would have to release. The generator is conditioned on the label y.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.methods import (
    Method,
    Needs,
    NodeSetting,
    NodeView,
    Query,
    Responses,
    Server,
    Tensors,
    adam,
    descend,
    payload_kinds,
    seeded,
    torch_generator,
)
from fedstill.models import Generator


@dataclass
class Distillation:
    """Server state."""

    G: nn.Module
    g_adam: torch.optim.Optimizer
    s_adam: torch.optim.Optimizer
    x: torch.Tensor  # inputs of all queries so far  (N, channels, H, W)
    z: torch.Tensor  # the ensemble's logits for them  (N, C)


@dataclass(frozen=True, kw_only=True)
class DENSE(Method):
    """DENSE."""

    title: ClassVar[str] = "DENSE"
    paper: ClassVar[str] = "Zhang et al., NeurIPS 2022"
    unit: ClassVar[Literal["step"]] = "step"
    has_ensemble: ClassVar[bool] = True

    steps: int = 200
    """Steps, each with one query to all nodes."""
    batch: int = 64
    """Inputs in a query, and in a step of the student."""
    noise: int = 100
    """Values in the generator's noise."""
    boundary: float = 1.0
    """Weight of the loss that seeks inputs for which student and ensemble predict different classes."""
    student_steps: int = 5
    """Steps of the student after each query."""
    lr: float = 1e-3
    """Adam's learning rate, of generator and student."""

    def needs(self) -> Needs:
        return Needs(images=True, single_label=True)

    @property
    def total_steps(self) -> int:
        return self.steps

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield Query(
            self.response,
            sends={"x": payload_kinds.INPUTS},
            releases={"logits": payload_kinds.LOGITS},
            differentiable=("x",),
            times=self.steps,
            rows=self.batch,
            depends_on_records=(),
            stackable=True,
        )

    # --- at a node --------------------------------------------------------------------------------------

    def response(self, node: NodeView, x: torch.Tensor) -> Tensors:
        return {"logits": node.model(x)}  # (B, channels, H, W) to (B, C)

    def preview_response(self, node: NodeView, x: torch.Tensor, z: torch.Tensor) -> Tensors:
        return {"logits": z}  # for evaluation: the model's outputs (B, C) unchanged

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> Distillation:
        classes, S = server.task.classes, server.student
        with seeded(server.seed, "generator"):  # initial weights
            G = Generator(server.shape, self.noise + classes, 64, server.mean, server.std)
        G = server.compute.to_device(G)
        x, z = torch.zeros(0, *server.shape), torch.zeros(0, classes)
        return Distillation(G, adam(G, self.lr), adam(S, self.lr), x.to(server.device), z.to(server.device))

    def step(self, server: Server, state: Distillation, t: int) -> Mapping[str, float]:
        S = server.student.eval()
        w, y = self.sample_noise(server, self.batch, "w", t)
        with server.compute.step(server.seed, "generator", t):
            x = state.G(w).float()
            z = self.ensemble_responses(server, state, server.query("response", x=x))  # (K, B, C) to (B, C)
            z_S = S(x).float()
            differs = (z.argmax(1) != z_S.argmax(1)).float()  # (B,)
            L_ce, L_div = F.cross_entropy(z, y), -(differs * kl(z, z_S)).mean()
        descend(state.g_adam, L_ce + self.boundary * L_div)  # through the nodes to x, and into G

        state.x, state.z = torch.cat([state.x, x.detach()]), torch.cat([state.z, z.detach()])
        S.train()
        for i in range(self.student_steps):
            generator = torch_generator(server.seed, "rows", t, i)
            rows = torch.randint(len(state.x), (self.batch,), generator=generator).to(server.device)
            with server.compute.step(server.seed, "student", t, i):
                L_S = kl(state.z[rows], S(state.x[rows]).float()).mean()
            descend(state.s_adam, L_S)
        return {"cross-entropy": L_ce.item(), "boundary": L_div.item(), "student": L_S.item()}

    def sample_noise(self, server: Server, count: int, *name: str | int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return noise and one-hot label as one vector (count, noise + C), and the labels (count,)."""
        generator, classes = torch_generator(server.seed, *name), server.task.classes
        y = torch.randint(classes, (count,), generator=generator)
        w = torch.cat([torch.randn(count, self.noise, generator=generator), F.one_hot(y, classes)], 1)
        return w.to(server.device), y.to(server.device)

    def ensemble_responses(self, server: Server, state: Distillation, responses: Responses) -> torch.Tensor:
        return responses["logits"].mean(0)

    def preview_samples(self, server: Server, state: Distillation, count: int) -> torch.Tensor:
        state.G.eval()
        with torch.no_grad():
            x: torch.Tensor = state.G(self.sample_noise(server, count, "preview_samples")[0])
        state.G.train()
        return x


def kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Return KL(teacher || student) of logits (B, C), for each input: (B,)."""
    log_p, log_q = teacher.log_softmax(1), student.log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1)
