"""Networks for rows of a table. They also take images, flattened to their pixels.

All map ``(B, F)`` or ``(B, channels, H, W)`` to ``(B, classes)``. None mixes examples, so DP-SGD can train
them.
"""

from __future__ import annotations

import math

import torch
from torch import nn


class Linear(nn.Sequential):
    """One linear layer. With a softmax it is logistic regression.

    Args:
        shape: ``(F,)`` of a row, or ``(channels, H, W)`` of an image.
        classes: number of outputs.

    Example:
        >>> Linear((5,), classes=2)(torch.zeros(3, 5)).shape
        torch.Size([3, 2])
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(math.prod(shape), classes))


class MLP(nn.Sequential):
    """Multi-layer perceptron with two hidden layers.

    Args:
        shape: ``(F,)`` of a row, or ``(channels, H, W)`` of an image.
        classes: number of outputs.
        width: size of the hidden layers.

    Example:
        >>> MLP((1, 8, 8), classes=10)(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 10])
    """

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
    """Layer norm and two linear layers with a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(B, width)`` to ``(B, width)``."""
        y: torch.Tensor = self.body(x)
        return x + y


class ResidualMLP(nn.Sequential):
    """Linear layer, two residual blocks and a head.

    The ResNet of Gorishniy et al., "Revisiting Deep Learning Models for Tabular Data", NeurIPS 2021, without
    dropout and with layer norm instead of batch norm, because a student is trained on generated rows and used
    on real ones.

    Args:
        shape: ``(F,)`` of a row, or ``(channels, H, W)`` of an image.
        classes: number of outputs.
        width: size of the features; the residual blocks have twice as many hidden units.

    Example:
        >>> ResidualMLP((5,), classes=2)(torch.zeros(3, 5)).shape
        torch.Size([3, 2])
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
