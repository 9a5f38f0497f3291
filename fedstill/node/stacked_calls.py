"""Stacked calls: one call of a method's function serves all nodes of one architecture.

In a stacked call (:func:`torch.func.vmap`) each tensor holds the values of all these nodes, one row for each.
:class:`OnGroup` leaves the call for parts that compute the whole group, and :class:`QuerySamples` are the
random examples of a function that a CUDA graph has captured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch._C._functorch import is_batchedtensor
from torch.func import vmap

from fedstill.core.dataset import TensorData
from fedstill.node.node import Node
from fedstill.node.stacked_modules import stack_tensors

Purpose = tuple[str | int | None, ...]  # None: the query's number
View = Callable[[TensorData], TensorData]
SampleRequest = tuple[int, Purpose, View | None]


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


class OnGroup(torch.autograd.Function):
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
        result = function(make_view(count=1), **{name: tensor[0] for name, tensor in tensors.items()})
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
