"""Features of a table's rows: numbers are scaled to -1..1, each category, or gap, has a place of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fedstill.core.table_schema import SchemaColumn


class RowFeatures(nn.Module):
    """Cells as numbers ``(N, columns)``, a category by its place and NaN for nothing, to features ``(N, F)``.

    A module, so that exports hold it.

    Args:
        columns: of the cells, in their order.
        dtype: of the cells.
    """

    place: torch.Tensor
    numeric: torch.Tensor
    missing: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    code: torch.Tensor

    def __init__(self, columns: Sequence[SchemaColumn], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        place: list[int] = []  # of each feature: its column, whether it says a number or that there is none,
        numeric, missing, low, high, code = ([] for _ in range(5))  # what becomes -1 and 1, and the category
        for number, column in enumerate(columns):
            width = len(column.features)
            numbers = column.type == "number"
            place += [number] * width
            missing += [False] * (width - column.missing) + [True] * column.missing
            numeric += [numbers] * width
            low += [column.span[0] if numbers else 0.0] * width
            high += [column.span[1] if numbers else 1.0] * width
            code += [float(each) for each in range(width)]
        for name, facts in (("place", place), ("numeric", numeric), ("missing", missing)):
            self.register_buffer(name, torch.tensor(facts))
        for name, numbers_of in (("low", low), ("high", high), ("code", code)):
            self.register_buffer(name, torch.tensor(numbers_of, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features, of the dtype of the cells."""
        cells = x[:, self.place]
        none = cells.isnan()
        scaled = (2 * (cells - self.low) / (self.high - self.low) - 1).clamp(-1, 1)
        scaled = torch.where(none, 0.0, scaled)
        own = torch.where(self.numeric, scaled, (cells == self.code).to(x.dtype))
        return torch.where(self.missing, none.to(x.dtype), own)
