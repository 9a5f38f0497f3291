"""FedMD-CG: extractors stay private; feature generators and heads are shared in their place.

Luo, Wang, Li, Lan, Gao, Shu: "Privacy-Preserving Federated Learning with Consistency via Knowledge
Distillation Using Conditional Generator", arXiv:2409.06955 (as FedMD-CG under review, 2023). Symbols and
equation numbers are the paper's: extractors F_i, heads D_i, generators G_i([z; y]), the global G and D.

In each round a node (a) trains its model on its own data and on G's features, and (b) trains its generator to
reproduce its extractor's features. The server averages generators and heads and distills them crosswise.
Where defaults are the published code's, the option's text gives the printed value.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedstill.core.options import NonNegativeFloat, PositiveFloat, PositiveInt
from fedstill.methods import NodeGroup, TrainStep
from fedstill.methods._feature_generators import Diversity, GlobalGenerator, diversity_loss, sample_noise
from fedstill.methods._local_generators import LocalGeneratorMethod, kl
from fedstill.models.extractor_head import EXTRACTOR, HEAD
from fedstill.models.generators import append_one_hot


@dataclass(frozen=True, kw_only=True)
class FedMDCG(LocalGeneratorMethod):
    """FedMD-CG's options."""

    title: ClassVar[str] = "FedMD-CG"
    paper: ClassVar[str] = "Luo et al., arXiv:2409.06955"

    rounds: PositiveInt = 10
    """Rounds; the local training (nodes.local.epochs) is divided among them. In fewer, longer rounds the
    generators are better trained before they are used.
    """
    lambda1: NonNegativeFloat = 1.0
    """Weight in Eq. 4 of the head's cross-entropy on G's features (Eq. 3)."""
    lambda2: NonNegativeFloat = 0.1
    """Weight in Eq. 4 of the distance of features from G's (Eq. 2). As printed about 1 (Fig. 6)."""
    lambda3: NonNegativeFloat = 1.0
    """Weight in Eq. 4 of the divergence of predictions from those on G's features (Eq. 2)."""
    ramp: NonNegativeFloat = 0.0
    """Growth of lambda1 to lambda3: to (t / (R - 1))^ramp of themselves in round t of R = rounds. 0 is all of
    them from the second round on, as printed; the published code has 3.
    """
    temperature: PositiveFloat = 10.0
    """Temperature of predictions in Eq. 2 and 10 to 12; in Eq. 5 it is 1. As printed it is 1 everywhere."""
    kl_first: Literal["teacher", "student"] = "teacher"
    """First argument of each KL: the teacher's predictions, which are constant, or as printed the student's.
    """
    lambda4: NonNegativeFloat = 1.0
    """Weight in Eq. 9 of the generator's distance from features (Eq. 5)."""
    lambda5: NonNegativeFloat = 1.0
    """Weight in Eq. 9 of the head's cross-entropy on the generator's features (Eq. 6)."""
    lambda6: NonNegativeFloat = 1.0
    """Weight in Eq. 9 of the diversity loss."""
    diversity: Diversity = "div2"
    """Diversity loss: none, div0 (Eq. 7), div1 (noise and label together) or div2 (Eq. 8)."""
    aggregation: Literal["kdc", "kd", "ave", "ave*"] = "kdc"
    """Aggregation at the server (Table 3): crossed distillation (Eq. 12), FedCG's distillation, or averages
    alone; ave* also omits the divergence of predictions in Eq. 2.
    """

    def make_model_step(self, nodes: NodeGroup, G: GlobalGenerator) -> TrainStep:
        """Return stage (a), Eq. 4: a step of F_i and D_i; in the first round on Eq. 1 alone."""
        task, smoothing, call_counter = nodes.setting.task, nodes.setting.local.smoothing, itertools.count()
        share = (G.t / max(self.rounds - 1, 1)) ** self.ramp

        def train_step(group: NodeGroup, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            call, model = next(call_counter), group.module("model")
            f = model(x, EXTRACTOR)  # F_i(x)  (G, B, p)
            d = model(f, HEAD)  # D_i(F_i(x))  (G, B, C)
            loss: torch.Tensor = task.loss(d, y, smoothing)  # Eq. 1  (G,)
            if G.t:
                f_hat = G.sample_features(group, y, call)  # G(z, y), constant
                loss = loss + share * self.lambda2 * (f - f_hat).square().mean((1, 2))  # Eq. 2
                if self.lambda3 and self.aggregation != "ave*":
                    d_hat = model(f_hat, HEAD).detach()
                    loss = loss + share * self.lambda3 * self.divergence(d, d_hat).mean(1)  # Eq. 2
                y_hat = G.sample_labels(group, y.shape, call)
                d_hat = model(G.sample_features(group, y_hat, "resampled", call), HEAD)
                loss = loss + share * self.lambda1 * task.loss(d_hat, y_hat)  # Eq. 3
            group.step("model", loss)
            return loss

        return train_step

    def make_generator_step(self, nodes: NodeGroup, t: int) -> TrainStep:
        """Return stage (b), Eq. 9: a step of G_i, with F_i and D_i after stage (a)."""
        task, call_counter = nodes.setting.task, itertools.count()

        def train_step(group: NodeGroup, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            call, model = next(call_counter), group.module("model")
            with torch.no_grad():
                f = model(x, EXTRACTOR)  # F_i(x)  (G, B, p)
                d = model(f, HEAD)  # D_i(F_i(x))  (G, B, C)
            z = sample_noise(group, y.shape, self.noise, "generator", t, call)  # (G, B, q)
            c = append_one_hot(z, y, task.classes)
            f_hat = group.module("generator")(c)  # G_i(z, y)
            d_hat = model(f_hat, HEAD)  # D_i(G_i(z, y))
            loss: torch.Tensor = self.divergence(d_hat, d, 1.0).mean(1)  # Eq. 5
            loss = loss + self.lambda4 * (f_hat - f).square().mean((1, 2))  # Eq. 5
            loss = loss + self.lambda5 * task.loss(d_hat, y)  # Eq. 6
            L_div = diversity_loss(self.diversity, f_hat, z, c[..., self.noise :])
            loss = loss + self.lambda6 * L_div  # Eq. 7, 8
            group.step("generator", loss)
            return loss

        return train_step

    def divergence(
        self, student: torch.Tensor, teacher: torch.Tensor, temperature: float | None = None
    ) -> torch.Tensor:
        """Return the KL of a student's and a teacher's logits at a temperature, ``(..., C)`` to ``(...)``.

        It is not multiplied by the temperature's square.
        """
        T = temperature or self.temperature
        p, q = student.float() / T, teacher.float() / T
        return kl(q, p) if self.kl_first == "teacher" else kl(p, q)
