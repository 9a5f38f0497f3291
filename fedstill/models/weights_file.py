"""Files of weights: safetensors, as no pickle is read; and digests of weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

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
        reason = f"{first_line(error)} (safetensors.torch.save_file writes one from a state dict)"
        raise ModelError(f"{option} {path.name!r} is not a safetensors file: {reason}") from error


def digest_weights(network: nn.Module, identity: Mapping[str, Any]) -> str:
    """Return a digest of a network's weights and of JSON values that identify it, 32 hexadecimal digits.

    >>> layer = nn.BatchNorm1d(2)
    >>> before = digest_weights(layer, {})
    >>> layer.running_mean[0] = 1.0
    >>> digest_weights(layer, {}) == before
    False
    """
    hashed = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    for name, tensor in network.state_dict().items():
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        hashed.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:32]
