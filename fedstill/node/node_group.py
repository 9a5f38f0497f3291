"""Nodes that compute together: query handlers are written for a group, and a single node is a group of one.

Networks of equal architecture can be stacked (one batched kernel serves G nodes) or computed one by one.
The results are the same; only the partition of nodes into groups differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap

from fedstill.core import timing
from fedstill.core.compute import match_layout, match_parameter_layout
from fedstill.core.cuda_graphs import uses_global_rng
from fedstill.core.errors import ArgumentError, QueryRefused
from fedstill.models.module_utils import load_vector, reparametrized_names, to_vector
from fedstill.node.node import Node
from fedstill.protocol.digests import digest


def stacking_key(module: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for two modules that one stacked call can compute.

    The key holds classes, parameter shapes, dtypes and all public attributes, since a user's ``forward``
    may depend on these.
    """
    return _describe_layers(module, _identity_text)


def architecture_key(module: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for two modules of one architecture, whose parameters can be averaged.

    Unlike in :func:`stacking_key`, attributes count by value and not by address: tensors by their numbers,
    functions by their names, other objects by their class. Tensors that ``torch.nn.utils.spectral_norm``,
    ``weight_norm`` or ``prune`` compute from parameters do not count.

    >>> from torch.nn.utils import spectral_norm
    >>> one, other = spectral_norm(nn.Linear(2, 3)), spectral_norm(nn.Linear(2, 3))
    >>> architecture_key(one) == architecture_key(other)
    True
    >>> architecture_key(one) == architecture_key(nn.Linear(2, 3))
    False
    """
    return _describe_layers(module, _content_text)


def _describe_layers(module: nn.Module, describe_value: Callable[[Any], str]) -> tuple[Any, ...]:
    """Return classes, public attributes (as texts of ``describe_value``) and tensor shapes of all layers."""
    layers = tuple(
        (
            name,
            type(layer).__module__,
            type(layer).__qualname__,
            layer.extra_repr(),
            tuple(
                sorted(
                    (key, describe_value(value))
                    for key, value in vars(layer).items()
                    if not key.startswith("_")
                    and key != "training"
                    and key not in reparametrized_names(layer)
                )
            ),
        )
        for name, layer in module.named_modules()
    )
    tensors = (*module.named_parameters(), *module.named_buffers())
    return layers, tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)


def _identity_text(value: Any) -> str:
    # The text of a long tensor omits numbers; the text of an object contains its address.
    return f"at {id(value)}" if hasattr(value, "shape") else repr(value)


def _content_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return digest("", {"": value.detach()})
    if hasattr(value, "tobytes") and hasattr(value, "shape"):  # a numpy array
        return f"{value.dtype} {value.shape} {value.tobytes().hex()}"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    return type(value).__qualname__ if f"{id(value):x}" in text or " at 0x" in text else text


def has_hooks(module: nn.Module) -> bool:
    """Return whether a network has hooks. A stacked call would run the first network's hooks for all.

    >>> has_hooks(nn.Linear(2, 3)), has_hooks(torch.nn.utils.spectral_norm(nn.Linear(2, 3)))
    (False, True)
    """
    hook_attributes = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(layer, attribute, None) for layer in module.modules() for attribute in hook_attributes)


def has_only_matrix_products(module: nn.Module) -> bool:
    """Return whether all trained layers are linear or norms; such networks are stacked on a CPU, too."""
    trainable_layers = [
        layer for layer in module.modules() if any(True for _ in layer.parameters(recurse=False))
    ]
    return all(isinstance(layer, (nn.Linear, nn.LayerNorm, nn.BatchNorm1d)) for layer in trainable_layers)


class StackedModules:
    """Modules of equal architecture as one module: ``(G, B, ...)`` in, ``(G, B, ...)`` out.

    With G > 1 the parameters move into stacked tensors, one row per module. Each module keeps its
    parameters as views of its row, so optimizers and state dicts stay valid.

    Args:
        modules: G modules with equal :func:`stacking_key`.
        frozen: names of parameters that are not trained.
    """

    def __init__(self, modules: Sequence[nn.Module], frozen: frozenset[str] = frozenset()) -> None:
        self.modules = list(modules)
        self.frozen = frozen
        self._training: bool | None = None
        # Stacking changes the storage of these parameters, not their identity.
        self._module_parameters = [dict(module.named_parameters()) for module in self.modules]
        self._parameters: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        if len(self.modules) > 1:
            self._stack()

    def train(self, mode: bool = True) -> None:
        """Switch to training mode with gradients of the parameters, or to evaluation mode without."""
        # Another group, or a view of one node, may have switched the same modules since.
        if mode is self._training and all(module.training is mode for module in self.modules):
            return
        self._training = mode
        for module in self.modules:
            module.train(mode)
        stacked: Mapping[str, torch.Tensor] = self._parameters
        for parameters in (*self._module_parameters, stacked):
            for name, tensor in parameters.items():
                tensor.requires_grad_(mode and name not in self.frozen)

    def __call__(self, x: torch.Tensor, submodule: str = "") -> torch.Tensor:
        """Compute module g on ``x[g]``. With fewer rows than modules, only the first modules are computed.

        Args:
            x: ``(G, B, ...)``.
            submodule: name of a submodule to compute instead of the whole, for example ``"head"``.

        Returns:
            Outputs ``(G, B, ...)`` in float32.
        """
        timing.check_limits()
        base = self.modules[0].get_submodule(submodule) if submodule else self.modules[0]
        if len(x) == 1:  # stacked kernels are slower for one module
            output: torch.Tensor = base(x[0])
            return output.float().unsqueeze(0)
        count, prefix = len(x), f"{submodule}." if submodule else ""

        def call_one(parameters: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = functional_call(base, (parameters, buffers), (x,))
            return result

        parameters = _submodule_tensors(self._parameters, prefix, count)
        buffers = _submodule_tensors(self._buffers, prefix, count)
        with _cast_batch_norm_inputs_to_float32(base, x.device):
            stacked: torch.Tensor = vmap(call_one)(parameters, buffers, x.contiguous())
        return stacked.float()

    def trainable_parameters(self, count: int) -> dict[str, torch.Tensor]:
        """Return the trained parameters of the first ``count`` modules by name, each ``(count, ...)``, in
        the graph.
        """
        if count == 1:
            return {
                name: parameter.unsqueeze(0)
                for name, parameter in self._module_parameters[0].items()
                if name not in self.frozen
            }
        return {name: tensor[:count] for name, tensor in self._parameters.items() if name not in self.frozen}

    def is_current(self) -> bool:
        """Return whether the parameters still lie here; a later stack of the same modules moves them."""
        if not self._parameters:  # alone
            return True
        name, rows = next(iter(self._parameters.items()))
        return all(
            module_parameters[name].data_ptr() == row.data_ptr()
            for module_parameters, row in zip(self._module_parameters, rows, strict=True)
        )

    def backward(self, losses: torch.Tensor) -> None:
        """Compute the gradients of each module's own loss, ``losses`` (G,), into its parameters' ``grad``."""
        is_single = len(losses) == 1
        leaves: dict[str, torch.Tensor] = {**self._module_parameters[0]} if is_single else self._parameters
        names = [name for name, leaf in leaves.items() if leaf.requires_grad]
        grads: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
            losses.sum(), [leaves[name] for name in names], allow_unused=True
        )
        for name, grad in zip(names, grads, strict=True):
            for row, module_parameters in enumerate(self._module_parameters[: len(losses)]):
                gradient = grad if is_single or grad is None else grad[row]
                module_parameters[name].grad = (
                    None if gradient is None else match_layout(gradient, module_parameters[name])
                )

    def _stack(self) -> None:
        for name, _ in self.modules[0].named_parameters():
            parameters = [module.get_parameter(name) for module in self.modules]
            # vmap does not support channels last.
            rows = torch.stack([parameter.detach() for parameter in parameters]).contiguous()
            for parameter, row in zip(parameters, rows, strict=True):
                parameter.data = row
            self._parameters[name] = rows.requires_grad_(parameters[0].requires_grad)
        for name, _ in self.modules[0].named_buffers():
            rows = torch.stack([module.get_buffer(name) for module in self.modules])
            self._buffers[name] = rows
            path, _, leaf = name.rpartition(".")
            for module, row in zip(self.modules, rows, strict=True):
                module.get_submodule(path)._buffers[leaf] = row


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

    def sample_batch(self, size: int, *purpose: str | int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample each node's own examples: inputs ``(G, size, ...)`` and targets ``(G, size, ...)``."""
        parts = [node.sample_batch(size, *purpose) for node in self.nodes]
        return stack_tensors([part.inputs for part in parts]), stack_tensors([part.targets for part in parts])

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
                expected = (
                    "a network with an optimizer: a model has one in a step of node.train only, other "
                    "networks that of node.add_module; node.train_on trains a model on given inputs"
                )
                raise ArgumentError("role of node.step", role, expected)
        stacked.backward(losses)
        for node in self.nodes[: len(losses)]:
            node.optimizers[role].step()


@contextmanager
def _cast_batch_norm_inputs_to_float32(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Pass inputs of batch norms in float32.

    On a GPU, torch 2.11 has no backward pass through stacked batch norms in bfloat16 whose running
    statistics are float32.
    """
    is_reduced = device.type == "cuda" and torch.is_autocast_enabled(device.type)
    layers = module.modules() if is_reduced else ()
    with ExitStack() as hooks:
        for layer in layers:
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                hooks.enter_context(layer.register_forward_pre_hook(_as_float32))
        yield


def _as_float32(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.float() for tensor in inputs)


def _submodule_tensors(
    tensors: Mapping[str, torch.Tensor], prefix: str, count: int
) -> dict[str, torch.Tensor]:
    """Return the tensors of one submodule, under the names that they have inside it."""
    return {
        name[len(prefix) :]: tensor[:count] for name, tensor in tensors.items() if name.startswith(prefix)
    }


def stack_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors as ``torch.stack``, without a copy if there is only one."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def group_by_architecture(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Yield lists of nodes with equal architectures, which can be stacked.

    A node forms its own list if its modules cannot be stacked (random layers, hooks, operations that
    ``vmap`` does not support), if a network trains with DP-SGD, or if the model consists of teachers.
    """
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in nodes:
        key: tuple[Any, ...] = tuple(
            (role, stacking_key(module), node.frozen[role]) for role, module in node.modules.items()
        )
        # Private training and teachers have their own code paths, and random layers give other numbers once
        # stacked.
        modules = node.modules.values()
        if (
            node.dp_sgd_parameters
            or node.teachers
            or any(uses_global_rng(layer_module) or has_hooks(layer_module) for layer_module in modules)
        ):
            key = ("alone", node.name)
        groups.setdefault(key, []).append(node)
    for members in groups.values():
        if len(members) == 1 or _supports_vmap(members[:2]):
            yield members
        else:
            yield from ([node] for node in members)


def _supports_vmap(pair: Sequence[Node]) -> bool:
    """Return whether ``vmap`` supports these nodes' models in training and evaluation mode, tried on
    copies.

    Only models are tried: other networks belong to a method and have inputs of their own.
    """
    group = NodeGroup([node.copy_without_gate() for node in pair])
    x = group.sample_batch(2, "try")[0]
    try:
        model = group.module("model")
        for mode in (True, False):
            model.train(mode)
            model(x)
    except RuntimeError:  # random layers, .item(), branches on values have different messages
        return False
    return True
