"""FedIOD: federated learning by collaborative distillation of inputs and outputs.

Gong, Li, Bao, Yao, Huang, Wu, Zhang, Zheng, Doermann: "Federated Learning via Input-Output
Collaborative Distillation", AAAI 2024. Symbols and equation numbers are the paper's: nodes' models
T_k, critics D_k, generator G, student S, noise w, inputs x, logits z_k, importance pi_k.

The nodes' models are trained to completion first and then only answer. In each step the server makes
inputs x = G(w) and asks the nodes about them; losses on the answers are pulled back through the nodes
to teach G which inputs to make, and the answers, ensembled, teach S.

Beyond the paper (each an option, the paper's form beside it): answers are remembered, so that S takes
many steps on one question; the ensemble seeks a consensus (:func:`fedstill.tasks.functional.consensus`);
milder adversaries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.choices import check_choices
from fedstill.compute import lay_out
from fedstill.errors import ArgumentError
from fedstill.federation.contract import Answers
from fedstill.methods.counting import Census, count_labels
from fedstill.methods.memory import AnswerMemory
from fedstill.methods.server import Method, Needs, Server, ServerSetting
from fedstill.models import Generator, PatchCritic
from fedstill.node import dpsgd
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.node.questions import NodeSetting, NodeSide, Question
from fedstill.node.training import cosine, set_lr, shifted
from fedstill.seeds import seeded, torch_generator
from fedstill.tasks import Ensemble


@dataclass(frozen=True)
class FedIODConfig:
    """FedIOD's options. The preset ``paper`` holds the published ones."""

    name: ClassVar[str] = "fediod"

    steps: int = 400
    """Distillation steps, each with one question to all nodes."""
    batch: int = 64
    """Inputs x in a question."""
    noise: int = 100
    """Values in w, the generator's noise."""
    generator_width: int = 64
    """Channels of G's first convolution (published: 128)."""
    critic_width: int = 32
    """Channels of D_k's first convolution (published: 128)."""

    through: bool = True
    """Pull losses back through the nodes; false: they only answer, and G learns from S (and from what else
    is known without them), as models that have no gradients, or gates that withhold them, allow."""
    gan: float = 1.0
    """Weight of L_gan (Eq. 2); 0: the nodes have no critics."""
    conf: float = 0.2
    """Weight of L_conf (Eq. 3)."""
    unique: float = 0.2
    """Weight of L_unique (Eq. 5)."""
    mimic: float = 0.02
    """Weight of L_mimic in the generator's loss (Eq. 10)."""
    balance: float = 10.0
    """Weight of the class balance, in the published code but not in the paper."""

    gan_form: Literal["eq2", "bce"] = "bce"
    """L_gan as printed in Eq. 2, or binary cross-entropy with the generator's non-saturating form."""
    gan_weights: Literal["size", "average", "expertise"] = "size"
    """How critics are weighed: by data size (pi_k), equally, or by who holds the classes x shows."""
    importance: Literal["counts", "fakeness", "realness", "size"] = "counts"
    """pi_k(x): Eq. 8 by class counts alone (published code), times D_k(x)/E D_k(x') (fakeness, as
    printed), times the same ratio of 1 - D_k (realness), or by data size only (Table 6, ***)."""
    ensemble: Ensemble = "consensus"
    """How answers are ensembled: logits (Eq. 9), log_probs, probs, or consensus, which listens to those
    who know the classes that an input shows."""
    tau: float = 1.0
    """Temperature of L_mimic; inf is the l2 limit of Eq. 10."""

    student_inputs: Literal["remembered", "fresh"] = "remembered"
    """What S learns on: remembered questions, or (published code) a fresh question for each step."""
    memory: int = 100_000
    """Remembered inputs with their ensembled answers; at least one batch."""
    student_steps: int = 5
    """Student steps after each question."""
    student_batch: int = 64
    """Remembered inputs in a student step."""

    student_augment: Literal["none", "shift", "mixup"] = "none"
    """What is done to remembered inputs: nothing, random shifts by up to an eighth of the image, or convex
    mixtures of two inputs with the same mixture of their answers."""

    generator_lr: float = 1e-3
    """Adam's learning rate for G, falling on a cosine to generator_lr_end."""
    generator_lr_end: float = 1e-4
    """Learning rate of G's last step."""
    critic_lr: float = 1e-3
    """Adam's learning rate for each D_k."""
    student_optimiser: Literal["adam", "sgd"] = "adam"
    """Adam, or SGD with momentum 0.9."""
    student_lr: float = 1e-3
    """Learning rate for S, falling on a cosine to student_lr_end."""
    student_lr_end: float = 1e-6
    """Learning rate of S's last step."""
    student_weight_decay: float = 0.0
    """L2 penalty on S."""

    def __post_init__(self) -> None:
        check_choices(self, "method")
        whole = (
            "steps",
            "batch",
            "noise",
            "generator_width",
            "critic_width",
            "student_steps",
            "student_batch",
        )
        for name in whole:
            if getattr(self, name) < 1:
                raise ArgumentError(f"method.{name}", getattr(self, name), "1 or more")
        for name in ("gan", "conf", "unique", "mimic", "balance", "student_weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ArgumentError(f"method.{name}", getattr(self, name), "0 or more")
        if self.generator_width < 2:
            raise ArgumentError("method.generator_width", self.generator_width, "2 or more")
        rates = ("generator_lr", "generator_lr_end", "critic_lr", "student_lr", "student_lr_end")
        for name in rates:
            if not 0 <= getattr(self, name) < math.inf:
                raise ArgumentError(f"method.{name}", getattr(self, name), "0 or more")
        if not self.tau > 0:
            raise ArgumentError("method.tau", self.tau, "above 0, or inf")
        if not self.through and self.mimic == 0:
            raise ArgumentError(
                "method.mimic", self.mimic, "above 0, where nothing else teaches the generator"
            )
        if self.memory < self.batch:
            raise ArgumentError("method.memory", self.memory, f"at least method.batch ({self.batch})")

    @property
    def rated(self) -> bool:
        """Whether pi_k(x) needs the critics."""
        return self.importance in ("fakeness", "realness")

    @property
    def critical(self) -> bool:
        """Whether there are critics at all."""
        return self.gan > 0 or self.rated


# --- at the nodes -----------------------------------------------------------------------------------


def node_side(config: FedIODConfig, setting: NodeSetting) -> NodeSide:
    """What FedIOD prepares at the nodes and the questions that they answer there."""
    task = setting.task

    def prepare(nodes: Sequence[Node]) -> None:
        """A critic D_k for each node, with its own first weights; none where nothing needs it."""
        for node in nodes if config.critical else ():
            norm: Literal["batch", "group"] = "group" if "critic" in node.private else "batch"
            with seeded(node.seed, node.name, "critic"):
                critic = PatchCritic(node.data.inputs.shape[1], config.critic_width, norm)
            node.add("critic", critic, _critic_adam(config))

    def examine(group: Group, number: int, x: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """z_k = T_k(x), and D_k(x) after one step of D_k on x and as many of the node's own inputs."""
        if not config.critical:
            return {"logits": group.bench("model")(x)}
        if "critic" in group.nodes[0].private:
            learn_privately(group.nodes[0], number, x[0].detach())
        else:
            learn(group, own(group, number, x), x.detach())
        answer = {"logits": group.bench("model")(x), "critic": group.bench("critic")(x)}
        return {**answer, **rating(group, number, x)}

    def own(group: Group, number: int, x: torch.Tensor) -> torch.Tensor:
        """x'_k: as many of each node's own inputs, ``(G, B, C, H, W)``."""
        return group.sample(x.shape[1], "critic", number)[0]

    def learn(group: Group, real: torch.Tensor, fake: torch.Tensor) -> None:
        """A step of each D_k (Eq. 2)."""
        critic = group.bench("critic")
        with torch.enable_grad():
            critic.train(True)
            losses = critic_loss(critic(real), critic(fake), config)
            group.step("critic", losses)

    def learn_privately(node: Node, number: int, fake: torch.Tensor) -> None:
        """The same with DP-SGD (DP-CGAN): x'_k are drawn each by itself; what fakes teach is free."""
        n, batch = len(node.data), config.batch
        dpsgd.step(
            node,
            "critic",
            node.private["critic"],
            dpsgd.rate(n, batch),
            number,
            private_loss=lambda D, real, _: on_real(D(real), config).flatten(1).mean(1),
            public_loss=lambda D: on_fake(D(fake), config).mean(),
            batch=min(n, batch),
        )

    def rating(group: Group, number: int, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """E D_k(x'_k), (G,), if pi_k(x) needs it."""
        if not config.rated:
            return {}
        real = group.bench("critic")(own(group, number, x))
        return {"critic_real": real.sigmoid().flatten(1).mean(1)}

    def predict(group: Group, number: int, x: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """z_k = T_k(x), and what pi_k(x) needs of the critic; nothing is trained."""
        answer = {"logits": group.bench("model")(x)}
        if config.rated:
            answer.update({"critic": group.bench("critic")(x), **rating(group, number, x)})
        return answer

    def look(nodes: Sequence[Node], x: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """What :func:`predict` would answer."""
        answers = [predict(Group([node]), 0, x.unsqueeze(0)) for node in nodes]
        return {name: torch.cat([answer[name] for answer in answers]) for name in answers[0]}

    def rehearse(group: Group) -> None:
        """One question and its way back, for the engine to time."""
        shape = group.nodes[0].data.inputs.shape[1:]
        x = torch.zeros(len(group), config.batch, *shape, device=group.device, requires_grad=True)
        answer = examine(group, 0, x)
        torch.autograd.grad(torch.stack([told.sum() for told in answer.values()]).sum(), x)

    rated = {"critic": "critic", "critic_real": "critic"} if config.rated else {}
    critic = {"critic": "critic"} if config.critical else {}
    reads = ("critic_real",) if config.rated else ()
    questions = [
        count_labels(task),
        Question(
            "examine",
            examine,
            {"x": "inputs"},
            {"logits": "logits", **critic, **rated},
            ("x",) if config.through else (),
            times=config.steps,
            rows=config.batch,
            reads=reads,
            trains=tuple(critic),
        ),
    ]
    if config.student_inputs == "fresh":
        predicted, fresh = {"logits": "logits", **rated}, config.student_steps * config.batch
        questions.append(
            Question(
                "predict", predict, {"x": "inputs"}, predicted, times=config.steps, rows=fresh, reads=reads
            )
        )
    return NodeSide({question.name: question for question in questions}, prepare, rehearse, look)


def critic_loss(real: torch.Tensor, fake: torch.Tensor, config: FedIODConfig) -> torch.Tensor:
    """What each D_k descends: it learns to be low on its own data and high on generated inputs (Eq. 2).

    The weight pi_k of Eq. 2 is left to the generator's side: at the node it would need the other
    nodes' sizes, and scales only one of the two terms.

    Args:
        real, fake: the critics' values before the sigmoid, ``(G, B, h, w)``.
        config: which form.

    Returns:
        ``(G,)``, a mean over batch and patches.
    """
    return (on_real(real, config) + on_fake(fake, config)).flatten(1).mean(1)


def on_real(d: torch.Tensor, config: FedIODConfig) -> torch.Tensor:
    """What D_k loses where it looks at real data, value by value."""
    return d.sigmoid() if config.gan_form == "eq2" else F.softplus(d)


def on_fake(d: torch.Tensor, config: FedIODConfig) -> torch.Tensor:
    """What D_k loses where it looks at what was generated, value by value."""
    return 1 - d.sigmoid() if config.gan_form == "eq2" else F.softplus(-d)


def _critic_adam(config: FedIODConfig) -> Any:
    return lambda module: torch.optim.Adam(
        module.parameters(), config.critic_lr, betas=(0.5, 0.999), fused=True
    )


# --- at the server ----------------------------------------------------------------------------------


class FedIODServer(Server):
    """The server's program: one call of :meth:`step` is one turn of Algorithm 1's second loop."""

    turn = "step"

    def __init__(self, config: FedIODConfig, setting: ServerSetting) -> None:
        super().__init__(setting)
        self.config, self.total = config, config.steps
        compute, seed, student = setting.compute, setting.seed, setting.student
        with seeded(seed, "generator"):
            G = Generator(setting.shape, config.noise, config.generator_width, setting.mean, setting.std)
        self.generator = compute.place(G)
        self.memory = AnswerMemory(config.memory)
        self.g_adam = torch.optim.Adam(G.parameters(), config.generator_lr, betas=(0.5, 0.999), fused=True)
        # What its owner froze stays as it is.
        self.learning = [parameter for parameter in student.parameters() if parameter.requires_grad]
        self.s_optimiser = _student_optimiser(self.learning, config)
        self.census: Census | None = None

    def step(self) -> Mapping[str, float]:
        """One distillation step (Algorithm 1): one question, one step of G, some of S.

        Returns:
            The losses of this step, unweighted.
        """
        config, task, t = self.config, self.task, self.done
        self._set_rates(t)
        self.census = self.census or Census.take(self.federation)

        # Input distillation
        w = torch.randn(config.batch, config.noise, generator=torch_generator(self.seed, "w", t))
        with self.compute.step(self.seed, "server", t):
            x = self.generator(w.to(self.compute.device)).float()  # (B, C, H, W)
            asked = x if config.through else x.detach()
            answers = self.federation.ask("examine", of=self.census.names, x=asked)
            sizes = self.census.of(answers.nodes).sizes  # |X'_k|  (K,)
            pi = sizes / sizes.sum()  # pi_k = |X'_k| / sum |X'_k|
            z = answers["logits"]  # (K, B, classes, ...)
            weights = self.importance(answers)
            z_bar = task.ensemble(z, weights, config.ensemble)  # Eq. 9  (B, classes, ...)
            L_gan = self._fooled(answers, pi, z_bar, weights)  # Eq. 2
            L_conf = task.confidence(z, pi)  # Eq. 3
            L_unique = task.uniqueness(z, pi)  # Eq. 5
            L_balance = task.balance(z_bar)
            L_mimic = task.distance(self._watching(x), z_bar, config.tau).mean()  # Eq. 10
            L_G = (
                config.gan * L_gan
                + config.conf * L_conf
                + config.unique * L_unique
                - config.mimic * L_mimic
                + config.balance * L_balance
            )  # Eq. 11
        self.g_adam.zero_grad()
        L_G.backward()  # type: ignore[no-untyped-call]
        self.g_adam.step()

        # Output distillation
        if config.student_inputs == "remembered":
            self.memory.add(x.detach(), z_bar.detach())
        fresh = self._ask_afresh(t) if config.student_inputs == "fresh" else []
        L_S = torch.zeros((), device=self.compute.device)
        for turn in range(config.student_steps):
            x_then, z_then = fresh[turn] if fresh else self._remember(t, turn)
            with self.compute.step(self.seed, "student", t, turn):
                L_S = task.distance(self.student(x_then).float(), z_then, config.tau).mean()  # Eq. 10
            self.s_optimiser.zero_grad()
            L_S.backward()  # type: ignore[no-untyped-call]
            self.s_optimiser.step()
        self.done += 1
        losses = torch.stack([L_gan, L_conf, L_unique, L_mimic, L_balance, L_S]).tolist()
        return dict(zip(("gan", "conf", "unique", "mimic", "balance", "student"), losses, strict=True))

    def importance(self, answers: Answers) -> torch.Tensor:
        """pi_k(x), Eq. 8: ``(K, B or 1, classes)``, summing to 1 over the nodes."""
        if self.census is None:
            raise ArgumentError("census", None, "known after the first step")
        told = self.census.of(answers.nodes)
        counts = told.counts  # (K, classes)
        if self.config.importance == "size":
            return self.task.importance(told.sizes.unsqueeze(1).expand_as(counts))
        if not self.config.rated:
            return self.task.importance(counts)
        fake = answers["critic"].detach().sigmoid().flatten(2).mean(2)  # D_k(x) (K, B)
        real = answers["critic_real"].unsqueeze(1)  # E D_k(x'_k) (K, 1)
        if self.config.importance == "realness":
            fake, real = 1 - fake, 1 - real
        return self.task.importance(counts, fake / real.clamp_min(1e-6))

    def ensemble(self, answers: Answers) -> torch.Tensor:
        """A(z_1..z_K, x), Eq. 9, of any answers: ``(B, classes, ...)``."""
        return self.task.ensemble(answers["logits"], self.importance(answers), self.config.ensemble)

    def imagine(self, count: int) -> torch.Tensor:
        """Inputs as G makes them now, from the same noise each time: ``(count, C, H, W)``."""
        w = torch.randn(count, self.config.noise, generator=torch_generator(self.seed, "imagine"))
        self.generator.eval()
        with torch.no_grad():
            images: torch.Tensor = self.generator(w.to(self.compute.device))
        self.generator.train()
        return images

    def state(self) -> dict[str, Any]:
        """What the server must remember to go on."""
        return {
            **super().state(),
            "census": None if self.census is None else self.census.state(),
            "generator": dict(self.generator.state_dict()),
            "g_adam": self.g_adam.state_dict(),
            "s_optimiser": self.s_optimiser.state_dict(),
            "memory": self.memory.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a remembered state."""
        super().load(state)
        self.census = Census.load(state["census"], self.compute.device)
        self.generator.load_state_dict(state["generator"])
        self.g_adam.load_state_dict(state["g_adam"])
        self.s_optimiser.load_state_dict(state["s_optimiser"])
        lay_out(self.g_adam)
        lay_out(self.s_optimiser)
        self.memory.load(state["memory"], self.compute.device)

    def _fooled(
        self, answers: Answers, pi: torch.Tensor, z_bar: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """L_gan as G descends it: each critic's doubts, summed over patches, weighed over nodes."""
        if not self.config.critical:
            return torch.zeros((), device=z_bar.device)
        d = answers["critic"]  # (K, B, h, w)
        if self.config.gan_form == "eq2":
            doubts = d.sigmoid().flatten(2).sum(2)  # (K, B); descending D ascends 1 - D
        else:
            doubts = F.softplus(d).flatten(2).sum(2)
        if self.config.gan_weights == "expertise":
            return (self.task.expertise(z_bar.detach(), weights) * doubts).sum(0).mean()
        if self.config.gan_weights == "average":
            return doubts.mean()
        return pi @ doubts.mean(1)

    def _remember(self, t: int, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Remembered inputs and answers, augmented as configured."""
        draw = torch_generator(self.seed, "memory", t, turn)
        x, z = self.memory.sample(self.config.student_batch, draw)
        if self.config.student_augment == "shift":
            x = shifted(x, draw, flip=False)
        elif self.config.student_augment == "mixup":
            x_other, z_other = self.memory.sample(self.config.student_batch, draw)
            share = torch.rand(len(x), generator=draw).to(x.device)
            x = torch.lerp(x_other, x, share.view(-1, *(1,) * (x.ndim - 1)))
            z = self.task.mix(z_other, z, share)
        return x, z

    def _ask_afresh(self, t: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """New inputs and their ensembled answers for all of this step's turns of S: one more question.

        G does not learn between the turns, so that one question serves them all.
        """
        batches = []
        for turn in range(self.config.student_steps):
            draw = torch_generator(self.seed, "fresh w", t, turn)
            w = torch.randn(self.config.batch, self.config.noise, generator=draw)
            with torch.no_grad(), self.compute.step(self.seed, "fresh", t, turn):
                batches.append(self.generator(w.to(self.compute.device)).float())  # (B, C, H, W)
        of = None if self.census is None else self.census.names
        with torch.no_grad():
            z = self.ensemble(self.federation.ask("predict", of=of, x=torch.cat(batches)))
        return list(zip(batches, torch.split(z, self.config.batch), strict=True))

    def _watching(self, x: torch.Tensor) -> torch.Tensor:
        """S(x) with gradients to x only; S neither learns nor moves its running statistics here."""
        self._learn(False)
        z_hat: torch.Tensor = self.student(x).float()
        self._learn(True)
        return z_hat

    def _learn(self, mode: bool) -> None:
        self.student.train(mode)
        for parameter in self.learning:
            parameter.requires_grad_(mode)

    def _set_rates(self, t: int) -> None:
        config = self.config
        set_lr(self.g_adam, cosine(t, config.steps, config.generator_lr, config.generator_lr_end))
        set_lr(self.s_optimiser, cosine(t, config.steps, config.student_lr, config.student_lr_end))


def _student_optimiser(learning: list[nn.Parameter], config: FedIODConfig) -> torch.optim.Optimizer:
    decay = config.student_weight_decay
    if config.student_optimiser == "adam":
        return torch.optim.Adam(learning, config.student_lr, weight_decay=decay, fused=True)
    return torch.optim.SGD(learning, config.student_lr, momentum=0.9, weight_decay=decay, fused=True)


METHOD = Method(
    name="fediod",
    title="FedIOD",
    paper="Gong et al., AAAI 2024",
    config=FedIODConfig,
    node_side=node_side,
    server=FedIODServer,
    needs=lambda config: Needs(),
)
