"""Networks split into extractor and head, for methods that share only one of the two.

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
    """Network ``head(extractor(x))``. Its parameters are those of the network that was split.

    Args:
        extractor: maps inputs to features, ``(B, p)``, or ``(B, p, H, W)`` for networks with one output per
            pixel.
        head: maps features to outputs.
    """

    def __init__(self, extractor: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.extractor, self.head = extractor, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's outputs."""
        outputs: torch.Tensor = self.head(self.extractor(x))
        return outputs


def split_model(model: nn.Module, subject: str) -> Split:
    """Split a network into two parts that share its parameters.

    A network with modules ``extractor`` and ``head`` is split there. An ``nn.Sequential`` is split after its
    last ``nn.Flatten`` that has parameters before it, so LeNet-5's head is its three linear layers, as in
    FedMD-CG's experiments. Without such a layer it is split before its last layer with parameters.

    Raises:
        ModelError: the network is neither, or a part has no parameters.

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
            f"{subject} cannot be split (expected a network with modules 'extractor' and 'head', "
            "or a torch.nn.Sequential)"
        )
    has_parameters = [any(True for _ in layer.parameters()) for layer in model]
    flattens = [
        index
        for index, layer in enumerate(model)
        if isinstance(layer, nn.Flatten) and any(has_parameters[:index])
    ]
    layers = [index for index, has in enumerate(has_parameters) if has]
    after_flatten = bool(flattens) and any(has_parameters[flattens[-1] :])
    cut = flattens[-1] + 1 if after_flatten else (layers or [0])[-1]
    if not any(has_parameters[:cut]) or not any(has_parameters[cut:]):
        raise ModelError(f"{subject} cannot be split (expected two layers with parameters or more)")
    # A slice would call the class of a custom Sequential. named_children() lists a reused layer only once.
    named = list(model._modules.items())
    return Split(nn.Sequential(OrderedDict(named[:cut])), nn.Sequential(OrderedDict(named[cut:])))


def count_features(model: Split, example: torch.Tensor, subject: str, *, maps: bool = False) -> int:
    """Return p, the number of features that an extractor returns for one input.

    Args:
        model: the split network.
        example: two inputs, ``(2, ...)``.
        subject: name of the model, for errors.
        maps: True to allow one vector per pixel, ``(B, p, H, W)``.

    Raises:
        ModelError: the extractor does not return one vector per input.
    """
    with in_mode(model, False), torch.no_grad():
        features = model.extractor(example)
    if (
        not isinstance(features, torch.Tensor)
        or features.ndim not in ((2, 4) if maps else (2,))
        or len(features) != len(example)
    ):
        form = tuple(features.shape) if isinstance(features, torch.Tensor) else type(features).__name__
        raise ModelError(f"the extractor of {subject} returns {form} for two inputs (expected (2, p))")
    return features.shape[1]
