"""FedZGE: the server's generator trains on logits alone, with finite differences along random directions.

Ma, Wang, Zhang: "Data-Free Black-Box Federated Learning via Zeroth-Order Gradient Estimation", AAAI 2025.
Symbols are the paper's, except noise, which is w here, as z are logits: nodes' models f_k, generator G,
student f, labels y, inputs x = G(w, y), q directions u of length 1, smoothing parameter epsilon, losses
L_fid, L_adv, L_div and L_info with weights 1, beta_1, beta_2 and beta_3.

The nodes' models are trained to completion first, and nothing is backpropagated through them. A model without
gradients, such as a forest or one behind a service, can be a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from fedstill.core.options import NonNegativeFloat, PositiveFloat, PositiveInt, PositiveOrInf
from fedstill.methods import (
    LabelHistogram,
    Method,
    Needs,
    NodeSetting,
    NodeView,
    Query,
    QueryDetails,
    Responses,
    Server,
    Tensors,
    count_labels_query,
)
from fedstill.methods._input_generators import GeneratorTraining, LabelGenerator
from fedstill.methods._replay_training import ReplayTraining, Student
from fedstill.methods._zeroth_order import query_with_differences
from fedstill.protocol.payload_kinds import INPUTS, LOGITS
from fedstill.protocol.secure_aggregation import SumWeighting, linear_sums
from fedstill.tasks import Ensemble


@dataclass
class FedZGEState:
    """Server state of the method."""

    generator: GeneratorTraining  # G
    student: Student  # f, with its replay memory
    histogram: LabelHistogram  # weights of the nodes


@dataclass(frozen=True, kw_only=True)
class FedZGE(Method):
    """FedZGE's options."""

    title: ClassVar[str] = "FedZGE"
    paper: ClassVar[str] = "Ma et al., AAAI 2025"
    query_names: ClassVar[tuple[str, ...]] = ("count_labels", "predict_logits")
    unit: ClassVar[Literal["step"]] = "step"
    has_ensemble: ClassVar[bool] = True
    batch_options: ClassVar[tuple[str, ...]] = ("batch", "student.batch")
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
    """Combination of the responses: logits, log_probs, probs, consensus, a robust one (median
    and others), or a custom one."""
    tau: PositiveOrInf = 5.0
    """Temperature of the student's distance to the ensemble, in L_adv and in its training; times tau^2."""
    adversary: NonNegativeFloat = 0.04
    """Weight of the adversarial loss (beta_1, L_adv; published: 1 without the factor tau^2, the same)."""
    diversity: NonNegativeFloat = 1.0
    """Weight of the diversity loss (beta_2, L_div)."""
    balance: NonNegativeFloat = 1.0
    """Weight of the information loss (beta_3, L_info)."""

    generator: LabelGenerator = field(default_factory=LabelGenerator)
    """The generator G."""
    student: ReplayTraining = field(default_factory=ReplayTraining)
    """The training of the student f."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.student.check_memory(self.batch)

    @property
    def total_steps(self) -> int:
        return self.steps

    def needs(self) -> Needs:
        return Needs(generates_inputs=True, single_label=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        if self.weights == "counts":
            yield count_labels_query(setting)
        weighting: SumWeighting = "counts" if self.weights == "counts" else "mean"
        yield Query(
            self.predict_logits,
            sends={"x": INPUTS},
            releases={"logits": LOGITS},
            times=self.steps,
            rows=(1 + self.directions) * self.batch,
            depends_on_records=(),
            # Probabilities and their logarithms saturate: at some inputs all nodes but one add exactly 0.
            sums=linear_sums(
                setting.secure_aggregation, {"logits": weighting}, ensemble=(self.ensemble, "logits")
            ),
            stackable=True,
            details=QueryDetails(finite_differences=True),
        )

    # --- at a node --------------------------------------------------------------------------------------

    def predict_logits(self, node: NodeView, x: torch.Tensor) -> Tensors:
        """Return f_k(x) for inputs and their neighbors."""
        return {"logits": node.model(node.task.observe(x))}

    def preview_response(self, node: NodeView, x: torch.Tensor, z: torch.Tensor) -> Tensors:
        return {"logits": z}

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FedZGEState:
        return FedZGEState(
            GeneratorTraining(self.generator, server),
            Student(self.student, server, self.tau),
            LabelHistogram(equal=self.weights == "equal"),
        )

    def step(self, server: Server, state: FedZGEState, t: int) -> Mapping[str, float]:
        """Run one query, one step of G, some of the student."""
        task, G = server.task, state.generator
        state.histogram.fetch(server)
        G.set_lr(t, self.steps)
        batch = G.source.sample_batch(self.batch, "w", t)
        w, y = batch.generator_input[:, : self.generator.noise], batch.labels
        with server.compute.step(server.seed, "server", t):
            x = G(batch)
            names = state.histogram.names
            responses = query_with_differences(
                server, "predict_logits", x, self.directions, self.epsilon, t, nodes=names
            )
            z = self.ensemble_responses(server, state, responses)  # (B, C)
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
        G.step(L_G)
        state.student.replay.add(x.detach(), z.detach())
        losses["student"] = state.student.train(t, self.steps, [])
        return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))

    def ensemble_responses(self, server: Server, state: FedZGEState, responses: Responses) -> torch.Tensor:
        omega = state.histogram.weights(server.task, responses.nodes)
        return server.task.ensemble(responses["logits"], omega, self.ensemble)

    def preview_samples(self, server: Server, state: FedZGEState, count: int) -> torch.Tensor | None:
        return state.generator.preview_samples(count)


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
