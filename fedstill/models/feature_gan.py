"""Networks in the space of features, behind a classifier's extractor: a conditional generator, its critic.

Both take a vector with the label's one-hot vector behind it (:func:`condition`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


def condition(vectors: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """``[v; one-hot y]``: vectors ``(..., n)`` and labels ``(...)`` to ``(..., n + classes)``.

    >>> condition(torch.tensor([[5.0], [6.0]]), torch.tensor([1, 0]), 2)
    tensor([[5., 0., 1.],
            [6., 1., 0.]])
    """
    return torch.cat([vectors, F.one_hot(labels, classes).to(vectors.dtype)], -1)


class FeatureGenerator(nn.Sequential):
    """``[z; one-hot y]`` (B, noise + classes) to features (B, features): three linear layers with batch norm.

    FedMD-CG, section 3.1. The last layer is bare, since an extractor's features may have any range. Layers
    before a batch norm have no bias: it would only learn rounding noise.
    """

    def __init__(
        self, noise: int, classes: int, features: int, width: int, device: torch.device | str | None = None
    ) -> None:
        super().__init__(
            nn.Linear(noise + classes, width, bias=False, device=device),
            nn.BatchNorm1d(width, device=device),
            nn.ReLU(),
            nn.Linear(width, width, bias=False, device=device),
            nn.BatchNorm1d(width, device=device),
            nn.ReLU(),
            nn.Linear(width, features, device=device),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """In full precision whatever the run's: torch refuses a stacked batch norm in bfloat16."""
        with torch.autocast(x.device.type, enabled=False):
            f: torch.Tensor = super().forward(x.float())  # type: ignore[no-untyped-call]
            return f


class FeatureCritic(nn.Sequential):
    """``[f; one-hot y]`` (B, features + classes) to one value (B, 1), high where f looks real.

    As FedMD-CG says of FedCG (section 3.1), a classifier's head with one output, whose hidden layers have
    those ``widths``: here with y beside f, since FedCG's critic judges both, and leaky ReLU 0.2.
    """

    def __init__(self, features: int, classes: int, widths: Sequence[int]) -> None:
        layers: list[nn.Module] = []
        inside = features + classes
        for width in widths:
            layers += [nn.Linear(inside, width), nn.LeakyReLU(0.2)]
            inside = width
        super().__init__(*layers, nn.Linear(inside, 1))


def hidden_widths(head: nn.Module) -> tuple[int, ...]:
    """The widths of a head's linear layers, but for the last.

    >>> hidden_widths(nn.Sequential(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 10)))
    (120,)
    """
    return tuple(layer.out_features for layer in head.modules() if isinstance(layer, nn.Linear))[:-1]
