"""Stacked calls: one call of a method's function serves all nodes of one architecture.

In a stacked call (:func:`torch.func.vmap`) each tensor holds the values of all these nodes, one row for each.
:meth:`NodeCall.on_group` leaves the call for parts that compute the whole group. :class:`QuerySamples` are
the random examples of a function that a CUDA graph has captured. For a single node all of this is a plain
call.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C._functorch import is_batchedtensor
from torch.func import vmap

from fedstill.core.dataset import TensorData
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.stacked_modules import stack_tensors

Purpose = tuple[str | int | None, ...]  # None: the query's number
View = Callable[[TensorData], TensorData]
SampleRequest = tuple[int, Purpose, View | None]

# A term of the loss that depends on no record: group and number of its nodes still in training, to one value
# for each of these nodes (G,). It is called once in each step.
LossTerm = Callable[[NodeGroup, int], torch.Tensor]


class QuerySamples:
    """Samples of the nodes' own examples that a query's function takes, so that they can be taken before it.

    A captured CUDA graph runs no Python. The samples that its function asked for in its first call are
    taken before each later call.
    """

    def __init__(self) -> None:
        self.requests: list[SampleRequest] = []
        self._taken: dict[SampleRequest, tuple[torch.Tensor, torch.Tensor]] = {}

    def get(
        self, nodes: Sequence[Node], number: int, request: SampleRequest
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a sample, which is taken now unless it was taken before."""
        if request in self._taken:
            return self._taken[request]
        if request not in self.requests:
            self.requests.append(request)
        return _sample(nodes, number, *request)

    def take(self, nodes: Sequence[Node], number: int) -> dict[str, torch.Tensor]:
        """Return the samples of all known requests as named tensors, ``(G, size, ...)`` each."""
        tensors: dict[str, torch.Tensor] = {}
        for index, request in enumerate(self.requests):
            inputs, targets = _sample(nodes, number, *request)
            tensors |= {f"sampled inputs {index}": inputs, f"sampled targets {index}": targets}
        return tensors

    def put(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the samples out of the named tensors, for the next call."""
        self._taken = {
            request: (tensors.pop(f"sampled inputs {index}"), tensors.pop(f"sampled targets {index}"))
            for index, request in enumerate(self.requests)
            if f"sampled inputs {index}" in tensors
        }


def _sample(
    nodes: Sequence[Node], number: int, size: int, purpose: Purpose, data: View | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return examples of each node, ``(G, size, ...)`` inputs and targets."""
    views = [node if data is None else with_data(node, data(node.data)) for node in nodes]
    named = [number if name is None else name for name in purpose]
    parts = [view.sample_batch(size, *named) for view in views]
    return stack_tensors([part.inputs for part in parts]), stack_tensors([part.targets for part in parts])


def with_data(node: Node, data: TensorData) -> Node:
    """Return a copy of the node with other data, record by record."""
    view = copy.copy(node)
    view.data = data
    return view


@dataclass(frozen=True)
class NodeCall:
    """Call of a method's function, for one node or for the first nodes of a group.

    Args:
        group: the nodes.
        number: number of the query.
        index: row of the node in the group, inside of a stacked call; None outside.
        count: number of nodes that are computed.
        samples: samples that were taken before the call, for a CUDA graph.
    """

    group: NodeGroup
    number: int
    index: torch.Tensor | None
    count: int
    samples: QuerySamples | None

    @property
    def nodes(self) -> list[Node]:
        """The nodes that are computed."""
        return self.group.nodes[: self.count]

    @property
    def node(self) -> Node:
        """The node.

        Raises:
            TypeError: the call computes several.
        """
        if self.index is not None or self.count != 1:
            raise TypeError(
                "a stacked call has no properties of single nodes; use node.separately, or declare the query "
                "without stackable"
            )
        return self.group.nodes[0]

    def on_group(self, run: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """Return the node's part of ``run``, a function of the tensors of all nodes ``(G, ...)``."""
        if self.index is None:
            outputs = run(*(tensor.unsqueeze(0) for tensor in tensors))
            if isinstance(outputs, tuple):
                return tuple(output.squeeze(0) for output in outputs)
            return outputs.squeeze(0)
        return _OnGroup.apply(lambda _, *values: run(*values), self.index, *tensors)  # type: ignore[no-untyped-call]

    def act_on_group(self, act: Callable[..., object], *tensors: torch.Tensor) -> None:
        """Call ``act``, a function of the tensors of all nodes ``(G, ...)`` without a result."""

        def run(*values: torch.Tensor) -> torch.Tensor:
            act(*values)
            return torch.zeros(self.count)

        self.on_group(run, *tensors)

    def sample(self, size: int, purpose: Purpose, data: View | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return examples of each node: inputs and targets, ``(G, size, ...)`` each."""
        for node in self.nodes:
            node.records_read = True
        samples = QuerySamples() if self.samples is None else self.samples
        return samples.get(self.nodes, self.number, (size, purpose, data))

    def require_no_capture(self, operation: str) -> None:
        """Stop the capture of a query as a CUDA graph, which would repeat random numbers and Python's part.

        Raises:
            RuntimeError: a graph is captured now. The query then runs without one.
        """
        if self.samples is None or not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{operation} cannot be captured; declare reads_values in the query's details")


class _OnGroup(torch.autograd.Function):
    """Leaves a stacked call: its ``vmap`` rule gets the tensors of all nodes, ``(G, ...)`` each."""

    @staticmethod
    def forward(run: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        raise RuntimeError("on_group outside of a stacked call")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], run: Callable[..., Any], *tensors: Any) -> Any:
        rows = [
            tensor.unsqueeze(0).expand(info.batch_size, *tensor.shape)
            if dim is None
            else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        outputs = run(*rows)
        return outputs, tuple(0 for _ in outputs) if isinstance(outputs, tuple) else 0


def map_nodes(
    function: Callable[..., Any],
    make_view: Callable[..., Any],
    count: int,
    tensors: Mapping[str, torch.Tensor],
) -> Any:
    """Return ``function(node, **tensors)`` of the first nodes of a group in one stacked call.

    Args:
        function: function of a node view and of that node's tensors; returns tensors.
        make_view: returns the view of ``count`` nodes, with the row ``index`` of the group in a stacked call.
        count: number of nodes of the group.
        tensors: ``(G, ...)`` each, G at most ``count``; all nodes without tensors.
    """
    count = min((len(tensor) for tensor in tensors.values()), default=count)
    if count == 1:
        result = function(make_view(count=1), **{name: tensor.squeeze(0) for name, tensor in tensors.items()})
        if isinstance(result, Mapping):
            return {name: value.unsqueeze(0) for name, value in result.items()}
        return result.unsqueeze(0)

    def call(index: torch.Tensor, tensors: dict[str, torch.Tensor]) -> Any:
        return function(make_view(index=index, count=count), **tensors)

    return vmap(call)(torch.arange(count), {**tensors})


def holds_stacked_tensor(function: Any) -> bool:
    """Return whether a function's closure, or its partial arguments, hold a tensor of a stacked call.

    Such a tensor has the rows of that call, and training may compute fewer nodes or another order.
    """
    held: list[Any] = []
    while isinstance(function, partial):
        held += [*function.args, *function.keywords.values()]
        function = function.func
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # a variable that is not assigned yet
            held.append(cell.cell_contents)
    return any(isinstance(each, torch.Tensor) and is_batchedtensor(each) for each in held)


def group_term(
    term: Callable[..., torch.Tensor],
    nodes: Sequence[Node],
    given: Mapping[str, torch.Tensor],
    make_view: Callable[..., Any],
) -> LossTerm:
    """Return the terms of the loss of a group's nodes, each the node's own ``term(node, number, **given)``.

    Arguments are those of :func:`group_train_step`.
    """
    rows, numbers = {node.name: row for row, node in enumerate(nodes)}, itertools.count()

    def values(group: NodeGroup, count: int) -> torch.Tensor:
        order = [rows[node.name] for node in group.nodes[:count]]
        number = next(numbers)
        terms: torch.Tensor = map_nodes(
            lambda node, **mine: term(node, number, **mine),
            partial(make_view, group),
            count,
            {name: tensor[order] for name, tensor in given.items()},
        )
        return terms

    return values


def group_train_step(
    step: Callable[..., torch.Tensor],
    nodes: Sequence[Node],
    given: Mapping[str, torch.Tensor],
    make_view: Callable[..., Any],
) -> Callable[[NodeGroup, int, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a training step of a group that takes a step of each of its nodes.

    Args:
        step: the step of one node, ``step(node, number, x, y, **given)``.
        nodes: the nodes, in the order of the rows of ``given``.
        given: further tensors of the nodes by name, ``(G, ...)`` each.
        make_view: returns a view of the nodes of a group, as in :func:`map_nodes`.
    """
    rows, numbers = {node.name: row for row, node in enumerate(nodes)}, itertools.count()

    def train_step(group: NodeGroup, _: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        order = [rows[node.name] for node in group.nodes[: len(x)]]
        tensors = {"x": x, "y": y, **{name: tensor[order] for name, tensor in given.items()}}
        number = next(numbers)
        losses: torch.Tensor = map_nodes(
            lambda node, x, y, **mine: step(node, number, x, y, **mine),
            partial(make_view, group),
            len(group),
            tensors,
        )
        return losses

    return train_step
