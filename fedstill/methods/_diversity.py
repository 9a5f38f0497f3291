"""Losses that keep a conditional generator from giving the same output for all noise.

Luo, Wang, Li, Lan, Gao, Shu: FedMD-CG, Eq. 7 (after Yoo et al. 2019), L_div^1 below it, and Eq. 8. All
are ``exp(-mean_jk ||f_j - f_k|| w_jk)`` over the pairs of a batch, with a weight w_jk that grows with the
distance of the noise and, but for Eq. 7, is larger for two labels than for one.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

Diversity = Literal["none", "div0", "div1", "div2"]


def div0(f: torch.Tensor, z: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Eq. 7, ``w_jk = ||z_j - z_k||``.

    Args:
        f: outputs ``(..., B, p)``.
        z: the noise they come from, ``(..., B, q)``.
        scale: multiplies each product of distances; 1 is as printed.

    Returns:
        ``(...)``, from 1 (all outputs equal) down to 0.

    >>> round(div0(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [2.0]])).item(), 4)  # e^(-4/4)
    0.3679
    """
    return _diversity(f, torch.cdist(z, z), scale)


def div1(f: torch.Tensor, z: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """L_div^1, ``w_jk = ||[z_j; y_j] - [z_k; y_k]||``, with labels one-hot ``y`` (..., B, C)."""
    labelled = torch.cat([z, y], -1)
    return _diversity(f, torch.cdist(labelled, labelled), scale)


def div2(f: torch.Tensor, z: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Eq. 8, ``w_jk = ||z_j - z_k|| e^{|y_j - y_k|_1}``: e^2 for two labels, 1 for one; ``y`` one-hot."""
    apart = torch.exp(torch.cdist(y, y, p=1.0))
    return _diversity(f, torch.cdist(z, z) * apart, scale)


def diversity(
    form: Diversity, f: torch.Tensor, z: torch.Tensor, y: torch.Tensor, per_value: bool
) -> torch.Tensor:
    """One of the forms by name, or 0.

    Args:
        form: which.
        f: outputs ``(..., B, p)``.
        z: noise ``(..., B, q)``.
        y: one-hot labels ``(..., B, C)``.
        per_value: measure distances of outputs and noise as root *means* of squares, that is divide them
            by sqrt(p) and sqrt(q). As printed, the exponent grows with both: 400 features and 32 noise
            values give e^-75 in Eq. 7 at first, which leaves no gradient.

    Returns:
        ``(...)``.
    """
    scale = 1 / math.sqrt(f.shape[-1] * z.shape[-1]) if per_value else 1.0
    if form == "none":
        return f.new_zeros(f.shape[:-2])
    if form == "div0":
        return div0(f, z, scale)
    return (div1 if form == "div1" else div2)(f, z, y, scale)


def _diversity(f: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
    # Around their mean: distances of large, nearly equal vectors would be rounding noise.
    f = f - f.mean(-2, keepdim=True)
    return torch.exp(-scale * (torch.cdist(f, f) * weights).mean((-2, -1)))
