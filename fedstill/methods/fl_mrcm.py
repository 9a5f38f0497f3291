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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from fedstill.core.checked import NonNegativeFloat, PositiveInt
from fedstill.core.errors import ArgumentError, NodeFault, QuestionRefused
from fedstill.federation.contract import Federation
from fedstill.methods._alignment import aligned, coarse, give_identifiers, latent
from fedstill.methods._asking import ask_those
from fedstill.methods._averaging import Averaged, Averaging
from fedstill.methods._histogram import Tensors
from fedstill.methods.server import Server
from fedstill.models.vector import load_vector, to_vector
from fedstill.node import training
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.node.training import train_round
from fedstill.protocol.kinds import PARAMETERS, SCHEDULE, Kind
from fedstill.protocol.method import Needs
from fedstill.protocol.questions import NodeSetting, question

FEATURES = Kind(
    "latent features",
    "what a node's model makes of its own training examples, half-way through",
    without="with method.lambda_adv = 0 none are told",
)
SENT = {"parameters": PARAMETERS, "round": SCHEDULE}


@dataclass
class Aligning(Averaged):
    """What changes from round to round, beside the student.

    Args:
        features: z_t, as the target told last ``(M, p)``.
    """

    features: torch.Tensor | None = None


def adversarial(method: FLMRCM, at: NodeSetting) -> bool:
    """Whether anything is aligned at all."""
    return method.lambda_adv > 0


@dataclass(frozen=True, kw_only=True)
class FLMRCM(Averaging):
    """FL-MRCM's options."""

    title: ClassVar[str] = "FL-MRCM"
    paper: ClassVar[str] = "Guo et al., CVPR 2021"

    target: str = ""
    """The node whose latent features all others align theirs with; none: the first one. With a name, no
    other node tells its features, whoever asks."""
    told: PositiveInt = 64
    """Images of its own whose features the target tells in each round, drawn anew."""
    lambda_adv: NonNegativeFloat = 1.0
    """Weight of the adversarial loss at the sources; 0 is FedAvg, and no features are told."""
    identifier_lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for the domain identifiers, the same in all rounds."""
    identifier_width: PositiveInt = 256
    """Width of their hidden layer."""

    def needs(self) -> Needs:
        """Networks alike, in two parts, that learn from images."""
        return Needs(trainable=True, same_architecture=True, split=True, images=True)

    # --- at the nodes -----------------------------------------------------------------------------------

    def prepare(self, nodes: Sequence[Node], at: NodeSetting) -> None:
        """A domain identifier C^k for each node, with its own first weights."""
        if self.lambda_adv:
            give_identifiers(nodes, self.identifier_width, self.adam)

    def adam(self, module: nn.Module) -> torch.optim.Optimizer:
        """The identifiers' optimiser."""
        return torch.optim.Adam(module.parameters(), self.identifier_lr, betas=(0.5, 0.999), fused=True)

    @question(
        sends=SENT,
        releases={"features": FEATURES},
        times=lambda self, at: self.rounds,
        rows=lambda self, at: self.told,
        reads=("features",),
        when=adversarial,
    )
    def tell_features(self, nodes: Group, parameters: torch.Tensor, round: int) -> Tensors:
        """z_t = E_t(x) of some of the target's own images, with E_t the server's: ``(1, M, p)``."""
        for node in nodes.nodes:
            if self.target not in ("", node.name):
                raise QuestionRefused(node.name, "tell_features", f"method.target: {self.target}")
        nodes.load("model", parameters)
        x, _ = nodes.sample(self.told, "target", round)
        bench = nodes.bench("model")
        bench.train(False)
        return {"features": coarse(bench(x, latent(nodes.nodes[0].model)))}

    @question(
        sends={**SENT, "features": FEATURES},
        releases={"parameters": PARAMETERS},
        times=lambda self, at: self.rounds,
        span=Averaging.round_span,
        when=adversarial,
    )
    def align(self, nodes: Group, parameters: torch.Tensor, round: int, features: torch.Tensor) -> Tensors:
        """One round at source sites, from the server's parameters on."""
        nodes.load("model", parameters)
        train_round(nodes, round, self.rounds, aligned(nodes, features[0], round, self.lambda_adv))
        return {"parameters": nodes.vectors("model")}

    def rehearse(self, nodes: Group) -> None:
        """A few steps as at a source site."""
        at, node, work = nodes.at, nodes.nodes[0], None
        if self.lambda_adv:
            with torch.no_grad():
                z = coarse(node.model.get_submodule(latent(node.model))(node.data.inputs[:2]))
            work = aligned(nodes, z, 0, self.lambda_adv)
        training.prepare(nodes.nodes, at.local)
        training.train(nodes.nodes, at.task, at.local, at.compute, steps=3, work=work)

    # --- at the server ----------------------------------------------------------------------------------

    def begin(self, server: Server) -> Aligning:
        """Nobody has told anything yet.

        Raises:
            ArgumentError: the target is none of the nodes.
        """
        nodes = server.federation.nodes
        if self.target not in ("", *nodes):
            raise ArgumentError("method.target", self.target, f"one of {', '.join(nodes)}")
        return Aligning()

    def turn(self, server: Server, state: Aligning, t: int) -> Mapping[str, float]:
        """One round: z_t from the target, local training everywhere, the weighted average.

        A target that is left out told its features before; the sources go on with these. If it never told
        any, they go on as under FedAvg.
        """
        federation, student = server.federation, server.student
        self.meet(server, state)
        w, target = to_vector(student), self.target or federation.nodes[0]
        sent = {"parameters": w, "round": torch.tensor(t)}
        if self.lambda_adv and target in federation.present:
            z_t = ask_those(federation, "tell_features", [target], **sent)
            state.features = state.features if z_t is None else z_t["features"][0]
        names = self.drawn([name for name in federation.present if name in state.sizes], server.seed, t)
        sources = [name for name in names if name != target and state.features is not None]
        updates = {
            **asked(federation, "align", sources, **sent, features=state.features),
            **asked(federation, "train", [name for name in names if name not in sources], **sent),
        }
        if not updates:
            raise NodeFault(", ".join(names), "train", "none of the nodes that were asked is left")
        # In the order of the nodes, whichever question they answered.
        updates = {name: updates[name] for name in federation.nodes if name in updates}
        n = torch.tensor([state.sizes[name] for name in updates], device=w.device)  # (K,)
        load_vector(student, self.combine(state, w, torch.stack(list(updates.values())), n))
        return {"moved": (to_vector(student) - w).norm().item()}


def asked(federation: Federation, question: str, of: Sequence[str], **sent: Any) -> dict[str, torch.Tensor]:
    """w_k of those among some nodes who answer, by name."""
    answers = ask_those(federation, question, of, **sent) if of else None
    return {} if answers is None else dict(zip(answers.nodes, answers["parameters"], strict=True))
