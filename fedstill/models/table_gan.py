"""What FedIOD adds to networks for tables: the server's generator of rows, and each node's critic of them."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from fedstill.core.table_schema import Schema


class TableGenerator(nn.Module):
    """Noise to rows that a schema allows: linear layers with batch norm and leaky ReLU, then each column.

    A number is a hyperbolic tangent, so that it stays within its declared range. Of categories one is 1 and
    the others 0, as in real rows, and gradients are those of a softmax: the straight-through estimator
    (Bengio, Léonard, Courville 2013, arXiv:1308.3432). Nothing is drawn but the noise. Where a number may be
    missing, its second feature says so, and then the number is 0.

    Args:
        noise: values in w.
        width: of the first layer; the second is twice as wide.
    """

    def __init__(self, schema: Schema, noise: int, width: int) -> None:
        super().__init__()
        self.places = [(column.type == "number", place) for column, place in schema.places()]
        self.body = nn.Sequential(
            nn.Linear(noise, width),
            nn.BatchNorm1d(width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 2 * width),
            nn.BatchNorm1d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Linear(2 * width, len(schema.features)),
        )

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        """``w`` (B, noise) to ``x`` (B, F)."""
        raw = self.body(w)
        return torch.cat(
            [_number(raw[:, place]) if number else chosen(raw[:, place]) for number, place in self.places], 1
        )


def _number(raw: torch.Tensor) -> torch.Tensor:
    """A number, alone or with whether it is missing: ``(B, 1 or 2)``."""
    value = raw[:, :1].tanh()
    if raw.shape[1] == 1:
        return value
    missing = chosen(F.pad(raw[:, 1:], (0, 1)))[:, :1]  # against a score of 0
    return torch.cat([value * (1 - missing), missing], 1)


def chosen(scores: torch.Tensor) -> torch.Tensor:
    """Categories by their scores ``(B, n)``: 1 for the highest and 0, with the gradient of the softmax.

    >>> chosen(torch.tensor([[0.5, 2.0, 1.0]])).tolist()
    [[0.0, 1.0, 0.0]]
    """
    soft = scores.softmax(1)
    hard = F.one_hot(soft.argmax(1), soft.shape[1]).to(soft.dtype)
    return hard + (soft - soft.detach())


class TableCritic(nn.Sequential):
    """``(B, F)`` to one value a row, ``(B, 1)``: large where it looks generated.

    The patch critic's layers, as far as rows have such: linear to w, leaky ReLU 0.2; linear to 2w, batch
    norm, leaky ReLU; linear to one. Batch norm always uses the batch's own statistics.

    Args:
        features: F.
        width: w.
        norm: as of :class:`fedstill.models.patch_critics.PatchCritic`.
    """

    def __init__(self, features: int, width: int, norm: Literal["batch", "group"] = "batch") -> None:
        wide = 2 * width
        super().__init__(
            nn.Linear(features, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, wide),
            nn.BatchNorm1d(wide, track_running_stats=False)
            if norm == "batch"
            else nn.GroupNorm(math.gcd(8, wide), wide),
            nn.LeakyReLU(0.2),
            nn.Linear(wide, 1),
        )
