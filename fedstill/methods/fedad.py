"""FedAD: one-way distillation of what nodes answer about public, unlabelled images, and of where they look.

Gong, Sharma, Karanam, Wu, Chen, Doermann, Innanje: "Ensemble Attention Distillation for Privacy-Preserving
Federated Learning", ICCV 2021; for reconstruction Gong et al., "Federated Learning with Privacy-Preserving
Ensemble Attention Distillation", arXiv:2210.08464. The nodes' outputs about public images are z_k here, where
they look is A_k; the student's are z and A.

The nodes' models are trained to completion first. Each is asked once about every public image, and the
student learns from what was answered: nobody is asked again, and nothing goes back to a node. The student's
attention should lie between the nodes' intersection, min_k A_k, on which they agree, and their union,
max_k A_k, which keeps what only some of them see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedstill.core import deadline
from fedstill.core.choices import check_choices
from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import torch_generator
from fedstill.data.public import Public
from fedstill.methods.counting import count_labels
from fedstill.methods.ensemble import look
from fedstill.methods.one_shot import OneShotServer
from fedstill.methods.parameters import finite
from fedstill.methods.public import AT_ONCE, known, logits, optimiser_of, passes
from fedstill.methods.server import ServerSetting
from fedstill.models.attention import looked, place_of
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.protocol.kinds import INDICES, LOGITS
from fedstill.protocol.method import Ask, Method, Needs
from fedstill.protocol.questions import NodeSetting, NodeSide, Question
from fedstill.tasks import Ensemble

CHUNK = 2000  # public images a question
MOST_SIDE = 64  # cells each way: a node's answer grows with the square of them
ATTENTION = "attention maps"  # a kind of tensor: what a model's layers say of public images, pooled


@dataclass(frozen=True)
class FedADConfig:
    """FedAD's options."""

    name: ClassVar[str] = "fedad"

    attention: float = 1.0
    """Weight of the attention loss; 0: no maps are told, and networks need no activations with places."""
    attend: Literal["between", "mean"] = "between"
    """Where the student should look: anywhere between the nodes' intersection and their union, or as their
    mean does, in which those count more who know what an image shows."""
    side: int = 8
    """Cells of an attention map, each way."""
    weights: Literal["counts", "equal"] = "counts"
    """How nodes are weighed in the ensemble: by their share of the examples of each class, or equally."""
    ensemble: Ensemble = "logits"
    """How answers are ensembled: logits, log_probs, probs, or consensus."""
    tau: float = 1.0
    """Temperature of the distillation; inf is its l2 limit."""

    epochs: int = 100
    """Passes of the student over the public images."""
    batch: int = 32
    """Public images a step of the student."""
    lr: float = 1e-3
    """Adam's learning rate, falling on a cosine to lr_end."""
    lr_end: float = 1e-5
    """Learning rate of the last pass."""
    weight_decay: float = 0.0
    """L2 penalty on the student."""

    def __post_init__(self) -> None:
        check_choices(self, "method")
        for name in ("side", "epochs", "batch"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"method.{name}", getattr(self, name), "1 or more")
        if self.side > MOST_SIDE:
            raise ArgumentError("method.side", self.side, f"up to {MOST_SIDE}")
        finite(self, "attention", "lr", "lr_end", "weight_decay")
        if not self.tau > 0:
            raise ArgumentError("method.tau", self.tau, "above 0, or inf")


# --- at the nodes -----------------------------------------------------------------------------------


def node_side(config: FedADConfig, setting: NodeSetting) -> NodeSide:
    """What nodes answer: outputs about public images, and where they look there."""
    places: dict[str, str] = {}  # of each node's model

    def prepare(nodes: Sequence[Node]) -> None:
        """Find where each model looks, before anything is trained."""
        for node in nodes if config.attention else ():
            shape = tuple(node.data.inputs.shape[1:])
            places[node.name] = place_of(node.model, shape, f"the model of {node.name}")

    def predict(group: Group, number: int, rows: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """z_k ``(G, B, C, ...)`` and A_k ``(G, B, side^2)`` of public images from one row up to another."""
        first, last = rows[0].tolist()
        x = known(setting.public).inputs[first:last]
        bench = group.bench("model")
        bench.train(False)
        if not config.attention:
            return {"logits": logits(group, x)}
        told = [attended(node, x) for node in group.nodes]
        return {"logits": torch.stack([z for z, _ in told]), "attention": torch.stack([A for _, A in told])}

    def attended(node: Node, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """z_k and A_k of one node: an activation inside is seen only where a model is computed by itself."""
        parts = []
        for part in torch.split(x, AT_ONCE):
            deadline.check()
            parts.append(looked(node.model, places[node.name], part, config.side))
        return torch.cat([z.float() for z, _ in parts]), torch.cat([A for _, A in parts])

    def rehearse(group: Group) -> None:
        """A part of a pass, for the engine to time."""
        predict(group, 0, torch.tensor([[0, min(AT_ONCE, len(known(setting.public)))]]))

    total = 0 if setting.public is None else len(setting.public)
    told = {"logits": LOGITS, **({"attention": ATTENTION} if config.attention else {})}
    times, rows = math.ceil(total / CHUNK), min(total, CHUNK)
    questions = [Question("predict", predict, {"rows": INDICES}, told, times=times, rows=rows, reads=())]
    if config.weights == "counts":
        questions.append(count_labels(setting.task))
    return NodeSide({question.name: question for question in questions}, prepare, rehearse, look)


# --- at the server ----------------------------------------------------------------------------------


def one_round(config: FedADConfig, public: Public | None, seed: int) -> Sequence[Ask]:
    """All that the nodes are asked, in order."""
    total = len(known(public))
    told = [Ask("count_labels")] if config.weights == "counts" else []
    firsts = range(0, total, CHUNK)
    return told + [Ask("predict", {"rows": torch.tensor([a, min(a + CHUNK, total)])}) for a in firsts]


class FedADServer(OneShotServer):
    """Asks, and distils outputs and attention.

    Args:
        config: FedAD's options.
        setting: what the server is made of.

    Raises:
        ModelError: the student has no attention.
    """

    def __init__(self, config: FedADConfig, setting: ServerSetting) -> None:
        optimiser = optimiser_of(setting.student, config.lr, weight_decay=config.weight_decay)
        super().__init__(config, setting, optimiser)
        self.config, self.public = config, known(setting.public)
        self.place = place_of(self.student, setting.shape, "the student") if config.attention else ""

    def gather(self) -> dict[str, torch.Tensor]:
        """Outputs ``(N, C, ...)``; with attention, its least and most ``(N, side^2)``."""
        parts: list[dict[str, torch.Tensor]] = []
        for _, answers in self.answered(one_round(self.config, self.public, self.seed)):
            weights = self.omega(answers)  # (K, 1, C)
            z = self.task.ensemble(answers["logits"], weights, self.config.ensemble)  # (B, C, ...)
            bounds: dict[str, torch.Tensor] = {}
            if self.config.attention:
                knowing = self.task.expertise(z, weights)  # (K, B)
                bounds = self._bounds(answers["attention"], knowing)
            parts.append({"outputs": z, **bounds})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def learn(self, e: int) -> Mapping[str, float]:
        """One pass over the public images."""
        losses = [self._learn(e, step, rows) for step, rows in enumerate(self._batches(e))]
        mean = torch.stack(losses).mean(0).tolist()
        return {"student": mean[0], **({"attention": mean[1]} if self.config.attention else {})}

    def _bounds(self, A: torch.Tensor, knowing: torch.Tensor) -> dict[str, torch.Tensor]:
        """Between which maps ``(B, P)`` A should lie, of the nodes' ``(K, B, P)`` and shares ``(K, B)``."""
        if self.config.attend == "mean":
            mean = (knowing.unsqueeze(2) * A).sum(0)
            return {"least": mean, "most": mean}
        return {"least": A.amin(0), "most": A.amax(0)}

    def _learn(self, e: int, step: int, rows: torch.Tensor) -> torch.Tensor:
        """A step of the student on some public images: its two losses, unweighted."""
        config, rows = self.config, rows.to(self.compute.device)
        x, target = self.public.inputs[rows], self.targets["outputs"][rows]
        L_A = target.new_zeros(())
        with self.compute.step(self.seed, "student", e, step):
            if config.attention:
                z, A = looked(self.student, self.place, x, config.side)
                L_A = outside(A, self.targets["least"][rows], self.targets["most"][rows]).mean()
            else:
                z = self.student(x)
            L_z = self.task.distance(z.float(), target, config.tau).mean()
        self.optimiser.zero_grad()
        (L_z + config.attention * L_A).backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        return torch.stack([L_z.detach(), L_A.detach()])

    def _batches(self, e: int) -> Iterator[torch.Tensor]:
        """Shuffled rows of the public images."""
        yield from passes(len(self.public), self.config.batch, torch_generator(self.seed, "order", e))


def outside(A: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """How far maps are outside their bounds: squared distances ``(B,)`` of ``(B, P)`` thrice, 0 within.

    >>> A, least, most = torch.tensor([[0.1, 0.5, 0.9]]), torch.full((1, 3), 0.3), torch.full((1, 3), 0.6)
    >>> outside(A, least, most)  # 0.2 below and 0.3 above
    tensor([0.1300])
    """
    return ((least - A).clamp_min(0) + (A - most).clamp_min(0)).square().sum(1)


METHOD = Method(
    name="fedad",
    title="FedAD",
    paper="Gong et al., ICCV 2021",
    config=FedADConfig,
    node_side=node_side,
    server=FedADServer,
    needs=lambda config: Needs(public=True, images=True),
    one_round=one_round,
)
