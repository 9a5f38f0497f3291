"""FedAD: one-way distillation of the nodes' outputs and attention maps on public, unlabeled images.

Gong, Sharma, Karanam, Wu, Chen, Doermann, Innanje: "Ensemble Attention Distillation for Privacy-Preserving
Federated Learning", ICCV 2021; for reconstruction Gong et al., "Federated Learning with Privacy-Preserving
Ensemble Attention Distillation", arXiv:2210.08464. The nodes' outputs for public images are z_k here and
their attention maps A_k; the student's are z and A.

The nodes' models are trained to completion first. Each is queried once about every public image, and the
student trains on the responses. Nothing is sent back to a node. The student's attention should lie between
the nodes' intersection, min_k A_k, on which they agree, and their union, max_k A_k, which keeps all that some
of them attend to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch

from fedstill.core import timing
from fedstill.core.dataset import shuffled_batches
from fedstill.core.options import NonNegativeFloat, PositiveOrInf
from fedstill.methods import (
    LabelHistogram,
    Method,
    Needs,
    Node,
    NodeSetting,
    NodeView,
    PublicData,
    Query,
    QueryCall,
    QueryDetails,
    Responses,
    Server,
    Tensors,
    count_labels_query,
    descend,
    torch_generator,
)
from fedstill.methods._public_data import (
    StudentTraining,
    require_public,
    row_range,
    split_rows,
)
from fedstill.models.attention_maps import find_attention_layer, outputs_and_attention
from fedstill.node.node_view import PUBLIC_BATCH
from fedstill.protocol.payload_kinds import INDICES, LOGITS, PayloadKind
from fedstill.tasks import Ensemble

CHUNK = 2000  # public images a query
SIDE = 8  # cells of an attention map, each way
ATTENTION = PayloadKind(
    "attention maps",
    "the regions of each public image that a node's model attends to",  # pooled activations
    category="responses",
    opt_out="with method.attention = 0 none are released",
)


@dataclass
class FedADState:
    """Server state besides the student."""

    optimizer: torch.optim.Optimizer  # the student's
    histogram: LabelHistogram  # weights of the nodes
    layer: str  # name of the student's attention layer
    targets: Mapping[str, torch.Tensor] = field(default_factory=dict)  # empty before the first pass


@dataclass(frozen=True, kw_only=True)
class FedAD(Method):
    """FedAD's options."""

    title: ClassVar[str] = "FedAD"
    paper: ClassVar[str] = "Gong et al., ICCV 2021"
    query_names: ClassVar[tuple[str, ...]] = ("count_labels", "predict")
    unit: ClassVar[Literal["epoch"]] = "epoch"
    one_round: ClassVar[bool] = True
    has_ensemble: ClassVar[bool] = True
    batch_options: ClassVar[tuple[str, ...]] = ("student.batch",)
    server_only_options: ClassVar[tuple[str, ...]] = ("ensemble", "tau", "student")

    attention: NonNegativeFloat = 1.0
    """Weight of the attention loss; 0: no maps are released, and networks need no spatial activations."""
    weights: Literal["counts", "equal"] = "counts"
    """Weights of the nodes in the ensemble: their shares of the examples of each class, or equal."""
    ensemble: Ensemble = "logits"
    """Combination of the responses: logits, log_probs, probs, consensus, a robust one (median
    and others), or a custom one."""
    tau: PositiveOrInf = 1.0
    """Temperature of the distillation; inf is its l2 limit."""

    student: StudentTraining = field(
        default_factory=partial(StudentTraining, epochs=100, batch=32, lr_end=1e-5)
    )
    """The training of the student."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.student.require_epochs()

    @property
    def total_steps(self) -> int:
        return self.student.epochs

    def needs(self) -> Needs:
        return Needs(public=True, images=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        if self.weights == "counts":
            yield count_labels_query(setting)
        yield Query(
            self.predict,
            sends={"rows": INDICES},
            releases={"logits": LOGITS, **({"attention": ATTENTION} if self.attention else {})},
            times=len(split_rows(setting.public, CHUNK)),
            rows=min(len(setting.public or ()), CHUNK),
            depends_on_records=(),
            stackable=True,
            details=QueryDetails(reads_values=True),
        )

    # --- at a node --------------------------------------------------------------------------------------

    def prepare(self, node: Node, setting: NodeSetting) -> None:
        """Find the attention layer of the model before training."""
        if self.attention:
            layers: dict[str, str] = setting.cached("layers", dict)
            shape = tuple(node.data.inputs.shape[1:])
            layers[node.name] = find_attention_layer(node.model, shape, f"the model of {node.name}")

    def predict(self, node: NodeView, rows: torch.Tensor) -> Tensors:
        """Return z_k ``(B, C, ...)`` and A_k ``(B, 64)`` of a range of public images."""
        first, last = row_range(rows)
        x = node.public.inputs[first:last]
        node.model.train(False)
        if not self.attention:
            return {"logits": node.predict(x)}
        z_k, A_k = node.separately(partial(self.predict_with_attention, x=x))
        return {"logits": z_k, "attention": A_k}

    def predict_with_attention(self, node: NodeView, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return z_k and A_k of one node; hooks work only on a model that is evaluated by itself."""
        layers: dict[str, str] = node.setting.cached("layers", dict)
        each = []
        for part in torch.split(x, PUBLIC_BATCH):
            timing.check_limits()
            each.append(outputs_and_attention(node.network(), layers[node.name], part, SIDE))
        return torch.cat([z.float() for z, _ in each]), torch.cat([A for _, A in each])

    def preview_response(self, node: NodeView, x: torch.Tensor, z: torch.Tensor) -> Tensors:
        return {"logits": z}

    # --- at the server ----------------------------------------------------------------------------------

    def planned_queries(self, public: PublicData | None, seed: int) -> Sequence[QueryCall]:
        """Return all queries."""
        counts = [QueryCall("count_labels")] if self.weights == "counts" else []
        return [*counts, *self.iterate_public_queries(require_public(public), seed)]

    def iterate_public_queries(self, public: PublicData, seed: int) -> Iterator[QueryCall]:
        for rows in split_rows(public, CHUNK):
            yield QueryCall("predict", {"rows": rows})

    def init_state(self, server: Server) -> FedADState:
        """Return the initial state.

        Raises:
            ModelError: a student without spatial activations.
        """
        layer = find_attention_layer(server.student, server.shape, "the student") if self.attention else ""
        histogram = LabelHistogram(equal=self.weights == "equal")
        return FedADState(self.student.make_optimizer(server.student), histogram, layer)

    def step(self, server: Server, state: FedADState, t: int) -> Mapping[str, float]:
        """Run one pass of the student over the public images, and before the first one all queries."""
        if not state.targets:
            state.histogram.fetch(server)
            state.targets = self.query_all(server, state)
        self.student.set_lr(state.optimizer, t, self.total_steps)
        server.student.train()
        return self.train_epoch(server, state, t)

    def query_all(self, server: Server, state: FedADState) -> Mapping[str, torch.Tensor]:
        """Return outputs ``(N, C, ...)``; with attention also its bounds ``least`` and ``most`` ``(N,
        64)``."""
        each: list[dict[str, torch.Tensor]] = []
        for call in self.iterate_public_queries(require_public(server.public), server.seed):
            responses = server.query(call.query, nodes=state.histogram.names, **call.tensors)
            z = self.ensemble_responses(server, state, responses)  # (B, C, ...)
            each.append({"outputs": z})
            if self.attention:
                A = responses["attention"]  # (K, B, 64)
                each[-1] |= {"least": A.amin(0), "most": A.amax(0)}  # intersection and union
        return {name: torch.cat([part[name] for part in each]) for name in each[0]}

    def train_epoch(self, server: Server, state: FedADState, e: int) -> Mapping[str, float]:
        order = shuffled_batches(
            len(require_public(server.public)), self.student.batch, torch_generator(server.seed, "order", e)
        )
        losses = [self.train_batch(server, state, e, step, rows) for step, rows in enumerate(order)]
        L_z, L_A = torch.stack(losses).mean(0).tolist()
        return {"student": L_z, **({"attention": L_A} if self.attention else {})}

    def train_batch(
        self, server: Server, state: FedADState, e: int, step: int, rows: torch.Tensor
    ) -> torch.Tensor:
        """Take a step of the student on some public images and return its two unweighted losses."""
        rows = rows.to(server.device)
        x = require_public(server.public).inputs[rows]
        target = {name: tensor[rows] for name, tensor in state.targets.items()}
        L_A = target["outputs"].new_zeros(())
        with server.compute.step(server.seed, "student", e, step):
            if self.attention:
                z, A = outputs_and_attention(server.student, state.layer, x, SIDE)
                L_A = attention_loss(A, target["least"], target["most"]).mean()
            else:
                z = server.student(x)
            L_z = server.task.distillation_loss(z.float(), target["outputs"], self.tau).mean()
        descend(state.optimizer, L_z + self.attention * L_A)
        return torch.stack([L_z.detach(), L_A.detach()])

    def ensemble_responses(self, server: Server, state: FedADState, responses: Responses) -> torch.Tensor:
        omega = state.histogram.weights(server.task, responses.nodes)  # (K, 1, C)
        return server.task.ensemble(responses["logits"], omega, self.ensemble)


def attention_loss(A: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """Return the squared distances ``(B,)`` of maps ``(B, P)`` from their bounds ``(B, P)``, 0 within.

    >>> A, least, most = torch.tensor([[0.1, 0.5, 0.9]]), torch.full((1, 3), 0.3), torch.full((1, 3), 0.6)
    >>> attention_loss(A, least, most)  # 0.2 below and 0.3 above
    tensor([0.1300])
    """
    return ((least - A).clamp_min(0) + (A - most).clamp_min(0)).square().sum(1)
