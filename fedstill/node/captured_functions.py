"""CUDA graphs of the functions of queries, where query, networks and device allow them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedstill.core.compute import Compute
from fedstill.core.cuda_graphs import CudaGraphStep, ModelAndOptimizerTensors, make_capturable
from fedstill.node.node_group import NodeGroup
from fedstill.node.query_functions import run_function
from fedstill.node.stacked_calls import QuerySamples
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors


class CapturedFunctions:
    """Functions of queries for one group of nodes; each runs as a CUDA graph if possible, else as it is."""

    def __init__(self, group: NodeGroup, setting: NodeSetting, compute: Compute) -> None:
        self.group, self.setting, self.compute = group, setting, compute
        self._samples: dict[str, QuerySamples] = {}  # by query name
        self._graphs: dict[str, CudaGraphStep | None] = {}  # by query name; None: called without a graph
        self._number = 0  # of the current query

    def __call__(
        self, query: Query, number: int, inputs: Tensors, values: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the outputs for tensors ``(G, ...)`` and plain values, as :func:`run_function`."""
        self._number = number
        if query.name not in self._graphs:
            self._graphs[query.name] = self._capture(query)
        graph = self._graphs[query.name]
        if graph is None:
            return run_function(query, self.group, self.setting, number, inputs, values)
        for node in self.group.nodes:
            node.set_learning_rates(query.trains)
        return graph(**inputs, **self._samples[query.name].take(self.group.nodes, number))

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
            return run_function(query, self.group, self.setting, self._number, tensors, {}, samples)

        return CudaGraphStep(step, ModelAndOptimizerTensors(modules, optimizers))
