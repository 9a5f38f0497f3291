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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from fedstill.core.options import NonNegativeFloat, PositiveInt, PositiveOrInf
from fedstill.methods import (
    Method,
    Needs,
    NodeSetting,
    NodeView,
    Query,
    Responses,
    Server,
    Tensors,
    torch_generator,
)
from fedstill.methods._input_generators import GeneratorTraining, LabelGenerator
from fedstill.methods._replay_memory import LabeledBatch
from fedstill.methods._replay_training import ReplayTraining, Student
from fedstill.methods._teachers import TeacherModels, UploadedModels, teacher_query, upload_query
from fedstill.tasks import Ensemble

DECAY = 0.99  # of mu, from batch to batch


@dataclass
class CoBoostingState:
    """Server state of the method."""

    generator: GeneratorTraining  # G
    student: Student  # with its replay memory
    w: torch.Tensor  # w_k (K,), in the order of the federation's nodes
    uploaded: UploadedModels | None  # the f_k, if they are uploaded


@dataclass(frozen=True, kw_only=True)
class CoBoosting(Method):
    """Co-Boosting's options."""

    title: ClassVar[str] = "Co-Boosting"
    paper: ClassVar[str] = "Dai et al., ICLR 2024"
    query_names: ClassVar[tuple[str, ...]] = ("upload_model", "predict_logits")
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
    ensemble: Ensemble = "logits"
    """Combination of the logits in A_w: logits, as in the paper, log_probs, probs, consensus, a
    robust one (median and others), or a custom one."""
    hardness: NonNegativeFloat = 1.0
    """Power of 1 - p_y(x) that weights inputs in G's loss; 0: all equal."""
    adversary: NonNegativeFloat = 1.0
    """Weight of the loss that seeks inputs on which student and ensemble differ."""
    bn: NonNegativeFloat = 0.0
    """Weight of the distance of inputs to the nodes' batch norm statistics; 0: none is released."""
    mu: NonNegativeFloat = 0.01
    """Step of the ensemble's weights w in 0..1 after each batch, decreasing by 1 % a batch; 0: equal weights.
    """
    epsilon: NonNegativeFloat = 8 / 255
    """Length of the perturbation of inputs before the student trains on them, of a pixel's range; 0: none."""
    tau: PositiveOrInf = 4.0
    """Temperature of the distance of student and ensemble, and of the logits along which inputs move."""

    generator: LabelGenerator = field(default_factory=LabelGenerator)
    """The generator G."""
    student: ReplayTraining = field(default_factory=ReplayTraining)
    """The training of the student."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.student.check_memory(self.batch)

    @property
    def total_steps(self) -> int:
        return self.steps

    def needs(self) -> Needs:
        uploaded = self.models == "uploaded"
        return Needs(images=True, generates_inputs=True, single_label=True, student_architecture=uploaded)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        if self.models == "uploaded":
            yield upload_query()
        else:  # besides the steps of G, one for the batch and one for the perturbed batch
            per_step = self.generator_steps + 1 + (self.epsilon > 0)
            yield teacher_query(bn=self.bn, times=self.steps * per_step, rows=self.batch)

    def preview_response(self, node: NodeView, x: torch.Tensor, z: torch.Tensor) -> Tensors:
        return {"logits": z}

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> CoBoostingState:
        K = len(server.federation.nodes)
        return CoBoostingState(
            GeneratorTraining(self.generator, server),
            Student(self.student, server, self.tau),
            torch.full((K,), 1 / K, device=server.device),
            UploadedModels(server) if self.models == "uploaded" else None,
        )

    def step(self, server: Server, state: CoBoostingState, t: int) -> Mapping[str, float]:
        """Take steps of G on one batch, improve w, and take steps of the student on its replay memory."""
        task, G, S = server.task, state.generator, state.student
        if state.uploaded is not None:
            state.uploaded.fetch(server)
        G.set_lr(t, self.steps)
        batch = G.source.sample_batch(self.batch, "w", t)
        y = batch.labels
        for step in range(self.generator_steps):
            with server.compute.step(server.seed, "server", t, step):
                x = G(batch)
                responses = self.respond(server, state, x)
                z = self.ensemble_responses(server, state, responses)  # A_w(x)  (B, C)
                hard = 1 - z.detach().softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)  # 1 - p_y(x)
                L_CE = (hard**self.hardness * F.cross_entropy(z, y, reduction="none")).mean()
                distance = task.distillation_loss(S.evaluate(x), z, self.tau)  # (B,)
                losses = {"recognized": L_CE, "sought": -distance.mean()}
                L_G = losses["recognized"] + self.adversary * losses["sought"]
                if self.bn:
                    losses["statistics"] = responses["statistics"].mean()
                    L_G = L_G + self.bn * losses["statistics"]
            G.step(L_G)
        S.replay.add(*self.make_replay_batch(server, state, x, y, t))
        losses["student"] = S.train(t, self.steps, [])
        return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))

    def make_replay_batch(
        self, server: Server, state: CoBoostingState, x: torch.Tensor, y: torch.Tensor, t: int
    ) -> LabeledBatch:
        """Improve w on the batch; return x~ = x + epsilon sign(d/dx v A_w(x)), v random, and A_w(x~)."""
        x = x.detach().requires_grad_(self.epsilon > 0)
        with server.compute.step(server.seed, "moving", t):
            responses = self.respond(server, state, x)
            self.update_node_weights(server, state, responses, y, t)
            z = self.ensemble_responses(server, state, responses)
        if not self.epsilon:
            return LabeledBatch(x, z.detach())
        v = 2 * torch.rand(z.shape, generator=torch_generator(server.seed, "v", t)) - 1
        (gradient,) = torch.autograd.grad((v.to(z.device) * (z / self.tau).softmax(1)).sum(), x)
        std = torch.tensor(server.std, device=x.device).view(-1, 1, 1)
        x = x.detach() + self.epsilon / std * gradient.sign()
        with torch.no_grad(), server.compute.step(server.seed, "moved", t):
            return LabeledBatch(x, self.ensemble_responses(server, state, self.respond(server, state, x)))

    def update_node_weights(
        self, server: Server, state: CoBoostingState, responses: Responses, y: torch.Tensor, t: int
    ) -> None:
        """Update w <- w - mu sign(d/dw CE(A_w(x), y)), within 0..1, for the nodes that responded."""
        rows = [server.federation.nodes.index(name) for name in responses.nodes]
        w, z_k = state.w[rows].requires_grad_(), responses["logits"].detach()
        with torch.enable_grad():
            loss = F.cross_entropy(self.weighted_ensemble(server, z_k, w), y)
            (gradient,) = torch.autograd.grad(loss, w)
        state.w[rows] = (w.detach() - self.mu * DECAY**t * gradient.sign()).clamp(0, 1)

    def respond(self, server: Server, state: CoBoostingState, x: torch.Tensor) -> Responses:
        """Return the nodes' responses to x ``(B, ...)``, or those of their uploaded models."""
        if state.uploaded is not None:
            return state.uploaded.respond(server, x, self.bn)
        return server.query("predict_logits", x=x)

    def ensemble_responses(
        self, server: Server, state: CoBoostingState, responses: Responses
    ) -> torch.Tensor:
        rows = [server.federation.nodes.index(name) for name in responses.nodes]
        return self.weighted_ensemble(server, responses["logits"], state.w[rows])

    def weighted_ensemble(self, server: Server, z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Return A_w(x) ``(B, C)`` of logits ``(K, B, C)``; weights ``(K,)`` need not sum to 1."""
        total = w.sum().clamp_min(1e-6)
        shares = (w / total).view(-1, 1, 1).expand(-1, 1, z.shape[2])
        return total * server.task.ensemble(z, shares, self.ensemble)

    def preview_samples(self, server: Server, state: CoBoostingState, count: int) -> torch.Tensor | None:
        return state.generator.preview_samples(count)
