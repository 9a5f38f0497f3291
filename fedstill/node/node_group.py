"""Nodes that compute together: query handlers are written for a group, and a single node is a group of one.

Networks of equal architecture can be stacked (one batched kernel serves G nodes) or computed one by one.
The results are the same; only the partition of nodes into groups differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from fedstill.core.compute import match_parameter_layout
from fedstill.core.cuda_graphs import uses_global_rng
from fedstill.core.errors import ArgumentError, QueryRefused
from fedstill.models.module_utils import load_vector, to_vector
from fedstill.node.node import Node
from fedstill.node.stacked_modules import StackedModules, stack_tensors


class NodeGroup:
    """G nodes whose networks have equal architectures, role by role.

    Attributes:
        nodes: the nodes.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)
        self._stacked: dict[str, StackedModules] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def device(self) -> torch.device:
        """Device of the nodes' data."""
        return self.nodes[0].data.inputs.device

    @cached_property
    def uses_global_rng(self) -> bool:
        """True if a network has layers that use torch's global generator."""
        return any(uses_global_rng(module) for node in self.nodes for module in node.modules.values())

    def module(self, role: str) -> StackedModules:
        """Return the group's networks of one role as one stacked module.

        Args:
            role: for example ``"model"`` or ``"critic"``.

        Raises:
            ArgumentError: a node has no network of this role.

        Example::

            logits = nodes.module("model")(x)  # (G, B, ...) to (G, B, C)
        """
        for node in self.nodes:
            if role not in node.modules:
                roles = ", ".join(node.modules)
                raise ArgumentError("role", role, f"one of {roles}; node.add_module adds others")
        if role not in self._stacked or not self._stacked[role].is_current():
            modules = [node.modules[role] for node in self.nodes]
            self._stacked[role] = StackedModules(modules, self.nodes[0].frozen[role])
            for node in self.nodes:  # stacking changes the memory layout of parameters
                if role in node.optimizers:
                    match_parameter_layout(node.optimizers[role])
        return self._stacked[role]

    def parameter_vectors(self, role: str, submodule: str = "") -> torch.Tensor:
        """Return the parameters of each node's network (or of one submodule) as one vector: ``(G, P)``."""
        self.module(role)
        return stack_tensors([to_vector(node.modules[role].get_submodule(submodule)) for node in self.nodes])

    def load_parameters(self, role: str, vectors: torch.Tensor, submodule: str = "") -> None:
        """Load vectors ``(G, P)`` into the nodes' networks of a role, or into one submodule of each.

        With fewer vectors, only the first nodes' networks get one.
        """
        self.module(role)
        for node, vector in zip(self.nodes[: len(vectors)], vectors, strict=True):
            load_vector(node.modules[role].get_submodule(submodule), vector)

    def step(self, role: str, losses: torch.Tensor) -> None:
        """Take one optimizer step of each node's network on its own loss.

        Args:
            role: role of the networks.
            losses: ``(G,)``, one loss per node; with fewer losses the first nodes take a step.

        Raises:
            QueryRefused: the network trains privately, and this step has no noise.
            ArgumentError: the network has no optimizer now, or there is not one loss per node.
        """
        stacked = self.module(role)
        if losses.ndim != 1 or not 0 < len(losses) <= len(self.nodes):
            expected = f"a vector of {len(self.nodes)}, one loss for each node"
            raise ArgumentError("losses of node.step", tuple(losses.shape), expected)
        for node in self.nodes:
            if role in node.dp_sgd_parameters or "model" in node.dp_sgd_parameters:
                rule = f"privacy: its networks train with DP-SGD, and here its {role} would train without"
                raise QueryRefused(node.name, "train_locally", rule)
        for node in self.nodes[: len(losses)]:
            if role not in node.optimizers:
                expected = "a network with an optimizer: a model has one in a step of node.train only"
                raise ArgumentError("role of node.step", role, expected)
        stacked.backward(losses)
        for node in self.nodes[: len(losses)]:
            node.optimizers[role].step()


# One step of the nodes still in training: group, step number, inputs (G, B, ...) and targets (G, B, ...)
# to the losses (G,) whose gradients it has used.
TrainStep = Callable[[NodeGroup, int, torch.Tensor, torch.Tensor], torch.Tensor]
