"""FL-MRCM: FedAvg in which all sites learn latent features that look like those of one, the target.

Guo, Wang, Zhou, Jiang, Patel: "Multi-institutional Collaborations for Improving Deep Learning-based Magnetic
Resonance Image Reconstruction using Federated Learning", CVPR 2021. Symbols are the paper's: encoders E^k of
source sites and E_t of the target site, latent features z^k and z_t, domain identifiers C^k, one at each
source, and the weight lambda_adv.

In each round the target tells the latent features of some of its own images, as the server's network sees
them: a release of its own kind, "latent features", made from private records. Sources train on the task's
loss and against their C^k, which tells z^k from z_t; the target trains on the task's loss alone. The server
averages parameters. The identifiers stay at the sources.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.errors import ArgumentError, ModelError, NodeFault, QuestionRefused
from fedstill.core.seeds import seeded
from fedstill.methods import parameters
from fedstill.methods.asking import ask_those
from fedstill.methods.counting import tell_size
from fedstill.methods.parameters import AveragingServer, RoundsConfig, drawn, round_span, train_round
from fedstill.methods.server import ServerSetting
from fedstill.models.split import EXTRACTOR, split
from fedstill.models.vector import load_vector, to_vector
from fedstill.node import training
from fedstill.node.group import Group, stack
from fedstill.node.node import Node
from fedstill.node.training import Work
from fedstill.protocol import kinds
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide, Question

FEATURES = "latent features"  # a kind of tensor: made from a node's own records, without any protection
ENCODER = f"{EXTRACTOR}.encoder"


@dataclass(frozen=True, kw_only=True)
class FLMRCMConfig(RoundsConfig):
    """FL-MRCM's options."""

    name: ClassVar[str] = "fl-mrcm"

    target: str = ""
    """The node whose latent features all others align theirs with; none: the first one. With a name, no
    other node tells its features, whoever asks."""
    told: int = 64
    """Images of its own whose features the target tells in each round, drawn anew."""
    lambda_adv: float = 1.0
    """Weight of the adversarial loss at the sources; 0 is FedAvg, and no features are told."""
    identifier_lr: float = 1e-3
    """Adam's learning rate for the domain identifiers, the same in all rounds."""
    identifier_width: int = 256
    """Width of their hidden layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("told", "identifier_width"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"method.{name}", getattr(self, name), "1 or more")
        parameters.finite(self, "lambda_adv", "identifier_lr")


def latent(model: nn.Module) -> str:
    """The part of a network that gives its latent features: its encoder, or its extractor if it has none."""
    return ENCODER if isinstance(getattr(model.extractor, "encoder", None), nn.Module) else EXTRACTOR


def coarse(z: torch.Tensor) -> torch.Tensor:
    """Latent features as vectors: maps ``(..., B, C, h, w)`` averaged over quarters, ``(..., B, 4 C)``.

    Vectors ``(..., B, p)`` stay. Any number of axes before B, one or none.

    >>> coarse(torch.arange(16.0).view(1, 1, 4, 4))
    tensor([[ 2.5000,  4.5000, 10.5000, 12.5000]])
    """
    if z.ndim < 4:
        return z
    front = z.shape[:-3]
    return F.adaptive_avg_pool2d(z.reshape(-1, *z.shape[-3:]), 2).reshape(*front, -1)


def make_identifier(features: int, width: int) -> nn.Module:
    """C^k: features ``(B, p)`` to one value (B, 1), high where they look like the target's."""
    return nn.Sequential(nn.Linear(features, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))


# --- at the nodes -----------------------------------------------------------------------------------


def node_side(config: FLMRCMConfig, setting: NodeSetting) -> NodeSide:
    """What a node answers: its data's size, its model after a round, and at the target latent features."""

    def prepare(nodes: Sequence[Node]) -> None:
        """A domain identifier C^k for each node, with its own first weights."""
        for node in nodes if config.lambda_adv else ():
            model = split(node.model, node.name)
            with torch.no_grad():
                z = coarse(model.eval().get_submodule(latent(model))(node.data.inputs[:2]))
            if z.ndim != 2:
                found = tuple(z.shape[1:])
                raise ModelError(f"latent features of {node.name} are {found}: allowed is (C, h, w) or (p,)")
            with seeded(node.seed, node.name, "identifier"):
                identifier = make_identifier(z.shape[1], config.identifier_width)
            node.add("identifier", identifier, adam)

    def adam(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(module.parameters(), config.identifier_lr, betas=(0.5, 0.999), fused=True)

    def tell_features(
        group: Group, number: int, parameters: torch.Tensor, round: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        """z_t = E_t(x) of some of the target's own images, with E_t the server's: ``(1, M, p)``."""
        for node in group.nodes:
            if config.target not in ("", node.name):
                raise QuestionRefused(node.name, "tell_features", f"method.target: {config.target}")
        group.load("model", parameters)
        x, _ = group.sample(config.told, "target", int(round[0]))
        bench = group.bench("model")
        bench.train(False)
        return {"features": coarse(bench(x, latent(group.nodes[0].model)))}

    def align(
        group: Group, number: int, parameters: torch.Tensor, round: torch.Tensor, features: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        """One round at source sites, from the server's parameters on."""
        group.load("model", parameters)
        t = int(round[0])
        train_round(group, setting, t, config.rounds, aligned(config, setting, features[0], t))
        return {"parameters": group.vectors("model")}

    def rehearse(group: Group) -> None:
        """A few steps as at a source site, for the engine to time."""
        work = None
        if config.lambda_adv:
            with torch.no_grad():
                part = latent(group.nodes[0].model)
                z = coarse(group.nodes[0].model.get_submodule(part)(group.nodes[0].data.inputs[:2]))
            work = aligned(config, setting, z, 0)
        training.prepare(group.nodes, setting.local)
        training.train(group.nodes, setting.task, setting.local, setting.compute, steps=3, work=work)

    sent = {"parameters": kinds.PARAMETERS, "round": "schedule"}
    questions = [tell_size(), parameters.train(config, setting)]
    if config.participation < 1:
        questions.append(parameters.begin())
    if config.lambda_adv:
        questions += [
            Question(
                "tell_features",
                tell_features,
                sent,
                {"features": FEATURES},
                times=config.rounds,
                rows=config.told,
                reads=("features",),
            ),
            Question(
                "align",
                align,
                {**sent, "features": FEATURES},
                {"parameters": kinds.PARAMETERS},
                times=config.rounds,
                span=lambda told: round_span(told, config.rounds),
            ),
        ]
    return NodeSide({question.name: question for question in questions}, prepare, rehearse, first=None)


def aligned(config: FLMRCMConfig, setting: NodeSetting, features: torch.Tensor, t: int) -> Work:
    """A step at source sites: one of C^k, and one of the model on its loss + lambda_adv L_advE.

    C^k learns to be high on the target's features and low on the site's own; the encoder learns to make it
    high on these. Both are binary cross-entropies, the encoder's in its non-saturating form.

    Args:
        config: FL-MRCM's options.
        setting: what a node is.
        features: the target's ``(M, p)``, of which each step draws as many as a batch has examples.
        t: the round.
    """
    task, turns = setting.task, itertools.count()

    def work(group: Group, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        model, identifier, turn = group.bench("model"), group.bench("identifier"), next(turns)
        identifier.train(True)
        part, (active, batch) = latent(group.nodes[0].model), inputs.shape[:2]
        rows = [
            torch.randint(len(features), (batch,), generator=node.draw("target's", t, turn))
            for node in group.nodes[:active]
        ]
        z_t = features[stack(rows).to(features.device)]  # (G, B, p)
        z = coarse(model(inputs, part))  # z^k = E^k(x)
        L_C = (F.softplus(-identifier(z_t)) + F.softplus(identifier(z.detach()))).mean((1, 2)) / 2
        group.step("identifier", L_C)
        L_advE = F.softplus(-identifier(z)).mean((1, 2))
        losses = task.loss(model(inputs), targets, setting.local.smoothing)
        group.step("model", losses + config.lambda_adv * L_advE)
        return losses

    return work


# --- at the server ----------------------------------------------------------------------------------


class FLMRCMServer(AveragingServer):
    """FedAvg's server, which asks the target for its features before each round.

    A target that is left out told its features before; the sources go on with these. If it never told any,
    they go on as under FedAvg.

    Args:
        config: FL-MRCM's options.
        setting: what the server is made of.

    Raises:
        ArgumentError: the target is none of the nodes.
    """

    def __init__(self, config: FLMRCMConfig, setting: ServerSetting) -> None:
        super().__init__(config, setting)
        self.config = config
        self.target = config.target or self.federation.nodes[0]
        if self.target not in self.federation.nodes:
            allowed = f"one of {', '.join(self.federation.nodes)}"
            raise ArgumentError("method.target", config.target, allowed)
        self.features: torch.Tensor | None = None  # z_t, as the target told last  (M, p)

    def step(self) -> Mapping[str, float]:
        """One round: z_t from the target, local training everywhere, the weighted average."""
        t = self.done
        if t == 0:
            self._begin()
        w, round = to_vector(self.shared), torch.tensor(t)
        if self.config.lambda_adv and self.target in self.federation.present:
            told = ask_those(self.federation, "tell_features", [self.target], parameters=w, round=round)
            self.features = self.features if told is None else told["features"][0]
        known = [name for name in self.federation.present if name in self.sizes]
        taking_part = drawn(known, self.config.participation, self.seed, t)
        sources = [name for name in taking_part if name != self.target and self.features is not None]
        received: dict[str, torch.Tensor] = {}
        for question, names in (("align", sources), ("train", [n for n in taking_part if n not in sources])):
            if names:
                sent = {"parameters": w, "round": round}
                if question == "align" and self.features is not None:
                    sent["features"] = self.features
                answers = ask_those(self.federation, question, names, **sent)
                if answers is not None:
                    received |= dict(zip(answers.nodes, answers["parameters"], strict=True))
        if not received:
            raise NodeFault(", ".join(taking_part), "train", "none of the nodes that were asked is left")
        # In the order of the nodes, whichever question they answered.
        names = [name for name in self.federation.nodes if name in received]
        n = torch.tensor([self.sizes[name] for name in names], device=w.device)  # (K,)
        load_vector(self.shared, self.combine(w, torch.stack([received[name] for name in names]), n))
        self.done += 1
        return {"moved": (to_vector(self.shared) - w).norm().item()}

    def state(self) -> dict[str, Any]:
        """See :class:`Server`."""
        return {**super().state(), "features": self.features}

    def load(self, state: Mapping[str, Any]) -> None:
        """See :class:`Server`."""
        super().load(state)
        features = state["features"]
        self.features = None if features is None else features.to(self.compute.device)


METHOD = Method(
    name="fl-mrcm",
    title="FL-MRCM",
    paper="Guo et al., CVPR 2021",
    config=FLMRCMConfig,
    node_side=node_side,
    server=FLMRCMServer,
    needs=lambda config: Needs(trainable=True, same_architecture=True, split=True, images=True),
)
