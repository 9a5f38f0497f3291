"""AsynDGAN: critics at the nodes teach a generator, and a task network learns on what that makes.

Chang, Qu, Zhang, Sabuncu, Chen, Zhang, Metaxas: "Synthetic Learning: Learn From Distributed Asynchronized
Discriminator GAN Without Sharing Medical Image Data", CVPR 2020. Symbols are the paper's: label maps x ~
s_j(x) of node j, the node's weight pi_j, its critic D_j, the central generator G; then a task network is
trained on pairs (G(x), x). The nodes train no task networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Interval
from torch import nn

from fedstill.core.checked import NonNegativeFloat, PositiveInt
from fedstill.core.errors import NodeFault
from fedstill.core.seeds import seeded
from fedstill.federation.contract import Answers
from fedstill.methods._asking import ask_those
from fedstill.methods._critics import CriticOptions, Critics
from fedstill.methods._gan import doubts
from fedstill.methods._histogram import TellsSize, Tensors
from fedstill.methods._imagine import Imagines
from fedstill.methods._maps import Maps, TellsMaps, notes
from fedstill.methods._pairs import LearnsPairs
from fedstill.methods._public import optimiser_of
from fedstill.methods.server import Server
from fedstill.models.conditional import ConditionalGenerator
from fedstill.node.group import Group
from fedstill.protocol.kinds import INPUTS
from fedstill.protocol.method import Needs
from fedstill.protocol.questions import NodeSetting, question
from fedstill.protocol.schedule import cosine, set_lr


@dataclass
class Synthesising:
    """What changes from step to step.

    Args:
        source: label maps, of which images are made.
        generator: G.
        g_adam: of G.
        s_adam: of the task network.
        sizes: examples by node.
    """

    source: Maps
    generator: nn.Module
    g_adam: torch.optim.Optimizer
    s_adam: torch.optim.Optimizer
    sizes: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AsynDGAN(TellsSize, TellsMaps, CriticOptions, LearnsPairs, Imagines):
    """AsynDGAN's options."""

    title: ClassVar[str] = "AsynDGAN"
    paper: ClassVar[str] = "Chang et al., CVPR 2020"
    unit: ClassVar[Literal["step"]] = "step"
    before: ClassVar[None] = None
    learns: ClassVar[bool] = False
    longer: ClassVar[tuple[str, ...]] = ("steps",)

    steps: PositiveInt = 400
    """Steps of the generator, each with one question to every node."""
    batch: PositiveInt = 8
    """Images in a question. With conditions = nodes each node is asked about as many of its own maps."""
    generator_width: PositiveInt = 64
    """Channels of G's first convolution (published: 64)."""
    critic_width: PositiveInt = 64
    """Channels of D_j's first convolution (published: 64)."""
    gan: Annotated[float, Interval(gt=0, lt=inf), "above 0, as there is nothing but critics"] = 1.0
    """Weight of the critics' part in the generator's loss, a mean over patches."""
    generator_lr: NonNegativeFloat = 2e-4
    """Adam's learning rate for G, falling on a cosine to generator_lr_end."""
    generator_lr_end: NonNegativeFloat = 2e-5
    """Learning rate of G's last step."""
    critic_lr: NonNegativeFloat = 2e-4
    """Adam's learning rate for each D_j."""

    def needs(self) -> Needs:
        """Images that can be made from label maps."""
        return Needs(images=True, maps=True)

    @property
    def turns(self) -> int:
        """First the generator learns, then the task network."""
        return self.steps + self.student_steps

    # --- at the nodes -----------------------------------------------------------------------------------

    def critics(self, at: NodeSetting) -> Critics:
        """D_j of the nodes."""
        return at.once("critics", lambda: Critics(self, at, maps=self))

    @question(
        sends=lambda self, at: {"x": INPUTS, **self.critics(at).sends},
        releases=lambda self, at: self.critics(at).releases,
        differentiable=("x",),
        times=lambda self, at: self.steps,
        rows=lambda self, at: self.batch,
        reads=lambda self, at: self.critics(at).reads,
        trains=("critic",),
        returned=lambda self, at: tuple(self.critics(at).sends) if self.conditions == "nodes" else (),
    )
    def judge(self, nodes: Group, x: torch.Tensor, **about: torch.Tensor) -> Tensors:
        """D_j(x) after one step of D_j on x and as many of the node's own, and how far x is from those."""
        return self.critics(nodes.at).judge(nodes, nodes.number, x, **about)

    def rehearse(self, nodes: Group) -> None:
        """One question and its way back."""
        x, about = self.critics(nodes.at).blank(nodes)
        torch.autograd.grad(self.judge(nodes, x, **about)["critic"].sum(), x)

    def notes(self, at: NodeSetting) -> tuple[str, ...]:
        """What is switched off for want of something."""
        return notes(self, at)

    # --- at the server ----------------------------------------------------------------------------------

    def begin(self, server: Server) -> Synthesising:
        """G with its first weights."""
        conditions, channels = server.task.conditions, server.shape[0]
        with seeded(server.seed, "generator"):
            G = ConditionalGenerator(
                conditions, channels, self.generator_width, server.mean, server.std, noise=self.map_noise
            )
        generator = server.compute.place(G)
        g_adam = torch.optim.Adam(G.parameters(), self.generator_lr, betas=(0.5, 0.999), fused=True)
        return Synthesising(
            Maps(self, server.setting), generator, g_adam, optimiser_of(server.student, self.student_lr)
        )

    def turn(self, server: Server, state: Synthesising, t: int) -> Mapping[str, float]:
        """One step of the generator, or later of the task network."""
        if not state.sizes:
            told = server.ask("tell_size")
            state.sizes = dict(zip(told.nodes, told["sizes"].tolist(), strict=True))
        state.source.gather(server.federation)
        if t < self.steps:
            return self.generate(server, state, t)
        return self.learn_pairs(server, state.source, state.generator, state.s_adam, t - self.steps)

    def generate(self, server: Server, state: Synthesising, t: int) -> Mapping[str, float]:
        """sum_j pi_j of what D_j, and the likeness to node j's images, say of G(x) (Eq. 2 and 3)."""
        set_lr(state.g_adam, cosine(t, self.steps, self.generator_lr, self.generator_lr_end))
        with server.compute.step(server.seed, "server", t):
            gan, unlike, pi = [], [], []
            for answers in self.answers(server, state, t):
                d = answers["critic"]  # (1 or K, B, h, w)
                gan.append(doubts(d, self).mean(1) / d[0, 0].numel())  # (1 or K,)
                pi += [state.sizes[name] for name in answers.nodes]
                if "difference" in answers.tensors:
                    unlike.append(answers["difference"].mean(1))
            each = torch.cat(gan)  # (K,)
            shares = torch.tensor(pi, device=each.device) / sum(pi)
            losses = {"gan": shares @ each}
            if unlike:
                losses["difference"] = shares @ torch.cat(unlike)
            L_G = self.gan * losses["gan"] + losses.get("difference", 0.0)
        state.g_adam.zero_grad()
        L_G.backward()  # type: ignore[no-untyped-call]
        state.g_adam.step()
        return {name: loss.item() for name, loss in losses.items()}

    def answers(self, server: Server, state: Synthesising, t: int) -> list[Answers]:
        """What nodes answer about G(x): each about its own maps, or all about the same that are nobody's."""
        present = server.federation.present
        known = [name for name in present if name in state.sizes and state.source.has(name)]
        if not known:
            raise NodeFault(", ".join(present), "judge", "none of them has told size and maps")
        question = server.federation.questions["judge"]
        if self.conditions != "nodes":
            w = state.source.draw(self.batch, "w", t)
            x = state.generator(*w.told).float()  # (B, C, H, W)
            return [server.ask("judge", of=known, x=x, **w.sent(question))]
        wishes = {name: state.source.draw(self.batch, "w", t, name, of=name) for name in known}
        told = [torch.cat(parts) for parts in zip(*(w.told for w in wishes.values()), strict=True)]
        made = torch.split(state.generator(*told).float(), self.batch)  # (B, C, H, W) a node
        asked = zip(wishes.items(), made, strict=True)
        given = [
            ask_those(server.federation, "judge", [name], x=x, **w.sent(question)) for (name, w), x in asked
        ]
        answered = [answers for answers in given if answers is not None]
        if not answered:
            raise NodeFault(", ".join(known), "judge", "none of the nodes that were asked is left")
        return answered
