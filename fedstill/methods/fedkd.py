"""FedKD: one-shot distillation from quantize_response, noisy predictions on public, unlabeled data.

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
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Interval

from fedstill.core.errors import format_option
from fedstill.core.options import NonNegativeFloat, PositiveInt, PositiveOrInf
from fedstill.core.seeds import derive, torch_generator
from fedstill.data.augmentation import random_shift
from fedstill.methods import (
    ArgumentError,
    Needs,
    Node,
    NodeGroup,
    PublicData,
    QueryCall,
    Server,
    TensorData,
    Tensors,
)
from fedstill.methods._logit_perturbation import check_no_nan, dequantize, quantize, sample_laplace
from fedstill.methods._one_shot import STUDENT_OPTIONS, OneShotMethod, OneShotState
from fedstill.methods._public_data import (
    compute_logits,
    distill,
    iterate_batches,
    make_student_optimizer,
    require_labeled,
    require_public,
    row_range,
    split_rows,
)
from fedstill.protocol.payload_kinds import INDICES, LOGITS, SCHEDULE, PayloadKind
from fedstill.protocol.queries import NodeSetting, Query, query
from fedstill.protocol.secure_aggregation import SumWeighting
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


def shift_public(public: PublicData | None, seed: int) -> torch.Tensor:
    """Return all public inputs ``(N, ...)`` unchanged (seed 0), or shifted in the same way at all nodes."""
    inputs = require_public(public).inputs
    return random_shift(inputs, torch_generator(seed, "view"), flip=False) if seed else inputs


@dataclass(frozen=True, kw_only=True)
class FedKD(OneShotMethod):
    """FedKD."""

    title: ClassVar[str] = "FedKD"
    paper: ClassVar[str] = "Gong et al., AAAI 2022"
    server_only_options: ClassVar[tuple[str, ...]] = (*STUDENT_OPTIONS, "optimizer")
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
    """Combination of the logits: logits (Eq. 2), log_probs, probs, consensus, or a custom one."""
    tau: PositiveOrInf = math.inf
    """Temperature of the distillation (Eq. 5-6); inf is its l2 limit (Eq. 7)."""

    predictions: PositiveInt = 1
    """Predictions of each public example (Table 2): the first one unchanged, then shifted by up to an eighth
    of the image. The student trains on the same images.
    """
    labeled: bool = False
    """Use public labels: public examples join every node's local training (Table 4)."""

    epochs: PositiveInt = 200
    """Passes of the student over the public data."""
    batch: PositiveInt = 64
    """Public examples in a batch of the student."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Adam, or SGD with momentum 0.9."""
    lr: NonNegativeFloat = 1e-3
    """The student's learning rate, falling on a cosine to lr_end."""
    lr_end: NonNegativeFloat = 1e-3
    """Learning rate of the last pass; the paper's is constant."""

    def needs(self) -> Needs:
        return Needs(public=True, public_labels=self.labeled, trains_on_public=self.labeled)

    @property
    def agrees_on_bound(self) -> bool:
        """True if the nodes must agree on a bound of their logits."""
        return self.levels > 0 and self.z_max == 0

    # --- at the nodes -----------------------------------------------------------------------------------

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        """Return the queries that nodes answer.

        Raises:
            ArgumentError: shifts of texts, of rows of a table, or of images whose targets are images.
        """
        task = setting.task
        if self.predictions > 1 and (task.form != "images" or task.kind == "image"):
            moved = {"texts": "texts are never shifted", "rows": "rows of a table are never shifted"}
            why = moved.get(task.form, "a shifted image was never measured")
            raise ArgumentError("method.predictions", self.predictions, f"1 for task {task.name}: {why}")
        return super().queries(setting)

    def prepare(self, nodes: Sequence[Node], setting: NodeSetting) -> None:
        """Add labeled public data to each node's training data, if they are used."""
        if self.labeled:
            public = require_labeled(setting.public)
            for node in nodes:
                inputs = torch.cat([node.data.inputs, public.inputs])
                node.data = TensorData(inputs, torch.cat([node.data.targets, public.targets]))

    def predict_all(self, nodes: NodeGroup, view: int) -> torch.Tensor:
        """Return each node's logits for all public inputs under one view, ``(G, N, C, ...)``.

        Models do not change after the first query. The last pass of each group is cached, as all queries
        about one view use it.
        """
        names = tuple(node.name for node in nodes.nodes)
        cache: dict[tuple[str, ...], tuple[int, torch.Tensor]] = nodes.setting.cached("predictions", dict)
        if names not in cache or cache[names][0] != view:
            cache[names] = view, compute_logits(nodes, shift_public(nodes.setting.public, view))
        return cache[names][1]

    @query(
        when=lambda self, setting: self.agrees_on_bound,
        sends={"view": SCHEDULE},
        releases={"largest": LOGIT_RANGE},
        times=lambda self, setting: self.predictions,
        depends_on_records=(),
    )
    def max_logit(self, nodes: NodeGroup, view: int) -> Tensors:
        """Return max over examples and classes of abs(z^k), ``(G,)``."""
        return {"largest": self.predict_all(nodes, view).abs().flatten(1).amax(1)}

    def quantize_response(self, response: Tensors, sent: Tensors) -> Tensors:
        """Return Q(z^k; S) of the released logits, ``(B, C, ...)``."""
        z_max = float(sent["z_max"]) if self.agrees_on_bound else self.z_max
        return (
            {"logits": quantize(response["logits"], self.levels, z_max)} if self.levels else response
        )  # Eq. 4

    @query(
        sends=lambda self, setting: {
            "rows": INDICES,
            "view": SCHEDULE,
            **({"z_max": LOGIT_RANGE} if self.agrees_on_bound else {}),
        },
        releases={"logits": LOGITS},
        times=lambda self, setting: (
            self.predictions * len(split_rows(setting.public, query_size(setting.public)))
        ),
        rows=lambda self, setting: min(len(setting.public or ()), query_size(setting.public)),
        depends_on_records=(),
        postprocess=quantize_response,
        shift_seed="view",
        sums=lambda self, setting: self.sum_weightings(setting),
    )
    def predict(self, nodes: NodeGroup, rows: torch.Tensor, view: int, z_max: float = 0.0) -> Tensors:
        """Return z^k of a range of public examples, ``(G, B, C, ...)``."""
        first, last = row_range(rows)
        z = self.predict_all(nodes, view)[:, first:last]
        return {"logits": z}

    def sum_weightings(self, setting: NodeSetting) -> Mapping[str, SumWeighting]:
        """Return the weighting of z_hat before its noise (Eq. 2), which is a sum over nodes.

        Raises:
            ArgumentError: a quantizer, whose indices cannot be added.
        """
        if self.levels:
            raise ArgumentError(
                "method.levels", self.levels, "0 (no quantizer) where link.secure_aggregation"
            )
        return super().sum_weightings(setting)

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
        return super().planned_queries(public, seed)

    def iterate_public_queries(self, public: PublicData, seed: int) -> Iterator[QueryCall]:
        for p in range(self.predictions):
            for rows in split_rows(public, query_size(public)):
                yield QueryCall("predict", {"rows": rows, "view": torch.tensor(view_seed(seed, p))})

    def init_state(self, server: Server) -> OneShotState:
        return OneShotState(make_student_optimizer(server.student, self.lr, self.optimizer))

    def targets(self, server: Server, state: OneShotState) -> Mapping[str, torch.Tensor]:
        """Return z_hat of each prediction of each example."""
        z_max = self.fetch_bound(server) if self.agrees_on_bound else self.z_max
        bound, each = {"z_max": z_max} if self.agrees_on_bound else {}, []
        for call in self.iterate_public_queries(require_public(server.public), server.seed):
            responses, omega = self.query_with_weights(server, state, call, **bound)
            # (K, B, C, ...), or of fewer nodes, whose weights make up for the others'
            z = responses["logits"]
            if self.levels:
                z = dequantize(z, self.levels, z_max)
                check_no_nan(responses.nodes, z)
            each.append(server.task.ensemble(z, omega, self.ensemble))  # Eq. 2
        z_hat = torch.stack(torch.cat(each).chunk(self.predictions))
        if not math.isinf(self.gamma):
            draws = [torch_generator(server.seed, "laplace", p) for p in range(self.predictions)]
            noise = [sample_laplace(tuple(z_hat[0].shape), 1 / self.gamma, draw) for draw in draws]
            z_hat = z_hat + torch.stack(noise).to(z_hat.device)  # Eq. 2, Lap(1 / gamma)
        return {"z_hat": z_hat}  # (P, N, C, ...)

    def fetch_bound(self, server: Server) -> float:
        """Return z_max: the largest logit of all nodes under all views."""
        views = [view_seed(server.seed, p) for p in range(self.predictions)]
        limits = [server.query("max_logit", view=view)["largest"].max() for view in views]
        return torch.stack(limits).max().clamp_min(1e-6).item()

    def train_epoch(self, server: Server, state: OneShotState, e: int) -> Mapping[str, float]:
        """Run one pass over D^0 under view ``e`` modulo the number of views."""
        p, seed = e % self.predictions, server.seed
        x, z_hat = shift_public(server.public, view_seed(seed, p)), state.targets["z_hat"][p]
        pairs = iterate_batches(x, z_hat, self.batch, seed, "public", e)
        distance = partial(server.task.distillation_loss, tau=self.tau)  # Eq. 5-7
        S = server.student
        return {"student": distill(S, state.optimizer, pairs, distance, server.compute, seed, "student", e)}
