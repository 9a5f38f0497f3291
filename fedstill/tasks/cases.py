"""Tells which case each example is a part of, and takes means over these."""

from __future__ import annotations

import torch

from fedstill.core.dataset import Cases


def case_of(examples: int, cases: Cases | None) -> tuple[torch.Tensor, int]:
    """Each example's case, ``(N,)`` from 0 in the order of :meth:`Cases.present`, and how many there are."""
    if cases is None:
        return torch.arange(examples), examples
    present, of = torch.unique(cases.of, return_inverse=True)
    return of, len(present)


def mean_by(values: torch.Tensor, of: torch.Tensor, count: int) -> torch.Tensor:
    """Means of ``values`` (N,) by group ``of`` (N,), ``(count,)``, without those that are NaN."""
    known = ~values.isnan()
    total = torch.zeros(count, dtype=values.dtype).index_add(0, of[known], values[known])
    return total / torch.bincount(of[known], minlength=count)  # 0 / 0 is NaN
