"""FedIOD: federated learning by collaborative distillation of inputs and outputs.

Gong, Li, Bao, Yao, Huang, Wu, Zhang, Zheng, Doermann: "Federated Learning via Input-Output
Collaborative Distillation", AAAI 2024. Symbols and equation numbers are the paper's: nodes' models
T_k, critics D_k, generator G, student S, noise w, inputs x, logits z_k, importance pi_k.

The nodes' models are trained to completion first and then only answer. In each step the server makes
inputs x = G(w) and asks the nodes about them; losses on the answers are pulled back through the nodes
to teach G which inputs to make, and the answers, ensembled, teach S.

Beyond the paper (each an option, the paper's form beside it): answers are remembered, so that S takes many
steps on one query; the ensemble seeks a consensus; milder adversaries. Where images are made from label
maps: :mod:`fedstill.methods.fediod_maps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from fedstill.core.options import Finite, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from fedstill.methods import (
    ArgumentError,
    Needs,
    NodeGroup,
    Responses,
    Server,
    cosine_lr,
    descend,
    query,
    set_lr,
)
from fedstill.methods._generated_inputs import GeneratesFromNoise, GeneratesInputs, GeneratorBatch
from fedstill.methods._importance_weights import ImportanceWeighting
from fedstill.methods._label_histogram import LabelHistogram, Tensors
from fedstill.methods._label_shift import LabelShift
from fedstill.methods._student import LabeledBatch, Student
from fedstill.methods._zeroth_order import query_with_differences
from fedstill.protocol.payload_kinds import INPUTS, LOGITS
from fedstill.protocol.queries import NodeSetting
from fedstill.protocol.secure_aggregation import SUM, SumWeighting
from fedstill.tasks.classification import SoftmaxTask


@dataclass
class FedIODState:
    """What changes from step to step."""

    histogram: LabelHistogram  # who holds how many examples of which class
    source: Any  # of what x is made: noise or maps
    generator: nn.Module  # G
    adam: torch.optim.Optimizer  # G's
    student: Student  # S, with what it remembers


@dataclass(frozen=True, kw_only=True)
class FedIOD(ImportanceWeighting, GeneratesFromNoise, GeneratesInputs):
    """FedIOD's options. The preset ``paper`` holds the published ones."""

    title: ClassVar[str] = "FedIOD"
    paper: ClassVar[str] = "Gong et al., AAAI 2024"
    unit: ClassVar[Literal["step"]] = "step"
    length_options: ClassVar[tuple[str, ...]] = ("steps",)

    steps: PositiveInt = 400
    """Distillation steps, each with one query to all nodes."""
    critic_batch: NonNegativeInt = 32
    """Inputs of a query that D_k learns on, beside as many of the node's own; 0: all (published). A critic
    that learns privately takes all."""
    conf: NonNegativeFloat = 0.2
    """Weight of L_conf (Eq. 3)."""
    unique: Finite = 0.2
    """Weight of L_unique (Eq. 5); below 0 G seeks inputs on which nodes agree, as the published code does."""
    mimic: NonNegativeFloat = 0.02
    """Weight of L_mimic in the generator's loss (Eq. 10)."""
    balance: NonNegativeFloat = 10.0
    """Weight of the class balance, in the published code but not in the paper."""
    label_shift: bool = False
    """S learns answers as they would be if generated inputs showed each class as often as the nodes' own do;
    for tasks with classes. Beyond the paper."""
    through: bool = True
    """Pull losses back through the nodes; false: they only answer, and G learns from S (and from what else
    is known without them), as models that have no gradients, or gates that withhold them, allow."""

    directions: NonNegativeInt = 0
    """With through = false: random directions along which answers are differenced in its place (FedZGE's q;
    published: 10), each as many further inputs in a query as there are; 0: none."""
    epsilon: PositiveFloat = 1e-3
    """How far along them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.through and self.mimic == 0 and not self.directions:
            allowed = "above 0, where nothing else teaches the generator"
            raise ArgumentError("method.mimic", self.mimic, allowed)
        if self.through and self.directions:
            raise ArgumentError("method.directions", self.directions, "0 where through = true")

    def needs(self) -> Needs:
        return Needs(generates_inputs=True, no_label_maps=True)

    @property
    def total_steps(self) -> int:
        return self.steps

    # --- at the nodes -----------------------------------------------------------------------------------

    @query(
        sends=lambda self, setting: {"x": INPUTS, **self.critics(setting).sends},
        releases=lambda self, setting: {
            "logits": LOGITS,
            **self.critics(setting).releases,
            **self.rating_kinds,
        },
        differentiable=lambda self, setting: ("x",) if self.through else (),
        times=lambda self, setting: self.steps,
        rows=lambda self, setting: (1 + self.directions) * self.batch,
        depends_on_records=lambda self, setting: (
            *(("critic_real",) if self.compares_with_real else ()),
            *self.critics(setting).depends_on_records,
        ),
        trains=lambda self, setting: ("critic",) if self.has_critics else (),
        sums=lambda self, setting: self.sum_weightings(setting),
        sampler=lambda self, nodes, x, **about: {
            **self.critics(nodes.setting).sample_inputs(nodes, nodes.query_number, x),
            **self.sample_real_inputs(nodes, x),
        },
        capturable=lambda self, setting: not self.critics(setting).compares_images,
        finite_differences=lambda self, setting: bool(self.directions),
    )
    def predict_logits(
        self, nodes: NodeGroup, x: torch.Tensor, known: torch.Tensor | None = None, **about: torch.Tensor
    ) -> Tensors:
        """z_k = T_k(x), and D_k(x) after one step of D_k on x and as many of the node's own inputs."""
        response = self.critics(nodes.setting).train_and_score(nodes, nodes.query_number, x, **about)
        z = nodes.module("model")(nodes.setting.task.observe(x))
        own = {} if known is None else {"known": known}
        return {"logits": z, **response, **self.rate_real(nodes, x, **own)}

    def sum_weightings(self, setting: NodeSetting) -> Mapping[str, SumWeighting]:
        """Weighting of the summed logits: by class counts or by size.

        Raises:
            ArgumentError: options that need more of a response than its logits. Entropies (Eq. 3, 5) and
                critic values (Eq. 2) of the same inputs are further equations for each node's response.
        """
        changes = [f"method.{name} = 0" for name in ("gan", "conf", "unique") if getattr(self, name)]
        if changes:
            changes += ['method.ensemble = "logits"'] if self.ensemble != "logits" else []
            expected = f"false, or {', '.join(changes)}: one statistic of each response enters a sum"
            raise ArgumentError("link.secure_aggregation", True, expected)
        return super().sum_weightings(setting)

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FedIODState:
        source, G, task = self.source(server), self.init_generator(server), server.task
        if self.label_shift and not isinstance(task, SoftmaxTask):
            raise ArgumentError(
                "method.label_shift", True, f"false, as task {task.name} has no shares of classes"
            )
        shift = LabelShift(task.classes, server.device) if self.label_shift else None
        return FedIODState(LabelHistogram(), source, *G, Student(self, server, shift))

    def step(self, server: Server, state: FedIODState, t: int) -> Mapping[str, float]:
        """One distillation step (Algorithm 1's second loop): one query, one step of G, some of S."""
        task = server.task
        state.histogram.fetch(server)
        state.source.fetch(server)
        set_lr(state.adam, cosine_lr(t, self.total_steps, self.generator_lr, self.generator_lr_end))

        # Input distillation
        w = state.source.sample(self.batch, "w", t)
        with server.compute.step(server.seed, "server", t):
            x, responses = self.query_teachers(server, state, "predict_logits", w)
            sizes = state.histogram.select(responses.nodes).sizes  # |X'_k|  (K,)
            pi = sizes / sizes.sum()  # pi_k = |X'_k| / sum |X'_k|
            z_k = responses["logits"]  # (K, B, classes, ...)
            weights = self.weights(server, state, responses)
            z_bar = task.ensemble(z_k, weights, self.ensemble)  # Eq. 9  (B, classes, ...)
            L_gan = self.gan_loss(task, responses, pi, z_bar, weights)  # Eq. 2
            L_conf, L_unique = self.confidence_uniqueness(server, responses, pi)  # Eq. 3 and 5
            L_balance = task.balance_loss(z_bar)
            if (shift := state.student.shift) is not None:
                shift.expect(state.histogram.counts.sum(0))
                shift.count(z_bar)
            z_S, z = state.student.evaluate(x), state.student.corrected_target(z_bar)
            L_mimic = task.distillation_loss(z_S, z, self.tau).mean()  # Eq. 10
            L_G = (
                self.gan * L_gan
                + self.conf * L_conf
                + self.unique * L_unique
                - self.mimic * L_mimic
                + self.balance * L_balance
            )  # Eq. 11
            losses = {
                "gan": L_gan,
                "conf": L_conf,
                "unique": L_unique,
                "mimic": L_mimic,
                "balance": L_balance,
            }
            if "difference" in responses.tensors:  # told by the one node that owns each map
                losses["difference"] = responses["difference"].sum(0).mean()
                L_G = L_G + losses["difference"]
        descend(state.adam, L_G)

        # Output distillation
        if self.student_inputs == "remembered":
            state.student.replay.add(x.detach(), z_bar.detach())
        fresh = self.query_fresh_batch(server, state, t) if self.student_inputs == "fresh" else []
        since = t - (self.total_steps - self.steps)
        losses["student"] = state.student.train(since, self.steps, fresh)
        return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))

    def confidence_uniqueness(
        self, server: Server, responses: Responses, pi: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """L_conf and L_unique of all z_k; 0 where the server sees the sum of the z_k only."""
        if responses.nodes == (SUM,):
            return torch.zeros((), device=server.device), torch.zeros((), device=server.device)
        z_k = responses["logits"]
        return server.task.confidence_loss(z_k, pi), server.task.uniqueness_loss(z_k, pi)

    def query_teachers(
        self, server: Server, state: FedIODState, query: str, w: GeneratorBatch
    ) -> tuple[torch.Tensor, Responses]:
        """x = G(w) and the nodes' answers about it."""
        x = state.generator(w.generator_input).float()  # (B, C, H, W)
        sent = w.query_tensors(server.federation.queries[query])
        asked = x if self.through else x.detach()
        names = state.histogram.names
        if self.directions:
            around = self.directions, self.epsilon, server.completed_steps
            return x, query_with_differences(server, query, x, *around, of=names, **sent)
        return x, server.query(query, of=names, x=asked, **sent)

    def query_fresh_batch(self, server: Server, state: FedIODState, t: int) -> list[LabeledBatch]:
        """New inputs and their ensembled answers for all of this step's turns of S: one more query.

        G does not learn between the turns, so that one query serves them all.
        """
        wishes, batches = [], []
        for turn in range(self.student_steps):
            wishes.append(state.source.sample(self.batch, "fresh w", t, turn))
            with torch.no_grad(), server.compute.step(server.seed, "fresh", t, turn):
                batches.append(state.generator(wishes[-1].generator_input).float())  # (B, C, H, W)
        x, maps = torch.cat(batches), [wish.maps for wish in wishes if wish.maps is not None]
        sent = GeneratorBatch(x, torch.cat(maps) if maps else None).query_tensors(
            server.federation.queries["predict"]
        )
        with torch.no_grad():
            responses = server.query("predict", of=state.histogram.names, x=x, **sent)
            weights = self.weights(server, state, responses)
            z = server.task.ensemble(responses["logits"], weights, self.ensemble)
        return list(zip(torch.split(x, self.batch), torch.split(z, self.batch), strict=True))
