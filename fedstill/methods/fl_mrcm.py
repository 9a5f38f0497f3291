"""FL-MRCM: FedAvg in which all sites align their latent features with those of one site, the target.

Guo, Wang, Zhou, Jiang, Patel: "Multi-institutional Collaborations for Improving Deep Learning-based Magnetic
Resonance Image Reconstruction using Federated Learning", CVPR 2021. Symbols are the paper's: encoders E^k of
source sites and E_t of the target site, latent features z^k and z_t, domain identifiers C^k, one at each
source, and the weight lambda_adv.

In each round the target releases the latent features of some of its own images under the server's network, as
a payload kind of its own, "latent features", computed from private records. Sources train on the task's loss
and against their C^k, which distinguishes z^k from z_t; the target trains on the task's loss alone. The
server averages parameters. The identifiers stay at the sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.errors import ArgumentError, ModelError, NodeFault, QueryRefused, list_names
from fedstill.core.options import NonNegativeFloat, PositiveInt
from fedstill.methods import (
    Needs,
    Node,
    NodeSetting,
    NodeView,
    Query,
    Server,
    Span,
    SpanOfRound,
    Tensors,
    adam,
    fetch_sizes,
    seeded,
)
from fedstill.methods.fedavg import FedAvg, FedAvgState, sample_nodes
from fedstill.models.extractor_head import EXTRACTOR, split_model
from fedstill.models.module_utils import load_vector, to_vector
from fedstill.protocol.payload_kinds import PARAMETERS, SCHEDULE, PayloadKind

FEATURES = PayloadKind(
    "latent features",
    "the extractor features of a node's own training examples",
    opt_out="with method.lambda_adv = 0 none are released",
)
WIDTH = 256  # of the hidden layer of a domain identifier
ROUND_INPUTS = {"parameters": PARAMETERS, "round": SCHEDULE}


@dataclass
class FLMRCMState(FedAvgState):
    """Server state besides the student."""

    features: torch.Tensor | None = None  # last z_t of the target (M, p)


def latent_module_name(model: nn.Module) -> str:
    """Return the name of the submodule that computes latent features: encoder, or extractor if there is
    none."""
    encoder = getattr(model.extractor, "encoder", None)
    return f"{EXTRACTOR}.encoder" if isinstance(encoder, nn.Module) else EXTRACTOR


def pool_latent(z: torch.Tensor) -> torch.Tensor:
    """Return latent features as vectors: maps ``(..., B, C, h, w)`` averaged over quarters, ``(..., B, 4
    C)``.

    Vectors ``(..., B, p)`` are unchanged. There may be any number of axes before B.

    >>> pool_latent(torch.arange(16.0).view(1, 1, 4, 4))
    tensor([[ 2.5000,  4.5000, 10.5000, 12.5000]])
    """
    if z.ndim < 4:
        return z
    leading = z.shape[:-3]
    return F.adaptive_avg_pool2d(z.reshape(-1, *z.shape[-3:]), 2).reshape(*leading, -1)


@dataclass(frozen=True, kw_only=True)
class FLMRCM(FedAvg):
    """FL-MRCM's options."""

    title: ClassVar[str] = "FL-MRCM"
    paper: ClassVar[str] = "Guo et al., CVPR 2021"
    query_names: ClassVar[tuple[str, ...]] = (
        "initialize_nodes",
        "count_samples",
        "train",
        "send_features",
        "align",
    )
    linear: ClassVar[bool] = False

    target: str = ""
    """Node with whose latent features all others align theirs; empty: the first one. With a name, no other
    node releases its features, whatever server queries them.
    """
    target_examples: PositiveInt = 64
    """Own images whose features the target releases in each round, sampled in each round."""
    lambda_adv: NonNegativeFloat = 1.0
    """Weight of the adversarial loss at the sources; 0 is FedAvg, and no features are released."""
    identifier_lr: NonNegativeFloat = 1e-3
    """Adam's learning rate for the domain identifiers, the same in all rounds."""

    def needs(self) -> Needs:
        return Needs(trainable=True, same_architecture=True, split_models=True, images=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield from super().queries(setting)
        if self.lambda_adv:
            yield Query(
                self.send_features,
                sends=ROUND_INPUTS,
                releases={"features": FEATURES},
                times=self.rounds,
                rows=self.target_examples,
                depends_on_records=("features",),
            )
            yield Query(
                self.align,
                sends={**ROUND_INPUTS, "features": FEATURES},
                releases={"parameters": PARAMETERS},
                times=self.rounds,
                span=SpanOfRound(self.rounds),
                stackable=True,
            )

    # --- at a node --------------------------------------------------------------------------------------

    def prepare(self, node: Node, setting: NodeSetting) -> None:
        """Add a domain identifier C^k: z ``(B, p)`` to one value, high if it looks like z_t.

        Raises:
            ModelError: the network's latent features are neither maps nor vectors.
        """
        if not self.lambda_adv:
            return
        model = split_model(node.model, node.name)
        with torch.no_grad():
            z = pool_latent(model.eval().get_submodule(latent_module_name(model))(node.data.inputs[:2]))
        if z.ndim != 2:
            shape = tuple(z.shape[1:])
            raise ModelError(f"latent features of {node.name} are {shape} (expected (C, h, w) or (p,))")
        with seeded(node.seed, node.name, "identifier"):
            layers = nn.Linear(z.shape[1], WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1)
        make_optimizer = partial(adam, lr=self.identifier_lr, beta=0.5)
        node.add_module("identifier", nn.Sequential(*layers), make_optimizer)

    def send_features(self, node: NodeView, parameters: torch.Tensor, round: int) -> Tensors:
        """Return z_t = E_t(x) of some of the target's own images, with the server's E_t: ``(M, p)``."""
        if self.target not in ("", node.name):
            raise QueryRefused(node.name, "send_features", f"method.target: {self.target}")
        node.load_parameters(parameters)
        x, _ = node.sample(self.target_examples, "target", round, each_query=False)
        node.model.train(False)
        return {"features": pool_latent(node.model(x, latent_module_name(node.network())))}

    def align(self, node: NodeView, parameters: torch.Tensor, round: int, features: torch.Tensor) -> Tensors:
        """Run one round at a source site, from the server's parameters."""
        node.load_parameters(parameters)
        node.train(Span.part(round, self.rounds), partial(self.align_step, features, round))
        return {"parameters": node.parameters()}

    def align_step(
        self, features: torch.Tensor, t: int, node: NodeView, step: int, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """Take a step of C^k, and one of the model on its loss + lambda_adv L_advE.

        C^k learns to be high for the target's features ``(M, p)`` and low for the site's own; the encoder
        learns to make it high for these. Both losses are binary cross-entropies, the encoder's
        non-saturating.
        """
        identifier = node.module("identifier")
        identifier.train(True)
        rows = node.random(
            lambda generator: torch.randint(len(features), (len(x),), generator=generator),
            "target's",
            t,
            step,
        )
        z_t = features[rows]  # (B, p)
        z = pool_latent(node.model(x, latent_module_name(node.model.structure)))  # z^k = E^k(x)
        L_C = (F.softplus(-identifier(z_t)) + F.softplus(identifier(z.detach()))).mean() / 2
        node.step("identifier", L_C)
        L_advE = F.softplus(-identifier(z)).mean()
        loss = node.loss(node.model(x), y)
        node.step("model", loss + self.lambda_adv * L_advE)
        return loss

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> FLMRCMState:
        """Return the initial state, without features.

        Raises:
            ArgumentError: the target is none of the nodes.
        """
        nodes = server.federation.nodes
        if self.target not in ("", *nodes):
            raise ArgumentError("method.target", self.target, f"one of {list_names(nodes)}")
        return FLMRCMState()

    def step(self, server: Server, state: FLMRCMState, t: int) -> Mapping[str, float]:
        """Run one round: z_t from the target, local training everywhere, the weighted average.

        If the target is excluded, the sources use its last features. Without any features they train as in
        FedAvg.
        """
        federation, student = server.federation, server.student
        if not state.n:
            state.n = fetch_sizes(server)
            if "initialize_nodes" in federation.queries:
                server.query("initialize_nodes", parameters=to_vector(student))
        w, target = to_vector(student), self.target or federation.nodes[0]
        sent: dict[str, Any] = {"parameters": w, "round": t}
        if self.lambda_adv and target in federation.present:
            z_t = server.query_or_none("send_features", nodes=[target], **sent)
            state.features = state.features if z_t is None else z_t["features"][0]
        known = [name for name in federation.present_sources if name in state.n]
        names = sample_nodes(known, self.participation, server.seed, t)
        sources = [name for name in names if name != target and state.features is not None]
        others = [name for name in names if name not in sources]
        responses = [
            server.query_or_none("align", nodes=sources, **sent, features=state.features)
            if sources
            else None,
            server.query_or_none("train", nodes=others, **sent) if others else None,
        ]
        updates = {
            name: w_k
            for response in responses
            if response
            for name, w_k in response.by_node("parameters").items()
        }
        if not updates:
            raise NodeFault(list_names(names), "train", "all queried nodes are excluded")
        # In the order of the nodes, whatever query they answered.
        updates = {name: updates[name] for name in federation.nodes if name in updates}
        n = torch.tensor([state.n[name] for name in updates], device=w.device)  # (K,)
        load_vector(student, self.aggregate(state, w, torch.stack(list(updates.values())), n))
        return {"moved": (to_vector(student) - w).norm().item()}
