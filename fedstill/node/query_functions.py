"""Runs the functions of queries for a group of nodes: node by node, stacked, or as captured CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from fedstill.core.compute import Compute
from fedstill.core.cuda_graphs import CudaGraphStep, ModelAndOptimizerTensors, make_capturable
from fedstill.core.errors import ArgumentError
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeView
from fedstill.node.stacked_calls import QuerySamples, map_nodes
from fedstill.node.stacked_modules import stack_tensors
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors, json_to_tensor


class FunctionRunner:
    """Runs the functions of queries of one group of nodes, as CUDA graphs if query and networks allow it."""

    def __init__(self, group: NodeGroup, setting: NodeSetting, compute: Compute) -> None:
        self.group, self.setting, self.compute = group, setting, compute
        self._samples: dict[str, QuerySamples] = {}  # by query name
        self._graphs: dict[str, CudaGraphStep | None] = {}  # by query name; None: called without a graph
        self._number = 0  # of the current query

    def __call__(
        self, query: Query, number: int, inputs: Tensors, values: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the outputs for tensors ``(G, ...)`` and plain values."""
        self._number = number
        if query.name not in self._graphs:
            self._graphs[query.name] = self._capture(query)
        graph = self._graphs[query.name]
        if graph is None:
            return self._call(query, number, inputs, values)
        for node in self.group.nodes:
            node.set_learning_rates(query.trains)
        return graph(**inputs, **self._samples[query.name].take(self.group.nodes, number))

    def _call(
        self,
        query: Query,
        number: int,
        inputs: Tensors,
        values: Mapping[str, Any],
        samples: QuerySamples | None = None,
    ) -> Mapping[str, Any]:
        # The server sends all nodes the same. Inputs with gradients are copied, as each node has its own.
        copied = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
        shared = {name: tensor[0] for name, tensor in inputs.items() if name not in copied}
        setting = self.setting
        if query.stackable:

            def one(node: NodeView, **tensors: torch.Tensor) -> Mapping[str, torch.Tensor]:
                return _checked_response(query, query.function(node, **shared, **tensors, **values))

            make_view = partial(NodeView, self.group, setting, number, samples=samples)
            outputs: Mapping[str, Any] = map_nodes(one, make_view, len(self.group), copied)
            return outputs
        responses = []
        for row, node in enumerate(self.group.nodes):
            view = NodeView(NodeGroup([node]), setting, number)
            own = {name: tensor[row] for name, tensor in copied.items()}
            response = query.function(view, **shared, **own, **values)
            responses.append(_checked_response(query, response))
        names = {name for response in responses for name in response}
        if any(len(response) < len(names) for response in responses):
            expected = f"{sorted(names)} from each node"
            raise ArgumentError(f"response of query {query.name}", "different names", expected)
        return {name: _join_nodes(query, name, [each[name] for each in responses]) for name in responses[0]}

    def _capture(self, query: Query) -> CudaGraphStep | None:
        nodes = self.group.nodes
        modules = [module for node in nodes for module in node.modules.values()]
        can_capture = query.is_capturable and self.compute.uses_cuda_graphs(*modules)
        if nodes[0].dp_sgd_parameters or not can_capture:
            return None
        optimizers = [node.optimizers[role] for node in nodes for role in query.trains]
        for optimizer in optimizers:
            make_capturable(optimizer)
        samples = self._samples[query.name] = QuerySamples()

        def step(**tensors: torch.Tensor) -> Mapping[str, torch.Tensor]:
            samples.put(tensors)
            return self._call(query, self._number, tensors, {}, samples)

        return CudaGraphStep(step, ModelAndOptimizerTensors(modules, optimizers))


def _checked_response(query: Query, response: object) -> Mapping[str, Any]:
    """Return one node's response, if it maps names to tensors. The gate refuses undeclared ones.

    Raises:
        ArgumentError: no mapping, or an item that is not a tensor without being declared as a JSON value.
    """
    if not isinstance(response, Mapping):
        found = type(response).__name__
        raise ArgumentError(f"response of query {query.name}", found, "a mapping from names to tensors")
    for name, value in response.items():
        if name not in query.details.json_values and not isinstance(value, torch.Tensor):
            expected = "a tensor; any JSON value if json_values names it"
            raise ArgumentError(f"{name} of query {query.name}", f"a {type(value).__name__}", expected)
    return response


def _join_nodes(query: Query, name: str, values: list[Any]) -> Any:
    """Return one part of all nodes' responses: ``(G, ...)``, or a list if it is not stacked.

    JSON values become text tensors.
    """
    if name in query.unstacked:
        return [json_to_tensor(value) for value in values] if name in query.details.json_values else values
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) > 1:
        raise ArgumentError(f"shapes of {name} of query {query.name}", shapes, "equal ones, or ragged")
    return stack_tensors(values)
