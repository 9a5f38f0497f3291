"""Nodes computed together: every handler is written for a group, and a group of one is a plain node.

Equal architectures can be stacked (one batched kernel serves G nodes) or taken one by one. Which,
is only a matter of how nodes are parted into groups; what is computed is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
    """What must be equal for two modules to be computed by one stacked call.

    Beside classes, parameter shapes and dtypes also all public attributes, since a user's ``forward``
    may depend on them.
    """
    return _describe_layers(module, _identity_text)


def architecture_key(module: nn.Module) -> tuple[Any, ...]:
    """Key that two modules share if they are of one architecture, so that their parameters can be averaged.

    As :func:`signature`, but attributes count by what they hold and not by where that lies in memory:
    tensors by their numbers, functions by their names, other objects by their class. A tensor that
    ``torch.nn.utils.spectral_norm``, ``weight_norm`` or ``prune`` computes from parameters does not count.

    >>> from torch.nn.utils import spectral_norm
    >>> one, other = spectral_norm(nn.Linear(2, 3)), spectral_norm(nn.Linear(2, 3))
    >>> kind(one) == kind(other), kind(one) == kind(nn.Linear(2, 3))
    (True, False)
    """
    return _describe_layers(module, _content_text)


def _describe_layers(module: nn.Module, describe_value: Callable[[Any], str]) -> tuple[Any, ...]:
    """Layers with their public attributes, as ``describe_value`` puts these, and tensors."""
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
    # A long tensor's text leaves numbers out; an object's text has its address in it.
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
    """Return whether a network has hooks: a stacked call would run the first network's for all.

    >>> hooked(nn.Linear(2, 3)), hooked(torch.nn.utils.spectral_norm(nn.Linear(2, 3)))
    (False, True)
    """
    hook_attributes = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(layer, attribute, None) for layer in module.modules() for attribute in hook_attributes)


def has_only_matrix_products(module: nn.Module) -> bool:
    """Whether all that a network learns are matrix products and norms: stacking these pays on a CPU, too."""
    trainable_layers = [
        layer for layer in module.modules() if any(True for _ in layer.parameters(recurse=False))
    ]
    return all(isinstance(layer, (nn.Linear, nn.LayerNorm, nn.BatchNorm1d)) for layer in trainable_layers)


class StackedModules:
    """Modules of equal architecture: ``(G, B, ...)`` in, ``(G, B, ...)`` out.

    With G above 1 the modules' parameters move into stacked tensors, one row a module; each module
    keeps its parameters as views of its row, so optimizers and state dicts stay the node's own.
    """

    def __init__(self, modules: Sequence[nn.Module], frozen: frozenset[str] = frozenset()) -> None:
        self.modules = list(modules)
        self.frozen = frozen
        self._training: bool | None = None
        # The modules' own parameters; stacking changes what they refer to, not which they are.
        self._module_parameters = [dict(module.named_parameters()) for module in self.modules]
        self._parameters: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        if len(self.modules) > 1:
            self._stack()

    def train(self, mode: bool = True) -> None:
        """Training mode with gradients to the parameters, or evaluation mode without."""
        if mode is self._training:
            return
        self._training = mode
        for module in self.modules:
            module.train(mode)
        stacked: Mapping[str, torch.Tensor] = self._parameters
        for parameters in (*self._module_parameters, stacked):
            for name, tensor in parameters.items():
                tensor.requires_grad_(mode and name not in self.frozen)

    def __call__(self, x: torch.Tensor, submodule: str = "") -> torch.Tensor:
        """Module g on ``x[g]``; with fewer rows than modules, the first ones only.

        Args:
            x: ``(G, B, ...)``.
            submodule: a submodule of each to compute instead of the whole, for example ``"head"``.
        """
        timing.check_limits()
        base = self.modules[0].get_submodule(submodule) if submodule else self.modules[0]
        if len(x) == 1:  # the stacked kernels would only cost
            output: torch.Tensor = base(x[0])
            return output.float().unsqueeze(0)
        count, prefix = len(x), f"{submodule}." if submodule else ""

        def call_one(parameters: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = functional_call(base, (parameters, buffers), (x,))
            return result

        parameters = _submodule_tensors(self._parameters, prefix, count)
        buffers = _submodule_tensors(self._buffers, prefix, count)
        with _batch_norm_in_float32(base, x.device):
            stacked: torch.Tensor = vmap(call_one)(parameters, buffers, x.contiguous())
        return stacked.float()

    def trainable_parameters(self, count: int) -> dict[str, torch.Tensor]:
        """The parameters in training of the first modules, by name: each ``(count, ...)``, in the graph."""
        if count == 1:
            return {
                name: parameter.unsqueeze(0)
                for name, parameter in self._module_parameters[0].items()
                if parameter.requires_grad
            }
        return {name: tensor[:count] for name, tensor in self._parameters.items() if tensor.requires_grad}

    def is_current(self) -> bool:
        """Whether the modules' parameters still lie here: a later bench of some of them moves them."""
        if not self._parameters:  # alone
            return True
        name, rows = next(iter(self._parameters.items()))
        return all(
            own[name].data_ptr() == row.data_ptr()
            for own, row in zip(self._module_parameters, rows, strict=True)
        )

    def backward(self, losses: torch.Tensor) -> None:
        """Gradients of each module's own loss, ``losses`` (G,), into its parameters' ``grad``."""
        is_single = len(losses) == 1
        leaves: dict[str, torch.Tensor] = {**self._module_parameters[0]} if is_single else self._parameters
        names = [name for name, leaf in leaves.items() if leaf.requires_grad]
        grads: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
            losses.sum(), [leaves[name] for name in names], allow_unused=True
        )
        for name, grad in zip(names, grads, strict=True):
            for row, own in enumerate(self._module_parameters[: len(losses)]):
                gradient = grad if is_single or grad is None else grad[row]
                own[name].grad = None if gradient is None else match_layout(gradient, own[name])

    def _stack(self) -> None:
        for name, _ in self.modules[0].named_parameters():
            parameters = [module.get_parameter(name) for module in self.modules]
            # Contiguous, as vmap does not know channels last.
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
    """G nodes whose networks have equal architectures, role by role."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)
        self._stacked: dict[str, StackedModules] = {}
        self.setting: Any = None  # what a method finds here (NodeSetting), while it answers
        self.query_number = 0  # of the query that is answered, which names what is drawn for it

    def for_query(self, setting: Any, query_number: int = 0) -> NodeGroup:
        """This group, answering query ``query_number`` of a method that finds ``setting`` here."""
        self.setting, self.query_number = setting, query_number
        return self

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def device(self) -> torch.device:
        """Where the nodes compute."""
        return self.nodes[0].data.inputs.device

    def module(self, role: str) -> StackedModules:
        """The group's networks of one role, computed as one."""
        for node in self.nodes:
            if role not in node.modules:
                known = ", ".join(node.modules)
                raise ArgumentError("the network's role", role, f"one of {known}, which node.add extends")
        if role not in self._stacked or not self._stacked[role].is_current():
            modules = [node.modules[role] for node in self.nodes]
            self._stacked[role] = StackedModules(modules, self.nodes[0].frozen[role])
            for node in self.nodes:  # stacking has changed how the parameters lie in memory
                if role in node.optimizers:
                    match_parameter_layout(node.optimizers[role])
        return self._stacked[role]

    def parameter_vectors(self, role: str, submodule: str = "") -> torch.Tensor:
        """Each node's network of a role, or a part of it, as one vector: ``(G, P)``."""
        self.module(role)
        return stack_tensors([to_vector(node.modules[role].get_submodule(submodule)) for node in self.nodes])

    def load_parameters(self, role: str, vectors: torch.Tensor, submodule: str = "") -> None:
        """Put vectors ``(G, P)`` into the nodes' networks of a role, or into a part of each."""
        self.module(role)
        for node, vector in zip(self.nodes, vectors, strict=True):
            load_vector(node.modules[role].get_submodule(submodule), vector)

    def sample(self, size: int, *purpose: str | int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each node's own random examples: inputs ``(G, size, ...)`` and targets ``(G, size, ...)``."""
        parts = [node.sample(size, *purpose) for node in self.nodes]
        return stack_tensors([part.inputs for part in parts]), stack_tensors([part.targets for part in parts])

    def step(self, role: str, losses: torch.Tensor) -> None:
        """One optimizer step of each node's network of a role, on its own loss; ``losses`` (G,).

        Raises:
            QueryRefused: the network learns privately, and this step has no noise.
            ArgumentError: the network has no optimizer now, or there is not one loss for each node.
        """
        stacked = self.module(role)
        if losses.ndim != 1 or not 0 < len(losses) <= len(self.nodes):
            expected = f"a vector of {len(self.nodes)}, one loss for each node"
            raise ArgumentError("losses of nodes.step", tuple(losses.shape), expected)
        for node in self.nodes:
            if role in node.private_steps or "model" in node.private_steps:
                rule = f"privacy: its networks learn with DP-SGD, and here its {role} would learn without"
                raise QueryRefused(node.name, "train_locally", rule)
        for node in self.nodes[: len(losses)]:
            if role not in node.optimizers:
                expected = "a network with an optimizer: a model has one in train_round alone, others have "
                raise ArgumentError("nodes.step", role, f"{expected}that of node.add")
        stacked.backward(losses)
        for node in self.nodes[: len(losses)]:
            node.optimizers[role].step()


@contextmanager
def _batch_norm_in_float32(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Batch norms take their inputs in float32.

    On a GPU torch (2.11, vmap) has no way back through stacked ones in bfloat16 whose running statistics are
    float32.
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
    """What belongs to one submodule, under the names that it has there."""
    return {
        name[len(prefix) :]: tensor[:count] for name, tensor in tensors.items() if name.startswith(prefix)
    }


def stack_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.stack``, without its copy where there is one tensor only."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def group_by_architecture(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """The nodes in lists of equal architectures, each list to be stacked or not as one pleases.

    A node whose modules cannot be stacked, for what they draw, for their hooks or for what ``vmap`` cannot
    take, is a list of its own; so is one whose networks learn with DP-SGD or are teachers.
    """
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in nodes:
        key: tuple[Any, ...] = tuple(
            (role, stacking_key(module), node.frozen[role]) for role, module in node.modules.items()
        )
        # Who learns privately, or has teachers, learns or is asked in its own way; and draws differ once
        # stacked.
        modules = node.modules.values()
        if (
            node.private_steps
            or node.teachers
            or any(uses_global_rng(each) or has_hooks(each) for each in modules)
        ):
            key = ("alone", node.name)
        groups.setdefault(key, []).append(node)
    for members in groups.values():
        if len(members) == 1 or _supports_vmap(members[:2]):
            yield members
        else:
            yield from ([node] for node in members)


def _supports_vmap(pair: Sequence[Node]) -> bool:
    """Whether ``vmap`` takes these nodes' models, in training and as they answer, tried on copies.

    Only models are tried: the other networks are a method's own, and take inputs of their own.
    """
    group = NodeGroup([node.copy_without_gate() for node in pair])
    x = group.sample(2, "try")[0]
    try:
        model = group.module("model")
        for mode in (True, False):
            model.train(mode)
            model(x)
    except RuntimeError:  # random draws, .item(), a branch on values: torch says so in many ways
        return False
    return True
