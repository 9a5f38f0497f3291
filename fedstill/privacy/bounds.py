"""Limits on how far a tensor can move, whatever it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fedstill.errors import ArgumentError

SLACK = 1 - 2.0**-20  # bounds are kept to this part of them, so that rounding to float32 stays within
LARGEST = torch.finfo(torch.float32).max


def shorten(rows: torch.Tensor, clip: float) -> torch.Tensor:
    """Rows whose L2 norm is above ``clip`` shortened to it, others as they are.

    Args:
        rows: (B, ...) of any float type; a single number is a row.
        clip: above 0.

    Returns:
        float32 on the same device, no row longer than ``clip``: those near it are a millionth shorter,
        so that rounding to float32 leaves them within.

    >>> shorten(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    flat = numbers(rows).reshape(rows_of(rows.shape))
    # In float64 no square of a float32 overflows or is lost.
    lengths = torch.linalg.vector_norm(flat, dim=1, keepdim=True, dtype=torch.float64)  # (B, 1)
    factors = (clip * SLACK / lengths).clamp(max=1)
    shortened: torch.Tensor = (flat.double() * factors).float()
    return shortened.view(rows.shape)


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """float32 without NaN (0) and infinities (the largest number): so that any row can be bounded."""
    return torch.nan_to_num(tensor.detach().float(), nan=0.0, posinf=LARGEST, neginf=-LARGEST)


def rows_of(shape: Sequence[int]) -> tuple[int, int]:
    """How many rows, and values in each, a tensor (B, ...) has; a single number is a row.

    >>> rows_of((5, 2, 3)), rows_of((5,)), rows_of(())
    ((5, 6), (5, 1), (1, 1))
    """
    return (shape[0], math.prod(shape[1:])) if len(shape) else (1, 1)


def not_negative(name: str, value: float) -> None:
    """Check a scale of noise or a bound.

    Raises:
        ArgumentError: it is below 0, infinite or NaN.
    """
    if not 0 <= value < math.inf:
        raise ArgumentError(name, value, "0 or more")
