"""Runner of query handlers, on a GPU as captured CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from fedstill.core.compute import Compute
from fedstill.core.cuda_graphs import CudaGraphStep, ModelAndOptimizerTensors, make_capturable
from fedstill.node.node_group import NodeGroup
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import Tensors


class HandlerRunner:
    """Runs query handlers of one group of nodes, captured as CUDA graphs if query and networks allow it."""

    def __init__(self, group: NodeGroup, compute: Compute) -> None:
        self.group, self.compute = group, compute
        self._graphs: dict[str, CudaGraphStep | None] = {}  # by query name; None: called without a graph

    def __call__(
        self, query: Query, number: int, inputs: Tensors, values: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return a handler's outputs for tensors ``(G, ...)`` and plain values."""
        sampled = {} if query.sampler is None else query.sampler(self.group, number, **inputs, **values)
        if query.name not in self._graphs:
            self._graphs[query.name] = self._capture(query, number)
        graph = self._graphs[query.name]
        if graph is None:
            return query.handler(self.group, number, **inputs, **values, **sampled)
        return graph(**inputs, **sampled)

    def _capture(self, query: Query, number: int) -> CudaGraphStep | None:
        nodes = self.group.nodes
        modules = [module for node in nodes for module in node.modules.values()]
        if nodes[0].dp_sgd_parameters or not (query.capturable and self.compute.uses_cuda_graphs(*modules)):
            return None
        optimizers = [node.optimizers[role] for node in nodes for role in query.trains]
        for optimizer in optimizers:
            make_capturable(optimizer)
        return CudaGraphStep(
            partial(query.handler, self.group, number), ModelAndOptimizerTensors(modules, optimizers)
        )
