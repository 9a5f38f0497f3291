"""What a run must remember to go on, as one safetensors file: tensors, and the rest as JSON.

The file is replaced in one move, so whoever is killed while writing leaves the one before.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedstill.core import private_files
from fedstill.core.errors import RunFolderError

State = Any  # dict | list | tuple | str | int | float | bool | None | Tensor, nested


def save_state(path: Path, state: State) -> None:
    """Write a nested state; the file at ``path`` is either the old one or the new one, never half.

    Raises:
        OSError: it cannot be written, and the old file stays; or the disk may not have the new one yet.
        TypeError: the state holds something else than dicts, lists, tuples, tensors and JSON values.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_encode(state, tensors))
    part = path.with_name(path.name + ".part")
    try:
        part.unlink(missing_ok=True)
        private_files.create_empty(part)  # a state is for whoever goes on with the run, and nobody else
        save_file(tensors, part, metadata={"tree": tree})
        with part.open("rb+") as file:
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)  # on a full disk its place is needed
        if isinstance(error, SafetensorError):
            found = re.search(r"os error (\d+)", str(error))  # a full disk, say
            number, told = (int(found[1]), os.strerror(int(found[1]))) if found else (errno.EIO, str(error))
            raise OSError(number, told, str(path)) from error
        raise
    os.replace(part, path)
    private_files.sync_folder(path.parent)


def check_state(state: State) -> None:
    """Refuse what :func:`save_state` could not write; nothing is written or copied.

    Raises:
        TypeError: the state holds something else than dicts, lists, tuples, tensors and JSON values.

    >>> check_state({"step": 3, "of": [1.0, None]})
    """
    if isinstance(state, Mapping | list | tuple):
        for part in state.values() if isinstance(state, Mapping) else state:
            check_state(part)
    elif not (state is None or isinstance(state, torch.Tensor | str | int | float | bool)):
        raise TypeError(f"state holds a {type(state).__name__} (expected tensors and JSON values)")


def load_state(path: Path) -> State:
    """Read what :func:`save_state` wrote, tensors on the CPU.

    As copies: they begin where torch lets tensors begin, not at any byte of a file. Where they begin decides
    which kernel computes them, and so their last digits.

    Raises:
        RunFolderError: the file is none of :func:`save_state`, or broken.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tree = json.loads(file.metadata()["tree"])
            names = file.keys()
            return _decode(tree, {name: file.get_tensor(name).clone() for name in names})
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunFolderError(f"{path} is no state of a run: {error}") from error


def _encode(value: State, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, Mapping):  # as pairs: an optimizer's state has whole numbers as keys
        return {"dict": [[key, _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, tensors) for item in value]}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"state holds a {type(value).__name__} (expected tensors and JSON values)")


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> State:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    items = [_decode(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)
