"""Copies of networks, also of those with torch's older reparametrizations.

``torch.nn.utils.spectral_norm``, ``weight_norm`` and ``prune`` keep what they computed in the last forward as
an attribute of the layer; with its graph it cannot be copied.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

Network = TypeVar("Network", bound=nn.Module)


def computed(layer: nn.Module) -> set[str]:
    """Names of a layer's tensors that an older reparametrization computes again in each forward.

    >>> computed(torch.nn.utils.spectral_norm(nn.Linear(2, 3))), computed(nn.Linear(2, 3))
    ({'weight'}, set())
    """
    own = [name for name, _ in layer.named_parameters(recurse=False)]
    return {name.removesuffix(end) for name in own for end in ("_orig", "_g") if name.endswith(end)}


def settle(module: nn.Module) -> None:
    """Detach what was computed in the last forward, so that the network can be copied."""
    for layer in module.modules():
        for name in computed(layer):
            if isinstance(value := vars(layer).get(name), torch.Tensor):
                setattr(layer, name, value.detach())


def copied(module: Network) -> Network:
    """A deep copy of a network."""
    settle(module)
    return copy.deepcopy(module)
