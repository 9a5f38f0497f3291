"""AsynDGAN: critics at the nodes teach a generator, and a task network learns on what that makes.

Chang, Qu, Zhang, Sabuncu, Chen, Zhang, Metaxas: "Synthetic Learning: Learn From Distributed Asynchronized
Discriminator GAN Without Sharing Medical Image Data", CVPR 2020. Symbols are the paper's: label maps x ~
s_j(x) of node j, the node's weight pi_j, its critic D_j, the central generator G; then a task network is
trained on pairs (G(x), x).

The nodes train no task networks, and none of what FedIOD distils is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from fedstill.core.compute import lay_out
from fedstill.core.errors import ArgumentError, NodeFault
from fedstill.core.seeds import seeded, torch_generator
from fedstill.data.augment import augmented, drawn
from fedstill.federation.contract import Answers
from fedstill.methods.asking import ask_those
from fedstill.methods.conditions import (
    MapsConfig,
    Wish,
    make_generator,
    make_source,
    notes,
    tell_maps,
)
from fedstill.methods.counting import tell_size
from fedstill.methods.critics import Critics, GANForm, doubts
from fedstill.methods.parameters import finite
from fedstill.methods.public import optimiser_of
from fedstill.methods.server import Server, ServerSetting
from fedstill.node.group import Group
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide
from fedstill.protocol.schedule import cosine, set_lr


@dataclass(frozen=True)
class AsynDGANConfig(MapsConfig):
    """AsynDGAN's options."""

    name: ClassVar[str] = "asyndgan"

    steps: int = 400
    """Steps of the generator, each with one question to every node."""
    batch: int = 8
    """Images in a question. With conditions = nodes each node is asked about as many of its own maps."""
    generator_width: int = 64
    """Channels of G's first convolution (published: 64)."""
    critic_width: int = 64
    """Channels of D_j's first convolution (published: 64)."""
    gan: float = 1.0
    """Weight of the critics' part in the generator's loss, a mean over patches."""
    gan_form: GANForm = "bce"
    """Binary cross-entropy with the generator's non-saturating form, or FedIOD's Eq. 2."""
    generator_lr: float = 2e-4
    """Adam's learning rate for G, falling on a cosine to generator_lr_end."""
    generator_lr_end: float = 2e-5
    """Learning rate of G's last step."""
    critic_lr: float = 2e-4
    """Adam's learning rate for each D_j."""

    student_steps: int = 1000
    """Steps of the task network, when the generator is done."""
    student_batch: int = 16
    """Generated pairs in such a step."""
    student_augment: Literal["none", "shift", "shift-flip", "turn"] = "none"
    """What is done to generated pairs: as local.augment."""
    student_lr: float = 1e-3
    """Adam's learning rate for the task network, falling on a cosine to student_lr_end."""
    student_lr_end: float = 1e-6
    """Learning rate of its last step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "batch", "generator_width", "critic_width", "student_steps", "student_batch"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"method.{name}", getattr(self, name), "1 or more")
        finite(self, "generator_lr", "generator_lr_end", "critic_lr", "student_lr", "student_lr_end")
        if not 0 < self.gan < float("inf"):
            raise ArgumentError("method.gan", self.gan, "above 0, as there is nothing but critics")


# --- at the nodes -----------------------------------------------------------------------------------


def node_side(config: AsynDGANConfig, setting: NodeSetting) -> NodeSide:
    """Critics only: their answers, and what the generator is made to learn from them."""
    critics = Critics(config, config, setting)

    def rehearse(group: Group) -> None:
        """One question and its way back, for the engine to time."""
        x, about = critics.blank(group)
        torch.autograd.grad(critics.judge(group, 0, x, **about)["critic"].sum(), x)

    questions = [tell_size(), critics.judging(config.steps)]
    if config.conditions == "nodes":
        questions.append(tell_maps(config, critics.gallery))
    by_name = {question.name: question for question in questions}
    said = notes(config, setting)
    return NodeSide(by_name, critics.prepare, rehearse, first=None, learns=False, notes=said)


# --- at the server ----------------------------------------------------------------------------------


class AsynDGANServer(Server):
    """First the generator learns from all nodes' critics, then the task network from the generator."""

    turn = "step"

    def __init__(self, config: AsynDGANConfig, setting: ServerSetting) -> None:
        super().__init__(setting)
        self.config, self.total = config, config.steps + config.student_steps
        self.source = make_source(config, setting, 0)
        with seeded(setting.seed, "generator"):
            G = make_generator(config, setting, 0, config.generator_width)
        self.generator = setting.compute.place(G)
        self.g_adam = torch.optim.Adam(G.parameters(), config.generator_lr, betas=(0.5, 0.999), fused=True)
        self.s_adam = optimiser_of(self.student, config.student_lr)
        self.sizes: dict[str, float] = {}  # examples by node

    def step(self) -> Mapping[str, float]:
        """One step of the generator, or later of the task network."""
        if not self.sizes:
            told = self.federation.ask("tell_size")
            self.sizes = dict(zip(told.nodes, told["sizes"].tolist(), strict=True))
        self.source.gather(self.federation)
        losses = self._generate() if self.done < self.config.steps else self._learn()
        self.done += 1
        return losses

    def _generate(self) -> Mapping[str, float]:
        """sum_j pi_j of what D_j, and the likeness to node j's images, say of G(x) (Eq. 2 and 3)."""
        config, t = self.config, self.done
        set_lr(self.g_adam, cosine(t, config.steps, config.generator_lr, config.generator_lr_end))
        with self.compute.step(self.seed, "server", t):
            gan, unlike, pi = [], [], []
            for answers in self._answers(t):
                d = answers["critic"]  # (1 or K, B, h, w)
                gan.append(doubts(d, config).mean(1) / d[0, 0].numel())  # (1 or K,)
                pi += [self.sizes[name] for name in answers.nodes]
                if "difference" in answers.tensors:
                    unlike.append(answers["difference"].mean(1))
            each = torch.cat(gan)  # (K,)
            shares = torch.tensor(pi, device=each.device) / sum(pi)
            losses = {"gan": shares @ each}
            if unlike:
                losses["difference"] = shares @ torch.cat(unlike)
            L_G = config.gan * losses["gan"] + losses.get("difference", 0.0)
        self.g_adam.zero_grad()
        L_G.backward()  # type: ignore[no-untyped-call]
        self.g_adam.step()
        return {name: loss.item() for name, loss in losses.items()}

    def _answers(self, t: int) -> list[Answers]:
        """What nodes answer about G(x): each about its own maps, or all about the same that are nobody's."""
        known = [n for n in self.federation.present if n in self.sizes and self.source.has(n)]
        if not known:
            raise NodeFault(
                ", ".join(self.federation.present), "judge", "none of them has told size and maps"
            )
        question = self.federation.questions["judge"]
        if self.config.conditions != "nodes":
            w = self.source.draw(self.config.batch, "w", t)
            x = self.generator(*w.told).float()  # (B, C, H, W)
            return [self.federation.ask("judge", of=known, x=x, **w.sent(question))]
        wishes = {name: self.source.draw(self.config.batch, "w", t, name, of=name) for name in known}
        told = [torch.cat(parts) for parts in zip(*(w.told for w in wishes.values()), strict=True)]
        made = torch.split(self.generator(*told).float(), self.config.batch)  # (B, C, H, W) a node
        asked = zip(wishes.items(), made, strict=True)
        given = [
            ask_those(self.federation, "judge", [name], x=x, **w.sent(question)) for (name, w), x in asked
        ]
        answered = [answers for answers in given if answers is not None]
        if not answered:
            raise NodeFault(", ".join(known), "judge", "none of the nodes that were asked is left")
        return answered

    def _learn(self) -> Mapping[str, float]:
        """One step of the task network on generated pairs."""
        config, t = self.config, self.done - self.config.steps
        set_lr(self.s_adam, cosine(t, config.student_steps, config.student_lr, config.student_lr_end))
        w = self.source.draw(config.student_batch, "student", t)
        with self.compute.step(self.seed, "student", t):
            x, targets = self._pairs(w, t)
            self.student.train()
            outputs = self.student(x).float()
            loss = self.task.loss(outputs.unsqueeze(0), targets.unsqueeze(0))[0]
        self.s_adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.s_adam.step()
        return {"student": loss.item()}

    def _pairs(self, w: Wish, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs as the task network gets them, and their targets."""
        if w.maps is None:
            raise ArgumentError("task", self.task.name, "one whose inputs are made from maps")
        x, augment = self._made(w), self.config.student_augment
        targets = self.task.labels(w.maps, x)
        if augment == "none":
            return self.task.observe(x), targets
        draws = drawn(len(x), torch_generator(self.seed, "augment", t))
        return augmented(self.task, x, targets, draws, augment)

    def _made(self, w: Wish) -> torch.Tensor:
        self.generator.eval()
        with torch.no_grad():
            x: torch.Tensor = self.generator(*w.told).float()
        self.generator.train()
        return x

    def imagine(self, count: int) -> torch.Tensor | None:
        """Images of the same maps each time: ``(count, C, H, W)``."""
        return self._made(self.source.draw(count, "imagine")) if self.source.ready else None

    def imagined_from(self, count: int) -> torch.Tensor | None:
        """The maps ``(count, H, W)`` uint8 of :meth:`imagine`."""
        return self.source.draw(count, "imagine").maps if self.source.ready else None

    def state(self) -> dict[str, Any]:
        """See :class:`Server`."""
        return {
            **super().state(),
            "sizes": self.sizes,
            "source": self.source.state(),
            "generator": dict(self.generator.state_dict()),
            "g_adam": self.g_adam.state_dict(),
            "s_adam": self.s_adam.state_dict(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """See :class:`Server`."""
        super().load(state)
        self.sizes = state["sizes"]
        self.source.load(state["source"])
        self.generator.load_state_dict(state["generator"])
        self.g_adam.load_state_dict(state["g_adam"])
        self.s_adam.load_state_dict(state["s_adam"])
        lay_out(self.g_adam)
        lay_out(self.s_adam)


METHOD = Method(
    name="asyndgan",
    title="AsynDGAN",
    paper="Chang et al., CVPR 2020",
    config=AsynDGANConfig,
    node_side=node_side,
    server=AsynDGANServer,
    needs=lambda config: Needs(images=True, maps=True),
)
