"""Where a network looks: the strength of its last spatial activation, place by place, without gradients.

Zagoruyko, Komodakis: "Paying More Attention to Attention", ICLR 2017, section 3.1: the mean over channels of
squared activations. It needs no classes and no second pass, so that it serves images as outputs too, and any
architecture that has activations with places; maps are brought to one size, so that they can be compared.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.errors import ModelError
from fedstill.models.module_utils import in_mode


def find_attention_layer(model: nn.Module, shape: tuple[int, ...], whose: str) -> str:
    """The name of the layer whose activation is looked at: the last one with places, before the output.

    Args:
        shape: of an input.
        whose: the first words of an error.

    Raises:
        ModelError: no layer gives ``(B, C, h, w)`` with more than one place.
    """
    given: list[tuple[str, object]] = []
    device = next(parameter.device for parameter in model.parameters())
    with ExitStack() as hooks, in_mode(model, False), torch.no_grad():
        for name, layer in model.named_modules():
            if name:
                seen = layer.register_forward_hook(lambda _, __, out, name=name: given.append((name, out)))
                hooks.enter_context(seen)
        output = model(torch.zeros(2, *shape, device=device))
    named = [
        name
        for name, out in given
        if isinstance(out, torch.Tensor) and out is not output and out.ndim == 4 and out[0, 0].numel() > 1
    ]
    if not named:
        raise ModelError(
            f"{whose} has no attention: allowed is a network with a layer that gives (B, C, h, w) before its "
            "output, as convolutions do, or to ask for none"
        )
    return named[-1]


def outputs_and_attention(
    model: nn.Module, place: str, x: torch.Tensor, side: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A network's outputs on inputs ``(B, ...)`` and where it looks: ``(B, side^2)`` of L2 norm 1.

    Gradients reach both. An input on which nothing is active has a map of zeros.

    Args:
        place: of the layer, as :func:`find_attention_layer` names it.
        side: cells of a map, each way: activations are averaged, or repeated, to that.
    """
    seen: list[torch.Tensor] = []
    with model.get_submodule(place).register_forward_hook(lambda _, __, out: seen.append(out)):
        outputs: torch.Tensor = model(x)
    strength = seen[-1].float().square().mean(1, keepdim=True)  # (B, 1, h, w)
    return outputs, F.normalize(F.adaptive_avg_pool2d(strength, side).flatten(1), dim=1)
