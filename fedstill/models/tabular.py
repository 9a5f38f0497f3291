"""Networks that map a row of a table to outputs: of images they take the pixels, flattened.

All take ``(B, F)`` or ``(B, channels, H, W)`` and give ``(B, classes)``. None mixes examples, so that each
can learn privately.
"""

from __future__ import annotations

import math

import torch
from torch import nn


class Linear(nn.Sequential):
    """One linear layer: with a softmax behind it, logistic regression."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(math.prod(shape), classes))


class MLP(nn.Sequential):
    """Two hidden layers."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 128) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(math.prod(shape), width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )


class ResidualLayers(nn.Module):
    """Layer norm and two linear layers around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, width)`` to the same."""
        y: torch.Tensor = self.body(x)
        return x + y


class ResidualMLP(nn.Sequential):
    """A linear layer, two residual blocks, and a head.

    The ResNet of Gorishniy et al., "Revisiting Deep Learning Models for Tabular Data", NeurIPS 2021, without
    dropout and with layer norm in the place of batch norm: a student sees generated rows while it learns and
    real ones afterwards.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(math.prod(shape), width),
            ResidualLayers(width),
            ResidualLayers(width),
            nn.LayerNorm(width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )
