"""AsynDGAN: critics at the nodes train a generator, and a task network trains on its images.

Chang, Qu, Zhang, Sabuncu, Chen, Zhang, Metaxas: "Synthetic Learning: Learn From Distributed Asynchronized
Discriminator GAN Without Sharing Medical Image Data", CVPR 2020. Symbols are the paper's: label maps x ~
s_j(x) of node j, the node's weight pi_j, its critic D_j, the global generator G. A task network is then
trained on pairs (G(x), x). The nodes train no task networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Interval
from torch import nn

from fedstill.core.options import NonNegativeFloat, PositiveInt
from fedstill.data.augmentation import augment_examples, sample_augmentation
from fedstill.methods import NodeFault, NodeGroup, Responses, Server, descend, query, torch_generator
from fedstill.methods._critics import CriticOptions, generator_gan_loss
from fedstill.methods._generated_inputs import InputGeneratorMethod, generate
from fedstill.methods._label_histogram import LabelHistogram, SampleCountQuery, Tensors
from fedstill.methods._label_maps import MapGeneratorOptions, MapSource
from fedstill.methods._public_data import make_student_optimizer
from fedstill.protocol.local_config import cosine_lr, set_lr
from fedstill.protocol.payload_kinds import INPUTS


@dataclass
class AsynDGANState:
    """Server state of the method."""

    source: MapSource  # label maps x
    generator: nn.Module  # G
    g_adam: torch.optim.Optimizer
    s_adam: torch.optim.Optimizer  # the task network's
    histogram: LabelHistogram  # examples by node


@dataclass(frozen=True, kw_only=True)
class AsynDGAN(SampleCountQuery, MapGeneratorOptions, CriticOptions, InputGeneratorMethod):
    """AsynDGAN's options."""

    title: ClassVar[str] = "AsynDGAN"
    batch_options: ClassVar[tuple[str, ...]] = ("student_batch",)
    paper: ClassVar[str] = "Chang et al., CVPR 2020"
    unit: ClassVar[Literal["step"]] = "step"
    initial_training: ClassVar[None] = None
    trains_models: ClassVar[bool] = False
    length_options: ClassVar[tuple[str, ...]] = ("steps",)

    steps: PositiveInt = 400
    """Steps of the generator, each with one query to every node."""
    batch: PositiveInt = 8
    """Images in a query. With conditions = nodes each node gets as many, of its own maps."""
    critic_width: PositiveInt = 64
    """Channels of the first convolution of each critic D_j (published: 64)."""
    gan: Annotated[float, Interval(gt=0, lt=inf), "above 0, as there is nothing but critics"] = 1.0
    """Weight of the critics' part in the generator's loss, a mean over patches."""
    generator_lr: NonNegativeFloat = 2e-4
    """Adam's learning rate for the generator G, falling on a cosine to generator_lr_end."""
    generator_lr_end: NonNegativeFloat = 2e-5
    """Learning rate of the generator's last step."""
    critic_lr: NonNegativeFloat = 2e-4
    """Adam's learning rate for each critic D_j."""

    student_steps: PositiveInt = 1000
    """Steps of the task network, after the generator's training."""
    student_batch: PositiveInt = 16
    """Generated pairs in a batch of the task network."""
    student_augment: Literal["none", "shift", "shift-flip", "turn"] = "none"
    """Augmentation of generated pairs, as local.augment."""
    student_lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for the task network, falling on a cosine to student_lr_end."""
    student_lr_end: NonNegativeFloat = 1e-6
    """Learning rate of its last step."""

    @property
    def total_steps(self) -> int:
        return self.steps + self.student_steps

    @property
    def critic_steps(self) -> int:
        return self.steps

    # --- at the nodes -----------------------------------------------------------------------------------

    @query(
        sends=lambda self, setting: {"x": INPUTS, **self.make_critics(setting).sends},
        releases=lambda self, setting: self.make_critics(setting).releases,
        differentiable=("x",),
        times=lambda self, setting: self.steps,
        rows=lambda self, setting: self.batch,
        depends_on_records=lambda self, setting: self.make_critics(setting).depends_on_records,
        trains=("critic",),
        owner_only=lambda self, setting: (
            tuple(self.make_critics(setting).sends) if self.conditions == "nodes" else ()
        ),
    )
    def score_with_critic(self, nodes: NodeGroup, x: torch.Tensor, **about: torch.Tensor) -> Tensors:
        """Return D_j(x) after one step of D_j on x and as many own images, and the distance of x from the own
        images."""
        return self.make_critics(nodes.setting).train_and_score(nodes, nodes.query_number, x, **about)

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> AsynDGANState:
        G, g_adam = self.init_generator(server)
        s_adam = make_student_optimizer(server.student, self.student_lr)
        return AsynDGANState(self.source(server), G, g_adam, s_adam, LabelHistogram())

    def step(self, server: Server, state: AsynDGANState, t: int) -> Mapping[str, float]:
        state.histogram.fetch(server)
        state.source.fetch(server)
        if t < self.steps:
            return self.train_generator(server, state, t)
        return self.train_on_pairs(server, state, t - self.steps)

    def train_generator(self, server: Server, state: AsynDGANState, t: int) -> Mapping[str, float]:
        """Take a step of G on sum_j pi_j of D_j's loss and of the distance to node j's images (Eq. 2 and
        3)."""
        set_lr(state.g_adam, cosine_lr(t, self.steps, self.generator_lr, self.generator_lr_end))
        with server.compute.step(server.seed, "server", t):
            gan, differences, names = [], [], list[str]()
            for responses in self.responses(server, state, t):
                d = responses["critic"]  # (1 or K, B, h, w)
                gan.append(generator_gan_loss(d, self.gan_form).mean(1) / d[0, 0].numel())  # (1 or K,)
                names += responses.nodes
                if "difference" in responses.tensors:
                    differences.append(responses["difference"].mean(1))
            each = torch.cat(gan)  # (K,)
            sizes = state.histogram.select(names).sizes
            pi = sizes / sizes.sum()
            losses = {"gan": pi @ each}
            if differences:
                losses["difference"] = pi @ torch.cat(differences)
            L_G = self.gan * losses["gan"] + losses.get("difference", 0.0)
        descend(state.g_adam, L_G)
        return {name: loss.item() for name, loss in losses.items()}

    def responses(self, server: Server, state: AsynDGANState, t: int) -> list[Responses]:
        """Return the nodes' responses to G(x): each to its own maps, or all to the same maps of no node."""
        present = server.federation.present
        known = [
            name
            for name in state.histogram.present_nodes(server.federation)
            if state.source.has_maps_of(name)
        ]
        if not known:
            raise NodeFault(", ".join(present), "score_with_critic", "no node has sent its size and maps")
        query = server.federation.queries["score_with_critic"]
        if self.conditions != "nodes":
            w = state.source.sample(self.batch, "w", t)
            x = state.generator(w.generator_input).float()  # (B, C, H, W)
            return [server.query("score_with_critic", nodes=known, x=x, **w.query_tensors(query))]
        batches = [state.source.sample(self.batch, "w", t, name, node=name) for name in known]
        x = state.generator(torch.cat([w.generator_input for w in batches])).float()  # (K B, C, H, W)
        received = [
            server.query_or_none("score_with_critic", nodes=[name], x=x_j, **w.query_tensors(query))
            for name, w, x_j in zip(known, batches, torch.split(x, self.batch), strict=True)
        ]
        valid = [responses for responses in received if responses is not None]
        if not valid:
            raise NodeFault(", ".join(known), "score_with_critic", "all queried nodes are excluded")
        return valid

    def train_on_pairs(self, server: Server, state: AsynDGANState, t: int) -> Mapping[str, float]:
        """Take step ``t`` of the task network on generated pairs (G(x), x) and return its loss."""
        set_lr(state.s_adam, cosine_lr(t, self.student_steps, self.student_lr, self.student_lr_end))
        task, w = server.task, state.source.sample(self.student_batch, "student", t)
        assert w.maps is not None
        with server.compute.step(server.seed, "student", t):
            x = generate(state.generator, w)
            targets = task.targets_from_maps(w.maps, x)
            if self.student_augment == "none":
                x = task.observe(x)
            else:
                draws = sample_augmentation(len(x), torch_generator(server.seed, "augment", t))
                x, targets = augment_examples(task, x, targets, draws, self.student_augment)
            server.student.train()
            outputs = server.student(x).float()
            loss = task.loss(outputs.unsqueeze(0), targets.unsqueeze(0))[0]
        descend(state.s_adam, loss)
        return {"student": loss.item()}
