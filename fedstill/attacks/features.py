"""What distances between images are measured in.

In pixels, in a network's features, or in those of a weights file. A distance means little without the space
that it is measured in. So each extractor has a name, and every result that used one carries it.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fedstill.core.errors import ArgumentError, DataError, ModelError
from fedstill.models.vgg import load_vgg

AT_ONCE = 256  # images whose features are computed at once
PIECE = 1 << 20  # bytes of a file that are read at once


@dataclass(frozen=True, eq=False)
class Extractor:
    """Images to vectors, with a name to be printed beside every number that came of them.

    Args:
        name: in words.
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
    will do. (:func:`fedstill.models.split.split` parts a LeNet-5 behind its convolutions instead, as FedMD-CG
    does; that is no layer before its last.) Features with places ``(B, p, h, w)`` are averaged over these.

    Args:
        model: of any architecture; stays as it is.
        example: one input or more ``(B, ...)``, to find the layer by.
        whose: as in "student": stands in the name.

    Raises:
        ModelError: no layer with parameters, or it takes something else than ``(B, p)`` or ``(B, p, h, w)``.
    """
    network = copy.deepcopy(model).eval().requires_grad_(False)
    device = next((own.device for own in network.parameters()), None)
    passed: list[tuple[nn.Module, object]] = []
    layers = [layer for layer in network.modules() if next(layer.parameters(recurse=False), None) is not None]

    def see(layer: nn.Module, given: tuple[object, ...]) -> None:
        passed.append((layer, given[0] if given else None))

    def last(x: torch.Tensor, among: Sequence[nn.Module]) -> tuple[nn.Module, torch.Tensor]:
        handles = [layer.register_forward_pre_hook(see) for layer in among]
        try:
            passed.clear()
            network(x)
        finally:
            for handle in handles:
                handle.remove()
        layer, features = passed.pop() if passed else (network, None)
        passed.clear()
        if not isinstance(features, torch.Tensor) or features.ndim not in (2, 4) or len(features) != len(x):
            form = tuple(features.shape) if isinstance(features, torch.Tensor) else "no tensor"
            allowed = "(B, p) or (B, p, h, w)"
            raise ModelError(
                f"the last layer of {whose} takes {form} for {len(x)} inputs: allowed is {allowed}"
            )
        return layer, features if features.ndim == 2 else features.mean((2, 3))

    with torch.no_grad():
        layer, _ = last(example.to(device or example.device), layers)
    return Extractor(f"features before the last layer of {whose}", lambda x: last(x, [layer])[1], device)


def vgg(path: str | Path, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> Extractor:
    """The last activation, relu4_3, of a VGG in a weights file, averaged over its places: 512 as published.

    Args:
        path: a safetensors file, as :func:`fedstill.models.vgg.load_vgg` reads it.
        mean, std: one a channel, by which the images that it will be given were normalised.

    Raises:
        ArgumentError, DataError, ModelError: as :func:`fedstill.models.vgg.load_vgg` says.
    """
    network = load_vgg(path, mean, std)
    return Extractor(f"relu4_3 of {_named(path)}", lambda x: network(x)[-1].mean((2, 3)), torch.device("cpu"))


def _named(path: str | Path) -> str:
    """A file by its name and the first digits of its SHA-256, since others may have the same name."""
    hashed = hashlib.sha256()
    with Path(path).open("rb") as file:
        while piece := file.read(PIECE):
            hashed.update(piece)
    return f"{Path(path).name} (SHA-256 {hashed.hexdigest()[:8]})"
