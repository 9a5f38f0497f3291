"""FedAD: one-way distillation of what nodes answer about public, unlabeled images, and of where they look.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedstill.core import timing
from fedstill.core.options import NonNegativeFloat, PositiveInt, PositiveOrInf
from fedstill.methods import (
    Needs,
    Node,
    NodeGroup,
    PublicData,
    QueryCall,
    Server,
    Tensors,
    descend,
    torch_generator,
)
from fedstill.methods._one_shot import OneShot, OneShotState
from fedstill.methods._public_data import (
    FORWARD_BATCH,
    compute_logits,
    make_student_optimizer,
    require_public,
    row_range,
    shuffled_batches,
    split_rows,
)
from fedstill.models.attention_maps import find_attention_layer, outputs_and_attention
from fedstill.protocol.payload_kinds import INDICES, LOGITS, PayloadKind
from fedstill.protocol.queries import NodeSetting, query
from fedstill.tasks import Ensemble

CHUNK = 2000  # public images a query
SIDE = 8  # cells of an attention map, each way
ATTENTION = PayloadKind(
    "attention maps",
    "where a node's model looks in each public image",  # what its layers say of it, pooled
    category="responses",
    opt_out="with method.attention = 0 none are told",
)


@dataclass
class FedADState(OneShotState):
    """What changes from pass to pass, and where the student looks."""

    place: str = ""  # of the layer whose activations its attention is


@dataclass(frozen=True, kw_only=True)
class FedAD(OneShot):
    """FedAD's options."""

    title: ClassVar[str] = "FedAD"
    paper: ClassVar[str] = "Gong et al., ICCV 2021"

    attention: NonNegativeFloat = 1.0
    """Weight of the attention loss; 0: no maps are told, and networks need no activations with places."""
    weights: Literal["counts", "equal"] = "counts"
    """How nodes are weighed in the ensemble: by their share of the examples of each class, or equally."""
    ensemble: Ensemble = "logits"
    """How answers are ensembled: logits, log_probs, probs, consensus, or one of your own."""
    tau: PositiveOrInf = 1.0
    """Temperature of the distillation; inf is its l2 limit."""

    epochs: PositiveInt = 100
    """Passes of the student over the public images."""
    batch: PositiveInt = 32
    """Public images a step of the student."""
    lr: NonNegativeFloat = 1e-3
    """Adam's learning rate, falling on a cosine to lr_end."""
    lr_end: NonNegativeFloat = 1e-5
    """Learning rate of the last pass."""

    def needs(self) -> Needs:
        return Needs(public=True, images=True)

    # --- at the nodes -----------------------------------------------------------------------------------

    def prepare(self, nodes: Sequence[Node], setting: NodeSetting) -> None:
        """Find where each model looks, before anything is trained."""
        places: dict[str, str] = setting.cached("places", dict)
        for node in nodes if self.attention else ():
            shape = tuple(node.data.inputs.shape[1:])
            places[node.name] = find_attention_layer(node.model, shape, f"the model of {node.name}")

    @query(
        sends={"rows": INDICES},
        releases=lambda self, setting: {
            "logits": LOGITS,
            **({"attention": ATTENTION} if self.attention else {}),
        },
        times=lambda self, setting: len(split_rows(setting.public, CHUNK)),
        rows=lambda self, setting: min(len(setting.public or ()), CHUNK),
        depends_on_records=(),
    )
    def predict(self, nodes: NodeGroup, rows: torch.Tensor) -> Tensors:
        """z_k ``(G, B, C, ...)`` and A_k ``(G, B, 64)`` of public images from one row up to another."""
        first, last = row_range(rows)
        x = require_public(nodes.setting.public).inputs[first:last]
        nodes.module("model").train(False)
        if not self.attention:
            return {"logits": compute_logits(nodes, x)}
        places: dict[str, str] = nodes.setting.cached("places", dict)
        told = [self.attended(node, places[node.name], x) for node in nodes.nodes]
        return {"logits": torch.stack([z for z, _ in told]), "attention": torch.stack([A for _, A in told])}

    def attended(self, node: Node, place: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """z_k and A_k of one node: an activation inside is seen only where a model is computed by itself."""
        each = []
        for part in torch.split(x, FORWARD_BATCH):
            timing.check_limits()
            each.append(outputs_and_attention(node.model, place, part, SIDE))
        return torch.cat([z.float() for z, _ in each]), torch.cat([A for _, A in each])

    # --- at the server ----------------------------------------------------------------------------------

    def public_queries(self, public: PublicData, seed: int) -> Iterator[QueryCall]:
        for rows in split_rows(public, CHUNK):
            yield QueryCall("predict", {"rows": rows})

    def init_state(self, server: Server) -> FedADState:
        """Nobody has been asked yet; a student without attention is refused."""
        place = find_attention_layer(server.student, server.shape, "the student") if self.attention else ""
        return FedADState(make_student_optimizer(server.student, self.lr), place=place)

    def targets(self, server: Server, state: FedADState) -> Mapping[str, torch.Tensor]:
        """Outputs ``(N, C, ...)``; with attention, its least and most ``(N, 64)``."""
        each: list[dict[str, torch.Tensor]] = []
        for call in self.public_queries(require_public(server.public), server.seed):
            responses, omega = self.query_with_weights(server, state, call)  # (K, 1, C)
            z = server.task.ensemble(responses["logits"], omega, self.ensemble)  # (B, C, ...)
            each.append({"outputs": z})
            if self.attention:
                A = responses["attention"]  # (K, B, 64)
                each[-1] |= {"least": A.amin(0), "most": A.amax(0)}  # intersection and union
        return {name: torch.cat([part[name] for part in each]) for name in each[0]}

    def train_epoch(self, server: Server, state: FedADState, e: int) -> Mapping[str, float]:
        order = shuffled_batches(
            len(require_public(server.public)), self.batch, torch_generator(server.seed, "order", e)
        )
        losses = [self.train_batch(server, state, e, step, rows) for step, rows in enumerate(order)]
        L_z, L_A = torch.stack(losses).mean(0).tolist()
        return {"student": L_z, **({"attention": L_A} if self.attention else {})}

    def train_batch(
        self, server: Server, state: FedADState, e: int, step: int, rows: torch.Tensor
    ) -> torch.Tensor:
        """A step of the student on some public images: its two losses, unweighted."""
        rows = rows.to(server.device)
        x = require_public(server.public).inputs[rows]
        target = {name: tensor[rows] for name, tensor in state.targets.items()}
        L_A = target["outputs"].new_zeros(())
        with server.compute.step(server.seed, "student", e, step):
            if self.attention:
                z, A = outputs_and_attention(server.student, state.place, x, SIDE)
                L_A = outside(A, target["least"], target["most"]).mean()
            else:
                z = server.student(x)
            L_z = server.task.distillation_loss(z.float(), target["outputs"], self.tau).mean()
        descend(state.optimizer, L_z + self.attention * L_A)
        return torch.stack([L_z.detach(), L_A.detach()])


def outside(A: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """How far maps are outside their bounds: squared distances ``(B,)`` of ``(B, P)`` thrice, 0 within.

    >>> A, least, most = torch.tensor([[0.1, 0.5, 0.9]]), torch.full((1, 3), 0.3), torch.full((1, 3), 0.6)
    >>> outside(A, least, most)  # 0.2 below and 0.3 above
    tensor([0.1300])
    """
    return ((least - A).clamp_min(0) + (A - most).clamp_min(0)).square().sum(1)
