"""Named tensors as bytes and back, in the form of safetensors, without its library.

That one is in Rust, whose allocations end the whole process where memory runs out, or raise what is no
``Exception``; messages come from others, and are as large as these make them. Here it is an error like any
other. Files that are not sent, as states and students, are written and read by the library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

MOST = 2**62  # numbers of a shape, and of what torch makes of it
LENGTH = 8  # bytes in which the header says how long it is
METADATA = "__metadata__"
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def to_bytes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Tensors on the CPU as one blob, each from a multiple of its numbers' size; equal ones are equal bytes.

    >>> blob = to_bytes({"x": torch.tensor([1.5, 2.0])}, {"note": "two"})
    >>> header_of(blob)["x"]
    {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 8]}
    >>> tensors_of(blob, header_of(blob))["x"].tolist()
    [1.5, 2.0]
    """
    header: dict[str, Any] = {METADATA: dict(metadata)}
    parts: list[Any] = []
    start = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name].detach()
        flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # of one number the stride may be any
        raw = flat.view(torch.uint8).numpy()
        end = start + raw.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        parts.append(raw.data)
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH)
    return b"".join([len(text).to_bytes(LENGTH, "little"), text, *parts])


def header_size(blob: bytes) -> int:
    """Bytes that stand before the tensors, as they say themselves; 0 where there are not as many."""
    length = int.from_bytes(blob[:LENGTH], "little")
    return length if length <= len(blob) - LENGTH else 0


def header_of(blob: bytes) -> dict[str, Any]:
    """What stands before the tensors.

    Raises:
        ValueError: no header, or none that is a table.
    """
    length = header_size(blob)
    if not length:
        raise ValueError("cut short")
    header = json.loads(blob[LENGTH : LENGTH + length])
    if not isinstance(header, dict):
        raise ValueError("its header is no table")
    return header


def tensors_of(blob: bytes, header: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of the tensors that a header names, each where torch lets tensors begin.

    Raises:
        ValueError, KeyError, TypeError: the header is not of this form, or its tensors are not all that is
            there, one behind the other.
        RuntimeError: torch has no such shape, or there is no more memory.
    """
    start = LENGTH + header_size(blob)
    told = sorted(((*each["data_offsets"], name) for name, each in header.items() if name != METADATA))
    tensors, at = {}, 0
    for begin, end, name in told:
        dtype, shape = DTYPES[header[name]["dtype"]], header[name]["shape"]
        whole = all(type(number) is int and number >= 0 for number in (begin, end, *shape))
        possible = whole and math.prod(max(side, 1) for side in shape) < MOST
        if not possible or begin != at or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"tensor {name} has other bytes than it says")
        at = end
        raw = torch.empty(end - begin, dtype=torch.uint8)
        raw.numpy()[:] = np.frombuffer(blob, np.uint8, end - begin, start + begin)
        if dtype == torch.bool:
            raw = (raw != 0).view(torch.uint8)  # other bytes than 0 and 1 are no booleans
        tensors[name] = raw.view(dtype).reshape(shape)
    if start + at != len(blob):
        raise ValueError("bytes that are no tensor's")
    return tensors
