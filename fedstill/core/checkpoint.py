"""Checkpoints: the state from which a run resumes, as one safetensors file.

Tensors are stored as such, everything else as JSON in the file's metadata. The file is replaced atomically,
so a process that is killed while writing leaves the previous checkpoint intact.
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
    """Write a nested state to ``path`` atomically.

    Args:
        path: the file. It is either the old one or the new one, never incomplete.
        state: nested dicts, lists and tuples of tensors and JSON values.

    Raises:
        OSError: the file cannot be written. The old file stays, unless only the final sync to the disk
            failed.
        TypeError: the state holds a value of another type.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(encode_state(state, tensors))
    part = path.with_name(path.name + ".part")
    try:
        part.unlink(missing_ok=True)
        private_files.create_empty(part)  # readable by the owner only
        # Copies, as safetensors refuses shared memory.
        copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        save_file(copies, part, metadata={"tree": tree})
        with part.open("rb+") as file:
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)  # frees space on a full disk
        if isinstance(error, SafetensorError):
            match = re.search(r"os error (\d+)", str(error))  # for example a full disk
            code, message = (int(match[1]), os.strerror(int(match[1]))) if match else (errno.EIO, str(error))
            raise OSError(code, message, str(path)) from error
        raise
    os.replace(part, path)
    private_files.sync_folder(path.parent)


def check_state(state: State) -> None:
    """Check that :func:`save_state` can write a state, without writing or copying it.

    Raises:
        TypeError: the state holds something other than dicts, lists, tuples, tensors and JSON values.

    >>> check_state({"step": 3, "of": [1.0, None]})
    """
    if isinstance(state, Mapping | list | tuple):
        for part in state.values() if isinstance(state, Mapping) else state:
            check_state(part)
    elif not (state is None or isinstance(state, torch.Tensor | str | int | float | bool)):
        raise TypeError(f"state holds a {type(state).__name__} (expected tensors and JSON values)")


def load_state(path: Path) -> State:
    """Read a file of :func:`save_state`. Tensors are on the CPU.

    Tensors are copied out of the file, so that their memory is aligned as torch aligns it. The alignment
    decides which kernel computes with a tensor, and so its last digits.

    Raises:
        RunFolderError: the file is not a checkpoint, or it is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tree = json.loads(file.metadata()["tree"])
            names = file.keys()
            return decode_state(tree, {name: file.get_tensor(name).clone() for name in names})
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunFolderError(f"{path} is not a checkpoint of a run: {error}") from error


def encode_state(value: State, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a nested state as JSON values that refer to its tensors by name.

    Args:
        value: nested dicts, lists and tuples of tensors and JSON values.
        tensors: gets the tensors, on the CPU.

    Raises:
        TypeError: the state holds a value of another type.
    """
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu()
        return {"tensor": name}
    if isinstance(value, Mapping):  # as pairs: an optimizer's state has integer keys
        return {"dict": [[key, encode_state(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode_state(item, tensors) for item in value]}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"state holds a {type(value).__name__} (expected tensors and JSON values)")


def decode_state(value: Any, tensors: Mapping[str, torch.Tensor]) -> State:
    """Return the state that :func:`encode_state` has encoded."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: decode_state(item, tensors) for key, item in content}
    items = [decode_state(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)
