"""FedIOD: federated learning by collaborative distillation of inputs and outputs.

Gong, Li, Bao, Yao, Huang, Wu, Zhang, Zheng, Doermann: "Federated Learning via Input-Output Collaborative
Distillation", AAAI 2024. Symbols and equation numbers are the paper's: nodes' models T_k, critics D_k,
generator G, student S, noise w, inputs x, logits z_k, importance pi_k.

The nodes' models are trained to completion first. In each step the server generates inputs x = G(w) and
queries the nodes about them. The input gradients of losses on the responses train G, and the ensembled
responses train S.

Beyond the paper (each an option, with the paper's form as another value): a replay memory, so that S takes
many steps on one query; a consensus ensemble; weaker adversaries. For images generated from label maps see
:mod:`fedstill.methods.fediod_maps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from fedstill.core.errors import format_option
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
from fedstill.methods._generated_inputs import GeneratorBatch, InputGeneratorMethod, NoiseGeneratorOptions
from fedstill.methods._importance_weights import ImportanceWeightingMethod
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
    """Server state of the method."""

    histogram: LabelHistogram  # who holds how many examples of which class
    source: Any  # of what x is made: noise or maps
    generator: nn.Module  # G
    adam: torch.optim.Optimizer  # G's
    student: Student  # S, with what it remembers


@dataclass(frozen=True, kw_only=True)
class FedIOD(ImportanceWeightingMethod, NoiseGeneratorOptions, InputGeneratorMethod):
    """FedIOD. The preset ``paper`` holds the published options."""

    title: ClassVar[str] = "FedIOD"
    paper: ClassVar[str] = "Gong et al., AAAI 2024"
    unit: ClassVar[Literal["step"]] = "step"
    length_options: ClassVar[tuple[str, ...]] = ("steps",)

    steps: PositiveInt = 400
    """Distillation steps, each with one query to all nodes."""
    critic_batch: NonNegativeInt = 32
    """Generated inputs of a query that D_k trains on, with as many of the node's own; 0: all (published). A
    critic that trains privately takes all.
    """
    conf: NonNegativeFloat = 0.2
    """Weight of L_conf (Eq. 3)."""
    unique: Finite = 0.2
    """Weight of L_unique (Eq. 5); below 0 G seeks inputs on which nodes agree, as in the published code."""
    mimic: NonNegativeFloat = 0.02
    """Weight of L_mimic in the generator's loss (Eq. 10)."""
    balance: NonNegativeFloat = 10.0
    """Weight of the class balance, in the published code but not in the paper."""
    label_shift: bool = False
    """Correct responses for the class shares of the nodes' own data before S trains on them; for tasks with
    classes. Beyond the paper.
    """
    backpropagate: bool = True
    """Backpropagate losses through the nodes. false: they return outputs only, and G trains on S (and on
    losses that do not need the nodes), for models without gradients, or gates that withhold them.
    """

    directions: NonNegativeInt = 0
    """With backpropagate = false: random directions for finite differences of the responses (FedZGE's q;
    published: 10), each with as many further inputs in a query; 0: none.
    """
    epsilon: PositiveFloat = 1e-3
    """Step along these directions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.backpropagate and self.mimic == 0 and not self.directions:
            allowed = "above 0, where nothing else teaches the generator"
            raise ArgumentError("method.mimic", self.mimic, allowed)
        if self.backpropagate and self.directions:
            raise ArgumentError("method.directions", self.directions, "0 where backpropagate = true")

    def needs(self) -> Needs:
        return Needs(generates_inputs=True, no_label_maps=True)

    @property
    def total_steps(self) -> int:
        return self.steps

    # --- at the nodes -----------------------------------------------------------------------------------

    @query(
        sends=lambda self, setting: {"x": INPUTS, **self.make_critics(setting).sends},
        releases=lambda self, setting: {
            "logits": LOGITS,
            **self.make_critics(setting).releases,
            **self.weighting_payload_kinds,
        },
        differentiable=lambda self, setting: ("x",) if self.backpropagate else (),
        times=lambda self, setting: self.steps,
        rows=lambda self, setting: (1 + self.directions) * self.batch,
        depends_on_records=lambda self, setting: (
            *(("critic_real",) if self.compares_with_real else ()),
            *self.make_critics(setting).depends_on_records,
        ),
        trains=lambda self, setting: ("critic",) if self.has_critics else (),
        sums=lambda self, setting: self.sum_weightings(setting),
        sampler=lambda self, nodes, x, **about: {
            **self.make_critics(nodes.setting).sample_real_and_set_rates(nodes, nodes.query_number, x),
            **self.sample_real_inputs(nodes, x),
        },
        capturable=lambda self, setting: not self.make_critics(setting).compares_images,
        finite_differences=lambda self, setting: bool(self.directions),
    )
    def predict_logits(
        self, nodes: NodeGroup, x: torch.Tensor, known: torch.Tensor | None = None, **about: torch.Tensor
    ) -> Tensors:
        """Return z_k = T_k(x), and D_k(x) after one step of D_k on x and as many own inputs."""
        response = self.make_critics(nodes.setting).train_and_score(nodes, nodes.query_number, x, **about)
        z = nodes.module("model")(nodes.setting.task.observe(x))
        own = {} if known is None else {"known": known}
        return {"logits": z, **response, **self.mean_critic_output_on_real(nodes, x, **own)}

    def sum_weightings(self, setting: NodeSetting) -> Mapping[str, SumWeighting]:
        """Return the weighting of the summed logits: by class counts or by size.

        Raises:
            ArgumentError: options that need more of a response than its logits. Entropies (Eq. 3, 5) and
                critic values (Eq. 2) of the same inputs are further equations for each node's response.
        """
        zeros = [name for name in ("gan", "conf", "unique") if getattr(self, name)]
        changes = [format_option(f"method.{name}", 0) for name in zeros]
        if changes:
            changes += [format_option("method.ensemble", "logits")] if self.ensemble != "logits" else []
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
        """Run one distillation step (second loop of Algorithm 1): one query, one step of G, some of S."""
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
                shift.set_real_counts(state.histogram.counts.sum(0))
                shift.count_decisions(z_bar)
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
            if "difference" in responses.tensors:  # of the one node that owns each map
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
        """Return L_conf and L_unique of all z_k; 0 if the server sees the sum of the z_k only."""
        if responses.nodes == (SUM,):
            return torch.zeros((), device=server.device), torch.zeros((), device=server.device)
        z_k = responses["logits"]
        return server.task.confidence_loss(z_k, pi), server.task.uniqueness_loss(z_k, pi)

    def query_teachers(
        self, server: Server, state: FedIODState, query: str, w: GeneratorBatch
    ) -> tuple[torch.Tensor, Responses]:
        """Return x = G(w) and the nodes' responses to it."""
        x = state.generator(w.generator_input).float()  # (B, C, H, W)
        sent = w.query_tensors(server.federation.queries[query])
        x_sent = x if self.backpropagate else x.detach()
        names = state.histogram.names
        if self.directions:
            differences = self.directions, self.epsilon, server.completed_steps
            return x, query_with_differences(server, query, x, *differences, nodes=names, **sent)
        return x, server.query(query, nodes=names, x=x_sent, **sent)

    def query_fresh_batch(self, server: Server, state: FedIODState, t: int) -> list[LabeledBatch]:
        """Return new inputs and their ensembled responses for all steps of S in this step: one more query.

        G does not train between these steps, so that one query serves them all.
        """
        generator_batches, batches = [], []
        for index in range(self.student_steps):
            generator_batches.append(state.source.sample(self.batch, "fresh w", t, index))
            with torch.no_grad(), server.compute.step(server.seed, "fresh", t, index):
                batches.append(state.generator(generator_batches[-1].generator_input).float())  # (B, C, H, W)
        x, maps = torch.cat(batches), [batch.maps for batch in generator_batches if batch.maps is not None]
        sent = GeneratorBatch(x, torch.cat(maps) if maps else None).query_tensors(
            server.federation.queries["predict"]
        )
        with torch.no_grad():
            responses = server.query("predict", nodes=state.histogram.names, x=x, **sent)
            weights = self.weights(server, state, responses)
            z = server.task.ensemble(responses["logits"], weights, self.ensemble)
        return list(zip(torch.split(x, self.batch), torch.split(z, self.batch), strict=True))
