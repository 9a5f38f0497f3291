"""Architectures of networks: equal ones can be averaged and mostly stacked; groups of nodes by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fedstill.core.cuda_graphs import uses_global_rng
from fedstill.models.module_utils import reparametrized_names
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.stacked_modules import stack_tensors
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
    x = stack_tensors([node.sample_batch(2, "try").inputs for node in group.nodes])
    try:
        model = group.module("model")
        for mode in (True, False):
            model.train(mode)
            model(x)
    except RuntimeError:  # random layers, .item(), branches on values have different messages
        return False
    return True
