"""Files of weights: safetensors, as no pickle is read."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedstill.core.errors import ModelError
from fedstill.core.registry import first_line


def lacking_weights_error(file: Path, lacking: list[str], network: str) -> ModelError:
    """Return the error of a file without some weights of a network, or with weights of other shapes.

    >>> str(lacking_weights_error(Path("w.safetensors"), ["conv.weight", "conv.bias"], "timm:x"))
    "w.safetensors: lacks 'conv.weight' and 1 other of timm:x, or has other shapes"
    """
    count = len(lacking) - 1
    others = f" and {count} {'other' if count == 1 else 'others'}" if count else ""
    return ModelError(f"{file}: lacks {lacking[0]!r}{others} of {network}, or has other shapes")


def read_weights(path: Path, option: str = "model.weights") -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, which an option names.

    Raises:
        ModelError: there is no such file, or it has another format.
    """
    if not path.is_file():
        raise ModelError(f"file not found: {path} ({option})")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{option} {path.name!r} is not a safetensors file: {first_line(error)}") from error
