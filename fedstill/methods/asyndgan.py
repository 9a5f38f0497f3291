"""AsynDGAN: critics at the nodes train a generator, and a task network trains on its images.

Chang, Qu, Zhang, Sabuncu, Chen, Zhang, Metaxas: "Synthetic Learning: Learn From Distributed Asynchronized
Discriminator GAN Without Sharing Medical Image Data", CVPR 2020. Symbols are the paper's: label maps x ~
s_j(x) of node j, the node's weight pi_j, its critic D_j, the global generator G. A task network is then
trained on pairs (G(x), x). The nodes train no task networks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Interval

from fedstill.core.errors import list_names
from fedstill.core.options import CheckedOptions, NonNegativeFloat, PositiveInt
from fedstill.data.augmentation import augment_examples, require_augmentable, sample_augmentation
from fedstill.methods import (
    Method,
    Needs,
    Node,
    NodeFault,
    NodeSetting,
    NodeView,
    Query,
    QueryDetails,
    Responses,
    Server,
    Tensors,
    cosine_lr,
    count_samples_query,
    descend,
    fetch_sizes,
    set_lr,
    torch_generator,
)
from fedstill.methods._discriminators import Discriminators, join_pairs
from fedstill.methods._input_generators import GeneratorBatch, GeneratorTraining
from fedstill.methods._label_maps import DIFFERENCE, MapGenerator, check_rows
from fedstill.methods._public_data import make_student_optimizer
from fedstill.protocol.payload_kinds import CRITIC, INPUTS

critic_options = partial(Discriminators, width=64, lr=2e-4)
generator_options = partial(MapGenerator, lr=2e-4, lr_end=2e-5)


@dataclass(frozen=True, kw_only=True)
class PairTraining(CheckedOptions):
    """Options of the task network, which trains on generated pairs."""

    section: ClassVar[str] = "method.student"

    steps: PositiveInt = 1000
    """Steps of the task network, after the generator's training."""
    batch: PositiveInt = 16
    """Generated pairs in a batch of the task network."""
    augment: Literal["none", "shift", "shift-flip", "turn"] = "none"
    """Augmentation of generated pairs, as local.augment."""
    lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for the task network, falling on a cosine to lr_end."""
    lr_end: NonNegativeFloat = 1e-6
    """Learning rate of its last step."""


@dataclass
class AsynDGANState:
    """Server state of the method."""

    generator: GeneratorTraining  # G, with the source of label maps x
    s_adam: torch.optim.Optimizer  # the task network's
    sizes: dict[str, float] = field(default_factory=dict)  # examples by node; empty before the first step


@dataclass(frozen=True, kw_only=True)
class AsynDGAN(Method):
    """AsynDGAN's options."""

    title: ClassVar[str] = "AsynDGAN"
    batch_options: ClassVar[tuple[str, ...]] = ("student.batch",)
    paper: ClassVar[str] = "Chang et al., CVPR 2020"
    query_names: ClassVar[tuple[str, ...]] = ("send_label_maps", "count_samples", "score_with_critic")
    unit: ClassVar[Literal["step"]] = "step"
    initial_training: ClassVar[None] = None
    trains_models: ClassVar[bool] = False
    length_options: ClassVar[tuple[str, ...]] = ("steps",)

    steps: PositiveInt = 400
    """Steps of the generator, each with one query to every node."""
    batch: PositiveInt = 8
    """Images in a query. With conditions = nodes each node gets as many, of its own maps."""
    gan: Annotated[float, Interval(gt=0, lt=inf), "above 0, as there is nothing but critics"] = 1.0
    """Weight of the critics' part in the generator's loss, a mean over patches."""
    generator: MapGenerator = field(default_factory=generator_options)
    """The generator G."""
    critic: Discriminators = field(default_factory=critic_options)
    """The critics D_j."""
    student: PairTraining = field(default_factory=PairTraining)
    """The training of the task network."""

    @property
    def total_steps(self) -> int:
        return self.steps + self.student.steps

    def needs(self) -> Needs:
        return Needs(images=True, label_maps=True)

    def notes(self, setting: NodeSetting) -> tuple[str, ...]:
        return self.generator.notes(setting)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        of_nodes = self.generator.conditions == "nodes"
        if of_nodes:
            yield self.generator.map_query()
        yield count_samples_query()
        about_x = self.generator.sends(setting.task, is_judged=True)
        compares = self.generator.compares_images(setting.task)
        difference = {"difference": DIFFERENCE} if compares else {}
        yield Query(
            self.score_with_critic,
            sends={"x": INPUTS, **about_x},
            releases={"critic": CRITIC, **difference},
            differentiable=("x",),
            times=self.steps,
            rows=self.batch,
            depends_on_records=tuple(difference),
            trains=("critic",),
            stackable=True,
            details=QueryDetails(owner_only=tuple(about_x) if of_nodes else (), reads_values=compares),
        )

    # --- at a node --------------------------------------------------------------------------------------

    def prepare(self, node: Node, setting: NodeSetting) -> None:
        """Add a critic D_j."""
        self.critic.add_to(node, setting.task, self.steps, judges_pairs=True)

    def score_with_critic(
        self, node: NodeView, x: torch.Tensor, maps: torch.Tensor, source: torch.Tensor | None = None
    ) -> Tensors:
        """Return D_j(x) after one step of D_j on x and as many own images, and the distance of x from the own
        images."""
        check_rows("maps", maps, (len(x),))
        pairs = join_pairs(node.task, x, maps)
        self.critic.train_step(node, pairs.detach(), self.batch, self.generator.pairs(node.setting))
        response = {"critic": node.module("critic")(pairs)}
        if source is not None:
            response["difference"] = node.separately(self.generator.difference, x, source)
        return response

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> AsynDGANState:
        require_augmentable(server.task, server.shape, self.student.augment, "method.student.augment")
        s_adam = make_student_optimizer(server.student, self.student.lr)
        return AsynDGANState(GeneratorTraining(self.generator, server), s_adam)

    def step(self, server: Server, state: AsynDGANState, t: int) -> Mapping[str, float]:
        state.sizes = state.sizes or fetch_sizes(server)
        state.generator.source.fetch(server)
        if t < self.steps:
            return self.generate(server, state, t)
        return self.train_on_pairs(server, state, t - self.steps)

    def generate(self, server: Server, state: AsynDGANState, t: int) -> Mapping[str, float]:
        """Take a step of G on sum_j pi_j of D_j's loss and of the distance to node j's images (Eq. 2 and
        3)."""
        state.generator.set_lr(t, self.steps)
        with server.compute.step(server.seed, "server", t):
            gan, differences, names = [], [], list[str]()
            for responses in self.responses(server, state, t):
                d = responses["critic"]  # (1 or K, B, h, w)
                gan.append(self.critic.generator_loss(d).mean(1) / d[0, 0].numel())  # (1 or K,)
                names += responses.nodes
                if "difference" in responses.tensors:
                    differences.append(responses["difference"].mean(1))
            each = torch.cat(gan)  # (K,)
            sizes = torch.tensor([state.sizes[name] for name in names], device=server.device)
            pi = sizes / sizes.sum()
            losses = {"gan": pi @ each}
            if differences:
                losses["difference"] = pi @ torch.cat(differences)
            L_G = self.gan * losses["gan"] + losses.get("difference", 0.0)
        state.generator.step(L_G)
        return {name: loss.item() for name, loss in losses.items()}

    def responses(self, server: Server, state: AsynDGANState, t: int) -> list[Responses]:
        """Return the nodes' responses to G(x): each to its own maps, or all to the same maps of no node."""
        present = server.federation.present
        known = [
            name
            for name in server.federation.present_sources
            if name in state.sizes and state.generator.source.has_maps_of(name)
        ]
        if not known:
            raise NodeFault(list_names(present), "score_with_critic", "no node has sent its size and maps")
        query = server.federation.queries["score_with_critic"]
        if self.generator.conditions != "nodes":
            w = state.generator.source.sample_batch(self.batch, "w", t)
            x = state.generator(w)  # (B, C, H, W)
            return [server.query("score_with_critic", nodes=known, x=x, **w.query_tensors(query))]
        batches = [state.generator.source.sample_batch(self.batch, "w", t, name, node=name) for name in known]
        x = state.generator(GeneratorBatch(torch.cat([w.generator_input for w in batches])))  # (K B, C, H, W)
        received = [
            server.query_or_none("score_with_critic", nodes=[name], x=x_j, **w.query_tensors(query))
            for name, w, x_j in zip(known, batches, torch.split(x, self.batch), strict=True)
        ]
        valid = [responses for responses in received if responses is not None]
        if not valid:
            raise NodeFault(list_names(known), "score_with_critic", "all queried nodes are excluded")
        return valid

    def train_on_pairs(self, server: Server, state: AsynDGANState, t: int) -> Mapping[str, float]:
        """Take step ``t`` of the task network on generated pairs (G(x), x) and return its loss."""
        set_lr(state.s_adam, cosine_lr(t, self.student.steps, self.student.lr, self.student.lr_end))
        task, w = server.task, state.generator.source.sample_batch(self.student.batch, "student", t)
        assert w.maps is not None
        with server.compute.step(server.seed, "student", t):
            x = state.generator.evaluate(w)
            targets = task.targets_from_maps(w.maps, x)
            if self.student.augment == "none":
                x = task.observe(x)
            else:
                draws = sample_augmentation(len(x), torch_generator(server.seed, "augment", t))
                x, targets = augment_examples(task, x, targets, draws, self.student.augment)
            server.student.train()
            outputs = server.student(x).float()
            loss = task.loss(outputs.unsqueeze(0), targets.unsqueeze(0))[0]
        descend(state.s_adam, loss)
        return {"student": loss.item()}

    def preview_samples(self, server: Server, state: AsynDGANState, count: int) -> torch.Tensor | None:
        return state.generator.preview_samples(count)

    def preview_maps(self, server: Server, state: AsynDGANState, count: int) -> torch.Tensor | None:
        return state.generator.preview_maps(count)
