"""FedKD: one-shot distillation from quantized, noisy predictions on public, unlabeled data.

Gong, Sharma, Karanam, Wu, Chen, Doermann, Innanje: "Preserving Privacy in Federated Learning with Ensemble
Cross-Domain Knowledge Distillation", AAAI 2022. Symbols and equation numbers are the paper's: public data
D^0, nodes' logits z^k, class weights omega_k^c, quantizer Q with S levels, ensemble z_hat, noise Lap(1 /
gamma), the student's logits z_tilde.

The nodes' models are trained to completion first. Each predicts every public example once (or a given number
of times, under augmentation), and the student trains on the predictions. Unless the nodes must first agree on
a bound of their logits, all queries are known in advance and can be exchanged as files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Interval

from fedstill.core.errors import format_option
from fedstill.core.options import NonNegativeFloat, PositiveInt, PositiveOrInf
from fedstill.core.seeds import derive, torch_generator
from fedstill.data.augmentation import random_shift
from fedstill.methods import (
    ArgumentError,
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
    TensorData,
    Tensors,
    count_labels_query,
)
from fedstill.methods._logit_perturbation import check_no_nan, dequantize, quantize, sample_laplace
from fedstill.methods._public_data import (
    StudentTraining,
    distill,
    iterate_batches,
    require_labeled,
    require_public,
    row_range,
    split_rows,
)
from fedstill.protocol.payload_kinds import INDICES, LOGITS, SCHEDULE, PayloadKind
from fedstill.protocol.secure_aggregation import SumWeighting, linear_sums
from fedstill.tasks import Ensemble

CHUNK = 2000  # public examples in a query
MAX_QUERY_VALUES = 2**24  # values in a query, as responses may be as large as the images
LOGIT_RANGE = PayloadKind(
    "logit range",
    "the largest score in a node's responses, which sets their rounding steps",
    category="responses",
    normal_size=0.0,
    opt_out="with a bound fixed in advance (method.z_max) none is released",
)


def query_size(public: PublicData | None) -> int:
    """Return the number of public examples in a query."""
    return CHUNK if public is None else max(1, min(CHUNK, MAX_QUERY_VALUES // public.inputs[0].numel()))


def view_seed(seed: int, p: int) -> int:
    """Return the seed of the p-th view; the first view is the public data unchanged."""
    return derive(seed, "view", p) if p else 0


def shift_public(public: PublicData, seed: int) -> torch.Tensor:
    """Return all public inputs ``(N, ...)`` unchanged (seed 0), or shifted in the same way at all nodes."""
    inputs = public.inputs
    return random_shift(inputs, torch_generator(seed, "view"), flip=False) if seed else inputs


@dataclass
class FedKDState:
    """Server state besides the student."""

    optimizer: torch.optim.Optimizer  # the student's
    histogram: LabelHistogram  # weights omega_k^c
    z_hat: torch.Tensor | None = None  # ensembled logits (P, N, C, ...), after all queries


@dataclass(frozen=True, kw_only=True)
class FedKD(Method):
    """One-shot distillation from quantized, noisy predictions on public data (Algorithm 1)."""

    title: ClassVar[str] = "FedKD"
    paper: ClassVar[str] = "Gong et al., AAAI 2022"
    query_names: ClassVar[tuple[str, ...]] = ("count_labels", "max_logit", "predict")
    unit: ClassVar[Literal["epoch"]] = "epoch"
    one_round: ClassVar[bool] = True
    has_ensemble: ClassVar[bool] = True
    batch_options: ClassVar[tuple[str, ...]] = ("student.batch",)
    server_only_options: ClassVar[tuple[str, ...]] = ("ensemble", "tau", "student")
    length_options: ClassVar[tuple[str, ...]] = ("predictions",)

    levels: Annotated[int, Interval(ge=0, lt=2**32 - 1), "1 or more, up to 4294967294, or 0 (none)"] = 200
    """Levels of the quantizer (S in Eq. 4): up to 254 a logit is one byte. 0: no quantizer, logits are
    released as float32."""
    gamma: PositiveOrInf = 10.0
    """Inverse scale of the noise Lap(1 / gamma) which the server adds to ensembled logits (Eq. 2). It hides
    nothing from the server and has no epsilon; inf is none. The paper's 1 needs many public examples (it has
    50,000) or logits trained without label smoothing. For noise at the nodes see nodes.privacy.
    """
    z_max: NonNegativeFloat = 0.0
    """Bound of the logits, fixed in advance; 0: the nodes release their largest logit, and all use the
    maximum of these, as in the paper.
    """
    weights: Literal["counts", "equal"] = "counts"
    """Class weights of the nodes (omega_k^c): shares of each class's examples (Eq. 1), or 1 / K."""
    ensemble: Ensemble = "logits"
    """Combination of the logits: logits (Eq. 2), log_probs, probs, consensus, a robust one (median
    and others), or a custom one."""
    tau: PositiveOrInf = math.inf
    """Temperature of the distillation (Eq. 5-6); inf is its l2 limit (Eq. 7)."""

    predictions: PositiveInt = 1
    """Predictions of each public example (Table 2): the first one unchanged, then shifted by up to an eighth
    of the image. The student trains on the same images.
    """
    labeled: bool = False
    """Use public labels: public examples join every node's local training (Table 4)."""

    student: StudentTraining = field(default_factory=StudentTraining)
    """The training of the student; the paper's learning rate is constant."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.student.require_epochs()

    @property
    def total_steps(self) -> int:
        return self.student.epochs

    def needs(self) -> Needs:
        return Needs(public=True, public_labels=self.labeled, trains_on_public=self.labeled)

    @property
    def agrees_on_bound(self) -> bool:
        """True if the nodes must agree on a bound of their logits."""
        return self.levels > 0 and self.z_max == 0

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        """Return the queries that nodes answer.

        Raises:
            ArgumentError: shifts of texts, of rows of a table, or of images whose targets are images.
        """
        task, public = setting.task, setting.public
        if self.predictions > 1 and (task.form != "images" or task.kind == "image"):
            moved = {"texts": "texts are never shifted", "rows": "rows of a table are never shifted"}
            why = moved.get(task.form, "a shifted image was never measured")
            raise ArgumentError("method.predictions", self.predictions, f"1 for task {task.name}: {why}")
        if self.weights == "counts":
            yield count_labels_query(setting)
        if self.agrees_on_bound:
            yield Query(
                self.max_logit,
                sends={"view": SCHEDULE},
                releases={"largest": LOGIT_RANGE},
                times=self.predictions,
                depends_on_records=(),
                stackable=True,
            )
        bound = {"z_max": LOGIT_RANGE} if self.agrees_on_bound else {}
        weighting: SumWeighting = "counts" if self.weights == "counts" else "mean"
        yield Query(
            self.predict,
            sends={"rows": INDICES, "view": SCHEDULE, **bound},
            releases={"logits": LOGITS},
            times=self.predictions * len(split_rows(public, query_size(public))),
            rows=min(len(public or ()), query_size(public)),
            depends_on_records=(),
            # Quantized logits cannot be added, and probabilities saturate.
            sums=linear_sums(
                setting.secure_aggregation,
                {"logits": weighting},
                levels=(self.levels, 0),
                ensemble=(self.ensemble, "logits"),
            ),
            stackable=True,
            details=QueryDetails(postprocess=self.quantize_response, shift_seed="view"),
        )

    # --- at a node --------------------------------------------------------------------------------------

    def prepare(self, node: Node, setting: NodeSetting) -> None:
        """Add labeled public data to the node's training data, if they are used."""
        if self.labeled:
            public = require_labeled(setting.public)
            inputs = torch.cat([node.data.inputs, public.inputs])
            node.data = TensorData(inputs, torch.cat([node.data.targets, public.targets]))

    def max_logit(self, node: NodeView, view: int) -> Tensors:
        """Return max over examples and classes of abs(z^k)."""
        return {"largest": self.predict_all(node, view).abs().max()}

    def predict(self, node: NodeView, rows: torch.Tensor, view: int, z_max: float = 0.0) -> Tensors:
        """Return z^k of a range of public examples, ``(B, C, ...)``."""
        first, last = row_range(rows)
        return {"logits": self.predict_all(node, view)[first:last]}

    def quantize_response(self, response: Tensors, sent: Tensors) -> Tensors:
        """Return Q(z^k; S) of the released logits, ``(B, C, ...)`` (Eq. 4)."""
        z_max = float(sent["z_max"]) if self.agrees_on_bound else self.z_max
        return {"logits": quantize(response["logits"], self.levels, z_max)} if self.levels else response

    def predict_all(self, node: NodeView, view: int) -> torch.Tensor:
        """Return the logits of all public inputs under one view, ``(N, C, ...)``.

        The model does not change after the first query, and all queries about one view use one pass.
        """

        def compute() -> torch.Tensor:
            return node.predict(node.shared(lambda: shift_public(node.public, view)))

        return node.cached("predictions", view, compute)

    def decode_scores(self, scores: torch.Tensor, sent: Mapping[str, Any]) -> torch.Tensor:
        z_max = float(sent["z_max"]) if self.agrees_on_bound else self.z_max
        return dequantize(scores, self.levels, z_max) if self.levels else scores

    def preview_response(self, node: NodeView, x: torch.Tensor, z: torch.Tensor) -> Tensors:
        return {"logits": z}

    # --- at the server: Algorithm 1 ---------------------------------------------------------------------

    def planned_queries(self, public: PublicData | None, seed: int) -> Sequence[QueryCall]:
        """Return all queries.

        Raises:
            ArgumentError: the nodes must agree on a bound, which takes a further round.
        """
        if self.agrees_on_bound:
            bound, no_bound = format_option("method.z_max", 20), format_option("method.levels", 0)
            allowed = (
                f"a bound above 0 fixed in advance, such as {bound} (or no quantizer: {no_bound}), as nodes "
                "are queried once and cannot first agree on one"
            )
            raise ArgumentError("method.z_max", self.z_max, allowed)
        counts = [QueryCall("count_labels")] if self.weights == "counts" else []
        return [*counts, *self.iterate_public_queries(require_public(public), seed)]

    def iterate_public_queries(self, public: PublicData, seed: int) -> Iterator[QueryCall]:
        for p in range(self.predictions):
            for rows in split_rows(public, query_size(public)):
                yield QueryCall("predict", {"rows": rows, "view": torch.tensor(view_seed(seed, p))})

    def init_state(self, server: Server) -> FedKDState:
        histogram = LabelHistogram(equal=self.weights == "equal")
        return FedKDState(self.student.make_optimizer(server.student), histogram)

    def step(self, server: Server, state: FedKDState, t: int) -> Mapping[str, float]:
        """Run one pass of the student over D^0 under one view, and before the first one all queries."""
        if state.z_hat is None:
            state.histogram.fetch(server)
            state.z_hat = self.query_all(server, state)
        self.student.set_lr(state.optimizer, t, self.total_steps)
        p, seed, student = t % self.predictions, server.seed, server.student.train()
        x = shift_public(require_public(server.public), view_seed(seed, p))  # D^0  (N, ...)
        z_hat = state.z_hat[p]  # (N, C, ...)
        pairs = iterate_batches(x, z_hat, self.student.batch, seed, "public", t)
        distance = partial(server.task.distillation_loss, tau=self.tau)  # Eq. 5-7
        purpose = (seed, "student", t)
        return {"student": distill(student, state.optimizer, pairs, distance, server.compute, *purpose)}

    def query_all(self, server: Server, state: FedKDState) -> torch.Tensor:
        """Return z_hat of each prediction of each example, ``(P, N, C, ...)``."""
        z_max = self.fetch_bound(server) if self.agrees_on_bound else self.z_max
        bound, each = {"z_max": z_max} if self.agrees_on_bound else {}, []
        for call in self.iterate_public_queries(require_public(server.public), server.seed):
            responses = server.query(call.query, nodes=state.histogram.names, **call.tensors, **bound)
            z = responses["logits"]  # z^k  (K, B, C, ...)
            if self.levels:
                z = dequantize(z, self.levels, z_max)  # Q(z^k; S) from the indices of its intervals (Eq. 4)
                check_no_nan(responses.nodes, z)
            omega = state.histogram.weights(server.task, responses.nodes)  # Eq. 1  (K, 1, C)
            each.append(server.task.ensemble(z, omega, self.ensemble))  # Eq. 2  (B, C, ...)
        z_hat = torch.stack(torch.cat(each).chunk(self.predictions))  # (P, N, C, ...)
        if not math.isinf(self.gamma):
            generators = [torch_generator(server.seed, "laplace", p) for p in range(self.predictions)]
            noise = [sample_laplace(tuple(z_hat[0].shape), 1 / self.gamma, each) for each in generators]
            z_hat = z_hat + torch.stack(noise).to(z_hat.device)  # Eq. 2, Lap(1 / gamma)
        return z_hat

    def fetch_bound(self, server: Server) -> float:
        """Return z_max: the largest logit of all nodes under all views."""
        views = [view_seed(server.seed, p) for p in range(self.predictions)]
        limits = [server.query("max_logit", view=view)["largest"].max() for view in views]
        return torch.stack(limits).max().clamp_min(1e-6).item()

    def ensemble_responses(self, server: Server, state: FedKDState, responses: Responses) -> torch.Tensor:
        omega = state.histogram.weights(server.task, responses.nodes)
        return server.task.ensemble(responses["logits"], omega, self.ensemble)
