"""A network as extractor and head, for methods that share only one of the two.

The extractor F maps an input to features, the head D maps features to outputs (FedMD-CG, section 2).
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from fedstill.core.errors import ModelError
from fedstill.models.module_utils import in_mode

EXTRACTOR, HEAD = "extractor", "head"


class Split(nn.Module):
    """``head(extractor(x))``; the parts' parameters are those of the network that was split.

    Args:
        extractor: inputs to features, ``(B, p)`` or, for networks with an output a pixel, ``(B, p, H, W)``.
    """

    def __init__(self, extractor: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.extractor, self.head = extractor, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The network's outputs."""
        outputs: torch.Tensor = self.head(self.extractor(x))
        return outputs


def split_model(model: nn.Module, whose: str) -> Split:
    """A network in two parts that share its parameters.

    A network with modules ``extractor`` and ``head`` says itself where it parts. An ``nn.Sequential``
    parts behind its last ``nn.Flatten`` that has parameters before it, so LeNet-5's head is its three
    linear layers (as in FedMD-CG's experiments); without one, before its last layer with parameters.

    Raises:
        ModelError: neither, or a part would have nothing to learn.

    >>> parts = split_model(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), "model")
    >>> len(parts.extractor), len(parts.head)
    (2, 1)
    """
    if isinstance(model, Split):
        return model
    extractor, head = getattr(model, EXTRACTOR, None), getattr(model, HEAD, None)
    if isinstance(extractor, nn.Module) and isinstance(head, nn.Module):
        return Split(extractor, head)
    if not isinstance(model, nn.Sequential):
        raise ModelError(
            f"{whose} cannot be split: allowed is a network with modules 'extractor' and 'head', "
            "or a torch.nn.Sequential"
        )
    learns = [any(True for _ in layer.parameters()) for layer in model]
    flattens = [at for at, layer in enumerate(model) if isinstance(layer, nn.Flatten) and any(learns[:at])]
    layers = [at for at, learning in enumerate(learns) if learning]
    at = flattens[-1] + 1 if flattens and any(learns[flattens[-1] :]) else (layers or [0])[-1]
    if not any(learns[:at]) or not any(learns[at:]):
        raise ModelError(f"{whose} cannot be split (expected two layers with parameters or more)")
    # Not by a slice, which calls the class of a user's own Sequential, and not by named_children(), which
    # names a layer that is used twice only once.
    named = list(model._modules.items())
    return Split(nn.Sequential(OrderedDict(named[:at])), nn.Sequential(OrderedDict(named[at:])))


def count_features(model: Split, example: torch.Tensor, whose: str, *, maps: bool = False) -> int:
    """Values p that an extractor gives for an input, which the head must take.

    Args:
        maps: whether it may also give a vector for each pixel, ``(B, p, H, W)``.

    Raises:
        ModelError: it gives something else than one vector an input.
    """
    with in_mode(model, False), torch.no_grad():
        found = model.extractor(example)
    if (
        not isinstance(found, torch.Tensor)
        or found.ndim not in ((2, 4) if maps else (2,))
        or len(found) != len(example)
    ):
        form = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ModelError(f"the extractor of {whose} gives {form} for two inputs (expected (2, p))")
    return found.shape[1]
