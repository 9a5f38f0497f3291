"""From an owner's arrays to inputs as a server declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.core.dataset import DataSet, TensorData, normalised
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.imports import find, is_path
from fedstill.data.arrays import ArrayData
from fedstill.data.config import DATA, DataConfig
from fedstill.data.groups import numbered
from fedstill.data.packs import Images, Raw
from fedstill.data.private_config import SOURCES, PrivateConfig
from fedstill.data.public import conform
from fedstill.data.spec import InputSpec


def groups_of(raw: Raw, config: PrivateConfig) -> torch.Tensor | None:
    """Whose each example is, ``(N,)`` int64, if the owner names a column that says so."""
    if not config.group:
        return None
    if config.group not in raw.columns:
        known = ", ".join(raw.columns) or "none"
        raise ArgumentError("data.group", config.group, f"a column with one value an example: {known}")
    return numbered(raw.columns[config.group].tolist())


def inputs_of(images: Images, config: PrivateConfig, spec: InputSpec, what: str) -> torch.Tensor:
    """Images normalised as the spec declares, ``(N, C, H, W)`` float32."""
    found = tuple(images.shape[1:])
    if config.normalised:
        if images.dtype == np.uint8:
            raise DataError(f"{what}: images are bytes: allowed are floats, as data.normalised says")
        _refuse_shape(found, spec, what, "")
        inputs = torch.from_numpy(np.ascontiguousarray(images))
        check_range(inputs, spec, what)
        return inputs
    if found == spec.shape:
        return normalised(images, spec.mean, spec.std)
    if not config.fit:
        _refuse_shape(found, spec, what, "; data.fit = true brings images into it")
    as_pixels = TensorData(normalised(images, (0.0,) * found[0], (1.0,) * found[0]), torch.zeros(len(images)))
    like = TensorData(torch.zeros(1, *spec.shape), torch.zeros(1))
    source = DataSet(what, as_pixels, as_pixels, spec.classes, (0.0,) * found[0], (1.0,) * found[0])
    target = DataSet("the server", like, like, spec.classes, spec.mean, spec.std)
    return conform(as_pixels.inputs, source, target)


def _refuse_shape(found: tuple[int, ...], spec: InputSpec, what: str, way_out: str) -> None:
    if found != spec.shape:
        shapes = f"{times(found)} (channels, height, width): allowed is {times(spec.shape)}"
        raise DataError(f"{what}: images are {shapes}{way_out}")


def times(shape: Sequence[int]) -> str:
    """A shape in words.

    >>> times((3, 32, 32))
    '3 x 32 x 32'
    """
    return " x ".join(map(str, shape))


def check_range(inputs: torch.Tensor, spec: InputSpec, what: str) -> None:
    """Refuse inputs that are no pixels from 0 to 1 under the spec's normalisation."""
    for channel, (mean, std) in enumerate(zip(spec.mean, spec.std, strict=True)):
        low, high = (0 - mean) / std, (1 - mean) / std
        least, most = inputs[:, channel].min().item(), inputs[:, channel].max().item()
        if least < low - 1e-3 or most > high + 1e-3:
            raise DataError(
                f"{what}: has values from {least:.4g} to {most:.4g} in channel {channel}: allowed by mean "
                f"{mean:.4g} and std {std:.4g} are {low:.4g} to {high:.4g}"
            )


def own_function(config: PrivateConfig, folder: Path) -> Callable[[Path], Any]:
    """What gives an owner's own data from a path: a function, or a class of :class:`ArrayData`.

    Raises:
        ArgumentError: it cannot be imported, or is another data set.
    """
    named = not is_path(config.source)
    found: Any = DATA[config.source] if named else find(config.source, folder, "data.source")
    if not isinstance(found, type) or not issubclass(found, DataConfig):
        function: Callable[[Path], Any] = found
        return function
    if not issubclass(found, ArrayData):
        raise ArgumentError("data.source", config.source, "a data set that is arrays, below ArrayData")
    kind = found
    return lambda path: kind(root=str(path)).arrays()


def locate(config: PrivateConfig, folder: Path) -> Path:
    """The file or folder that a configuration means.

    Raises:
        ArgumentError: the owner's own function cannot be imported.
        DataError: there is no such file or folder.
    """
    path = folder / Path(config.path).expanduser()
    if config.source not in SOURCES:  # what the path means is the function's own business
        own_function(config, folder)
    elif config.source in ("folder", "nifti") and not path.is_dir():
        raise DataError(f"data.path {config.path!r}: there is no folder {path}")
    elif config.source not in ("folder", "nifti") and not path.is_file():
        raise DataError(f"data.path {config.path!r}: there is no file {path}")
    return path
