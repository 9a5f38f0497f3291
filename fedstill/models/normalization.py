"""Group norm as torch has it, at the speed that its other memory layout allows.

On a CPU torch's kernels (2.13) for channels last take up to thirty times as long in bfloat16 as those for
channels first, more than it costs to lay their input out anew and the output back; and where no gradient
goes to the input, as behind a frozen layer, they end the whole process.

How far inputs are from what batch norm has kept of a network's training data, layer by layer.

Yin et al., "Dreaming to Distill: Data-free Knowledge Transfer via DeepInversion", CVPR 2020, section 3.2.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm``, which computes inputs that lie channels last as channels first.

    >>> x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    >>> y = GroupNorm(2, 4)(x)
    >>> (y - nn.GroupNorm(2, 4)(x)).abs().max().item() < 1e-5
    True
    >>> y.is_contiguous(memory_format=torch.channels_last)
    True
    """

    any_layout = True  # a network with it may lie channels last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, C, H, W)`` or any other ``(B, C, ...)`` to the same shape and layout."""
        if not _has_slow_layout(x):
            return super().forward(x)
        y = super().forward(x.contiguous())
        return y.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # vmap knows no memory formats


def _has_slow_layout(x: torch.Tensor) -> bool:
    """Whether torch's kernels for this input's layout are to be kept from it.

    In float32 they are as quick, if a gradient goes to the input or none to anything.
    """
    # By strides, as what vmap stacks does not say which format it has.
    last = x.dim() == 4 and x.stride(1) == 1 and x.shape[1] > 1 and x.shape[2] * x.shape[3] > 1
    if not last or x.device.type != "cpu":
        return False
    return x.dtype != torch.float32 or (torch.is_grad_enabled() and not x.requires_grad)


def outputs_and_batch_norm_loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A network's outputs on inputs ``(B, ...)``, and sum_l |mu_l(x) - mu_l| + |sigma_l^2(x) - sigma_l^2|.

    The sum, a scalar, is over layers of batch norm, of what flows into each; mu_l and sigma_l^2 are its
    running statistics, and lengths are of vectors over channels. Gradients reach both; a network without such
    layers has 0.

    >>> norm = nn.BatchNorm1d(1).eval()  # it has kept mean 0 and variance 1
    >>> outputs_and_batch_norm_loss(norm, torch.tensor([[2.0], [6.0]]))[1]  # mean 4 and variance 4
    tensor(7.)
    """
    apart: list[torch.Tensor] = []

    def look(layer: Any, given: tuple[torch.Tensor, ...], _: torch.Tensor) -> None:
        h = given[0].float()
        over = [0, *range(2, h.ndim)]
        variance, mean = torch.var_mean(h, over, correction=0)
        apart.append((mean - layer.running_mean).norm() + (variance - layer.running_var).norm())

    layers = [each for each in model.modules() if isinstance(each, _BatchNorm) and each.track_running_stats]
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(look))
        out: torch.Tensor = model(x)
    return out.float(), torch.stack(apart).sum() if apart else 0.0 * x.sum()
