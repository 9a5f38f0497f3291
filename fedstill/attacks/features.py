"""What distances between images are measured in.

In pixels, or in a network's features. A distance means little without the space
that it is measured in. So each extractor has a name, and every result that used one carries it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedstill.core.errors import ArgumentError, DataError, ModelError

AT_ONCE = 256  # images whose features are computed at once


@dataclass(frozen=True, eq=False)
class Extractor:
    """Images to vectors, with a name to be printed beside every number that came of them.

    Args:
        of: a batch ``(B, C, H, W)`` to vectors ``(B, d)``, without state.
        device: where ``of`` computes; None: where the images are.

    >>> space = pixels()
    >>> space.name, space(torch.tensor([[[[0.25, 2.0]]]])).tolist()
    ('pixels', [[0.25, 1.0]])
    """

    name: str
    of: Callable[[torch.Tensor], torch.Tensor]
    device: torch.device | None = None

    @torch.no_grad()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Images as the networks take them ``(N, C, H, W)`` to vectors ``(N, d)``, float64, on the CPU.

        Raises:
            ArgumentError: there are no images.
            DataError: a vector holds NaN or infinity: distances would be none.
        """
        if not len(images):
            raise ArgumentError("images", 0, "one or more")
        parts = (self.of(part.to(self.device or part.device)) for part in torch.split(images, AT_ONCE))
        found = torch.cat([part.cpu().double() for part in parts])
        if not found.isfinite().all():
            raise DataError(f"{self.name}: NaN or infinity, so that there are no distances")
        return found


def pixels(mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> Extractor:
    """Pixels in 0..1, all in one vector; what is outside is cut off, as a picture is.

    Args:
        mean, std: one a channel, by which the images that it will be given were normalised.
    """
    scale = [torch.tensor(values).view(1, -1, 1, 1) for values in (mean, std)]

    def of(images: torch.Tensor) -> torch.Tensor:
        shift, width = (part.to(images.device) for part in scale)
        return (images.double() * width + shift).clamp(0, 1).flatten(1)

    return Extractor("pixels", of)


def penultimate(model: nn.Module, example: torch.Tensor, whose: str) -> Extractor:
    """What goes into a network's last layer: of a copy, in evaluation mode, as the network is now.

    The last layer is the last one with parameters of its own that an input passes, so that any architecture
    will do. Features with places ``(B, p, h, w)`` are averaged over these.

    Args:
        example: one input or more ``(B, ...)``, to find the layer by.
        whose: as in "student": stands in the name.

    Raises:
        ModelError: no layer with parameters, or it takes something else than ``(B, p)`` or ``(B, p, h, w)``.
    """
    network = copy.deepcopy(model).eval().requires_grad_(False)
    device = next((own.device for own in network.parameters()), None)
    layers = [layer for layer in network.modules() if next(layer.parameters(recurse=False), None) is not None]

    def last(x: torch.Tensor, among: Sequence[nn.Module]) -> tuple[nn.Module, torch.Tensor]:
        passed: list[tuple[nn.Module, object]] = [(network, None)]

        def see(layer: nn.Module, given: tuple[object, ...]) -> None:
            passed.append((layer, given[0] if given else None))

        handles = [layer.register_forward_pre_hook(see) for layer in among]
        try:
            network(x)
        finally:
            for handle in handles:
                handle.remove()
        layer, features = passed[-1]
        if not isinstance(features, torch.Tensor) or features.ndim not in (2, 4) or len(features) != len(x):
            form = tuple(features.shape) if isinstance(features, torch.Tensor) else "no tensor"
            allowed = f"for {len(x)} inputs: allowed is (B, p) or (B, p, h, w)"
            raise ModelError(f"the last layer of {whose} takes {form} {allowed}")
        return layer, features if features.ndim == 2 else features.mean((2, 3))

    with torch.no_grad():
        layer, _ = last(example.to(device or example.device), layers)
    return Extractor(f"features before the last layer of {whose}", lambda x: last(x, [layer])[1], device)
