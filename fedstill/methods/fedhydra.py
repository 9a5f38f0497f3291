"""FedHydra: DENSE with an ensemble that weighs the nodes by how well each one's model knows a class.

Bai, Song, Wu, Sajjanhar, Xiang, Zhou, Tao, Li, Li: "A Unified Solution to Diverse Heterogeneities in One-Shot
Federated Learning" (FedHydra), KDD 2025, arXiv:2410.21119. Nodes' models are f_k, U the matrix of weights
u_k^c of node k for class c, generator G, student f_S, labels y. Noise is w.

1. Model stratification: for each node and class, a generator of its own learns inputs that f_k assigns to the
   class. The weight u_k^c is the relative decrease of its cross-entropy, (max - min) / min over the steps.
2. Stratified aggregation: for an input that G makes for label y, nodes weigh u_k^y. The rest is DENSE.

The nodes' models are trained to completion first. As published they are uploaded once; here they stay at the
nodes and are queried (``models``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge

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
)
from fedstill.methods._input_generators import GeneratorTraining, InputGenerator, LabelGenerator
from fedstill.methods._replay_training import ReplayTraining, Student
from fedstill.methods._teachers import TeacherModels, UploadedModels, teacher_query, upload_query
from fedstill.tasks import Ensemble


@dataclass
class FedHydraState:
    """Server state of the method."""

    generator: GeneratorTraining  # G
    student: Student  # f_S, with its replay memory
    U: LabelHistogram  # u_k^c in place of counts (K, C); empty until they are measured
    uploaded: UploadedModels | None  # the f_k, if they are uploaded


@dataclass(frozen=True, kw_only=True)
class FedHydra(Method):
    """One-shot distillation with nodes weighted by how well their models know each class."""

    title: ClassVar[str] = "FedHydra"
    paper: ClassVar[str] = "Bai et al., KDD 2025"
    query_names: ClassVar[tuple[str, ...]] = ("upload_model", "predict_class", "predict_logits")
    unit: ClassVar[Literal["step"]] = "step"
    has_ensemble: ClassVar[bool] = True
    length_options: ClassVar[tuple[str, ...]] = ("steps", "generator_steps", "class_steps")
    batch_options: ClassVar[tuple[str, ...]] = ("batch", "student.batch")

    class_steps: Annotated[int, Ge(2)] = 20
    """Steps of the generator that measures one node's model for one class, each a query to that node."""
    steps: PositiveInt = 400
    """Batches of inputs after that; the student trains after each."""
    batch: PositiveInt = 64
    """Inputs x in a batch."""
    generator_steps: PositiveInt = 1
    """Steps of G on a batch's noise and labels, each with a query to all nodes (published: 20, each time with
    a new G).
    """
    models: TeacherModels = "queried"
    """queried: nodes are queried about each x. uploaded: they upload their models once (published), which a
    policy of outputs only refuses.
    """
    ensemble: Ensemble = "logits"
    """Combination of the logits under the weights: logits, as in the paper, log_probs, probs, consensus, a
    robust one (median and others), or a custom one."""
    bn: NonNegativeFloat = 1.0
    """Weight of the distance to the nodes' batch norm statistics in G's loss; 0: none is released."""
    adversary: NonNegativeFloat = 0.5
    """Weight of the loss that seeks inputs on which ensemble and student predict different classes."""
    tau: PositiveOrInf = 1.0
    """Temperature of the divergence in G's loss, and of the distillation."""

    generator: LabelGenerator = field(default_factory=LabelGenerator)
    """The generator G, and those that measure the nodes' models."""
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
        if self.models == "uploaded":
            yield upload_query()
        else:
            times = setting.task.classes * self.class_steps
            yield replace(teacher_query(bn=0, times=times, rows=self.batch), name="predict_class")
            yield teacher_query(bn=self.bn, times=self.steps * self.generator_steps, rows=self.batch)

    def preview_response(self, node: NodeView, x: torch.Tensor, z: torch.Tensor) -> Tensors:
        return {"logits": z}

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FedHydraState:
        return FedHydraState(
            GeneratorTraining(self.generator, server),
            Student(self.student, server, self.tau),
            LabelHistogram(),
            UploadedModels(server) if self.models == "uploaded" else None,
        )

    def step(self, server: Server, state: FedHydraState, t: int) -> Mapping[str, float]:
        """Take steps of G on one batch of noise and labels, and steps of f_S on its replay memory; before the
        first one measure U."""
        task, G, f_S = server.task, state.generator, state.student
        if state.uploaded is not None:
            state.uploaded.fetch(server)
        if not state.U.names:
            state.U = self.stratify(server, state)
        G.set_lr(t, self.steps)
        batch = G.source.sample_batch(self.batch, "w", t)
        for step in range(self.generator_steps):
            with server.compute.step(server.seed, "server", t, step):
                x = G(batch)
                responses = self.respond(server, state, x)
                z = self.ensemble_for_labels(server, state, responses, batch.labels)  # (B, C)
                z_S = f_S.evaluate(x)  # f_S(x)
                divergence = task.distillation_loss(z_S, z, self.tau)  # (B,)
                differs = z.argmax(1) != z_S.argmax(1)
                losses = {
                    "recognized": F.cross_entropy(z, batch.labels),
                    "sought": -(differs * divergence).mean(),
                }
                L_G = losses["recognized"] + self.adversary * losses["sought"]
                if self.bn:
                    losses["statistics"] = responses["statistics"].mean()
                    L_G = L_G + self.bn * losses["statistics"]
            G.step(L_G)
        f_S.replay.add(x.detach(), z.detach())
        losses["student"] = f_S.train(t, self.steps, [])
        return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))

    # 1. Model stratification.

    def stratify(self, server: Server, state: FedHydraState) -> LabelHistogram:
        """Return U of all nodes that respond."""
        names = server.federation.present if state.uploaded is None else tuple(state.uploaded.models)
        rows = {name: self.measure_node(server, state, name) for name in names}
        measured = {name: row for name, row in rows.items() if row is not None}
        U = torch.stack(list(measured.values()))  # (K, C)
        return LabelHistogram(tuple(measured), U, U.sum(1))

    def measure_node(self, server: Server, state: FedHydraState, name: str) -> torch.Tensor | None:
        """Return u_k^c of all classes ``(C,)``; None if the node is excluded meanwhile."""
        row = [self.measure_class(server, state, name, c) for c in range(server.task.classes)]
        known = [u for u in row if u is not None]
        return torch.stack(known) if len(known) == len(row) else None

    def measure_class(self, server: Server, state: FedHydraState, name: str, c: int) -> torch.Tensor | None:
        """Train a generator of its own on f_k's cross-entropy with class c, and return u_k^c.

        All nodes and classes start from the same generator and the same noise.
        """
        G = GeneratorTraining(InputGenerator(**vars(self.generator)), server)
        w = G.source.sample_batch(self.batch, "class")
        y = torch.full((self.batch,), c, device=server.device)
        L_CE = []
        for step in range(self.class_steps):
            with server.compute.step(server.seed, "class", name, c, step):
                responses = self.respond_one(server, state, name, G(w))
                if responses is None:
                    return None
                L_CE.append(F.cross_entropy(responses["logits"][0], y))
            G.step(L_CE[-1])
        return relative_decrease(torch.stack(L_CE).detach())

    def respond_one(
        self, server: Server, state: FedHydraState, name: str, x: torch.Tensor
    ) -> Responses | None:
        """Return one node's response to x ``(B, ...)``, or that of its uploaded model."""
        if state.uploaded is not None:
            return state.uploaded.respond(server, x, 0.0, (name,))
        if name not in server.federation.present:
            return None
        return server.query_or_none("predict_class", nodes=(name,), x=x)

    # 2. Stratified aggregation.

    def respond(self, server: Server, state: FedHydraState, x: torch.Tensor) -> Responses:
        """Return the nodes' responses to x ``(B, ...)``, or those of their uploaded models."""
        if state.uploaded is not None:
            return state.uploaded.respond(server, x, self.bn)
        return server.query("predict_logits", nodes=state.U.names, x=x)

    def ensemble_for_labels(
        self, server: Server, state: FedHydraState, responses: Responses, y: torch.Tensor
    ) -> torch.Tensor:
        """Return sum_k u_k^y f_k(x) ``(B, C)`` of inputs that G made for labels y ``(B,)``."""
        u = state.U.weights(server.task, responses.nodes)  # (K, 1, C)
        u_y = u[:, 0, y].unsqueeze(2).expand_as(responses["logits"])  # (K, B, C)
        return server.task.ensemble(responses["logits"], u_y, self.ensemble)

    def ensemble_responses(self, server: Server, state: FedHydraState, responses: Responses) -> torch.Tensor:
        """Return the ensemble of inputs without labels, whose logit of class c is the one for y = c."""
        u = state.U.weights(server.task, responses.nodes)  # (K, 1, C)
        return server.task.ensemble(responses["logits"], u, self.ensemble)

    def preview_samples(self, server: Server, state: FedHydraState, count: int) -> torch.Tensor | None:
        return state.generator.preview_samples(count)


def relative_decrease(losses: torch.Tensor) -> torch.Tensor:
    """Return (max - min) / min of the losses of all steps ``(T,)``: ``()``.

    >>> relative_decrease(torch.tensor([2.0, 3.0, 0.5]))
    tensor(5.)
    """
    least, most = losses.aminmax()
    return (most - least) / least.clamp_min(torch.finfo(losses.dtype).eps)
