"""Runs the functions of queries for a group of nodes: node by node, or one stacked call for all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from fedstill.core.errors import ArgumentError
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeView
from fedstill.node.stacked_calls import QuerySamples, map_nodes
from fedstill.node.stacked_modules import stack_tensors
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors, json_to_tensor


def run_function(
    query: Query,
    group: NodeGroup,
    setting: NodeSetting,
    number: int,
    inputs: Tensors,
    values: Mapping[str, Any],
    samples: QuerySamples | None = None,
) -> Mapping[str, Any]:
    """Return the outputs of a query's function for a group of nodes.

    Args:
        query: the query.
        group: the nodes.
        setting: environment of the method.
        number: number of the query.
        inputs: tensors of the query, ``(G, ...)``, a row for each node.
        values: its numbers and JSON values.
        samples: the nodes' own examples, if they were taken before the call.

    Returns:
        Tensors ``(G, ...)``, or lists of G tensors, by name.

    Raises:
        ArgumentError: a response that is not as declared.
    """
    # The server sends all nodes the same. Inputs with gradients are copied, as each node has its own.
    copied = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    shared = {name: tensor[0] for name, tensor in inputs.items() if name not in copied}

    def run(node: NodeView, **own: torch.Tensor) -> Mapping[str, Any]:
        return _checked_response(query, query.function(node, **shared, **own, **values))

    if query.stackable:
        make_view = partial(NodeView, group, setting, number, samples=samples)
        outputs: Mapping[str, Any] = map_nodes(run, make_view, len(group), copied)
        return outputs
    is_single = len(group) == 1
    responses = [
        run(
            NodeView(group if is_single else NodeGroup([node]), setting, number),
            # squeeze has a backward pass without a copy.
            **{name: tensor.squeeze(0) if is_single else tensor[row] for name, tensor in copied.items()},
        )
        for row, node in enumerate(group.nodes)
    ]
    if any(response.keys() != responses[0].keys() for response in responses):
        names = {name for response in responses for name in response}
        expected = f"{sorted(names)} from each node"
        raise ArgumentError(f"response of query {query.name}", "different names", expected)
    return {name: _join_nodes(query, name, [each[name] for each in responses]) for name in responses[0]}


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
