"""Clipping: bounds on the length of any tensor row, whatever it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

CLIP_MARGIN = 1 - 2.0**-20  # share of a bound that is used, so that rounding to float32 stays within it
MAX_FLOAT32 = torch.finfo(torch.float32).max
MIN_NORM = 1e-15  # assumed for shorter rows, as squares of their numbers underflow in float32
BLOCK_SIZE = 128  # numbers whose squares are added in float32: rounding errors stay below the margin


def clip_rows(rows: torch.Tensor, clip: float) -> torch.Tensor:
    """Clip the L2 norm of each row of (B, ...) to ``clip``; a single number is a row.

    The result is float32, and no row is longer than ``clip``. Rows near the limit become a millionth
    shorter, so that rounding leaves them within it.

    >>> clip_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    flat = to_finite(rows).reshape(row_count_and_size(rows.shape))
    factors = clip_factors(
        torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64), clip
    )  # no square overflows
    shortened: torch.Tensor = (flat.double() * factors.unsqueeze(1)).float()
    return shortened.view(rows.shape)


def row_norms(rows: torch.Tensor) -> torch.Tensor:
    """Compute the L2 norms of long float32 rows ``(B, n)`` fast: ``(B,)`` float64, infinite or NaN where a
    row is.

    The relative error is at most 5e-7, or the absolute one MIN_NORM. A norm in float32 alone is less exact:
    over ten million numbers its rounding errors add up to a hundredth, and squares of large numbers
    overflow.

    >>> row_norms(torch.tensor([[3e30, 4e30], [3.0, 4.0], [torch.inf, 0.0]]))
    tensor([5.0000e+30, 5.0000e+00,        inf], dtype=torch.float64)
    """
    rows = rows.contiguous()  # else the numbers may be added one after another, which rounds more
    blocked = rows.shape[1] // BLOCK_SIZE * BLOCK_SIZE
    blocks = rows[:, :blocked].view(len(rows), blocked // BLOCK_SIZE, BLOCK_SIZE)
    remainder = torch.linalg.vector_norm(rows[:, blocked:], dim=1, keepdim=True)
    norms: torch.Tensor = torch.cat([blocks.norm(dim=2), remainder], 1).double().norm(dim=1)
    if not (finite := norms.isfinite()).all():  # leaves the other norms unchanged, to the bit
        norms = torch.where(finite, norms, torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))
    return norms


def clip_factors(norms: torch.Tensor, clip: float) -> torch.Tensor:
    """Return the factors, from 0 to 1, that shorten rows of given norms to at most ``clip``.

    A norm that is not finite has the factor 0; make the numbers of such a row finite before multiplying.

    >>> clip_factors(torch.tensor([0.0, 1.0, 4.0, torch.inf, torch.nan]), 2.0)
    tensor([1.0000, 1.0000, 0.5000, 0.0000, 0.0000])
    """
    factors = (clip * CLIP_MARGIN / norms.clamp(min=MIN_NORM)).clamp(max=1)
    return torch.where(norms.isfinite(), factors, torch.zeros_like(factors))


def to_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to float32 with NaN replaced by 0 and infinities by the largest number, so that any row can
    be bounded.
    """
    return torch.nan_to_num(tensor.detach().float(), nan=0.0, posinf=MAX_FLOAT32, neginf=-MAX_FLOAT32)


def row_count_and_size(shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of rows of a tensor (B, ...) and of values in each; a single number is a row.

    >>> row_count_and_size((5, 2, 3)), row_count_and_size((5,)), row_count_and_size(())
    ((5, 6), (5, 1), (1, 1))
    """
    return (shape[0], math.prod(shape[1:])) if len(shape) else (1, 1)
