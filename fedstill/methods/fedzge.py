"""FedZGE: the server's generator trains on logits alone, with finite differences along random directions.

Ma, Wang, Zhang: "Data-Free Black-Box Federated Learning via Zeroth-Order Gradient Estimation", AAAI 2025.
Symbols are the paper's, except noise, which is w here, as z are logits: nodes' models f_k, generator G,
student f, labels y, inputs x = G(w, y), q directions u of length 1, smoothing parameter epsilon, losses
L_fid, L_adv, L_div and L_info with weights 1, beta_1, beta_2 and beta_3.

The nodes' models are trained to completion first, and nothing is backpropagated through them. A model without
gradients, such as a forest or one behind a service, can be a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.options import NonNegativeFloat, PositiveFloat, PositiveInt, PositiveOrInf
from fedstill.methods import Needs, NodeGroup, Server, cosine_lr, descend, query, set_lr
from fedstill.methods._generated_inputs import InputGeneratorMethod, LabelGeneratorOptions
from fedstill.methods._label_histogram import LabelHistogram, Tensors
from fedstill.methods._public_data import NodeWeightingMethod
from fedstill.methods._student import Student, StudentOptions
from fedstill.methods._zeroth_order import query_with_differences
from fedstill.protocol.payload_kinds import INPUTS, LOGITS
from fedstill.tasks import Ensemble


@dataclass
class FedZGEState:
    """Server state of the method."""

    histogram: LabelHistogram  # who counts how much
    source: Any  # of noise and labels
    generator: nn.Module  # G
    adam: torch.optim.Optimizer  # G's
    student: Student  # f, with what it remembers


@dataclass(frozen=True, kw_only=True)
class FedZGE(NodeWeightingMethod, LabelGeneratorOptions, StudentOptions, InputGeneratorMethod):
    """FedZGE's options."""

    title: ClassVar[str] = "FedZGE"
    paper: ClassVar[str] = "Ma et al., AAAI 2025"
    unit: ClassVar[Literal["step"]] = "step"
    length_options: ClassVar[tuple[str, ...]] = ("steps",)

    steps: PositiveInt = 400
    """Steps, each with one query to all nodes."""
    batch: PositiveInt = 64
    """Inputs x in a step; a query has 1 + q times as many."""
    directions: PositiveInt = 10
    """Random directions in which each input is moved (q)."""
    epsilon: PositiveFloat = 1e-3
    """Smoothing parameter: length of these moves, in units of the normalized inputs. Models with piecewise
    constant outputs, such as forests, need more (0.5).
    """
    weights: Literal["counts", "equal"] = "counts"
    """Weights of the nodes: their shares of each class's examples, or equal."""
    ensemble: Ensemble = "logits"
    """Combination of the responses: logits, log_probs, probs, consensus, or a custom one."""
    tau: PositiveOrInf = 5.0
    """Temperature of the student's distance to the ensemble, in L_adv and in its training; times tau^2."""
    adversary: NonNegativeFloat = 0.04
    """Weight of the adversarial loss (beta_1, L_adv; published: 1 without the factor tau^2, the same)."""
    diversity: NonNegativeFloat = 1.0
    """Weight of the diversity loss (beta_2, L_div)."""
    balance: NonNegativeFloat = 1.0
    """Weight of the information loss (beta_3, L_info)."""

    def needs(self) -> Needs:
        return Needs(generates_inputs=True, single_label=True)

    @property
    def total_steps(self) -> int:
        return self.steps

    # --- at the nodes -----------------------------------------------------------------------------------

    @query(
        sends={"x": INPUTS},
        releases={"logits": LOGITS},
        times=lambda self, setting: self.steps,
        rows=lambda self, setting: (1 + self.directions) * self.batch,
        depends_on_records=(),
        sums=lambda self, setting: self.sum_weightings(setting),
        finite_differences=True,
    )
    def predict_logits(self, nodes: NodeGroup, x: torch.Tensor) -> Tensors:
        """Return f_k(x) for inputs and their neighbors."""
        return {"logits": nodes.module("model")(nodes.setting.task.observe(x))}

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FedZGEState:
        source, G = self.source(server), self.init_generator(server)
        return FedZGEState(LabelHistogram(), source, *G, Student(self, server))

    def step(self, server: Server, state: FedZGEState, t: int) -> Mapping[str, float]:
        """Run one query, one step of G, some of the student."""
        task = server.task
        self.fetch_weights(server, state)
        set_lr(state.adam, cosine_lr(t, self.steps, self.generator_lr, self.generator_lr_end))
        batch = state.source.sample(self.batch, "w", t)
        w, y = batch.generator_input[:, : self.noise], batch.labels
        with server.compute.step(server.seed, "server", t):
            x = state.generator(batch.generator_input).float()
            names = state.histogram.names
            responses = query_with_differences(
                server, "predict_logits", x, self.directions, self.epsilon, t, nodes=names
            )
            omega = self.omega(server, state, responses.nodes)
            z = task.ensemble(responses["logits"], omega, self.ensemble)  # (B, C)
            losses = {
                "fidelity": F.cross_entropy(z, y),  # L_fid: x shows y
                "adversary": -task.distillation_loss(state.student.evaluate(x), z, self.tau).mean(),  # L_adv
                "diversity": diversity_loss(x, w),  # L_div
                "balance": task.balance_loss(z),  # L_info
            }
            L_G = (
                losses["fidelity"]
                + self.adversary * losses["adversary"]
                + self.diversity * losses["diversity"]
                + self.balance * losses["balance"]
            )
        descend(state.adam, L_G)
        state.student.replay.add(x.detach(), z.detach())
        losses["student"] = state.student.train(t, self.steps, [])
        return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))


def diversity_loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return L_div, exp(-mean_ij |x_i - x_j|^2 |w_i - w_j|^2), which is lower for inputs that differ with
    their noise.

    Squared distances of inputs ``(B, ...)`` and of noise ``(B, q)`` are means over their values.

    >>> diversity_loss(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [2.0]])).log()  # half: 1 x 4
    tensor(-2.)
    """
    x = x.flatten(1)
    x = x - x.mean(0)  # distances of large, nearly equal vectors would be rounding noise
    products = torch.cdist(x, x).square() * torch.cdist(w, w).square()
    return torch.exp(-products.mean() / (x.shape[1] * w.shape[1]))
