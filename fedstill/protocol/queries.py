"""What a node can be asked and what a method finds there: queries are data, and how they are answered.

A method declares its queries: it marks the functions that answer them.
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
from fedstill.protocol.local_config import WHOLE, LocalConfig, Span
from fedstill.protocol.payload_kinds import (
    DATA_SIZES,
    GRADIENTS,
    LABEL_COUNTS,
    SCHEDULE,
    PayloadKind,
    payload_kind,
)
from fedstill.protocol.secure_aggregation import WEIGHT, SumWeighting
from fedstill.protocol.wire_format import as_text, from_text
from fedstill.tasks import Task

T = TypeVar("T")
Handler = Callable[..., Mapping[str, torch.Tensor]]
CLOSED: WeakSet[Handler] = WeakSet()  # functions that answer queries declared as closed
COUNTS = (LABEL_COUNTS, DATA_SIZES)  # what weights are, and so no statistic of a response
WEIGHTS = {"mean": DATA_SIZES, "size": DATA_SIZES, "counts": LABEL_COUNTS}  # what weights, summed, are


@dataclass(frozen=True)
class Query:
    """One thing that a method asks nodes.

    Args:
        name: as policy and audit log know it.
        handler: called as ``handler(group, number, **inputs)``; inputs and answers have the group's
            nodes first, ``(G, ...)``.
        sends: the kind of each tensor that goes down with it.
        releases: the kind of each tensor that its answer holds.
        differentiable: the inputs through which gradients that reach the answer are pulled back. They
            leave the node, too.
        times: how often a run asks it, so that a node with a limit can refuse beforehand; 0 is not known.
        constant: the answer follows from the node's data alone, whatever it has been asked before; asked
            again under another number's state, it is the same release.
        rows: inputs that it is about at most, where that is known beforehand: prices follow from it.
        width: numbers in each row of what it answers of kind "rows", from which prices follow, too; 0: as
            many as there are classes.
        reads: the tensors of its answer that are computed from the node's records themselves; all others
            come from its networks. None: not declared, and then no mechanism can protect any of them.
        trains: networks, beside the model, that take a step on the node's records for each answer.
        span: the part of the local training that comes with it, by the tensors that were sent; None is none.
        beside: what its training descends beside the task's own loss, from the second step or round on, in
            words; an attack that goes by the task's loss alone is then weaker than it could be.
        finish: what is done to an answer after the gate's noise and before it travels, by what was sent (a
            quantizer, say). It never sees what is private.
        gradients: the kind of the gradients that leave.
        returned: the tensors that go down with it to that node alone whose releases they come from.
        moves: the number by which a node moves its public inputs before it answers about them; 0 moves none.
        ragged: the tensors of its answer whose shape differs from node to node: the handler gives a list of
            them, one a node, and the server finds them by :meth:`Responses.by_node`.
        values: what goes down with it, or is answered, as a JSON value and no tensor: the handler gets the
            value, and gives a list of values, one a node.
        sums: under secure aggregation (``at.secure_aggregation``), how each part of the answer is added over
            nodes (:mod:`fedstill.protocol.secure_aggregation`). Empty elsewhere, and of what cannot be added.
        draws: what its handler is given besides, by name, ``(G, ...)`` each: called as the handler is, before
            it. Nothing else is drawn, or set by the query's number, for an answer then.
        records: whether an answer follows from tensors alone, without a look at their values, so that a GPU
            may record how it is made (:mod:`fedstill.core.cuda_graphs`).
        finite_differences: whether the server takes small differences of answers, which bfloat16 would round away:
            then they are computed in float32, whatever the run's precision.
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
    reads: tuple[str, ...] | None = None
    trains: tuple[str, ...] = ()
    span: Callable[[Mapping[str, torch.Tensor]], Span] | None = None
    beside: str = ""
    finish: Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | (
        None
    ) = None
    gradients: PayloadKind = GRADIENTS
    returned: tuple[str, ...] = ()
    moves: str = ""
    ragged: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    sums: Mapping[str, SumWeighting] = field(default_factory=dict)
    draws: Handler | None = None
    records: bool = False
    finite_differences: bool = False

    def __post_init__(self) -> None:
        for part in ("sends", "releases"):
            named = {name: payload_kind(kind) for name, kind in getattr(self, part).items()}
            object.__setattr__(self, part, named)
        object.__setattr__(self, "gradients", payload_kind(self.gradients))
        if self.gradients.of != "gradients":
            raise ArgumentError(f"gradients of query {self.name}", self.gradients, "a kind of gradients")
        strange = {*self.ragged} - self.releases.keys() | {*self.values} - {*self.sends, *self.releases}
        if strange:
            raise ArgumentError(f"query {self.name}", sorted(strange), "parts that it sends or releases")
        if self.sums and (self.sums.keys() != self.releases.keys() or self.apart):
            raise ArgumentError(f"sums of query {self.name}", [*self.sums], "all parts of its answer")
        statistics = [name for name in self.sums if self.releases[name] not in COUNTS]
        if len(statistics) > 1:
            expected = "one statistic besides counts: several reveal what single nodes responded"
            raise ArgumentError(f"sums of query {self.name}", statistics, expected)
        if self.records and (self.ragged or self.values or SCHEDULE in self.sends.values()):
            raise ArgumentError(f"query {self.name}", "records", "where tensors alone are sent and given")
        if self.differentiable and (self.ragged or self.values):
            apart = [*self.ragged, *self.values]
            raise ArgumentError(f"query {self.name}", apart, "none, where gradients are pulled back")

    @property
    def weighting(self) -> tuple[PayloadKind, SumWeighting] | None:
        """Kind of the one statistic that enters a sum, and how it is weighted; None for counts, or no sum."""
        for name, how in self.sums.items():
            if self.releases[name] not in COUNTS:
                return self.releases[name], how
        return None

    @property
    def sums_outputs(self) -> bool:
        """Return whether outputs of the nodes' networks enter a sum."""
        return self.weighting is not None and self.weighting[0].output

    def sum_fault(self, optimizer: str) -> str | None:
        """Return why a sum of parameters that a local optimizer trained would reveal single nodes, or None.

        A first step of Adam is the sign of each gradient. A server that asks for one step a round reads, from
        the sum of few values with few weights, the sizes of all nodes and the signs of each.
        """
        if self.weighting is not None and self.weighting[0].of == "model" and optimizer == "adam":
            return "sums: local.optimizer is adam, expected sgd, whose steps are linear in gradients"
        return None

    @property
    def closed(self) -> bool:
        """Whether it is one of the package's own of whose answer no subclass of the method can change a part.

        That goes by the very function that answers it, whatever else is said of it.
        """
        return self.handler in CLOSED

    @property
    def apart(self) -> frozenset[str]:
        """The parts of its answer that are not stacked over nodes."""
        return frozenset((*self.ragged, *self.values)) & self.releases.keys()

    def require(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse what came down with it, if that is not what it declares.

        Raises:
            ArgumentError: other tensors, or a schedule that is no number.
        """
        if set(tensors) != set(self.sends):
            raise ArgumentError(
                f"tensors of query {self.name}", sorted(tensors), f"exactly {sorted(self.sends)}"
            )
        for key, kind in self.sends.items():
            if kind == SCHEDULE and (tensors[key].ndim or tensors[key].dtype != torch.int64):
                # A tensor in the place of a number could be priced as one round, and trained as two.
                found = f"{tensors[key].dtype} of shape {tuple(tensors[key].shape)}"
                raise ArgumentError(f"{key} of query {self.name}", found, "one whole number: int64, shape ()")

    def take(self, arrived: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What came down, as the handler gets it: JSON values read.

        Raises:
            DataError: one that is none.
        """
        return {name: from_text(t) if name in self.values else t for name, t in arrived.items()}

    def give(self, response: object, nodes: int) -> dict[str, Any]:
        """What the handler gave for so many nodes, as it leaves: JSON values as text; a list, one a node, of
        what is apart.

        Raises:
            ArgumentError: something else than one tensor, of what is not declared to be apart: its shape
                could tell what no mechanism has counted on; or not one part a node, so that a node's release
                would be another's, or a piece of its own.
        """
        if not isinstance(response, Mapping):
            found = type(response).__name__
            raise ArgumentError(f"what query {self.name} answers", found, "tensors by name, in a mapping")
        for name, given in response.items():
            if name not in self.apart:
                sound = isinstance(given, torch.Tensor) and given.shape[:1] == (nodes,)
                allowed = f"a tensor ({nodes}, ...), a part a node"
            else:
                sound = isinstance(given, list | tuple) and len(given) == nodes
                sound = sound and (name in self.values or all(isinstance(t, torch.Tensor) for t in given))
                allowed = f"a list of {nodes} {'values' if name in self.values else 'tensors'}, one a node"
            if not sound:
                tensor = isinstance(given, torch.Tensor)
                found = f"a tensor {tuple(given.shape)}" if tensor else f"a {type(given).__name__}"
                found += f" of {len(given)}" if isinstance(given, list | tuple) else ""
                told = (
                    "; a list, one a node, where ragged or values name it" if name not in self.apart else ""
                )
                raise ArgumentError(f"{name} of query {self.name}", found, allowed + told)
        return {
            name: [as_text(value) for value in given] if name in self.values else given
            for name, given in response.items()
        }

    def kinds(self) -> Mapping[str, PayloadKind]:
        """The kind of everything that may leave a node for this query."""
        return {
            **self.releases,
            **{name + WEIGHT: WEIGHTS[how] for name, how in self.sums.items() if how in WEIGHTS},
            **dict.fromkeys((f"d/d{name}" for name in self.differentiable), self.gradients),
        }

    def from_package(self, package: str) -> Query:
        """The same query of a method that comes from elsewhere: what it releases bears that name."""
        releases = {name: kind.at(package) for name, kind in self.releases.items()}
        return replace(self, releases=releases, gradients=self.gradients.at(package))


_MAKING = RLock()  # one thread at a time makes what all share, and what that needs


@dataclass(frozen=True)
class NodeSetting:
    """What a method finds at every node.

    Args:
        task: losses and counts.
        local: how nodes train their models, and for how long in all.
        compute: device and precision.
        public: public data, or None.
        schema: what the columns of rows of a table may be; none where that is not known, or inputs are none.
        perceptual: VGG features, frozen, for losses that compare images by them; None: the node has none.
        secure_aggregation: the server is to see sums of the nodes' answers only.
    """

    task: Task
    local: LocalConfig
    compute: Compute
    public: PublicData | None = None
    perceptual: nn.Module | None = None
    schema: Schema = NO_SCHEMA
    secure_aggregation: bool = False
    _kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What a method makes once for all queries of a run: the first time it is asked for.

        Nodes that are computed at once get the same one.
        """
        with _MAKING:
            if name not in self._kept:
                self._kept[name] = make()
        made: T = self._kept[name]
        return made


def stand_in(task: Task, shape: tuple[int, ...] = ()) -> PublicData:
    """Public data in place of any: what a method declares follows from its options, not from the data."""
    shape = shape or ((1, 8, 8) if task.form == "images" else (8,))
    inputs = torch.zeros(2, *shape, dtype=torch.int64 if task.form == "texts" else torch.float32)
    return PublicData("none", inputs, task.empty_targets(2, shape))


def _nothing(_: object) -> None:
    """What a method does where it has nothing to prepare."""


@dataclass(frozen=True)
class NodeSide:
    """A method's part at the nodes.

    Args:
        queries: that it answers, by name.
        prepare: called once with all nodes, before anything else.
        look: what a query about inputs ``(B, ...)``, of which the nodes' models give ``(K, B, C, ...)``,
            would be answered, ``(K, ...)`` a tensor, with nothing trained, released or counted: for
            evaluation in a simulation only. None where the method has no ensemble.
        first: the part of the local training that is done before the first query; None is nothing, and so
            it is where nothing learns.
        learns: whether the nodes' own models are trained at all, then or later.
        adds: which method, with which options, names the statistic that enters a sum: of a stranger's method,
            any option may choose it.
        notes: what a run should be told of it: what is switched off here, and why.
    """

    queries: Mapping[str, Query]
    prepare: Callable[[Sequence[Any]], None] = _nothing
    look: Callable[[Sequence[Any], torch.Tensor, torch.Tensor], Mapping[str, torch.Tensor]] | None = None
    first: Span | None = WHOLE
    learns: bool = True
    adds: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.learns:  # a training that is done is one that is paid for
            object.__setattr__(self, "first", None)
        forms: dict[str, str] = {}
        for name in self.queries:
            for subject, form in self.forms(name).items():
                if forms.setdefault(subject, form) != form:
                    expected = f"{forms[subject]}, as in the other queries: one statistic with one weighting"
                    raise ArgumentError(f"sums of query {name}", form, expected)

    @property
    def sums(self) -> bool:
        """Whether the server sees sums of answers only."""
        return any(query.sums for query in self.queries.values())

    def forms(self, query: str, run: str = "") -> dict[str, str]:
        """Return what a query adds to a sum: the statistic and its weighting, by what it is a statistic of.

        A node never adds two forms of one subject. All outputs of its networks are one subject: they are
        functions of each other (:mod:`fedstill.node.sum_history`).

        Args:
            run: name of the run, where counts carry noise: they differ from run to run, and so do sums that
                are weighted by them.
        """
        asked = self.queries[query]
        if asked.weighting is None:
            return {}
        kind, how = asked.weighting
        chosen = self.adds and (kind.output or kind.package)
        statistic = f"{kind} of {self.adds}" if chosen else str(kind)
        noised = f" of run {run!r}" if run and how in ("size", "counts") else ""
        # What a stranger's method calls records may be a function of the outputs, too.
        return {"outputs" if kind.output or kind.package else str(kind): f"{statistic} by {how}{noised}"}

    def travels(self) -> tuple[PayloadKind, ...]:
        """All kinds of tensor that go down or leave, each once, in alphabetical order."""
        sent = {kind for query in self.queries.values() for kind in query.sends.values()}
        return tuple(sorted(sent.union(self.leaves())))

    def leaves(self) -> tuple[PayloadKind, ...]:
        """The kinds of tensor that leave a node, each once, in alphabetical order."""
        kinds = [kind for query in self.queries.values() for kind in query.kinds().values()]
        return tuple(sorted(set(kinds)))


def score_shape_fault(
    name: str, shape: tuple[int, ...], rows: int | None, outputs: tuple[int, ...] | None
) -> str | None:
    """Return the fault in the shape of scores ``(B, ...)``, at a node's gate and at the server, or None.

    Args:
        rows: how many inputs they are about; None: not known.
        outputs: of the task for one input; None: not known.

    >>> score_shape_fault("logits", (64, 4), 64, (3,))
    'logits are (64, 4), for 3 classes'
    """
    if rows is not None and shape[:1] != (rows,):
        return f"{name} are {shape}, for {rows} inputs"
    if outputs is not None and shape[1:] != outputs:
        wanted = f"{outputs[0]} classes" if len(outputs) == 1 else f"outputs of shape {outputs}"
        return f"{name} are {shape}, for {wanted}"
    return None


F = TypeVar("F", bound=Callable[..., Any])
DECLARED = "__query__"  # the attribute of a function that a query marks


def query(**declaration: Any) -> Callable[[F], F]:
    """Marks a function of a method as what nodes answer to a query of its name.

    The function is called at the nodes as ``function(method, nodes, **inputs)``, where ``nodes`` is a
    :class:`~fedstill.node.node_group.Group` and inputs and answers have its nodes first, ``(G, ...)``; a
    tensor without dimensions arrives as a number.

    Args:
        declaration: the fields of :class:`Query`, but for its name and handler. Each may also be a
            function of the method and what it finds at the nodes (:class:`NodeSetting`), since options decide
            of much.
            ``closed`` says that nothing that a subclass of the method could change has a part in the answer.
            ``span``, ``finish`` and ``draws`` are functions of the method and of what they are given in a
            :class:`Query`; ``draws`` gets the nodes, as the marked function does. ``when`` says whether
            the query is asked at all, ``name`` what it is called, if not as the function.
    """
    known = {part.name for part in fields(Query)} | {"when", "name", "closed"}
    unknown = sorted(set(declaration) - known)
    if unknown:
        raise TypeError(f"a query has no {', '.join(unknown)}")

    def mark(function: F) -> F:
        setattr(function, DECLARED, declaration)
        return function

    return mark


def declared(method: Any, at: NodeSetting) -> list[Query]:
    """The queries that a method's functions are marked as, in the order in which they stand."""
    marked = _marked(type(method))
    found = (_query(name, function, parts, method, at) for name, (function, parts) in marked.items())
    return [query for query in found if query is not None]


def names(method: type) -> frozenset[str]:
    """The names of all queries that a method's functions are marked as, whatever its options."""
    return frozenset(parts.get("name", name) for name, (_, parts) in _marked(method).items())


def _marked(method: type) -> dict[str, tuple[Callable[..., Any], Mapping[str, Any]]]:
    marked: dict[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {}
    for kind in reversed(method.__mro__):
        for name, function in vars(kind).items():
            if hasattr(function, DECLARED):
                marked[name] = function, getattr(function, DECLARED)
            elif name in marked:  # answered in another way, of which nothing is said
                less = {"reads": None, "closed": False, "draws": None, "records": False}
                marked[name] = function, {**marked[name][1], **less}
    return marked


def _query(
    name: str, function: Callable[..., Any], parts: Mapping[str, Any], method: Any, at: NodeSetting
) -> Query | None:
    when = parts.get("when")
    if when is not None and not when(method, at):
        return None
    values: dict[str, Any] = {}
    for key, value in parts.items():
        if key in ("span", "finish"):
            values[key] = value if value is None else partial(value, method)
        elif key not in ("when", "name", "draws") and (key != "sums" or at.secure_aggregation):
            values[key] = value(method, at) if callable(value) else value

    def answering(function: Callable[..., Any]) -> Handler:
        def handler(group: Any, number: int, **inputs: Any) -> Mapping[str, torch.Tensor]:
            response: Mapping[str, torch.Tensor] = function(method, group.knowing(at, number), **inputs)
            return response

        return handler

    handler = answering(function)
    if parts.get("draws") is not None:
        values["draws"] = answering(parts["draws"])
    if not (_ours(type(method)) or name in vars(type(method))):
        values["records"] = False  # helpers of a subclass may draw, or look at values
    closed = values.pop("closed", False)
    if closed and _ours(function):
        CLOSED.add(handler)
    return Query(parts.get("name", name), handler, **values)


def _ours(thing: Any) -> bool:
    module: str = thing.__module__
    return module.partition(".")[0] == "fedstill"
