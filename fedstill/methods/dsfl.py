"""DS-FL: nodes label public data together, sharpen the mean of their labels, and train on it.

Itahara, Nishio, Koda, Morikura, Yamamoto: "Distillation-Based Semi-Supervised Federated Learning for
Communication-Efficient Collaborative Training With Non-IID Private Data", IEEE Transactions on Mobile
Computing 22(1), 2023, arXiv:2008.06180. Symbols are the paper's: models w_k, open data I^o, a round's rows
o_r of it, labels t_k by node and t_g of all, T of the entropy reduction.

In each round nodes *update* on their own data and *predict* o_r; the server *aggregates* the labels and
sharpens them; it *broadcasts* them, and all models, the server's too, are *distilled* from them.

``cache_rounds`` and ``beta`` are cache and sharpening of SCARLET (Azuma, Nishio, Kitagawa, Nakano, Tanimura:
"Soft-Label Caching and Sharpening for Communication-Efficient Federated Distillation", arXiv:2504.19602): a
label no older than its duration D is neither queried nor sent again, as server and nodes have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from fedstill.core.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from fedstill.methods import (
    LabelHistogram,
    Method,
    Needs,
    Node,
    NodeSetting,
    NodeView,
    Query,
    Responses,
    Server,
    Span,
    SpanOfRound,
    Tensors,
    count_labels_query,
)
from fedstill.methods._public_data import make_student_optimizer, require_public, sample_rows, train_student
from fedstill.protocol.payload_kinds import INDICES, LOGITS, SCHEDULE
from fedstill.tasks.logit_formulas import entropy

NEVER = -1  # no round yet
TAU = 1.0  # KL to t_g: the cross-entropy to it less its entropy, which no model moves
LR = 1e-3  # Adam's, of the student and of the nodes' second optimizer, which is new in each round


@dataclass
class DSFLState:
    """Server state besides the student."""

    optimizer: torch.optim.Optimizer  # the student's
    histogram: LabelHistogram  # weights of the nodes
    t_g: torch.Tensor  # the last labels, as logits (N, C)
    since: torch.Tensor  # the round that each label is of (N,), or NEVER
    nodes_with_labels: tuple[str, ...] = ()  # nodes that have all labels


@dataclass(frozen=True, kw_only=True)
class DSFL(Method):
    """DS-FL's options."""

    title: ClassVar[str] = "DS-FL"
    batch_options: ClassVar[tuple[str, ...]] = ("distill_batch",)
    paper: ClassVar[str] = "Itahara et al., IEEE TMC 2023"
    query_names: ClassVar[tuple[str, ...]] = ("count_labels", "predict", "distill")
    initial_training: ClassVar[Span | None] = None  # nodes learn in the rounds
    has_ensemble: ClassVar[bool] = True

    rounds: PositiveInt = 10
    """Rounds; the local training budget (nodes.local.epochs) is divided among them."""
    subset: PositiveInt = 1000
    """Examples of o_r, sampled in each round; at most all public ones."""
    weights: Literal["equal", "counts"] = "equal"
    """Weights of the nodes: equal, as in the paper, or their shares of the examples of each class."""
    T: PositiveFloat = 0.1
    """Temperature of the entropy reduction, softmax(mean / T); from 1 on labels are flatter than the mean."""
    beta: NonNegativeFloat = 0.0
    """SCARLET's sharpening in place of T's: the mean to the power of beta, normalized; 1 is the mean itself.
    0: T's."""
    cache_rounds: NonNegativeInt = 0
    """Rounds for which a label is cached (D in SCARLET): if its example is sampled again, it is neither
    queried nor sent. 0: no cache, every label is of its round.
    """
    distill_epochs: NonNegativeInt = 1
    """Passes of each node over o_r."""
    distill_batch: PositiveInt = 32
    """Public examples in a batch, of nodes and student."""
    student_epochs: NonNegativeInt = 10
    """Passes of the student over o_r."""

    def needs(self) -> Needs:
        return Needs(public=True, trainable=True, single_label=True)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        if self.weights == "counts":
            yield count_labels_query(setting)
        yield Query(
            self.predict,
            sends={"rows": INDICES, "round": SCHEDULE},
            releases={"logits": LOGITS},
            times=self.rounds,
            rows=self.subset if setting.public is None else min(self.subset, len(setting.public)),
            depends_on_records=(),
            span=SpanOfRound(self.rounds),
            stackable=True,
        )
        kept = {"kept": INDICES} if self.cache_rounds else {}
        yield Query(
            self.distill,
            sends={"rows": INDICES, "t_g": LOGITS, "round": SCHEDULE, **kept},
            times=self.rounds,
            depends_on_records=(),
            stackable=True,
        )

    # --- at a node --------------------------------------------------------------------------------------

    def prepare(self, node: Node, setting: NodeSetting) -> None:
        """Add a buffer for cached labels."""
        if self.cache_rounds:
            shape = len(require_public(setting.public)), setting.task.classes
            node.add_buffers("labels", t_g=torch.zeros(shape))

    def predict(self, node: NodeView, rows: torch.Tensor, round: int) -> Tensors:
        """*Update* on own data, then return t_k of the unlabeled rows of o_r, as logits ``(B, C)``."""
        node.train(Span.part(round, self.rounds))
        if not len(rows):  # all of o_r is labeled
            return {"logits": torch.zeros(0, node.task.classes, device=node.device)}
        node.model.train(False)
        return {"logits": node.predict(node.public.inputs[rows.long()])}

    def distill(
        self,
        node: NodeView,
        rows: torch.Tensor,
        t_g: torch.Tensor,
        round: int,
        kept: torch.Tensor | None = None,
    ) -> Tensors:
        """Distill t_g on o_r: of new ``rows`` and of those that are ``kept`` in the cache."""
        d = rows.long()
        if kept is not None:
            cached = node.cache_rows("labels", "t_g", d, t_g)  # (N, C), the same at all nodes
            d = torch.cat([d, kept.long()])
            t_g = cached[d]
        divergence = partial(node.task.distillation_loss, tau=TAU)
        passes = {"epochs": self.distill_epochs, "batch": self.distill_batch}
        node.train_on(node.public.inputs[d], t_g, divergence, "distil", round, **passes, lr=LR)
        return {}

    def preview_response(self, node: NodeView, x: torch.Tensor, z: torch.Tensor) -> Tensors:
        return {"logits": z}

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> DSFLState:
        n, to = len(require_public(server.public)), server.device
        t_g, since = torch.zeros(n, server.task.classes, device=to), torch.full((n,), NEVER, device=to)
        histogram = LabelHistogram(equal=self.weights == "equal")
        return DSFLState(make_student_optimizer(server.student, LR), histogram, t_g, since)

    def step(self, server: Server, state: DSFLState, t: int) -> Mapping[str, float]:
        state.histogram.fetch(server)
        o_r = sample_rows(server, self.subset, t).to(server.device)
        present = state.histogram.present_nodes(server.federation)
        if not state.nodes_with_labels or not {*present} <= {
            *state.nodes_with_labels
        }:  # a returning node lacks labels
            state.since.fill_(NEVER)
        fresh = (state.since[o_r] == NEVER) | (state.since[o_r] + self.cache_rounds < t)
        rows, kept = o_r[fresh], o_r[~fresh]
        responses = server.query("predict", nodes=present, rows=rows.int(), round=t)
        state.t_g[rows], state.since[rows] = self.aggregate(server, state, responses), t
        sent: dict[str, Any] = {"kept": kept.int()} if self.cache_rounds else {}
        sent |= {"rows": rows.int(), "t_g": state.t_g[rows], "round": t}
        state.nodes_with_labels = server.query("distill", nodes=responses.nodes, **sent).nodes
        passes = {"epochs": self.student_epochs, "batch": self.distill_batch}
        divergence = partial(server.task.distillation_loss, tau=TAU)
        return {
            "entropy": entropy(state.t_g[o_r], 1).mean().item(),
            "asked": len(rows) / len(o_r),
            "student": train_student(server, state.optimizer, o_r, state.t_g[o_r], divergence, t, **passes),
        }

    def aggregate(self, server: Server, state: DSFLState, responses: Responses) -> torch.Tensor:
        """Return t_g, the mean of t_k with reduced entropy, as logits: ``(B, C)``."""
        log_mean = self.ensemble_responses(server, state, responses).log_softmax(1)
        return self.beta * log_mean if self.beta else log_mean.exp() / self.T

    def ensemble_responses(self, server: Server, state: DSFLState, responses: Responses) -> torch.Tensor:
        omega = state.histogram.weights(server.task, responses.nodes)
        return server.task.ensemble(responses["logits"], omega, "probs")  # a mean of distributions
