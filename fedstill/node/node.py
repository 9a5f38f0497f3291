"""A node: one place's private data, its model, its critic, its randomness and its gate."""

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

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Node:
    """What stays in one place: private training data, a network of any architecture, and the gate, the only
    way out. The seed is of the node's own randomness."""

    def __init__(self, name: str, data: TensorData, model: nn.Module, gate: Gate, seed: int) -> None:
        self.name, self.data, self.gate, self.seed = name, data, gate, seed
        self.modules: dict[str, nn.Module] = {"model": model}
        self.frozen = {
            "model": frozen_parameter_names(model)
        }  # parameters that their owner does not want trained
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        # Fingerprints of all that its state follows from: numbers and contents of what it has answered, in
        # order, and what it has learned privately, to the last bit.
        self.history_hash = ""
        self.pretraining_hash = ""  # of what it had learned privately before the first query
        self.query_context_hash = ""  # of all of this, with what is being answered now: it names the noise
        self.private_steps: Mapping[str, DPParameters] = {}  # networks that learn with DP-SGD, by role
        # While a query is answered, by role: of how many records on average, and how many, the private
        # steps are that are charged and not taken yet. None: no query is.
        self.remaining_private_steps: dict[str, tuple[int, int]] | None = None
        self.query_history_hash = (
            ""  # a fingerprint of all that it was asked, in order, as every node can make it
        )
        self.released_counts: dict[
            str, torch.Tensor
        ] = {}  # counts that have left, by which its answers are weighed
        self.captured_step: CudaGraphStep | None = None  # a step of its model's local training, on a GPU
        self.teachers: list[Node] = []  # PATE: those that its model consists of, each with its own data

    def __copy__(self) -> Node:
        """One that shares all but its recorded step with it: it may be given other networks."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), recorded=None)
        return twin

    @property
    def model(self) -> nn.Module:
        """The node's task model T_k."""
        return self.modules["model"]

    @property
    def is_frozen(self) -> bool:
        """Whether its owner left nothing in its model to train."""
        return len(self.frozen["model"]) == sum(1 for _ in self.model.parameters())

    @property
    def learners(self) -> Sequence[Node]:
        """Those whose models learn from this node's data: itself, or its teachers."""
        return self.teachers or [self]

    def add_module(self, role: str, module: nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Give the node a further network that it trains, for example its critic."""
        self.modules[role] = module.to(self.data.inputs.device)
        self.frozen[role] = frozen_parameter_names(module)
        self.optimizers[role] = make_optimizer(module)

    def private_state(self) -> dict[str, torch.Tensor]:
        """The state of the networks that learn with DP-SGD, as it is now."""
        return {
            f"{role}.{name}": tensor
            for role in sorted(self.private_steps.keys() & self.modules.keys())
            for name, tensor in self.modules[role].state_dict().items()
        }

    def generator(self, *purpose: str | int) -> torch.Generator:
        """The node's random generator for one purpose: the same purpose gives the same draws."""
        return torch_generator(self.seed, self.name, *purpose)

    def sample(self, size: int, *purpose: str | int) -> TensorData:
        """``size`` of its own examples, with replacement."""
        indices = torch.randint(len(self.data), (size,), generator=self.generator(*purpose))
        return self.data.subset(copy_to_device(indices, self.data.inputs.device))

    def copy_without_gate(self) -> Node:
        """A copy to try things on: own networks, the same data, no gate to release anything."""
        twin = copy.copy(self)
        for module in self.modules.values():
            detach_computed(module)
        # One deep copy for both, so that the copied optimizers hold the copied parameters.
        twin.modules, twin.optimizers = copy.deepcopy((self.modules, self.optimizers))
        del twin.gate
        return twin

    def state_dict(self) -> dict[str, Any]:
        """What the node must remember to go on."""
        return {
            "modules": {role: dict(module.state_dict()) for role, module in self.modules.items()},
            "optimizers": {role: optimizer.state_dict() for role, optimizer in self.optimizers.items()},
            "history_hash": self.history_hash,
            "query_history_hash": self.query_history_hash,
            "released_counts": self.released_counts,
            "pretraining_hash": self.pretraining_hash,
            "teachers": [
                {role: optimizer.state_dict() for role, optimizer in teacher.optimizers.items()}
                for teacher in self.teachers
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a remembered state; the networks must exist already."""
        for role, values in state["modules"].items():
            self.modules[role].load_state_dict(values)
        states = [(self, state["optimizers"]), *zip(self.teachers, state["teachers"], strict=True)]
        for node, optimizers in states:  # teachers' networks are parts of the node's own
            for role in node.optimizers.keys() - optimizers.keys():
                del node.optimizers[role]
            for role, values in optimizers.items():
                node.optimizers[role].load_state_dict(values)
                match_parameter_layout(node.optimizers[role])
        self.history_hash, self.pretraining_hash = state["history_hash"], state["pretraining_hash"]
        # What has left weighs its answers for good: others, from before they left, would tell them apart.
        self.query_history_hash, self.released_counts = (
            state["query_history_hash"],
            {**state["released_counts"], **self.released_counts},
        )


def frozen_parameter_names(module: nn.Module) -> frozenset[str]:
    """The names of the parameters that do not learn."""
    return frozenset(name for name, parameter in module.named_parameters() if not parameter.requires_grad)
