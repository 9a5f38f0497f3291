"""FedIOD: federated learning by collaborative distillation of inputs and outputs.

Gong, Li, Bao, Yao, Huang, Wu, Zhang, Zheng, Doermann: "Federated Learning via Input-Output
Collaborative Distillation", AAAI 2024. Symbols and equation numbers are the paper's: nodes' models
T_k, critics D_k, generator G, student S, noise w, inputs x, logits z_k, importance pi_k.

The nodes' models are trained to completion first and then only answer. In each step the server makes
inputs x = G(w) and asks the nodes about them; losses on the answers are pulled back through the nodes
to teach G which inputs to make, and the answers, ensembled, teach S.

Where a task has conditions (segmentation, say), G makes x from label maps, D_k judges pairs of map and
image, and L_gan is helped by the distance to the real image of the same map, told by the node that owns it.

Beyond the paper (each an option, the paper's form beside it): answers are remembered, so that S takes
many steps on one question; the ensemble seeks a consensus (:func:`fedstill.tasks.functional.consensus`);
milder adversaries; S learns from the maps, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from fedstill.core.compute import lay_out
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import seeded
from fedstill.federation.contract import Answers
from fedstill.methods.conditions import MapsConfig, Wish, make_generator, make_source, notes, tell_maps
from fedstill.methods.counting import Census, count_labels
from fedstill.methods.critics import Critics, Tensors, doubts
from fedstill.methods.parameters import finite
from fedstill.methods.recall import Augment, Known, Recall
from fedstill.methods.server import Server, ServerSetting
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.protocol.kinds import LABEL_MAPS
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide, Question
from fedstill.protocol.schedule import cosine, set_lr
from fedstill.tasks import Ensemble


@dataclass(frozen=True)
class FedIODConfig(MapsConfig):
    """FedIOD's options. The preset ``paper`` holds the published ones."""

    name: ClassVar[str] = "fediod"

    steps: int = 400
    """Distillation steps, each with one question to all nodes."""
    pretrain: int = 0
    """Steps of generator and critics alone that come before."""
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

    student_augment: Augment = "none"
    """What is done to remembered inputs, and to answers that are maps: nothing, random shifts by up to an
    eighth of the image, quarter turns and mirror images, or convex mixtures of two with the same mixture of
    their answers."""
    obey: float = 0.0
    """With maps: weight in the generator's loss of the task's own loss of the nodes' ensembled answers on the
    labels of x's map, so that x shows them what its map says; beyond the paper."""
    paired: float = 0.0
    """With maps: weight of the task's own loss on x and the labels that its map gives, beside L_mimic; beyond
    the paper."""

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
        super().__post_init__()
        least = {"generator_width": 2}
        for name in (
            "steps",
            "batch",
            "noise",
            "generator_width",
            "critic_width",
            "student_steps",
            "student_batch",
        ):
            if getattr(self, name) < least.get(name, 1):
                raise ArgumentError(f"method.{name}", getattr(self, name), f"{least.get(name, 1)} or more")
        finite(self, "gan", "conf", "unique", "mimic", "balance", "obey", "paired", "student_weight_decay")
        finite(self, "generator_lr", "generator_lr_end", "critic_lr", "student_lr", "student_lr_end")
        if not self.tau > 0:
            raise ArgumentError("method.tau", self.tau, "above 0, or inf")
        if not self.through and self.mimic == 0:
            raise ArgumentError(
                "method.mimic", self.mimic, "above 0, where nothing else teaches the generator"
            )
        if self.pretrain < 0 or (self.pretrain and not (self.through and self.gan)):
            allowed = "0 or more, and 0 where critics do not teach the generator (gan = 0, through = false)"
            raise ArgumentError("method.pretrain", self.pretrain, allowed)
        if self.paired and self.student_augment == "mixup":
            raise ArgumentError("method.paired", self.paired, "0 with mixup, as maps do not mix")
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
    task, critics = setting.task, Critics(config, config, setting, config.critical)

    def examine(group: Group, number: int, x: torch.Tensor, **about: torch.Tensor) -> Tensors:
        """z_k = T_k(x), and D_k(x) after one step of D_k on x and as many of the node's own inputs."""
        answer = critics.judge(group, number, x, **about)
        return {"logits": group.bench("model")(task.observe(x)), **answer, **rating(group, number, x)}

    def rating(group: Group, number: int, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """E D_k(x'_k), (G,), if pi_k(x) needs it."""
        if not config.rated:
            return {}
        real = group.bench("critic")(critics.own(group, number, x.shape[1]))
        return {"critic_real": real.sigmoid().flatten(1).mean(1)}

    def predict(group: Group, number: int, x: torch.Tensor, maps: torch.Tensor | None = None) -> Tensors:
        """z_k = T_k(x), and what pi_k(x) needs of the critic; nothing is trained."""
        answer = {"logits": group.bench("model")(task.observe(x))}
        if config.rated:
            answer.update({"critic": critics.look(group, x, maps), **rating(group, number, x)})
        return answer

    def look(nodes: Sequence[Node], x: torch.Tensor) -> Tensors:
        """What :func:`predict` would answer about inputs as models get them, and of which no map is known."""
        plain = task.conditions or not config.rated
        groups = [Group([node]) for node in nodes]
        answers = [
            {"logits": group.bench("model")(x.unsqueeze(0))} if plain else predict(group, 0, x.unsqueeze(0))
            for group in groups
        ]
        return {name: torch.cat([answer[name] for answer in answers]) for name in answers[0]}

    def rehearse(group: Group) -> None:
        """One question and its way back, for the engine to time."""
        x, about = critics.blank(group)
        answer = examine(group, 0, x, **about)
        torch.autograd.grad(torch.stack([told.sum() for told in answer.values()]).sum(), x)

    rated = {"critic": "critic", "critic_real": "critic"} if config.rated else {}
    reads = ("critic_real",) if config.rated else ()
    questions = [
        count_labels(task),
        Question(
            "examine",
            examine,
            {"x": "inputs", **critics.sends},
            {"logits": "logits", **critics.releases, **rated},
            ("x",) if config.through else (),
            times=config.steps,
            rows=config.batch,
            reads=(*reads, *critics.reads),
            trains=("critic",) if config.critical else (),
        ),
    ]
    if task.conditions and config.conditions == "nodes":
        questions.append(tell_maps(config, critics.gallery))
    if config.pretrain:
        questions.append(critics.judging(config.pretrain))
    if config.student_inputs == "fresh":
        seen = {"maps": LABEL_MAPS} if config.rated and critics.pairs else {}
        predicted, fresh = {"logits": "logits", **rated}, config.student_steps * config.batch
        questions.append(
            Question(
                "predict",
                predict,
                {"x": "inputs", **seen},
                predicted,
                times=config.steps,
                rows=fresh,
                reads=reads,
            )
        )
    by_name = {question.name: question for question in questions}
    return NodeSide(by_name, critics.prepare, rehearse, look, notes=notes(config, setting))


# --- at the server ----------------------------------------------------------------------------------


class FedIODServer(Server):
    """The server's program: one call of :meth:`step` is one turn of Algorithm 1's second loop."""

    turn = "step"

    def __init__(self, config: FedIODConfig, setting: ServerSetting) -> None:
        super().__init__(setting)
        self.config, self.total = config, config.pretrain + config.steps
        compute, seed, student = setting.compute, setting.seed, setting.student
        for name in ("obey", "paired"):
            if getattr(config, name) and not self.task.conditions:
                raise ArgumentError(f"method.{name}", getattr(config, name), "0, as this task has no maps")
        self.source = make_source(config, setting, config.noise)  # of what x is made: noise w, or maps
        with seeded(seed, "generator"):
            G = make_generator(config, setting, config.noise, config.generator_width)
        self.generator = compute.place(G)
        self.memory = Recall(self.task, config.memory, config.student_augment, setting.shape, seed)
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
        self.source.gather(self.federation)
        if t < config.pretrain:
            return self._pretrain(self.census, t)

        # Input distillation
        w = self.source.draw(config.batch, "w", t)
        with self.compute.step(self.seed, "server", t):
            x, answers = self._ask("examine", w)
            sizes = self.census.of(answers.nodes).sizes  # |X'_k|  (K,)
            pi = sizes / sizes.sum()  # pi_k = |X'_k| / sum |X'_k|
            z = answers["logits"]  # (K, B, classes, ...)
            weights = self.importance(answers)
            z_bar = task.ensemble(z, weights, config.ensemble)  # Eq. 9  (B, classes, ...)
            L_gan = self._fooled(answers, pi, z_bar, weights)  # Eq. 2
            L_map = self._of_maps(answers, w, x, z_bar)
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
            L_G = L_G + L_map.get("difference", 0.0) + config.obey * L_map.get("obey", 0.0)
        self.g_adam.zero_grad()
        L_G.backward()  # type: ignore[no-untyped-call]
        self.g_adam.step()

        # Output distillation
        if config.student_inputs == "remembered":
            self.memory.add(Known(x.detach(), z_bar.detach(), w.maps))
        fresh = self._ask_afresh(t) if config.student_inputs == "fresh" else []
        L_S = torch.zeros((), device=self.compute.device)
        for turn in range(config.student_steps):
            known = fresh[turn] if fresh else self.memory.sample(config.student_batch, t, turn)
            with self.compute.step(self.seed, "student", t, turn):
                L_S = self._student_loss(known)
            self.s_optimiser.zero_grad()
            L_S.backward()  # type: ignore[no-untyped-call]
            self.s_optimiser.step()
        self.done += 1
        losses = {"gan": L_gan, "conf": L_conf, "unique": L_unique, "mimic": L_mimic, "balance": L_balance}
        losses |= {"student": L_S, **L_map}
        return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))

    def importance(self, answers: Answers) -> torch.Tensor:
        """pi_k(x), Eq. 8: ``(K, B or 1, classes)``, summing to 1 over the nodes."""
        if self.census is None:
            raise ArgumentError("census", None, "known after the first step")
        told = self.census.of(answers.nodes)
        counts = told.counts  # (K, classes)
        if self.config.importance == "size":
            return self.task.importance(told.sizes.unsqueeze(1).expand_as(counts))
        if not self.config.rated or "critic" not in answers.tensors:  # no map is known of what was asked
            return self.task.importance(counts)
        fake = answers["critic"].detach().sigmoid().flatten(2).mean(2)  # D_k(x) (K, B)
        real = answers["critic_real"].unsqueeze(1)  # E D_k(x'_k) (K, 1)
        if self.config.importance == "realness":
            fake, real = 1 - fake, 1 - real
        return self.task.importance(counts, fake / real.clamp_min(1e-6))

    def ensemble(self, answers: Answers) -> torch.Tensor:
        """A(z_1..z_K, x), Eq. 9, of any answers: ``(B, classes, ...)``."""
        return self.task.ensemble(answers["logits"], self.importance(answers), self.config.ensemble)

    def imagine(self, count: int) -> torch.Tensor | None:
        """Inputs as G makes them now, of the same noise or maps each time: ``(count, C, H, W)``."""
        if not self.source.ready:
            return None
        self.generator.eval()
        with torch.no_grad():
            images: torch.Tensor = self.generator(*self.source.draw(count, "imagine").told)
        self.generator.train()
        return images

    def imagined_from(self, count: int) -> torch.Tensor | None:
        """The maps ``(count, H, W)`` uint8 of :meth:`imagine`, where there are any."""
        return self.source.draw(count, "imagine").maps if self.source.ready else None

    def state(self) -> dict[str, Any]:
        """What the server must remember to go on."""
        return {
            **super().state(),
            "census": None if self.census is None else self.census.state(),
            "source": self.source.state(),
            "generator": dict(self.generator.state_dict()),
            "g_adam": self.g_adam.state_dict(),
            "s_optimiser": self.s_optimiser.state_dict(),
            "memory": self.memory.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a remembered state."""
        super().load(state)
        self.census = Census.load(state["census"], self.compute.device)
        self.source.load(state["source"])
        self.generator.load_state_dict(state["generator"])
        self.g_adam.load_state_dict(state["g_adam"])
        self.s_optimiser.load_state_dict(state["s_optimiser"])
        lay_out(self.g_adam)
        lay_out(self.s_optimiser)
        self.memory.load(state["memory"], self.compute.device)

    def _ask(self, question: str, w: Wish) -> tuple[torch.Tensor, Answers]:
        """x = G(w) and the nodes' answers about it."""
        x = self.generator(*w.told).float()  # (B, C, H, W)
        asked = x if self.config.through else x.detach()
        of = None if self.census is None else self.census.names
        sent = w.sent(self.federation.questions[question])
        return x, self.federation.ask(question, of=of, x=asked, **sent)

    def _pretrain(self, census: Census, t: int) -> Mapping[str, float]:
        """One step of G and the critics alone."""
        with self.compute.step(self.seed, "server", t):
            w = self.source.draw(self.config.batch, "w", t)
            x, answers = self._ask("judge", w)
            sizes = census.of(answers.nodes).sizes
            losses = {"gan": sizes / sizes.sum() @ doubts(answers["critic"], self.config).mean(1)}
            losses |= self._of_maps(answers, w, x)
            L_G = self.config.gan * losses["gan"] + losses.get("difference", 0.0)
        self.g_adam.zero_grad()
        L_G.backward()  # type: ignore[no-untyped-call]
        self.g_adam.step()
        self.done += 1
        return {name: loss.item() for name, loss in losses.items()}

    def _fooled(
        self, answers: Answers, pi: torch.Tensor, z_bar: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """L_gan as G descends it: each critic's doubts, summed over patches, weighed over nodes."""
        if not self.config.critical:
            return torch.zeros((), device=z_bar.device)
        each = doubts(answers["critic"], self.config)  # (K, B)
        if self.config.gan_weights == "expertise":
            return (self.task.expertise(z_bar.detach(), weights) * each).sum(0).mean()
        if self.config.gan_weights == "average":
            return each.mean()
        return pi @ each.mean(1)

    def _of_maps(
        self, answers: Answers, w: Wish, x: torch.Tensor, z_bar: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """What x loses that is not what its maps say: beside real images, and in the nodes' eyes."""
        found: dict[str, torch.Tensor] = {}
        if "difference" in answers.tensors:  # told by the one node that owns each map
            found["difference"] = answers["difference"].sum(0).mean()
        if self.config.obey and w.maps is not None and z_bar is not None:
            labels = self.task.labels(w.maps, x)
            found["obey"] = self.task.loss(z_bar.unsqueeze(0), labels.unsqueeze(0))[0]
        return found

    def _student_loss(self, known: Known) -> torch.Tensor:
        """L_mimic as S descends it (Eq. 10), and perhaps the task's own loss on the maps."""
        z_hat = self.student(self.task.observe(known.x)).float()
        loss = self.task.distance(z_hat, known.z, self.config.tau).mean()
        if self.config.paired and known.maps is not None:
            labels = self.task.labels(known.maps, known.x)
            loss = loss + self.config.paired * self.task.loss(z_hat.unsqueeze(0), labels.unsqueeze(0))[0]
        return loss

    def _ask_afresh(self, t: int) -> list[Known]:
        """New inputs and their ensembled answers for all of this step's turns of S: one more question.

        G does not learn between the turns, so that one question serves them all.
        """
        wishes, batches = [], []
        for turn in range(self.config.student_steps):
            wishes.append(self.source.draw(self.config.batch, "fresh w", t, turn))
            with torch.no_grad(), self.compute.step(self.seed, "fresh", t, turn):
                batches.append(self.generator(*wishes[-1].told).float())  # (B, C, H, W)
        x, every = torch.cat(batches), [wish.maps for wish in wishes if wish.maps is not None]
        maps = torch.cat(every) if every else None
        of = None if self.census is None else self.census.names
        sent = Wish((), maps).sent(self.federation.questions["predict"])
        with torch.no_grad():
            z = self.ensemble(self.federation.ask("predict", of=of, x=x, **sent))
        return Known(x, z, maps).parts(self.config.batch)

    def _watching(self, x: torch.Tensor) -> torch.Tensor:
        """S(x) with gradients to x only; S neither learns nor moves its running statistics here."""
        self._learn(False)
        z_hat: torch.Tensor = self.student(self.task.observe(x)).float()
        self._learn(True)
        return z_hat

    def _learn(self, mode: bool) -> None:
        self.student.train(mode)
        for parameter in self.learning:
            parameter.requires_grad_(mode)

    def _set_rates(self, t: int) -> None:
        config = self.config
        set_lr(self.g_adam, cosine(t, self.total, config.generator_lr, config.generator_lr_end))
        since = max(t - config.pretrain, 0)
        set_lr(self.s_optimiser, cosine(since, config.steps, config.student_lr, config.student_lr_end))


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
    needs=lambda config: Needs(images=True),
)
