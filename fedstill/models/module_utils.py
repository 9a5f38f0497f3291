"""Copies, modes and parameter vectors of networks.

:func:`deep_copy` also copies networks with torch's older reparametrizations
(``torch.nn.utils.spectral_norm``, ``weight_norm`` and ``prune``), which keep the last forward pass's tensor
with its graph as an attribute. Vectors hold parameters and buffers in the order of ``state_dict()``, so
averaging vectors also averages batch norm's running statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from fedstill.core.errors import ArgumentError

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def reparametrized_names(layer: nn.Module) -> set[str]:
    """Return the names of a layer's tensors that an older reparametrization recomputes in each forward pass.

    >>> reparametrized_names(torch.nn.utils.spectral_norm(nn.Linear(2, 3)))
    {'weight'}
    >>> reparametrized_names(nn.Linear(2, 3))
    set()
    """
    names = [name for name, _ in layer.named_parameters(recurse=False)]
    return {name.removesuffix(end) for name in names for end in ("_orig", "_g") if name.endswith(end)}


def detach_computed(module: nn.Module) -> None:
    """Detach the tensors of the last forward pass, so that the network can be copied."""
    for layer in module.modules():
        for name in reparametrized_names(layer):
            if isinstance(value := vars(layer).get(name), torch.Tensor):
                setattr(layer, name, value.detach())


def deep_copy(module: ModuleT) -> ModuleT:
    """Return a deep copy of a network."""
    detach_computed(module)
    return copy.deepcopy(module)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set a network to training or evaluation mode within the context, then restore its mode.

    >>> norm = nn.BatchNorm1d(1)
    >>> with in_mode(norm, False):
    ...     print(norm.training)
    False
    >>> norm.training
    True
    """
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)


def parameter_count(module: nn.Module) -> int:
    """Return the number of parameters of a network, frozen ones included.

    >>> parameter_count(nn.Linear(2, 3))
    9
    """
    return sum(parameter.numel() for parameter in module.parameters())


def to_vector(module: nn.Module) -> torch.Tensor:
    """Return all parameters and buffers as one float32 vector ``(P,)``, a copy.

    >>> to_vector(nn.Linear(2, 3)).shape
    torch.Size([9])
    """
    tensors = [tensor.detach().float().reshape(-1) for tensor in module.state_dict().values()]
    return torch.cat(tensors) if tensors else torch.zeros(0)


def integer_mask(module: nn.Module) -> torch.Tensor:
    """Return which entries of :func:`to_vector` are integers, such as batch norm's count of batches:
    ``(P,)``.

    >>> integer_mask(nn.BatchNorm1d(1)).tolist()
    [False, False, False, False, True]
    """
    tensors = module.state_dict().values()
    parts = [torch.full((tensor.numel(),), not tensor.is_floating_point()) for tensor in tensors]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def load_vector(module: nn.Module, vector: torch.Tensor) -> None:
    """Load a vector ``(P,)`` into parameters and buffers, in place. Integer entries are rounded.

    Raises:
        ArgumentError: the length of the vector differs from the size of the module's state.
    """
    tensors = list(module.state_dict().values())
    sizes = [tensor.numel() for tensor in tensors]
    if vector.shape != (sum(sizes),):
        raise ArgumentError("parameters", tuple(vector.shape), f"({sum(sizes)},), as the network has")
    with torch.no_grad():
        for tensor, part in zip(tensors, torch.split(vector, sizes), strict=True):
            values = part if tensor.is_floating_point() else part.round()
            tensor.copy_(values.view(tensor.shape))


def weighted_mean(vectors: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return ``sum_k w_k v_k / sum_k w_k`` of ``(K, P)`` and ``(K,)``: ``(P,)``.

    >>> weighted_mean(torch.tensor([[0.0], [4.0]]), torch.tensor([3.0, 1.0]))
    tensor([1.])
    """
    return (weights / weights.sum()) @ vectors
