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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from fedstill.core.options import (
    Finite,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveOrInf,
)
from fedstill.methods import (
    ArgumentError,
    LabelHistogram,
    Method,
    Needs,
    Node,
    NodeSetting,
    NodeView,
    Query,
    QueryDetails,
    Responses,
    Server,
    Tensors,
    count_labels_query,
)
from fedstill.methods._discriminators import Discriminators, join_pairs, sample_real
from fedstill.methods._importance_weights import Importance, importance_weights
from fedstill.methods._input_generators import GeneratorBatch, GeneratorTraining, InputGenerator
from fedstill.methods._label_maps import DIFFERENCE, check_rows
from fedstill.methods._label_shift import LabelShift
from fedstill.methods._replay_memory import LabeledBatch
from fedstill.methods._replay_training import ReplayTraining, Student
from fedstill.methods._zeroth_order import query_with_differences
from fedstill.protocol.payload_kinds import CRITIC, INPUTS, LOGITS
from fedstill.protocol.secure_aggregation import SUM, SumWeighting, linear_sums
from fedstill.tasks import Ensemble, Task
from fedstill.tasks.classification import SoftmaxTask


@dataclass
class FedIODState:
    """Server state of the method."""

    generator: GeneratorTraining  # G, and what its inputs are made of: noise or maps
    student: Student  # S, with its replay memory
    histogram: LabelHistogram = field(default_factory=LabelHistogram)  # |X'_k|, by class and in all


@dataclass(frozen=True, kw_only=True)
class FedIOD(Method):
    """Distillation from generated inputs (Algorithm 1).

    The preset ``cifar10-fediod-printed`` holds the printed options.
    """

    title: ClassVar[str] = "FedIOD"
    paper: ClassVar[str] = "Gong et al., AAAI 2024"
    query_names: ClassVar[tuple[str, ...]] = ("count_labels", "predict", "predict_logits")
    unit: ClassVar[Literal["step"]] = "step"
    has_ensemble: ClassVar[bool] = True
    length_options: ClassVar[tuple[str, ...]] = ("steps",)
    batch_options: ClassVar[tuple[str, ...]] = ("batch", "student.batch")

    steps: PositiveInt = 400
    """Distillation steps, each with one query to all nodes."""
    batch: PositiveInt = 64
    """Inputs x in a query."""
    ensemble: Ensemble = "consensus"
    """Combination of the responses: logits (Eq. 9), their sum, log_probs, probs, consensus, which follows the
    nodes that know the classes an input shows, a robust one (median and others), or a custom one.
    """
    importance: Importance = "counts"
    """Importance weight of a node for an input (pi_k(x), Eq. 8). counts: by class counts alone (published
    code). fakeness: times D_k(x)/E D_k(x') (as printed). realness: times the same ratio of 1 - D_k. odds:
    data size times D_k's odds that x is the node's own, with ensemble = probs (FedGO). size: data size alone
    (Table 6, three stars).
    """
    gan: NonNegativeFloat = 1.0
    """Weight of the adversarial loss (L_gan, Eq. 2); 0: the nodes have no critics, unless importance needs
    them.
    """
    gan_weights: Literal["size", "average", "expertise"] = "size"
    """Weights of the critics in the adversarial loss: by data size (pi_k), equal, or by which node holds the
    classes that x shows (in pretraining by data size).
    """
    conf: NonNegativeFloat = 0.2
    """Weight of the confidence loss (L_conf, Eq. 3)."""
    unique: Finite = 0.2
    """Weight of the uniqueness loss (L_unique, Eq. 5); below 0 the generator seeks inputs on which nodes
    agree, as in the published code.
    """
    mimic: NonNegativeFloat = 0.02
    """Weight of the mimic loss in the generator's loss (L_mimic, Eq. 10)."""
    tau: PositiveOrInf = 1.0
    """Temperature of the student's distance to the ensemble; inf is its l2 limit (Eq. 10)."""
    balance: NonNegativeFloat = 10.0
    """Weight of the class balance, in the published code but not in the paper."""
    label_shift: bool = False
    """Correct responses for the class shares of the nodes' own data before the student trains on them; for
    tasks with classes. Beyond the paper.
    """
    student_inputs: Literal["replayed", "fresh"] = "replayed"
    """Inputs of the student: replayed queries, or a fresh query for each step (published code)."""
    backpropagate: bool = True
    """Backpropagate losses through the nodes. false: they return outputs only, and the generator trains
    on the student (and on losses that do not need the nodes), for models without gradients, or gates that
    withhold them.
    """
    directions: NonNegativeInt = 0
    """With backpropagate = false: random directions for finite differences of the responses (FedZGE's q;
    published: 10), each with as many further inputs in a query; 0: none.
    """
    epsilon: PositiveFloat = 1e-3
    """Step along these directions."""

    generator: InputGenerator = field(default_factory=InputGenerator)
    """The generator G."""
    critic: Discriminators = field(default_factory=partial(Discriminators, batch=32))
    """The critics D_k."""
    student: ReplayTraining = field(default_factory=ReplayTraining)
    """The training of the student S."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.student.check_memory(self.batch)
        if self.importance == "odds" and self.critic.loss == "eq2":
            allowed = "bce where importance = odds: what else critics learn says nothing of odds"
            raise ArgumentError("method.critic.loss", self.critic.loss, allowed)
        if not self.backpropagate and self.mimic == 0 and not self.directions:
            allowed = "above 0, where nothing else teaches the generator"
            raise ArgumentError("method.mimic", self.mimic, allowed)
        if self.backpropagate and self.directions:
            raise ArgumentError("method.directions", self.directions, "0 where backpropagate = true")

    @property
    def total_steps(self) -> int:
        return self.steps

    @property
    def rates_inputs(self) -> bool:
        """True if pi_k(x) compares the critic's values of x with those of the node's own data."""
        return self.importance in ("fakeness", "realness")

    @property
    def weighs_by_critics(self) -> bool:
        """True if pi_k(x) needs the critics."""
        return self.rates_inputs or self.importance == "odds"

    @property
    def has_critics(self) -> bool:
        """True if the nodes have critics."""
        return self.gan > 0 or self.weighs_by_critics

    def needs(self) -> Needs:
        return Needs(generates_inputs=True, no_label_maps=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        difference = {"difference": DIFFERENCE} if self.generator.compares_images(setting.task) else {}
        weighting: SumWeighting = "size" if self.importance == "size" else "counts"
        # Entropies (Eq. 3, 5) and critic values (Eq. 2) of the same inputs are further equations for z_k.
        sums = linear_sums(
            setting.secure_aggregation and not difference,
            {"logits": weighting},
            gan=(self.gan, 0),
            conf=(self.conf, 0),
            unique=(self.unique, 0),
            ensemble=(self.ensemble, "logits"),
            importance=(self.importance, weighting),
        )
        about_x = self.generator.sends(setting.task, is_judged=self.has_critics)
        critic = {"critic": CRITIC} if self.has_critics else {}
        rating = {"critic_real": CRITIC} if self.rates_inputs else {}
        yield count_labels_query(setting)
        if self.student_inputs == "fresh":
            maps = {"maps": about_x["maps"]} if self.weighs_by_critics and "maps" in about_x else {}
            yield Query(
                self.predict,
                sends={"x": INPUTS, **maps},
                releases={"logits": LOGITS, **(critic if self.weighs_by_critics else {}), **rating},
                times=self.steps,
                rows=self.student.steps * self.batch,
                depends_on_records=tuple(rating),
                sums=sums,
                stackable=True,
            )
        yield Query(
            self.predict_logits,
            sends={"x": INPUTS, **about_x},
            releases={"logits": LOGITS, **critic, **difference, **rating},
            differentiable=("x",) if self.backpropagate else (),
            times=self.steps,
            rows=(1 + self.directions) * self.batch,
            depends_on_records=(*rating, *difference),
            trains=tuple(critic),
            sums=sums,
            stackable=True,
            details=QueryDetails(
                step_records=self.batch,
                finite_differences=bool(self.directions),
                reads_values=bool(difference),
            ),
        )

    # --- at a node --------------------------------------------------------------------------------------

    def prepare(self, node: Node, setting: NodeSetting) -> None:
        """Add a critic D_k, if the method has critics."""
        self.critic.check_table_batches(setting.task, self.batch)
        if self.has_critics:
            judges_pairs = self.generator.pairs(setting) is not None
            self.critic.add_to(node, setting.task, self.total_steps, judges_pairs=judges_pairs)

    def predict_logits(
        self,
        node: NodeView,
        x: torch.Tensor,
        maps: torch.Tensor | None = None,
        source: torch.Tensor | None = None,
    ) -> Tensors:
        """Train D_k for one step on x and as many own inputs, and return z_k = T_k(x) and D_k(x)."""
        critic = self.train_critic(node, x, maps)
        difference = self.difference(node, x, source)
        z_k = node.model(node.task.observe(x))
        return {"logits": z_k, **critic, **difference, **self.mean_critic_output_on_real(node, len(x))}

    def train_critic(self, node: NodeView, x: torch.Tensor, maps: torch.Tensor | None) -> Tensors:
        """Take a step of D_k (Eq. 2), and return D_k(x) ``(B, h, w)``."""
        if not self.has_critics:
            return {}
        seen = self.critic_input(node.task, x, maps)
        self.critic.train_step(node, seen.detach(), self.batch, self.generator.pairs(node.setting))
        return {"critic": node.module("critic")(seen)}

    def difference(self, node: NodeView, x: torch.Tensor, source: torch.Tensor | None) -> Tensors:
        """Return the distance of x from the node's own images of the same maps ``(B,)``."""
        if source is None:
            return {}
        return {"difference": node.separately(self.generator.difference, x, source)}

    def mean_critic_output_on_real(self, node: NodeView, size: int) -> Tensors:
        """Return E D_k(x'_k), over a sample of the node's own inputs, if pi_k(x) needs it."""
        if not self.rates_inputs:
            return {}
        d = node.module("critic")(sample_real(node, size, self.generator.pairs(node.setting)))
        return {"critic_real": d.sigmoid().flatten().mean()}

    def predict(self, node: NodeView, x: torch.Tensor, maps: torch.Tensor | None = None) -> Tensors:
        """Return z_k = T_k(x), and what pi_k(x) needs; nothing is trained (published code)."""
        return {"logits": node.model(node.task.observe(x)), **self.critic_values(node, x, maps)}

    def critic_values(self, node: NodeView, x: torch.Tensor, maps: torch.Tensor | None) -> Tensors:
        """Return the critic's values that pi_k(x) needs."""
        if not self.weighs_by_critics:
            return {}
        d = node.module("critic")(self.critic_input(node.task, x, maps))
        return {"critic": d, **self.mean_critic_output_on_real(node, len(x))}

    def preview_response(self, node: NodeView, x: torch.Tensor, z: torch.Tensor) -> Tensors:
        """Return the response of :meth:`predict` to inputs whose label maps are unknown."""
        is_known = not node.task.condition_channels
        return {"logits": z, **(self.critic_values(node, x, None) if is_known else {})}

    def critic_input(self, task: Task, x: torch.Tensor, maps: torch.Tensor | None) -> torch.Tensor:
        """Return what D_k sees of x: the image, or the pair of label map and image."""
        if maps is None:
            return x
        check_rows("maps", maps, (len(x),))
        return join_pairs(task, x, maps)

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FedIODState:
        if self.label_shift and not isinstance(server.task, SoftmaxTask):
            allowed = f"false, as task {server.task.name} has no shares of classes"
            raise ArgumentError("method.label_shift", True, allowed)
        generator = GeneratorTraining(self.generator, server)
        shift = LabelShift(server.task.classes, server.device) if self.label_shift else None
        return FedIODState(generator, Student(self.student, server, self.tau, shift))

    def step(self, server: Server, state: FedIODState, t: int) -> Mapping[str, float]:
        """Run one distillation step (second loop of Algorithm 1): one query, one step of G, some of S."""
        task, G, S = server.task, state.generator, state.student
        state.histogram.fetch(server)
        G.source.fetch(server)
        G.set_lr(t, self.total_steps)

        # Input distillation
        w = G.source.sample_batch(self.batch, "w", t)
        with server.compute.step(server.seed, "server", t):
            x, responses = self.query_teachers(server, state, "predict_logits", w)  # x = G(w)  (B, C, H, W)
            sizes = state.histogram.select(responses.nodes).sizes  # |X'_k|  (K,)
            share = sizes / sizes.sum()  # |X'_k| / sum |X'_k|
            z_k = responses["logits"]  # (K, B, classes, ...)
            pi = importance_weights(self.importance, task, state.histogram, responses)  # (K, B or 1, classes)
            z_bar = task.ensemble(z_k, pi, self.ensemble)  # Eq. 9  (B, classes, ...)
            losses = {"gan": self.gan_loss(task, responses, share, z_bar, pi)}  # Eq. 2
            if responses.nodes == (SUM,):  # secure aggregation: no single z_k
                losses["conf"] = losses["unique"] = torch.zeros((), device=server.device)
            else:
                losses["conf"] = task.confidence_loss(z_k, share)  # Eq. 3
                losses["unique"] = task.uniqueness_loss(z_k, share)  # Eq. 5
            if S.shift is not None:
                S.shift.set_real_counts(state.histogram.counts.sum(0))
                S.shift.count_decisions(z_bar)
            losses["balance"] = task.balance_loss(z_bar)
            z_hat, target = S.evaluate(x), S.corrected_target(z_bar)  # S(x) and z_bar  (B, classes, ...)
            losses["mimic"] = task.distillation_loss(z_hat, target, self.tau).mean()  # Eq. 10
            weights = {"gan": self.gan, "conf": self.conf, "unique": self.unique, "mimic": -self.mimic}
            weights["balance"] = self.balance
            L_G = 0.0 * x.mean()  # Eq. 11; losses without a weight are not backpropagated, through nodes or S
            for name in (name for name, weight in weights.items() if weight):
                L_G = L_G + weights[name] * losses[name]
            if "difference" in responses.tensors:  # of the one node that owns each map
                losses["difference"] = responses["difference"].sum(0).mean()
                L_G = L_G + losses["difference"]
        # Backward: the federation sends each node dL_G/dz_k and adds the nodes' gradients of x (autograd.py).
        G.step(L_G)

        # Output distillation
        if self.student_inputs == "replayed":
            S.replay.add(x.detach(), z_bar.detach(), w.maps)
        fresh = self.query_fresh_batches(server, state, t) if self.student_inputs == "fresh" else []
        # Its own steps count from 0, also after a pretraining of G (fediod-maps).
        losses["student"] = S.train(t - (self.total_steps - self.steps), self.steps, fresh)
        return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))

    def gan_loss(
        self, task: Task, responses: Responses, share: torch.Tensor, z_bar: torch.Tensor, pi: torch.Tensor
    ) -> torch.Tensor:
        """Return L_gan as G descends it (Eq. 2): the critics' losses, weighted over nodes.

        Args:
            task: the task.
            responses: the nodes' responses.
            share: shares of the data ``(K,)``.
            z_bar: ensembled logits ``(B, classes)``.
            pi: weights of the nodes in z_bar ``(K, B or 1, classes)``.
        """
        if not self.has_critics:
            return torch.zeros((), device=z_bar.device)
        each = self.critic.generator_loss(responses["critic"])  # (K, B)
        if self.gan_weights == "expertise":
            return (task.expertise(z_bar.detach(), pi) * each).sum(0).mean()
        return each.mean() if self.gan_weights == "average" else share @ each.mean(1)

    def query_teachers(
        self, server: Server, state: FedIODState, query: str, w: GeneratorBatch
    ) -> tuple[torch.Tensor, Responses]:
        """Return x = G(w) and the nodes' responses to it."""
        x, names = state.generator(w), state.histogram.names  # x (B, C, H, W)
        sent = w.query_tensors(server.federation.queries[query])
        if self.directions:
            differences = self.directions, self.epsilon, server.completed_steps
            return x, query_with_differences(server, query, x, *differences, nodes=names, **sent)
        return x, server.query(query, nodes=names, x=x if self.backpropagate else x.detach(), **sent)

    def query_fresh_batches(self, server: Server, state: FedIODState, t: int) -> list[LabeledBatch]:
        """Return new inputs and their ensembled responses for all steps of S in this step: one more query.

        G does not train between these steps, so that one query serves them all.
        """
        arguments, batches = [], []
        for index in range(self.student.steps):
            arguments.append(state.generator.source.sample_batch(self.batch, "fresh w", t, index))
            with torch.no_grad(), server.compute.step(server.seed, "fresh", t, index):
                batches.append(state.generator(arguments[-1]))  # (B, C, H, W)
        x, maps = torch.cat(batches), [w.maps for w in arguments if w.maps is not None]
        w = GeneratorBatch(x, torch.cat(maps) if maps else None)
        sent = w.query_tensors(server.federation.queries["predict"])
        with torch.no_grad():
            responses = server.query("predict", nodes=state.histogram.names, x=x, **sent)
            pi = importance_weights(self.importance, server.task, state.histogram, responses)
            z = server.task.ensemble(responses["logits"], pi, self.ensemble)
        return list(map(LabeledBatch, batches, torch.split(z, self.batch), (w.maps for w in arguments)))

    def ensemble_responses(self, server: Server, state: Any, responses: Responses) -> torch.Tensor | None:
        if not state.histogram.names:
            raise ArgumentError("histogram", None, "known after the first step")
        pi = importance_weights(self.importance, server.task, state.histogram, responses)
        return server.task.ensemble(responses["logits"], pi, self.ensemble)

    def preview_samples(self, server: Server, state: FedIODState, count: int) -> torch.Tensor | None:
        return state.generator.preview_samples(count)

    def preview_maps(self, server: Server, state: FedIODState, count: int) -> torch.Tensor | None:
        return state.generator.preview_maps(count)
