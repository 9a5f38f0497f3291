"""Shared parts of methods with public data: weights of the nodes, responses about rows, training on rows.

Server and nodes hold the same public inputs, so a query about them carries row numbers and the seed of an
augmentation, never inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.methods import (
    ArgumentError,
    Node,
    NodeGroup,
    PublicData,
    Responses,
    TensorData,
    stack_tensors,
    torch_generator,
)
from fedstill.methods._label_histogram import LabelCountQuery, LabelHistogram, Tensors
from fedstill.methods._server import Server, descend
from fedstill.node.local_training import inference_batch_size, make_optimizer
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import Method
from fedstill.protocol.queries import NodeSetting, Query
from fedstill.protocol.secure_aggregation import SumWeighting
from fedstill.tasks import Ensemble

FORWARD_BATCH = (
    250  # public inputs that each node of a group computes at once, and fewer where they are large
)

Distance = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # student, target (B, C, ...) to (B,)
Batch = tuple[torch.Tensor, torch.Tensor]  # inputs (B, ...) and targets (B, C, ...)


# --- weights of the nodes in an ensemble ----------------------------------------------------------------


@dataclass
class WeightedState:
    """Server state: the student's optimizer, and the nodes' weights."""

    optimizer: torch.optim.Optimizer
    histogram: LabelHistogram = field(default_factory=LabelHistogram)  # empty until the first turn


class LogitEnsembleMethod(Method):
    """Base class of methods whose nodes return logits, which are combined as option ``ensemble`` says."""

    ensemble: Ensemble

    def logit_sum_weighting(self, weighting: SumWeighting) -> Mapping[str, SumWeighting]:
        """Return the weighting of summed logits under secure aggregation.

        Raises:
            ArgumentError: an ensemble that is not a weighted mean of logits. Probabilities and their
                logarithms saturate: for inputs that a server chooses, all nodes but one add exactly 0.
        """
        if self.ensemble != "logits":
            expected = "logits, as saturated probabilities of extreme inputs reveal single responses"
            raise ArgumentError("method.ensemble", self.ensemble, expected)
        return {"logits": weighting}


class NodeWeightingMethod(LabelCountQuery, LogitEnsembleMethod):
    """Base class of methods that weight nodes by their shares of each class's examples, or equally."""

    weights: Literal["counts", "equal"]

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        """Return the queries, without label counts if the nodes are weighted equally."""
        return [
            query
            for query in super().queries(setting)
            if self.weighted_by_counts or query.name != "count_labels"
        ]

    @property
    def weighted_by_counts(self) -> bool:
        """True if nodes are weighted by their shares of each class's examples."""
        return self.weights == "counts"

    def preview_responses(
        self, nodes: Sequence[Node], x: torch.Tensor, z: torch.Tensor, setting: NodeSetting
    ) -> Tensors:
        return {"logits": z}

    def sum_weightings(self, setting: NodeSetting) -> Mapping[str, SumWeighting]:
        """Return the weighting of summed logits; raises as :meth:`logit_sum_weighting`."""
        return self.logit_sum_weighting("counts" if self.weighted_by_counts else "mean")

    def fetch_weights(self, server: Server, state: Any) -> None:
        """Fetch the nodes' label counts, if they are weights and not known yet."""
        if self.weighted_by_counts:
            state.histogram.fetch(server)
        elif not state.histogram.names:
            names = (
                server.federation.response_sources
                if server.federation.link.secure_aggregation
                else server.federation.nodes
            )
            even = LabelHistogram.uniform(names, server.task.classes, server.device)
            state.histogram = even

    def omega(self, server: Server, state: Any, nodes: Sequence[str]) -> torch.Tensor:
        """Return the weights of some nodes by class: ``(K, 1, C)``, summing to 1 over nodes."""
        return server.task.importance_weights(state.histogram.select(nodes).counts)

    def ensemble_responses(self, server: Server, state: Any, responses: Responses) -> torch.Tensor | None:
        if not state.histogram.names:
            return None
        omega = self.omega(server, state, responses.nodes)
        return server.task.ensemble(responses["logits"], omega, self.ensemble)


# --- the data ------------------------------------------------------------------------------------------


def require_public(public: PublicData | None) -> PublicData:
    """Return the public data.

    Raises:
        ArgumentError: there are none.
    """
    if public is None:
        raise ArgumentError("public", None, "public data")
    return public


def require_labeled(public: PublicData | None) -> TensorData:
    """Return the public data with labels.

    Raises:
        ArgumentError: there are none, or they have no labels.
    """
    public = require_public(public)
    if public.labels is None:
        raise ArgumentError("public.labels", None, "labels, to learn from")
    return TensorData(public.inputs, public.labels)


def split_rows(public: PublicData | None, size: int) -> list[torch.Tensor]:
    """Return ranges of at most ``size`` rows that cover the public data, ``(2,)`` each; none without public
    data.

    >>> [rows.tolist() for rows in split_rows(PublicData("made", torch.zeros(5, 1)), 2)]
    [[0, 2], [2, 4], [4, 5]]
    """
    total = 0 if public is None else len(public)
    return [torch.tensor([first, min(first + size, total)]) for first in range(0, total, size)]


def row_range(rows: torch.Tensor) -> tuple[int, int]:
    """Return start and stop of a received row range ``(G, 2)``.

    Raises:
        ArgumentError: not a range.

    >>> row_range(torch.tensor([[2, 4]]))
    (2, 4)
    """
    if rows.ndim != 2 or rows.shape[1] != 2 or not rows[0, 0] <= rows[0, 1]:
        expected = "two row numbers, the first no larger: from one up to the other"
        raise ArgumentError("rows", tuple(rows.shape[1:]), expected)
    first, last = rows[0].tolist()
    return first, last


def sample_rows(server: Server, most: int, t: int) -> torch.Tensor:
    """Return the row numbers of a round's subset of the public data, ``(B,)`` on the CPU; at most
    ``most``."""
    generator = torch_generator(server.seed, "subset", t)
    return torch.randperm(len(require_public(server.public)), generator=generator)[:most]


def shuffled_batches(count: int, batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return one shuffled pass over ``count`` rows, in batches of nearly equal size up to ``batch``.

    Batch norm cannot train on one row: if ``batch`` is 2 and ``count`` odd, one batch has 3.

    >>> sorted(len(rows) for rows in shuffled_batches(10, 4, torch.Generator()))
    [3, 3, 4]
    >>> sorted(len(rows) for rows in shuffled_batches(5, 2, torch.Generator()))
    [2, 3]
    """
    order = torch.randperm(count, generator=generator)
    pieces = math.ceil(count / batch)
    return torch.tensor_split(order, min(pieces, max(count // 2, 1)) if batch > 1 else pieces)


def iterate_batches(
    x: torch.Tensor, target: torch.Tensor, size: int, seed: int, *purpose: str | int
) -> Iterator[Batch]:
    """Yield one shuffled pass over inputs ``(N, ...)`` and targets ``(N, C, ...)``; ``purpose`` names the
    order."""
    for rows in shuffled_batches(len(x), size, torch_generator(seed, *purpose)):
        chosen = rows.to(x.device)
        yield x[chosen], target[chosen]


# --- responses and training ----------------------------------------------------------------------------


def compute_logits(group: NodeGroup, x: torch.Tensor) -> torch.Tensor:
    """Return each node's logits for the same inputs ``(N, ...)``: ``(G, N, C, ...)``."""
    model = group.module("model")
    pieces = torch.split(x, min(FORWARD_BATCH, inference_batch_size(x)))
    return torch.cat([model(part.expand(len(group), *part.shape)) for part in pieces], 1)


def make_student_optimizer(
    model: nn.Module, lr: float, how: Literal["adam", "sgd"] = "adam"
) -> torch.optim.Optimizer:
    """Return Adam, or SGD with momentum 0.9, for a network's trainable parameters."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return make_optimizer(learning, LocalConfig(optimizer=how, lr=lr))


def finetune_on_public(
    nodes: NodeGroup,
    x: torch.Tensor,
    targets: torch.Tensor,
    losses: Distance,
    *purpose: str | int,
    epochs: int,
    batch: int,
    lr: float,
) -> None:
    """Train each node's model on the same public examples ``(N, ...)``, in its own order, with a new Adam.

    ``losses`` maps outputs and targets ``(G, B, ...)`` to ``(G,)``; ``purpose`` names the random streams.
    """
    model, first = nodes.module("model"), nodes.nodes[0]
    model.train(True)
    optimizers = [make_student_optimizer(node.model, lr) for node in nodes.nodes]
    for epoch in range(epochs):
        orders = [
            shuffled_batches(len(x), batch, node.random_generator(*purpose, epoch)) for node in nodes.nodes
        ]
        for step, rows in enumerate(zip(*orders, strict=True)):
            chosen = stack_tensors(rows).to(x.device)  # (G, B)
            with (
                torch.enable_grad(),
                nodes.setting.compute.step(first.seed, first.name, *purpose, epoch, step),
            ):
                model.backward(losses(model(x[chosen]), targets[chosen]))
            for optimizer in optimizers:
                optimizer.step()
    model.train(False)


def distill(
    student: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    distance: Distance,
    compute: Compute,
    seed: int,
    *purpose: str | int,
) -> float:
    """Train a student towards targets, one step for each batch, and return the mean distance, or 0.

    The student's training mode is not changed. ``seed`` and ``purpose`` name the random stream of dropout.
    """
    losses = []
    for step, (x, target) in enumerate(batches):
        with compute.step(seed, *purpose, step):
            loss = distance(student(x).float(), target).mean()
        descend(optimizer, loss)
        losses.append(loss.detach())
    return torch.stack(losses).mean().item() if losses else 0.0


def train_student(
    server: Server,
    optimizer: torch.optim.Optimizer,
    rows: torch.Tensor,
    targets: torch.Tensor,
    distance: Distance,
    t: int,
    *,
    epochs: int,
    batch: int,
) -> float:
    """Train the student on the public examples of rows ``(B,)`` in round t and return the mean distance."""
    x = require_public(server.public).inputs[rows]
    orders = [
        iterate_batches(x, targets, batch, server.seed, "student's order", t, epoch)
        for epoch in range(epochs)
    ]
    student, compute = server.student.train(), server.compute
    return distill(student, optimizer, chain(*orders), distance, compute, server.seed, "student", t)
