"""FedGEN: the server learns a generator of features that all nodes' heads recognise, and lends it to them.

Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021,
Algorithm 1. Symbols are FedMD-CG's, which compares with it: extractors F_i, heads D_i, the generator
G([z; y]).

In each round a node trains its model on its own data and its head on what G gives; shared parameters are
averaged; then the server teaches G features that the nodes' heads, ensembled, take for those of label y.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from fedstill.core.choices import check_choices
from fedstill.core.compute import lay_out
from fedstill.core.seeds import seeded
from fedstill.methods import parameters
from fedstill.methods.counting import LABEL_COUNTS, Census, count_labels
from fedstill.methods.diversity import Diversity, diversity
from fedstill.methods.generators import GeneratorConfig, Received, imagined, make_generator
from fedstill.methods.parameters import KINDS, drawn
from fedstill.methods.server import Server, ServerSetting
from fedstill.models.features import condition
from fedstill.models.split import EXTRACTOR, HEAD, split
from fedstill.models.vector import load_vector, to_vector, weighted_mean
from fedstill.node import training
from fedstill.node.group import Bench, Group
from fedstill.node.training import Work
from fedstill.protocol import kinds
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide, Question


@dataclass(frozen=True, kw_only=True)
class FedGENConfig(GeneratorConfig):
    """FedGEN's options."""

    name: ClassVar[str] = "fedgen"

    shares: Literal["head", "model"] = "head"
    """What nodes share: the head alone (partial sharing, as FedMD-CG compares with it) or the whole model."""
    alpha: float = 1.0
    """Weight of the head's cross-entropy on what G gives, at the nodes."""
    diversity: Diversity = "div0"
    """The generator's diversity loss: none, div0 (FedMD-CG's Eq. 7), or FedMD-CG's own div1 and div2."""
    eta: float = 1.0
    """Weight of the diversity loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, "method")
        parameters.finite(self, "alpha", "eta")

    @property
    def part(self) -> str:
        """The part of the model that is shared."""
        return HEAD if self.shares == "head" else ""


# --- at the nodes -----------------------------------------------------------------------------------


def node_side(config: FedGENConfig, setting: NodeSetting) -> NodeSide:
    """What a node answers: its label counts, and its head or model after a round of training."""
    task, local, compute = setting.task, setting.local, setting.compute

    def train(
        group: Group,
        number: int,
        generator: torch.Tensor,
        parameters: torch.Tensor,
        counts: torch.Tensor,
        round: torch.Tensor,
    ) -> Mapping[str, torch.Tensor]:
        """One round at a node."""
        t = int(round[0])
        G = Received(config, group, generator, counts, t)
        group.load("model", parameters, config.part)
        # Before the first round nobody has taught G anything.
        train_round(group, setting, t, config.rounds, model_work(config, setting, G if t else None))
        return {"parameters": group.vectors("model", config.part)}

    train_round = parameters.train_round

    def rehearse(group: Group) -> None:
        """A few steps of local training, for the engine to time."""
        node = group.nodes[0]
        fresh = make_generator(config, node.model, node.data.inputs.shape[1:], task.classes)
        counts = torch.ones(len(group), task.classes, device=group.device)
        G = Received(config, group, to_vector(fresh).unsqueeze(0), counts, 0)
        training.prepare(group.nodes, local)
        training.train(group.nodes, task, local, compute, steps=3, work=model_work(config, setting, G))

    kind = KINDS[config.part]
    question = Question(
        "train",
        train,
        sends={
            "generator": kinds.GENERATOR_PARAMETERS,
            "parameters": kind,
            "counts": LABEL_COUNTS,
            "round": "schedule",
        },
        releases={"parameters": kind},
        times=config.rounds,
        beside="cross-entropy on what the global generator gives",
    )
    questions = (parameters.begin(), count_labels(task), question)
    return NodeSide({question.name: question for question in questions}, rehearse=rehearse, first=None)


def model_work(config: FedGENConfig, setting: NodeSetting, G: Received | None) -> Work:
    """A step of F_i and D_i on CE(D_i(F_i(x)), y) + alpha CE(D_i(G(z, y')), y')."""
    task, turns = setting.task, itertools.count()

    def work(group: Group, step: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        turn, model = next(turns), group.bench("model")
        loss = task.loss(model(model(x, EXTRACTOR), HEAD), y, setting.local.smoothing)  # (G,)
        if G is not None:
            y_hat = G.labels(group, y.shape, turn)
            d_hat = model(G.features(group, y_hat, turn), HEAD)  # D_i(G(z, y'))
            loss = loss + config.alpha * task.loss(d_hat, y_hat)
        group.step("model", loss)
        return loss

    return work


# --- at the server ----------------------------------------------------------------------------------


class FedGENServer(Server):
    """FedGEN's server: averages what is shared, then teaches G.

    Args:
        config: FedGEN's options.
        setting: what the server is made of.
    """

    def __init__(self, config: FedGENConfig, setting: ServerSetting) -> None:
        super().__init__(setting)
        self.config, self.total = config, config.rounds
        with seeded(setting.seed, "generator"):
            G = make_generator(config, setting.student, setting.shape, setting.task.classes)
        self.G = setting.compute.place(G)
        self.adam = torch.optim.Adam(G.parameters(), config.server_lr, fused=True)
        self.shared = split(self.student, "the student").get_submodule(config.part)
        self.uploads = Bench([copy.deepcopy(self.shared) for _ in setting.federation.nodes])
        self.uploads.train(False)
        self.census: Census | None = None  # n_i^y and n_i

    def step(self) -> Mapping[str, float]:
        """One round of Algorithm 1."""
        config, t = self.config, self.done
        if self.census is None:
            self.federation.ask("begin", parameters=to_vector(self.student))
            self.census = Census.take(self.federation)
        answers = self.federation.ask(
            "train",
            of=drawn(self.census.present(self.federation), config.participation, self.seed, t),
            generator=to_vector(self.G),
            parameters=to_vector(self.shared),
            counts=self.census.counts.sum(0),
            round=torch.tensor(t),
        )
        told = self.census.of(answers.nodes)
        for module, vector in zip(self.uploads.modules, answers["parameters"], strict=False):
            load_vector(module, vector)
        load_vector(self.shared, weighted_mean(answers["parameters"], told.sizes))
        losses = self._teach(t, told.counts)
        self.done += 1
        return losses

    def generator_loss(self, z: torch.Tensor, y: torch.Tensor, n_y: torch.Tensor) -> torch.Tensor:
        """CE of the heads' weighted ensemble on G(z, y), and the diversity loss, unweighted: ``(2,)``.

        Args:
            z: noise ``(B, q)``.
            y: labels ``(B,)``.
            n_y: how many examples of each label the uploading nodes hold, ``(K, C)``.
        """
        classes = self.task.classes
        c = condition(z, y, classes)
        f = self.G(c).float()  # G(z, y)  (B, p)
        head = "" if self.config.part else HEAD
        d = self.uploads(f.expand(len(n_y), *f.shape), head)  # D_k(G(z, y))  (K, B, C)
        alpha = self.task.importance(n_y).squeeze(1)[:, y]  # alpha_k^y  (K, B)
        ensembled = (alpha.unsqueeze(2) * d).sum(0)  # (B, C)
        L_ce = self.task.loss(ensembled.unsqueeze(0), y.unsqueeze(0)).squeeze(0)
        return torch.stack([L_ce, diversity(self.config.diversity, f, z, c[:, z.shape[1] :], True)])

    def state(self) -> dict[str, Any]:
        """See :class:`Server`."""
        own = {"G": dict(self.G.state_dict()), "adam": self.adam.state_dict()}
        return {**super().state(), **own, "census": None if self.census is None else self.census.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """See :class:`Server`."""
        super().load(state)
        self.G.load_state_dict(state["G"])
        self.adam.load_state_dict(state["adam"])
        lay_out(self.adam)
        self.census = Census.load(state["census"], self.compute.device)

    def _teach(self, t: int, n_y: torch.Tensor) -> Mapping[str, float]:
        """Steps of G, which learns in training mode: no G of the nodes' own is listened to beside it."""
        config = self.config
        losses = torch.zeros(2)
        self.G.train()
        for turn in range(config.server_steps):
            z, y = imagined(self.compute, n_y, config.server_batch, config.noise, self.seed, t, turn)
            with self.compute.step(self.seed, "student", t, turn):
                losses = self.generator_loss(z, y, n_y)
            self.adam.zero_grad()
            (losses[0] + config.eta * losses[1]).backward()  # type: ignore[no-untyped-call]
            self.adam.step()
        self.G.eval()
        return dict(zip(("generator", "diversity"), losses.tolist(), strict=True))


METHOD = Method(
    name="fedgen",
    title="FedGEN",
    paper="Zhu et al., ICML 2021",
    config=FedGENConfig,
    node_side=node_side,
    server=FedGENServer,
    needs=lambda config: Needs(trainable=True, same_architecture=True, split=True, one_label=True),
    central="virtual",
)
