"""How far inputs are from what batch norm has kept of a network's training data, layer by layer.

Yin et al., "Dreaming to Distill: Data-free Knowledge Transfer via DeepInversion", CVPR 2020, section 3.2.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def remembered(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A network's outputs on inputs ``(B, ...)``, and sum_l |mu_l(x) - mu_l| + |sigma_l^2(x) - sigma_l^2|.

    The sum, a scalar, is over layers of batch norm, of what flows into each; mu_l and sigma_l^2 are its
    running statistics, and lengths are of vectors over channels. Gradients reach both; a network without such
    layers has 0.

    >>> norm = nn.BatchNorm1d(1).eval()  # it has kept mean 0 and variance 1
    >>> remembered(norm, torch.tensor([[2.0], [6.0]]))[1]  # mean 4 and variance 4
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
