"""A node: one data owner's private data, model, random generators and gate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fedstill.core.compute import copy_to_device, match_parameter_layout
from fedstill.core.cuda_graphs import CudaGraphStep
from fedstill.core.dataset import TensorData
from fedstill.core.seeds import torch_generator
from fedstill.models.module_utils import detach_computed
from fedstill.node.gate import Gate
from fedstill.privacy.dpsgd import DPParameters
from fedstill.protocol.local_config import set_lr

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class BufferModule(nn.Module):
    """Tensors by name, as a module without parameters, so that a node saves and restores them with its
    networks."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


class Node:
    """One data owner (a client or site) with private training data, networks of any architecture and a
    gate.

    Nothing leaves a node except through its gate.

    Args:
        name: unique name of the node.
        data: private training data.
        model: task model T_k of any architecture.
        gate: checks, charges and records every release.
        seed: seed of the node's own random generators.

    Attributes:
        modules: networks by role; ``"model"`` is the task model.
        frozen: names of the parameters that are not trained, by role.
        optimizers: optimizers by role.
        learning_rates: learning rate by the number of steps taken, by role, where it is not constant.
        history_hash: hash of all that the node's state depends on: numbers and contents of the queries that
            it has responded to, in order, and all privately learned weights, to the last bit.
        pretraining_hash: the part of ``history_hash`` for private training before the first query.
        query_context_hash: ``history_hash`` with the current query; it names the noise.
        dp_sgd_parameters: parameters of DP-SGD, by the role of each network that trains privately.
        records_read: the current query's function has read the node's records.
        remaining_private_steps: mean sample size and number of charged DP-SGD steps that are not taken yet,
            by role; None outside a query.
        captured_step: a training step captured as a CUDA graph.
        teachers: PATE teachers of which the model consists, each with its own part of the data.
    """

    def __init__(self, name: str, data: TensorData, model: nn.Module, gate: Gate, seed: int) -> None:
        self.name, self.data, self.gate, self.seed = name, data, gate, seed
        self.modules: dict[str, nn.Module] = {"model": model}
        self.frozen = {"model": frozen_parameter_names(model)}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.learning_rates: dict[str, Callable[[int], float]] = {}
        self.history_hash = self.pretraining_hash = self.query_context_hash = ""
        self.dp_sgd_parameters: Mapping[str, DPParameters] = {}
        self.remaining_private_steps: dict[str, tuple[int, int]] | None = None
        self.records_read = False
        self.captured_step: CudaGraphStep | None = None
        self.teachers: list[Node] = []

    def __copy__(self) -> Node:
        """Return a node that shares everything except the captured training step."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), captured_step=None)
        return twin

    @property
    def model(self) -> nn.Module:
        """Task model T_k."""
        return self.modules["model"]

    @property
    def is_frozen(self) -> bool:
        """True if no parameter of the model is trained."""
        return len(self.frozen["model"]) == sum(1 for _ in self.model.parameters())

    @property
    def self_or_teachers(self) -> Sequence[Node]:
        """Nodes whose models are trained on this node's data: the node itself, or its teachers."""
        return self.teachers or [self]

    def add_module(
        self,
        role: str,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        learning_rate: Callable[[int], float] | None = None,
    ) -> None:
        """Add a network that the node trains, for example its critic.

        Args:
            role: key in ``modules``.
            module: the network; it is moved to the device of the node's data.
            make_optimizer: returns the network's optimizer.
            learning_rate: learning rate of the optimizer by the number of steps taken; None: constant.
        """
        self.modules[role] = module.to(self.data.inputs.device)
        self.frozen[role] = frozen_parameter_names(module)
        self.optimizers[role] = make_optimizer(module)
        if learning_rate is not None:
            self.learning_rates[role] = learning_rate

    def add_buffers(self, role: str, **tensors: torch.Tensor) -> None:
        """Add tensors that the node keeps from query to query, and saves with its networks.

        Args:
            role: key in ``modules``.
            tensors: initial values by name.
        """
        self.modules[role] = BufferModule(**tensors).to(self.data.inputs.device)
        self.frozen[role] = frozenset()

    def buffers(self, role: str) -> dict[str, torch.Tensor]:
        """Return the tensors of :meth:`add_buffers` by name; they can be changed in place."""
        return dict(self.modules[role].named_buffers())

    def set_learning_rates(self, roles: Sequence[str]) -> None:
        """Set the learning rates of the next step of these networks, and count the step."""
        for role in roles:
            if role in self.learning_rates:
                options = self.optimizers[role].param_groups[0]
                taken = options.setdefault("steps taken", 0)
                set_lr(self.optimizers[role], self.learning_rates[role](taken))
                options["steps taken"] = taken + 1

    def dp_trained_state(self) -> dict[str, torch.Tensor]:
        """Return the current parameters and buffers of all networks that train with DP-SGD."""
        return {
            f"{role}.{name}": tensor
            for role in sorted(self.dp_sgd_parameters.keys() & self.modules.keys())
            for name, tensor in self.modules[role].state_dict().items()
        }

    def random_generator(self, *purpose: str | int) -> torch.Generator:
        """Return the node's random generator for one purpose; equal purposes give equal numbers."""
        return torch_generator(self.seed, self.name, *purpose)

    def sample_batch(self, size: int, *purpose: str | int) -> TensorData:
        """Sample ``size`` examples of the node's data with replacement."""
        indices = torch.randint(len(self.data), (size,), generator=self.random_generator(*purpose))
        return self.data.subset(copy_to_device(indices, self.data.inputs.device))

    def copy_without_gate(self) -> Node:
        """Return a copy for trial runs: own networks, the same data, no gate."""
        twin = copy.copy(self)
        for module in self.modules.values():
            detach_computed(module)
        # Copy both at once, so that the copied optimizers hold the copied parameters.
        twin.modules, twin.optimizers = copy.deepcopy((self.modules, self.optimizers))
        del twin.gate
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {
            "modules": {role: dict(module.state_dict()) for role, module in self.modules.items()},
            "optimizers": {role: optimizer.state_dict() for role, optimizer in self.optimizers.items()},
            "history_hash": self.history_hash,
            "encoder": {} if self.gate.encoder is None else self.gate.encoder.state_dict(),
            "pretraining_hash": self.pretraining_hash,
            "teachers": [
                {role: optimizer.state_dict() for role, optimizer in teacher.optimizers.items()}
                for teacher in self.teachers
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`; the networks must exist already."""
        for role, values in state["modules"].items():
            self.modules[role].load_state_dict(values)
        states = [(self, state["optimizers"]), *zip(self.teachers, state["teachers"], strict=True)]
        for node, optimizers in states:  # teachers' networks are submodules of the node's model
            for role in node.optimizers.keys() - optimizers.keys():
                del node.optimizers[role]
            for role, values in optimizers.items():
                node.optimizers[role].load_state_dict(values)
                match_parameter_layout(node.optimizers[role])
        self.history_hash, self.pretraining_hash = state["history_hash"], state["pretraining_hash"]
        if self.gate.encoder is not None:
            self.gate.encoder.load_state_dict(state["encoder"])


def frozen_parameter_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters without gradients."""
    return frozenset(name for name, parameter in module.named_parameters() if not parameter.requires_grad)
