"""Group norm that is fast in channels-last layout, and a loss on batch norm statistics.

On a CPU, torch's (2.13) group norm kernels for channels-last inputs take up to thirty times as long in
bfloat16 as those for channels-first inputs, more than changing the layout twice costs. If no gradient flows
to the input, as after a frozen layer, they crash the process. :class:`GroupNorm` avoids them.

:func:`outputs_and_batch_norm_loss` measures how far the statistics of inputs are from those that batch norm
stored in training (Yin et al., "Dreaming to Distill: Data-free Knowledge Transfer via DeepInversion", CVPR
2020, section 3.2).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm`` that computes channels-last inputs as channels-first.

    >>> x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    >>> y = GroupNorm(2, 4)(x)
    >>> (y - nn.GroupNorm(2, 4)(x)).abs().max().item() < 1e-5
    True
    >>> y.is_contiguous(memory_format=torch.channels_last)
    True
    """

    any_layout = True  # a network with this layer may use channels last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize ``(B, C, H, W)`` or any other ``(B, C, ...)``; shape and layout stay the same."""
        if not _has_slow_layout(x):
            return super().forward(x)
        y = super().forward(x.contiguous())
        return y.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # vmap does not support memory formats


def _has_slow_layout(x: torch.Tensor) -> bool:
    """Return whether torch's kernels for this input's layout are slow or crash.

    In float32 they are fast, if a gradient flows to the input or no gradient is computed at all.
    """
    # By strides, because tensors stacked by vmap do not report their memory format.
    last = x.dim() == 4 and x.stride(1) == 1 and x.shape[1] > 1 and x.shape[2] * x.shape[3] > 1
    if not last or x.device.type != "cpu":
        return False
    return x.dtype != torch.float32 or (torch.is_grad_enabled() and not x.requires_grad)


def outputs_and_batch_norm_loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs on inputs ``(B, ...)``, and sum_l |mu_l(x) - mu_l| + |sigma_l^2(x) - sigma_l^2|, a
    scalar.

    The sum is over batch norm layers l. mu_l(x) and sigma_l^2(x) are the statistics of the layer's input,
    mu_l and sigma_l^2 its running statistics; norms are over channels. Gradients reach both return values. A
    network without such layers has loss 0.

    >>> norm = nn.BatchNorm1d(1).eval()  # running mean 0 and variance 1
    >>> outputs_and_batch_norm_loss(norm, torch.tensor([[2.0], [6.0]]))[1]  # mean 4 and variance 4
    tensor(7.)
    """
    distances: list[torch.Tensor] = []

    def add_distance(layer: Any, inputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> None:
        h = inputs[0].float()
        axes = [0, *range(2, h.ndim)]
        variance, mean = torch.var_mean(h, axes, correction=0)
        distances.append((mean - layer.running_mean).norm() + (variance - layer.running_var).norm())

    layers = [
        layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats
    ]
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(add_distance))
        out: torch.Tensor = model(x)
    return out.float(), torch.stack(distances).sum() if distances else 0.0 * x.sum()
