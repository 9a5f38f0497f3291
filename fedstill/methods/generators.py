"""What methods with a conditional feature generator share: FedMD-CG, FedCG and FedGEN.

A model is an extractor F_i, which never leaves its node, and a head D_i. In its place a generator
G_i([z; y]) of features travels. Symbols and equation numbers are those of FedMD-CG (Luo et al.,
"Privacy-Preserving Federated Learning with Consistency via Knowledge Distillation Using Conditional
Generator", arXiv:2409.06955), section 2.

Batch norm in generators: its running statistics are averaged as parameters are. It uses the batch's own
where a generator learns at a node and the running ones wherever a generator is listened to.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import seeded, torch_generator
from fedstill.methods import parameters
from fedstill.methods.counting import LABEL_COUNTS, Census
from fedstill.methods.parameters import RoundsConfig, drawn
from fedstill.methods.server import Server, ServerSetting
from fedstill.models import example
from fedstill.models.features import FeatureGenerator, condition
from fedstill.models.split import features, split
from fedstill.models.vector import load_vector, to_vector, weighted_mean
from fedstill.node import training
from fedstill.node.group import Bench, Group, stack
from fedstill.node.node import MakeOptimiser, Node
from fedstill.node.training import Work
from fedstill.protocol import kinds
from fedstill.protocol.questions import Handler, NodeSetting, Question
from fedstill.protocol.schedule import Span

CONSISTENCY = 512  # examples on which the consistency loss is measured, the same each round


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig(RoundsConfig):
    """What all methods with a feature generator have."""

    noise: int = 32
    """Values q in z, the generator's noise."""
    generator_width: int = 128
    """Width of the generator's two hidden layers."""
    server_steps: int = 50
    """Steps that the server learns in each round."""
    server_batch: int = 64
    """Generated examples in such a step."""
    server_lr: float = 1e-3
    """Adam's learning rate at the server."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("noise", 1), ("generator_width", 1), ("server_steps", 0), ("server_batch", 2)):
            if getattr(self, name) < least:
                raise ArgumentError(f"method.{name}", getattr(self, name), f"{least} or more")
        parameters.finite(self, "server_lr")


@dataclass(frozen=True, kw_only=True)
class LocalGeneratorConfig(GeneratorConfig):
    """What methods have whose nodes train generators of their own."""

    generator_lr: float = 1e-3
    """Adam's learning rate for the nodes' generators, the same in all rounds."""
    generator_passes: float = 1.0
    """Steps of a node's generator for each step of its model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parameters.finite(self, "generator_lr", "generator_passes")
        if self.generator_passes == 0:
            raise ArgumentError("method.generator_passes", self.generator_passes, "above 0")


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """``KL(softmax(p) || softmax(q))`` of logits ``(..., C)``: ``(...)``, in nats.

    >>> round(kl(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0])).item(), 4)
    0.1201
    """
    log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)  # small values have many digits
    return (log_p.exp() * (log_p - log_q)).sum(-1)


# --- at the nodes -----------------------------------------------------------------------------------


def make_generator(
    config: GeneratorConfig, model: nn.Module, shape: Sequence[int], classes: int
) -> FeatureGenerator:
    """A generator of the features that ``model``'s extractor gives for inputs of ``shape`` (C, H, W)."""
    parts = split(model, "the model")
    device = next(model.parameters()).device
    p = features(parts, example(shape).to(device), "the model")
    return FeatureGenerator(config.noise, classes, p, config.generator_width)


def give_generators(
    nodes: Sequence[Node], config: LocalGeneratorConfig, setting: NodeSetting, beta: float
) -> None:
    """A local generator G_i for each node, under the role ``generator``, which :func:`begin` fills.

    Raises:
        ArgumentError: batches of one example, which batch norm cannot learn from.
    """
    check_batch(setting)
    for node in nodes:
        with seeded(node.seed, node.name, "generator"):
            G = make_generator(config, node.model, node.data.inputs.shape[1:], setting.task.classes)
        node.add("generator", G, make_adam(config, beta))


def train_generators(
    group: Group,
    config: LocalGeneratorConfig,
    setting: NodeSetting,
    span: Span,
    work: Work,
    roles: Sequence[str] = ("generator",),
    steps: int | None = None,
) -> None:
    """A round's part, ``span``, of the training of a group's generators, on the nodes' own data."""
    local, lr = setting.local, config.generator_lr
    passes = config.generator_passes
    local = replace(
        local, epochs=passes * local.epochs, least_steps=round(passes * local.least_steps), lr=lr, lr_end=lr
    )
    training.train(
        group.nodes,
        setting.task,
        local,
        setting.compute,
        span=span,
        steps=steps,
        work=work,
        roles=roles,
        purpose="generator",
    )


def make_adam(config: LocalGeneratorConfig, beta: float) -> MakeOptimiser:
    """Makes Adam with a first beta; :func:`train_generators` sets its learning rate."""
    return lambda module: torch.optim.Adam(
        module.parameters(), config.generator_lr, betas=(beta, 0.999), fused=True
    )


def check_batch(setting: NodeSetting) -> None:
    """Refuse batches that batch norm cannot learn from."""
    if setting.local.batch < 2:
        raise ArgumentError(
            "nodes.local.batch", setting.local.batch, "2 or more, for the generator's batch norm"
        )


def begin(times: int = 1) -> Question:
    """The question by which all nodes take the server's first weights; nothing leaves."""

    def handler(
        group: Group, number: int, parameters: torch.Tensor, generator: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        group.load("model", parameters)
        group.load("generator", generator)
        return {}

    sends = {"parameters": kinds.PARAMETERS, "generator": kinds.GENERATOR_PARAMETERS}
    return Question("begin", handler, sends=sends, times=times)


def train(handler: Handler, rounds: int) -> Question:
    """The question of a round: take the global generator and head, train, give the local ones back.

    The handler is called as ``handler(group, number, generator, head, counts, round)``; ``counts`` are the
    label counts of all nodes together, which p(y) follows.
    """
    travels = {"generator": kinds.GENERATOR_PARAMETERS, "head": kinds.HEAD_PARAMETERS}
    sends = {**travels, "counts": LABEL_COUNTS, "round": "schedule"}
    beside = "distances from what the global generator gives"
    return Question("train", handler, sends=sends, releases=travels, times=rounds, beside=beside)


class Received:
    """The global generator G as a group of nodes received it, listened to and never trained.

    Args:
        config: its size.
        group: who received it.
        generator: its parameters ``(G, P)``, the same for each node.
        counts: label counts of all nodes together ``(G, C)``, the same for each node.
        t: the round, which names the random draws.
    """

    def __init__(
        self, config: GeneratorConfig, group: Group, generator: torch.Tensor, counts: torch.Tensor, t: int
    ) -> None:
        node, self.classes = group.nodes[0], counts.shape[1]
        G = make_generator(config, node.model, node.data.inputs.shape[1:], self.classes)
        self._generator = G.to(group.device).eval().requires_grad_(False)
        load_vector(self._generator, generator[0])
        self._noise, self._counts, self._t = config.noise, counts[0].cpu(), t

    def features(self, group: Group, y: torch.Tensor, *purpose: str | int) -> torch.Tensor:
        """G(z, y) for labels ``(G, B)``, z drawn by each node: ``(G, B, p)``, constant."""
        z = draw_noise(group, y.shape, self._noise, self._t, *purpose)
        with torch.no_grad():
            flat = self._generator(condition(z, y, self.classes).flatten(0, 1))
        f: torch.Tensor = flat.float().view(*y.shape, -1)
        return f

    def labels(self, group: Group, shape: Sequence[int], *purpose: str | int) -> torch.Tensor:
        """Labels y ~ p(y), drawn by each node: ``shape`` is (G, B)."""
        rows, batch = shape
        draws = [node.draw("y", self._t, *purpose) for node in group.nodes[:rows]]
        drawn = [torch.multinomial(self._counts, batch, replacement=True, generator=draw) for draw in draws]
        return stack(drawn).to(group.device)


def draw_noise(group: Group, shape: Sequence[int], noise: int, *purpose: str | int) -> torch.Tensor:
    """z ~ N(0, I), drawn by each of the first nodes: ``shape`` is (G, B), the result ``(G, B, noise)``."""
    rows, batch = shape
    draws = [node.draw("z", *purpose) for node in group.nodes[:rows]]
    return stack([torch.randn(batch, noise, generator=draw) for draw in draws]).to(group.device)


# --- at the server ----------------------------------------------------------------------------------


class Uploads:
    """The generators and heads that nodes uploaded, evaluated as one: ``(K, B, ...)``.

    Args:
        G, D: networks of the architectures that nodes have.
        nodes: how many nodes upload at most.
    """

    def __init__(self, G: nn.Module, D: nn.Module, nodes: int) -> None:
        self.generators = Bench([copy.deepcopy(G) for _ in range(nodes)])
        self.heads = Bench([copy.deepcopy(D) for _ in range(nodes)])
        for bench in (self.generators, self.heads):
            bench.train(False)

    def load(self, generators: torch.Tensor, heads: torch.Tensor) -> None:
        """Take the parameters of K nodes, ``(K, P)`` each; later ones stand in their place."""
        for bench, vectors in ((self.generators, generators), (self.heads, heads)):
            for module, vector in zip(bench.modules, vectors, strict=False):
                load_vector(module, vector)

    def features(self, c: torch.Tensor, rows: int) -> torch.Tensor:
        """G_i(z, y) of the first nodes: ``c = [z; y]`` (B, q + C) to ``(K, B, p)``."""
        return self.generators(c.expand(rows, *c.shape))

    def judged(self, f: torch.Tensor) -> torch.Tensor:
        """D_i of features ``(K, B, p)``: ``(K, B, C)``."""
        return self.heads(f)


def crossed(uploads: Uploads, G: nn.Module, D: nn.Module, c: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    """Eq. 10 and 11: L_kl,1, L_kl,2 and L_kl,3, means over a batch: ``(3,)``.

    Gradients flow to G and D alone. In L_kl,2 only D learns, in L_kl,3 only G.

    Args:
        uploads: local generators G_i and heads D_i.
        G, D: the global ones.
        c: ``[z; y]`` (B, q + C).
        tau: tau_{i, y} for each example's label, ``(K, B)``.
    """
    with torch.no_grad():
        f_i = uploads.features(c, len(tau))  # G_i(z, y)  (K, B, p)
        d_i = uploads.judged(f_i)  # D_i(G_i(z, y))  (K, B, C)
    f = G(c)  # G(z, y)  (B, p)
    d_g = D(f).expand_as(d_i)  # D(G(z, y))
    d_ig = D(f_i.flatten(0, 1)).view_as(d_i)  # D(G_i(z, y))
    d_gi = uploads.judged(f.expand_as(f_i))  # D_i(G(z, y))
    return torch.stack([(tau * kl(d, d_i)).sum(0).mean() for d in (d_g, d_ig, d_gi)])


def ensembled(
    uploads: Uploads, G: nn.Module, D: nn.Module, c: torch.Tensor, pi: torch.Tensor
) -> torch.Tensor:
    """FedCG's server loss: KL from the weighted mean of rho(D_i(G_i)) to rho(D(G)), a mean over a batch.

    Args:
        uploads: local generators G_i and heads D_i.
        G, D: the global ones, to which gradients flow.
        c: ``[z; y]`` (B, q + C).
        pi: the nodes' weights ``(K,)``, summing to 1.
    """
    with torch.no_grad():
        d_i = uploads.judged(uploads.features(c, len(pi)))  # (K, B, C)
        teacher = torch.tensordot(pi, d_i.softmax(-1), 1)  # (B, C)
        log_teacher = teacher.clamp_min(torch.finfo(teacher.dtype).tiny).log()
    return kl(log_teacher, D(G(c))).mean()


class GeneratorServer(Server):
    """The server of FedMD-CG and of FedCG: averages generators and heads, then distils into the averages.

    Args:
        config: rounds, sizes, the server's learning.
        setting: what the server is made of. The student's head is D; its extractor is only the nodes'
            first one.
        aggregation: after averaging, ``crossed`` distillation (Eq. 12), ``ensemble`` distillation
            (FedCG), or ``none``.
    """

    def __init__(self, config: GeneratorConfig, setting: ServerSetting, aggregation: str) -> None:
        super().__init__(setting)
        self.config, self.total, self.aggregation = config, config.rounds, aggregation
        with seeded(setting.seed, "generator"):
            G = make_generator(config, setting.student, setting.shape, setting.task.classes)
        self.G, self.D = setting.compute.place(G).eval(), split(setting.student, "the student").head.eval()
        self.uploads = Uploads(self.G, self.D, len(setting.federation.nodes))
        self.census: Census | None = None  # n_i^y and n_i

    def step(self) -> Mapping[str, float]:
        """One round.

        Returns:
            ``consistency``: how well local heads know what local generators give (G+D loss, Fig. 5), and
            the last distillation's losses.
        """
        config, t = self.config, self.done
        self.census = self.census or self._begin()
        answers = self.federation.ask(
            "train",
            of=drawn(self.census.present(self.federation), config.participation, self.seed, t),
            generator=to_vector(self.G),
            head=to_vector(self.D),
            counts=self.census.counts.sum(0),
            round=torch.tensor(t),
        )
        told = self.census.of(answers.nodes)
        n_y, n = told.counts, told.sizes  # (K, C), (K,)
        self.uploads.load(answers["generator"], answers["head"])
        losses = {"consistency": self._consistency(n_y)}
        load_vector(self.G, weighted_mean(answers["generator"], n))
        load_vector(self.D, weighted_mean(answers["head"], n))
        losses.update(self._distil(t, n_y, n))
        self.done += 1
        return losses

    def state(self) -> dict[str, Any]:
        """See :class:`Server`."""
        told = None if self.census is None else self.census.state()
        return {**super().state(), "G": dict(self.G.state_dict()), "census": told}

    def load(self, state: Mapping[str, Any]) -> None:
        """See :class:`Server`."""
        super().load(state)
        self.G.load_state_dict(state["G"])
        self.census = Census.load(state["census"], self.compute.device)

    def _begin(self) -> Census:
        self.federation.ask("begin", parameters=to_vector(self.student), generator=to_vector(self.G))
        return Census.take(self.federation)

    def _distil(self, t: int, n_y: torch.Tensor, n: torch.Tensor) -> Mapping[str, float]:
        """Steps on Eq. 12, or on FedCG's loss, from the averages."""
        config = self.config
        if self.aggregation == "none":
            return {}
        tau = self.task.importance(n_y).squeeze(1)  # tau_{i, y}  (K, C)
        learning = [w for w in (*self.G.parameters(), *self.D.parameters()) if w.requires_grad]
        adam = torch.optim.Adam(learning, config.server_lr, fused=True)
        losses = torch.zeros(1)
        for turn in range(config.server_steps):
            z, y = imagined(self.compute, n_y, config.server_batch, config.noise, self.seed, t, turn)
            c = condition(z, y, self.task.classes)
            with self.compute.step(self.seed, "student", t, turn):
                if self.aggregation == "crossed":
                    losses = crossed(self.uploads, self.G, self.D, c, tau[:, y])
                else:
                    losses = ensembled(self.uploads, self.G, self.D, c, n / n.sum()).unsqueeze(0)
            adam.zero_grad()
            losses.sum().backward()  # type: ignore[no-untyped-call]
            adam.step()
        names = ("kl1", "kl2", "kl3") if self.aggregation == "crossed" else ("kl",)
        return dict(zip(names, losses.tolist(), strict=False))

    def _consistency(self, n_y: torch.Tensor) -> float:
        """CE(rho(D_i(G_i(z, y))), y), each node weighed by how many examples of y it holds."""
        z, y = imagined(self.compute, n_y, CONSISTENCY, self.config.noise, self.seed, "consistency")
        tau = self.task.importance(n_y).squeeze(1)[:, y]  # (K, B)
        with torch.no_grad(), self.compute.autocast():
            f = self.uploads.features(condition(z, y, self.task.classes), len(n_y))
            told = self.uploads.judged(f).log_softmax(-1)  # (K, B, C)
        right = told.gather(2, y.expand(len(n_y), -1).unsqueeze(2)).squeeze(2)  # (K, B)
        return -(tau * right).sum(0).mean().item()


def imagined(
    compute: Compute, n_y: torch.Tensor, batch: int, noise: int, seed: int, *purpose: str | int
) -> tuple[torch.Tensor, torch.Tensor]:
    """z ~ N(0, I) (batch, noise) and y ~ p(y) (batch,), p(y) as the counts ``(K, C)`` summed over nodes."""
    draw = torch_generator(seed, "imagined", *purpose)
    z = torch.randn(batch, noise, generator=draw)
    y = torch.multinomial(n_y.sum(0).cpu(), batch, replacement=True, generator=draw)
    return z.to(compute.device), y.to(compute.device)
