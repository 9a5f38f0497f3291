"""DENSE: a generator makes inputs that the nodes' ensemble recognizes and the student does not.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu: "DENSE: Data-Free One-Shot Federated Learning", NeurIPS 2022.
Symbols are the paper's, except noise, which is w here, as z are logits: nodes' models f_k, their ensemble D,
generator G, student f_S, labels y, losses L_CE (similarity), L_BN (stability) and L_div (transferability)
with weights 1, lambda_1 and lambda_2.

The nodes' models are trained to completion first. As published they are uploaded once; here they stay at the
nodes and are queried (``models``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from fedstill.core.options import NonNegativeFloat, PositiveInt, PositiveOrInf
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
)
from fedstill.methods._input_generators import GeneratorTraining, LabelGenerator
from fedstill.methods._replay_training import ReplayTraining, Student
from fedstill.methods._teachers import TeacherModels, UploadedModels, teacher_query, upload_query
from fedstill.tasks import Ensemble


@dataclass
class DENSEState:
    """Server state of the method."""

    generator: GeneratorTraining  # G
    student: Student  # f_S, with its replay memory
    histogram: LabelHistogram  # weights of the nodes in D
    uploaded: UploadedModels | None  # the f_k, if they are uploaded


@dataclass(frozen=True, kw_only=True)
class DENSE(Method):
    """One-shot distillation from inputs that the ensemble recognizes and the student does not."""

    title: ClassVar[str] = "DENSE"
    paper: ClassVar[str] = "Zhang et al., NeurIPS 2022"
    query_names: ClassVar[tuple[str, ...]] = ("count_labels", "upload_model", "predict_logits")
    unit: ClassVar[Literal["step"]] = "step"
    has_ensemble: ClassVar[bool] = True
    length_options: ClassVar[tuple[str, ...]] = ("steps", "generator_steps")
    batch_options: ClassVar[tuple[str, ...]] = ("batch", "student.batch")

    steps: PositiveInt = 400
    """Batches of inputs; the student trains after each."""
    batch: PositiveInt = 64
    """Inputs x in a batch."""
    generator_steps: PositiveInt = 1
    """Steps of G on a batch's noise and labels, each with a query to all nodes (published: 30, each time with
    a new G).
    """
    models: TeacherModels = "queried"
    """queried: nodes are queried about each x. uploaded: they upload their models once (published), which a
    policy of outputs only refuses.
    """
    weights: Literal["counts", "equal"] = "equal"
    """Weights of the nodes in D: equal, as in the paper, or their shares of each class's examples, which are
    then released."""
    ensemble: Ensemble = "logits"
    """Combination of the logits in D: logits, as in the paper, log_probs, probs, consensus, a robust
    one (median and others), or a custom one."""
    bn: NonNegativeFloat = 1.0
    """Weight of the stability loss (lambda_1, L_BN); 0: nodes release nothing about their batch norm."""
    adversary: NonNegativeFloat = 0.5
    """Weight of the transferability loss (lambda_2, L_div)."""
    tau: PositiveOrInf = 1.0
    """Temperature of the transferability loss (L_div) and of the distillation."""

    generator: LabelGenerator = field(default_factory=LabelGenerator)
    """The generator G."""
    student: ReplayTraining = field(default_factory=ReplayTraining)
    """The training of the student f_S."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.student.check_memory(self.batch)

    @property
    def total_steps(self) -> int:
        return self.steps

    def needs(self) -> Needs:
        return Needs(generates_inputs=True, single_label=True, student_architecture=self.models == "uploaded")

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        if self.weights == "counts":
            yield count_labels_query(setting)
        if self.models == "uploaded":
            yield upload_query()
        else:
            yield teacher_query(bn=self.bn, times=self.steps * self.generator_steps, rows=self.batch)

    def preview_response(self, node: NodeView, x: torch.Tensor, z: torch.Tensor) -> Tensors:
        return {"logits": z}

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> DENSEState:
        return DENSEState(
            GeneratorTraining(self.generator, server),
            Student(self.student, server, self.tau),
            LabelHistogram(equal=self.weights == "equal"),
            UploadedModels(server) if self.models == "uploaded" else None,
        )

    def step(self, server: Server, state: DENSEState, t: int) -> Mapping[str, float]:
        """Take steps of G on one batch of noise and labels, and steps of f_S on its replay memory."""
        task, G, f_S = server.task, state.generator, state.student
        state.histogram.fetch(server)
        if state.uploaded is not None:
            state.uploaded.fetch(server, state.histogram.names)
        G.set_lr(t, self.steps)
        batch = G.source.sample_batch(self.batch, "w", t)
        for step in range(self.generator_steps):
            with server.compute.step(server.seed, "server", t, step):
                x = G(batch)
                responses = self.respond(server, state, x)
                z = self.ensemble_responses(server, state, responses)  # D(x)  (B, C)
                z_S = f_S.evaluate(x)  # f_S(x)
                divergence = task.distillation_loss(z_S, z, self.tau)  # (B,)
                differs = z.argmax(1) != z_S.argmax(1)
                losses = {
                    "recognized": F.cross_entropy(z, batch.labels),  # L_CE
                    "sought": -(differs * divergence).mean(),  # L_div
                }
                L_G = losses["recognized"] + self.adversary * losses["sought"]
                if self.bn:
                    losses["statistics"] = responses["statistics"].mean()  # L_BN
                    L_G = L_G + self.bn * losses["statistics"]
            G.step(L_G)
        f_S.replay.add(x.detach(), z.detach())
        losses["student"] = f_S.train(t, self.steps, [])
        return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))

    def respond(self, server: Server, state: DENSEState, x: torch.Tensor) -> Responses:
        """Return the nodes' responses to x ``(B, ...)``, or those of their uploaded models."""
        if state.uploaded is not None:
            return state.uploaded.respond(server, x, self.bn)
        return server.query("predict_logits", nodes=state.histogram.names, x=x)

    def ensemble_responses(self, server: Server, state: Any, responses: Responses) -> torch.Tensor:
        """Return D(x) = 1 / K sum_k f_k(x), or the weighted mean."""
        omega = state.histogram.weights(server.task, responses.nodes)
        return server.task.ensemble(responses["logits"], omega, self.ensemble)

    def preview_samples(self, server: Server, state: DENSEState, count: int) -> torch.Tensor | None:
        return state.generator.preview_samples(count)
