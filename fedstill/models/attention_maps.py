"""Attention maps of a network: the strength of its last spatial activation at each position, without
gradients.

Zagoruyko, Komodakis: "Paying More Attention to Attention", ICLR 2017, section 3.1: the mean over channels of
    squared
activations. The maps need neither classes nor a second pass, so they also serve networks whose outputs are
images. They are resized to one size, so that maps of different networks can be compared.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.errors import ModelError
from fedstill.models.module_utils import in_mode


def find_attention_layer(model: nn.Module, shape: tuple[int, ...], subject: str) -> str:
    """Return the name of the layer whose activation becomes the map: the last spatial one before the output.

    Args:
        model: the network.
        shape: shape of an input.
        subject: name of the model, the first words of an error.

    Raises:
        ModelError: no layer returns ``(B, C, h, w)`` with more than one position.
    """
    activations: list[tuple[str, object]] = []
    device = next(parameter.device for parameter in model.parameters())
    with ExitStack() as hooks, in_mode(model, False), torch.no_grad():
        for name, layer in model.named_modules():
            if name:
                hook = layer.register_forward_hook(
                    lambda _, __, out, name=name: activations.append((name, out))
                )
                hooks.enter_context(hook)
        output = model(torch.zeros(2, *shape, device=device))
    spatial = [
        name
        for name, out in activations
        if isinstance(out, torch.Tensor) and out is not output and out.ndim == 4 and out[0, 0].numel() > 1
    ]
    if not spatial:
        raise ModelError(
            f"{subject} has no attention map (expected a layer that returns (B, C, h, w) before the output, "
            "such as a convolution, or a method without attention maps)"
        )
    return spatial[-1]


def outputs_and_attention(
    model: nn.Module, layer: str, x: torch.Tensor, side: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a network's outputs on inputs ``(B, ...)`` and its attention maps, ``(B, side^2)`` with L2 norm
    1.

    Gradients reach both. The map of an input without any activation is zero.

    Args:
        model: the network.
        layer: name of the layer, from :func:`find_attention_layer`.
        x: inputs, ``(B, ...)``.
        side: height and width of a map. Activations are averaged, or repeated, to this size.
    """
    activations: list[torch.Tensor] = []
    with model.get_submodule(layer).register_forward_hook(lambda _, __, out: activations.append(out)):
        outputs: torch.Tensor = model(x)
    strength = activations[-1].float().square().mean(1, keepdim=True)  # (B, 1, h, w)
    return outputs, F.normalize(F.adaptive_avg_pool2d(strength, side).flatten(1), dim=1)
