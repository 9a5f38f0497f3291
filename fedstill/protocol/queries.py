"""Queries: declarations of the requests that a method sends to nodes.

A method declares a query with the decorator :func:`query` on the function that nodes run for it. A
:class:`Query` holds the declaration, :class:`NodeSetting` the environment of a method at a node, and
:class:`NodeSide` the whole part of a method that runs at the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from threading import RLock
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError
from fedstill.core.table_schema import NO_SCHEMA, Schema
from fedstill.data.public import PublicData
from fedstill.protocol.local_config import FULL_TRAINING, LocalConfig, Span
from fedstill.protocol.payload_kinds import (
    DATA_SIZES,
    GRADIENTS,
    LABEL_COUNTS,
    SCHEDULE,
    PayloadKind,
    payload_kind,
)
from fedstill.protocol.secure_aggregation import WEIGHT_SUFFIX, SumWeighting
from fedstill.protocol.wire_format import json_from_tensor, json_to_tensor
from fedstill.tasks import Task

T = TypeVar("T")
Handler = Callable[..., Mapping[str, torch.Tensor]]
SEALED: WeakSet[Handler] = WeakSet()  # handlers of queries that are declared as sealed
COUNT_KINDS = (LABEL_COUNTS, DATA_SIZES)  # kinds of weights; they are no statistic of a response
WEIGHT_KINDS = {"mean": DATA_SIZES, "size": DATA_SIZES, "counts": LABEL_COUNTS}  # kind of the summed weights


@dataclass(frozen=True)
class Query:
    """Declaration of one request that a method sends to nodes.

    Args:
        name: name in policies and audit logs.
        handler: called as ``handler(group, number, **inputs)``. Inputs and outputs have the group's nodes as
            first axis, ``(G, ...)``.
        sends: payload kind of each tensor of the request, by name.
        releases: payload kind of each tensor of the response, by name.
        differentiable: inputs for which the server can request gradients. These gradients are releases, too.
        times: number of these queries in a run. A node with a limit refuses by it before any training. 0:
            unknown.
        constant: the response depends on the node's data only, not on earlier queries. A repeated query is
            the same release.
        rows: largest number of inputs in a query, if known in advance; the privacy cost depends on it.
        width: values in each row of a released tensor of category "rows"; the privacy cost depends on it. 0:
            the number of classes.
        depends_on_records: tensors of the response that are computed from the node's records directly. All
            others are outputs of its networks. None: not declared, so that no mechanism can protect any.
        trains: networks other than the model that take one training step on the node's records for each
            response.
        span: part of the local training that the query includes, as a function of the sent tensors; None:
            none.
        extra_loss: description of the terms that its training adds to the task's loss from the second step or
            round on. An attack that assumes the task's loss alone is weaker for it.
        postprocess: function of response and sent tensors, applied after the gate's noise and before the
            response is sent, such as a quantizer. It never sees private values.
        gradients: payload kind of the released gradients.
        owner_only: tensors of the request that are sent only to the node whose releases they come from.
        shift_seed: name of the sent number that seeds the shift of the public inputs; 0 shifts none.
        ragged: tensors of the response whose shape differs between nodes. The handler returns a list of them,
            one for each node, and the server reads them with :meth:`Responses.by_node`.
        json_values: parts of request or response that are JSON values in place of tensors. The handler gets
            the value, and returns a list of values, one for each node.
        sums: how each part of the response is added over nodes under secure aggregation
            (:mod:`fedstill.protocol.secure_aggregation`). Empty otherwise, and for responses that cannot be
            added.
        sampler: returns the handler's sampled inputs, ``(G, ...)`` each, by name. It is called like the
            handler and before it. The handler then samples nothing itself, and ignores the query's number.
        capturable: the handler reads no tensor's values on the CPU, so that a CUDA graph can capture it
            (:mod:`fedstill.core.cuda_graphs`).
        finite_differences: the server subtracts nearly equal responses, which bfloat16 would round away. They
            are then computed in float32, whatever the run's precision.

    Raises:
        ArgumentError: parts of the declaration that contradict each other.
    """

    name: str
    handler: Handler
    sends: Mapping[str, PayloadKind] = field(default_factory=dict)
    releases: Mapping[str, PayloadKind] = field(default_factory=dict)
    differentiable: tuple[str, ...] = ()
    times: int = 0
    constant: bool = False
    rows: int = 0
    width: int = 0
    depends_on_records: tuple[str, ...] | None = None
    trains: tuple[str, ...] = ()
    span: Callable[[Mapping[str, torch.Tensor]], Span] | None = None
    extra_loss: str = ""
    postprocess: Callable[
        [Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]
    ] | (None) = None
    gradients: PayloadKind = GRADIENTS
    owner_only: tuple[str, ...] = ()
    shift_seed: str = ""
    ragged: tuple[str, ...] = ()
    json_values: tuple[str, ...] = ()
    sums: Mapping[str, SumWeighting] = field(default_factory=dict)
    sampler: Handler | None = None
    capturable: bool = False
    finite_differences: bool = False

    def __post_init__(self) -> None:
        for part in ("sends", "releases"):
            named = {name: payload_kind(kind) for name, kind in getattr(self, part).items()}
            object.__setattr__(self, part, named)
        object.__setattr__(self, "gradients", payload_kind(self.gradients))
        if self.gradients.category != "gradients":
            raise ArgumentError(f"gradients of query {self.name}", self.gradients, "a kind of gradients")
        undeclared = {*self.ragged} - self.releases.keys() | {*self.json_values} - {
            *self.sends,
            *self.releases,
        }
        if undeclared:
            raise ArgumentError(f"query {self.name}", sorted(undeclared), "names of sent or released tensors")
        if self.sums and (self.sums.keys() != self.releases.keys() or self.unstacked):
            raise ArgumentError(f"sums of query {self.name}", [*self.sums], "all tensors of the response")
        statistics = [name for name in self.sums if self.releases[name] not in COUNT_KINDS]
        if len(statistics) > 1:
            expected = "one statistic besides counts: several reveal single nodes' responses"
            raise ArgumentError(f"sums of query {self.name}", statistics, expected)
        if self.capturable and (self.ragged or self.json_values or SCHEDULE in self.sends.values()):
            raise ArgumentError(
                f"query {self.name}", "capturable", "False with ragged tensors, JSON values or a schedule"
            )
        if self.differentiable and (self.ragged or self.json_values):
            parts = [*self.ragged, *self.json_values]
            raise ArgumentError(
                f"query {self.name}", parts, "no ragged tensors or JSON values in a differentiable query"
            )

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

    def sum_fault(self, optimizer: str) -> str | None:
        """Return why a sum of parameters trained with an optimizer would reveal single nodes, or None.

        The first step of Adam is the sign of each gradient. A server that requests one step a round can read
        the sizes of all nodes and the signs of each from the sum of few values with few weights.
        """
        if self.weighting is not None and self.weighting[0].category == "model" and optimizer == "adam":
            return "sums: local.optimizer is adam, expected sgd, whose steps are linear in gradients"
        return None

    @property
    def sealed(self) -> bool:
        """True for a query of this package whose response no subclass of the method can change.

        Decided by the handler itself, not by other parts of the declaration.
        """
        return self.handler in SEALED

    @property
    def unstacked(self) -> frozenset[str]:
        """Parts of the response that are not stacked over nodes."""
        return frozenset((*self.ragged, *self.json_values)) & self.releases.keys()

    def check_inputs(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check the received tensors of a request against the declaration.

        Raises:
            ArgumentError: other names, or a schedule that is not one number.
        """
        if set(tensors) != set(self.sends):
            raise ArgumentError(
                f"tensors of query {self.name}", sorted(tensors), f"exactly {sorted(self.sends)}"
            )
        for key, kind in self.sends.items():
            if kind == SCHEDULE and (tensors[key].ndim or tensors[key].dtype != torch.int64):
                # A tensor in place of the number could be charged as one round and trained as two.
                found = f"{tensors[key].dtype} of shape {tuple(tensors[key].shape)}"
                raise ArgumentError(f"{key} of query {self.name}", found, "one whole number: int64, shape ()")

    def decode_inputs(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the received tensors as the handler's inputs, with JSON values decoded.

        Raises:
            DataError: an invalid JSON value.
        """
        return {name: json_from_tensor(t) if name in self.json_values else t for name, t in tensors.items()}

    def encode_response(self, response: object, nodes: int) -> dict[str, Any]:
        """Return the handler's output for ``nodes`` nodes as it is sent: JSON values as text tensors.

        Raises:
            ArgumentError: an item that is not a tensor without being declared as ragged or JSON, as its shape
                could reveal values that no mechanism accounts for; or not exactly one part for each node, so
                that a node's release would be another node's.
        """
        if not isinstance(response, Mapping):
            found = type(response).__name__
            raise ArgumentError(f"response of query {self.name}", found, "a mapping from names to tensors")
        for name, value in response.items():
            if name not in self.unstacked:
                is_valid = isinstance(value, torch.Tensor) and value.shape[:1] == (nodes,)
                expected = f"a tensor ({nodes}, ...), one part for each node"
            else:
                is_valid = isinstance(value, list | tuple) and len(value) == nodes
                is_valid = is_valid and (
                    name in self.json_values or all(isinstance(t, torch.Tensor) for t in value)
                )
                items = "values" if name in self.json_values else "tensors"
                expected = f"a list of {nodes} {items}, one for each node"
            if not is_valid:
                is_tensor = isinstance(value, torch.Tensor)
                found = f"a tensor {tuple(value.shape)}" if is_tensor else f"a {type(value).__name__}"
                found += f" of {len(value)}" if isinstance(value, list | tuple) else ""
                if name not in self.unstacked:
                    expected += "; a list with one item for each node if ragged or json_values names it"
                raise ArgumentError(f"{name} of query {self.name}", found, expected)
        return {
            name: [json_to_tensor(item) for item in value] if name in self.json_values else value
            for name, value in response.items()
        }

    def released_kinds(self) -> Mapping[str, PayloadKind]:
        """Return the payload kind of every tensor that a node may release for this query."""
        return {
            **self.releases,
            **{
                name + WEIGHT_SUFFIX: WEIGHT_KINDS[weighting]
                for name, weighting in self.sums.items()
                if weighting in WEIGHT_KINDS
            },
            **dict.fromkeys((f"d/d{name}" for name in self.differentiable), self.gradients),
        }

    def from_package(self, package: str) -> Query:
        """Return the same query of a plug-in's method, with its released kinds named after the package."""
        releases = {name: kind.for_package(package) for name, kind in self.releases.items()}
        return replace(self, releases=releases, gradients=self.gradients.for_package(package))


_CACHE_LOCK = RLock()  # reentrant: making one cached object may need another


@dataclass(frozen=True)
class NodeSetting:
    """Environment of a method at every node.

    Args:
        task: losses and metrics.
        local: optimizer, learning rate and length of the nodes' local training.
        compute: device and precision.
        public: public data, or None.
        schema: the columns of a table; empty if unknown, or for other inputs.
        perceptual: frozen VGG features for perceptual losses; None: the node has none.
        secure_aggregation: the server sees sums of the nodes' responses only.
    """

    task: Task
    local: LocalConfig
    compute: Compute
    public: PublicData | None = None
    perceptual: nn.Module | None = None
    schema: Schema = NO_SCHEMA
    secure_aggregation: bool = False
    _cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def cached(self, name: str, create: Callable[[], T]) -> T:
        """Return the object of a name, and create it at the first call.

        The object is shared by all queries of a run and by nodes that run in parallel.
        """
        with _CACHE_LOCK:
            if name not in self._cache:
                self._cache[name] = create()
        value: T = self._cache[name]
        return value


def placeholder_public(task: Task, shape: tuple[int, ...] = ()) -> PublicData:
    """Return two blank public examples, for declarations that depend on options only."""
    shape = shape or ((1, 8, 8) if task.form == "images" else (8,))
    inputs = torch.zeros(2, *shape, dtype=torch.int64 if task.form == "texts" else torch.float32)
    return PublicData("none", inputs, task.empty_targets(2, shape))


def _prepare_nothing(_: object) -> None:
    """Do nothing, for methods without preparation."""


@dataclass(frozen=True)
class NodeSide:
    """Part of a method that runs at the nodes.

    Args:
        queries: its queries, by name.
        prepare: called once with all nodes before anything else.
        preview_responses: function of nodes, inputs ``(B, ...)`` and the models' outputs ``(K, B, C, ...)``
            that returns the tensors of a response, ``(K, ...)`` each, without training, release or charge.
            Used for evaluation in a simulation only. None: the method has no ensemble.
        initial_training: part of the local training before the first query; None: none.
        trains_models: the nodes' models are trained at all, in or before the queries.
        sum_source: method and options that choose the summed statistic, for plug-ins' methods, in which any
            option may choose it.
        notes: messages for the user about parts that are switched off.

    Raises:
        ArgumentError: queries that sum one statistic with different weightings.
    """

    queries: Mapping[str, Query]
    prepare: Callable[[Sequence[Any]], None] = _prepare_nothing
    preview_responses: (
        Callable[[Sequence[Any], torch.Tensor, torch.Tensor], Mapping[str, torch.Tensor]] | None
    ) = None
    initial_training: Span | None = FULL_TRAINING
    trains_models: bool = True
    sum_source: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.trains_models:  # no training is done, and none is charged
            object.__setattr__(self, "initial_training", None)
        weightings: dict[str, str] = {}
        for name in self.queries:
            for subject, weighting in self.weightings(name).items():
                if weightings.setdefault(subject, weighting) != weighting:
                    expected = (
                        f"{weightings[subject]}, as in the other queries: one statistic with one weighting"
                    )
                    raise ArgumentError(f"sums of query {name}", weighting, expected)

    @property
    def sums(self) -> bool:
        """True if the server sees sums of responses only."""
        return any(query.sums for query in self.queries.values())

    def weightings(self, query: str, run: str = "") -> dict[str, str]:
        """Return the summed statistic and its weighting, by the subject of the statistic.

        A node never adds one subject with two weightings. All outputs of its networks are one subject, as
        they are functions of each other (:mod:`fedstill.node.sum_history`).

        Args:
            query: name of the query.
            run: name of the run, where counts carry noise: noisy counts differ between runs, and so do sums
                that are weighted by them.
        """
        declaration = self.queries[query]
        if declaration.weighting is None:
            return {}
        kind, weighting = declaration.weighting
        by_options = self.sum_source and (kind.is_output or kind.package)
        statistic = f"{kind} of {self.sum_source}" if by_options else str(kind)
        noised = f" of run {run!r}" if run and weighting in ("size", "counts") else ""
        # A plug-in's statistic may be a function of the outputs whatever its declared kind.
        return {
            "outputs" if kind.is_output or kind.package else str(kind): f"{statistic} by {weighting}{noised}"
        }

    def transmitted_kinds(self) -> tuple[PayloadKind, ...]:
        """Return all payload kinds that are sent or released, sorted and unique."""
        sent = {kind for query in self.queries.values() for kind in query.sends.values()}
        return tuple(sorted(sent.union(self.released_kinds())))

    def released_kinds(self) -> tuple[PayloadKind, ...]:
        """Return all payload kinds that a node releases, sorted and unique."""
        kinds = [kind for query in self.queries.values() for kind in query.released_kinds().values()]
        return tuple(sorted(set(kinds)))


def score_shape_fault(
    name: str, shape: tuple[int, ...], rows: int | None, outputs: tuple[int, ...] | None
) -> str | None:
    """Return the fault in the shape of scores ``(B, ...)``, or None.

    Checked at a node's gate and at the server.

    Args:
        name: name of the tensor.
        shape: its shape.
        rows: number of inputs of the query; None: unknown.
        outputs: shape of the task's outputs for one input; None: unknown.

    >>> score_shape_fault("logits", (64, 4), 64, (3,))
    'logits are (64, 4), for 3 classes'
    """
    if rows is not None and shape[:1] != (rows,):
        return f"{name} are {shape}, for {rows} inputs"
    if outputs is not None and shape[1:] != outputs:
        expected = f"{outputs[0]} classes" if len(outputs) == 1 else f"outputs of shape {outputs}"
        return f"{name} are {shape}, for {expected}"
    return None


F = TypeVar("F", bound=Callable[..., Any])
QUERY_ATTRIBUTE = "__query__"  # attribute of a decorated function


def query(**declaration: Any) -> Callable[[F], F]:
    """Declare a function of a method as the handler of a query, which gets the function's name.

    Nodes call the function as ``function(method, nodes, **inputs)``, where ``nodes`` is a
    :class:`~fedstill.node.node_group.NodeGroup`. Inputs and outputs have its nodes as first axis,
    ``(G, ...)``. A tensor without dimensions arrives as a number.

    Args:
        declaration: fields of :class:`Query` except name and handler. Each may also be a function of the
            method and the :class:`NodeSetting` that returns the value. In addition:

            - ``name``: the query's name, if not the function's.
            - ``when``: function of method and setting; the query exists only if it returns true.
            - ``sealed``: no subclass of the method can change any part of the response.

            ``span``, ``postprocess`` and ``sampler`` are functions of the method and of their arguments in
            :class:`Query`. ``sampler`` gets the nodes, as the decorated function does.

    Raises:
        TypeError: an unknown field.
    """
    known = {part.name for part in fields(Query)} | {"when", "name", "sealed"}
    unknown = sorted(set(declaration) - known)
    if unknown:
        raise TypeError(f"a query has no {', '.join(unknown)}")

    def decorate(function: F) -> F:
        setattr(function, QUERY_ATTRIBUTE, declaration)
        return function

    return decorate


def declared_queries(method: Any, setting: NodeSetting) -> list[Query]:
    """Return the queries that a method declares with :func:`query`, in the order of their definition."""
    functions = _decorated_functions(type(method))
    queries = (
        _build_query(name, function, parts, method, setting) for name, (function, parts) in functions.items()
    )
    return [query for query in queries if query is not None]


def query_names(method: type) -> frozenset[str]:
    """Return the names of all queries that a method can declare, whatever its options."""
    return frozenset(parts.get("name", name) for name, (_, parts) in _decorated_functions(method).items())


def _decorated_functions(method: type) -> dict[str, tuple[Callable[..., Any], Mapping[str, Any]]]:
    functions: dict[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {}
    for kind in reversed(method.__mro__):
        for name, function in vars(kind).items():
            if hasattr(function, QUERY_ATTRIBUTE):
                functions[name] = function, getattr(function, QUERY_ATTRIBUTE)
            elif name in functions:  # overridden without a declaration
                overridden = {
                    "depends_on_records": None,
                    "sealed": False,
                    "sampler": None,
                    "capturable": False,
                }
                functions[name] = function, {**functions[name][1], **overridden}
    return functions


def _build_query(
    name: str, function: Callable[..., Any], parts: Mapping[str, Any], method: Any, setting: NodeSetting
) -> Query | None:
    when = parts.get("when")
    if when is not None and not when(method, setting):
        return None
    values: dict[str, Any] = {}
    for key, value in parts.items():
        if key in ("span", "postprocess"):
            values[key] = value if value is None else partial(value, method)
        elif key not in ("when", "name", "sampler") and (key != "sums" or setting.secure_aggregation):
            values[key] = value(method, setting) if callable(value) else value

    def as_handler(function: Callable[..., Any]) -> Handler:
        def handler(group: Any, number: int, **inputs: Any) -> Mapping[str, torch.Tensor]:
            nodes = group.set_query(setting, number)
            response: Mapping[str, torch.Tensor] = function(method, nodes, **inputs)
            return response

        return handler

    handler = as_handler(function)
    if parts.get("sampler") is not None:
        values["sampler"] = as_handler(parts["sampler"])
    if not (_is_builtin(type(method)) or name in vars(type(method))):
        values["capturable"] = False  # a subclass may override a helper that samples or reads values
    sealed = values.pop("sealed", False)
    if sealed and _is_builtin(function):
        SEALED.add(handler)
    return Query(parts.get("name", name), handler, **values)


def _is_builtin(thing: Any) -> bool:
    module: str = thing.__module__
    return module.partition(".")[0] == "fedstill"
