"""Queries: declarations of the requests that a method sends to nodes.

A :class:`Query` declares a request and the function that nodes run for it. For the functions' environment
see :mod:`fedstill.protocol.node_side`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from fedstill.core.errors import ArgumentError
from fedstill.protocol.local_config import Span
from fedstill.protocol.payload_kinds import (
    DATA_SIZES,
    GRADIENTS,
    LABEL_COUNTS,
    SCHEDULE,
    PayloadKind,
    payload_kind,
)
from fedstill.protocol.secure_aggregation import WEIGHT_SUFFIX, SumWeighting

NodeFunction = Callable[..., Mapping[str, Any]]
Postprocess = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
COUNT_KINDS = (LABEL_COUNTS, DATA_SIZES)  # kinds of weights; they are no statistic of a response
WEIGHT_KINDS = {"mean": DATA_SIZES, "size": DATA_SIZES, "counts": LABEL_COUNTS}  # kind of the summed weights


@dataclass(frozen=True, kw_only=True)
class QueryDetails:
    """Rare properties of a :class:`Query`.

    Args:
        constant: the response depends on the node's data only, not on earlier queries. A repeated query is
            the same release.
        width: values in each row of a released tensor of category "rows", on which the privacy cost depends
            (0: the number of classes), or in the one vector that is released (0: unknown).
        gradients: payload kind of the released gradients.
        extra_loss: description of the terms that its training adds to the task's loss from the second step or
            round on. An attack that assumes the task's loss alone is weaker for it.
        extra_loss_reads_records: whether these terms depend on records; others need no noise.
        postprocess: function of response and sent tensors, applied after the gate's noise and before the
            response is sent, such as a quantizer. It never sees private values.
        owner_only: tensors of the request that are sent only to the node whose releases they come from.
        shift_seed: name of the sent number that seeds the shift of the public inputs; 0 shifts none.
        ragged: tensors of the response whose shape differs between nodes. The server reads them with
            :meth:`Responses.by_node`.
        json_values: parts of request or response that are JSON values in place of tensors.
        step_records: mean number of records in the training step of each network in ``trains``, which the
            privacy cost of that step depends on. 0: ``rows``.
        finite_differences: the server subtracts nearly equal responses, which bfloat16 would round away. They
            are then computed in float32, whatever the run's precision.
        reads_values: the function reads values of tensors in ``node.separately``, so that no CUDA graph can
            capture it.
    """

    constant: bool = False
    width: int = 0
    gradients: PayloadKind = GRADIENTS
    extra_loss: str = ""
    extra_loss_reads_records: bool = True
    postprocess: Postprocess | None = None
    owner_only: tuple[str, ...] = ()
    shift_seed: str = ""
    ragged: tuple[str, ...] = ()
    json_values: tuple[str, ...] = ()
    step_records: int = 0
    finite_differences: bool = False
    reads_values: bool = False


@dataclass(frozen=True)
class Query:
    """Declaration of one request that a method sends to nodes.

    Args:
        function: function that a node runs for it, ``function(node, **inputs)``, where ``node`` is a
            :class:`fedstill.node.node_view.NodeView`. It returns the response, a tensor for each name in
            ``releases``. A sent tensor without dimensions arrives as a number.
        sends: payload kind of each tensor of the request, by name.
        releases: payload kind of each tensor of the response, by name.
        differentiable: inputs for which the server can request gradients. These gradients are releases, too.
        times: number of these queries in a run. A node with a limit refuses by it before any training. 0:
            unknown.
        rows: largest number of inputs in a query, if known in advance; the privacy cost depends on it.
        depends_on_records: tensors of the response that are computed from the node's records directly. All
            others are outputs of its networks. None: not declared, so that no mechanism can protect any.
        trains: networks other than the model that take one training step on the node's records for each
            response.
        span: part of the local training that the query includes, as a function of the sent tensors; None:
            none.
        sums: how each part of the response is added over nodes under secure aggregation
            (:mod:`fedstill.protocol.secure_aggregation`). Empty otherwise, and for responses that cannot be
            added.
        stackable: one call of the function can serve several nodes (:mod:`fedstill.node.node_view`), and, if
            only tensors are sent, a CUDA graph can capture it. The function then uses no property of a single
            node, such as its name or data, and no value of a tensor in Python.
        name: name in policies and audit logs; the function's name by default.
        details: rare properties.

    Attributes:
        declared_in: class of the method whose ``queries`` makes this declaration; None outside of it.

    Raises:
        ArgumentError: parts of the declaration that contradict each other.
    """

    function: NodeFunction
    sends: Mapping[str, PayloadKind] = field(default_factory=dict)
    releases: Mapping[str, PayloadKind] = field(default_factory=dict)
    differentiable: tuple[str, ...] = ()
    times: int = 0
    rows: int = 0
    depends_on_records: tuple[str, ...] | None = None
    trains: tuple[str, ...] = ()
    span: Callable[[Mapping[str, torch.Tensor]], Span] | None = None
    sums: Mapping[str, SumWeighting] = field(default_factory=dict)
    stackable: bool = False
    name: str = ""
    details: QueryDetails = QueryDetails()
    declared_in: type | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for part in ("sends", "releases"):
            named = {name: payload_kind(kind) for name, kind in getattr(self, part).items()}
            object.__setattr__(self, part, named)
        if not (self.name or getattr(self.function, "__name__", "")):
            raise ArgumentError("name of a query", self.name, "a name, as its function has none")
        object.__setattr__(self, "name", self.name or self.function.__name__)
        gradients = payload_kind(self.details.gradients)
        object.__setattr__(self, "details", replace(self.details, gradients=gradients))
        self._require_consistency()

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph may capture the function: tensors in, tensors out."""
        rare = self.details
        reads = rare.reads_values or rare.ragged or rare.json_values or SCHEDULE in self.sends.values()
        return self.stackable and not reads

    @property
    def weighting(self) -> tuple[PayloadKind, SumWeighting] | None:
        """Payload kind and weighting of the one summed statistic; None for counts, or without a sum."""
        for name, weighting in self.sums.items():
            if self.releases[name] not in COUNT_KINDS:
                return self.releases[name], weighting
        return None

    @property
    def sums_outputs(self) -> bool:
        """Return whether outputs of the nodes' networks enter a sum."""
        return self.weighting is not None and self.weighting[0].is_output

    @property
    def needs_float32(self) -> bool:
        """Return whether nodes compute the response in float32, whatever the run's precision.

        Sums of responses with few digits, such as bfloat16's, reveal more than sums of precise ones.
        """
        return self.details.finite_differences or self.sums_outputs

    def sum_fault(self, optimizer: str) -> str | None:
        """Return why a sum of parameters trained with an optimizer would reveal single nodes, or None.

        The first step of Adam is the sign of each gradient. A server that requests one step a round can read
        the sizes of all nodes and the signs of each from the sum of few values with few weights.
        """
        if self.weighting is not None and self.weighting[0].category == "model" and optimizer == "adam":
            return "sums: local.optimizer is adam, expected sgd, whose steps are linear in gradients"
        return None

    @cached_property
    def unstacked(self) -> frozenset[str]:
        """Parts of the response that are not stacked over nodes."""
        return frozenset((*self.details.ragged, *self.details.json_values)) & self.releases.keys()

    def check_inputs(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check the names of a request's tensors against the declaration.

        Raises:
            ArgumentError: other names.
        """
        if set(tensors) != set(self.sends):
            raise ArgumentError(
                f"tensors of query {self.name}", sorted(tensors), f"exactly {sorted(self.sends)}"
            )

    def released_kinds(self) -> Mapping[str, PayloadKind]:
        """Return the payload kind of every tensor that a node may release for this query."""
        return self._released_kinds

    @cached_property
    def _released_kinds(self) -> Mapping[str, PayloadKind]:
        return {
            **self.releases,
            **{
                name + WEIGHT_SUFFIX: WEIGHT_KINDS[weighting]
                for name, weighting in self.sums.items()
                if weighting in WEIGHT_KINDS
            },
            **dict.fromkeys((f"d/d{name}" for name in self.differentiable), self.details.gradients),
        }

    def _require_consistency(self) -> None:
        """Check that no part of the declaration contradicts another."""
        rare = self.details
        unstacked = [*rare.ragged, *rare.json_values]
        if rare.gradients.category != "gradients":
            raise ArgumentError(f"gradients of query {self.name}", rare.gradients, "a kind of gradients")
        if not (rare.step_records >= 0 and rare.step_records % 1 == 0):
            raise ArgumentError(f"step_records of query {self.name}", rare.step_records, "an integer >= 0")
        undeclared = {*rare.ragged} - self.releases.keys()
        undeclared |= {*rare.json_values} - self.sends.keys() - self.releases.keys()
        if undeclared:
            raise ArgumentError(f"query {self.name}", sorted(undeclared), "names of sent or released tensors")
        if self.stackable and self.unstacked:
            expected = "no ragged tensors or JSON values in the response of a stackable function"
            raise ArgumentError(f"query {self.name}", sorted(self.unstacked), expected)
        if self.differentiable and unstacked:
            expected = "no ragged tensors or JSON values in a differentiable query"
            raise ArgumentError(f"query {self.name}", unstacked, expected)
        if self.sums and (self.sums.keys() != self.releases.keys() or self.unstacked):
            raise ArgumentError(f"sums of query {self.name}", [*self.sums], "all tensors of the response")
        statistics = [name for name in self.sums if self.releases[name] not in COUNT_KINDS]
        if len(statistics) > 1:
            expected = "one statistic besides counts: several reveal single nodes' responses"
            raise ArgumentError(f"sums of query {self.name}", statistics, expected)
