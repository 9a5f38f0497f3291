"""Named tensors as bytes and back, in the form of safetensors, without its library.

That one is in Rust, whose allocations end the whole process where memory runs out, or raise what is no
``Exception``; messages come from others, and are as large as these make them. Here it is an error like any
other. Files that are not sent, as states and students, are written and read by the library.

Messages between a server and a node as bytes, and tensors in a form that takes fewer of them.

A message is one blob of safetensors with a JSON header in its metadata: no pickle, nothing that could run.
Compact forms are chosen by config and are the same on every engine, in-process too, so that a run's figures
do not depend on where its nodes are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.options import Checked
from fedstill.protocol.payload_kinds import INPUTS, payload_kind

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
    >>> decode_header(blob)["x"]
    {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 8]}
    >>> decode_tensors(blob, decode_header(blob))["x"].tolist()
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


def decode_header(blob: bytes) -> dict[str, Any]:
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


def decode_tensors(blob: bytes, header: Mapping[str, Any]) -> dict[str, torch.Tensor]:
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


Tensors = Mapping[str, torch.Tensor]
Form = Literal["float32", "float16", "int8"]
SCALE = ":scale"  # "x:scale" goes with an "x" of int8 or float16: what each row is multiplied by
HEADER, STRIDES = "fedstill", "strides"  # in the metadata of a message
MAX_HEADER = 1_000_000  # bytes of a message before its tensors: parsed, they take fifty times as much memory


@dataclass(frozen=True)
class WireConfig(Checked):
    """In which form tensors travel. Shorter forms round what they carry, on every engine alike."""

    under: ClassVar[str] = "wire"

    inputs: Form = "float32"
    """The inputs that the server asks about; the shorter forms have a scale for each input."""
    gradients: Form = "float32"
    """Gradients, down to the nodes and back up."""

    def form(self, kind: str) -> Form:
        """The form in which a kind of tensor travels."""
        if payload_kind(kind).of == "gradients":
            return self.gradients
        return self.inputs if kind == INPUTS else "float32"

    def compress(self, tensors: Tensors, kinds: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Tensors as they travel, by name, each of a kind; :func:`decompress` takes them back to float32.

        >>> wire = WireConfig(inputs="int8")
        >>> sent = wire.compress({"x": torch.tensor([[0.5, -1.27], [2.54, 0.0]])}, {"x": "inputs"})
        >>> sent["x"].tolist(), [round(scale, 4) for scale in sent["x:scale"].tolist()]
        ([[50, -127], [127, 0]], [0.01, 0.02])
        """
        sent: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            form = self.form(kinds.get(name, ""))
            if form == "float32" or not tensor.is_floating_point() or not tensor.numel():
                sent[name] = tensor
            else:
                rows = tensor.reshape(len(tensor), -1) if tensor.ndim else tensor.reshape(1, 1)
                dtype, top = (torch.int8, 127) if form == "int8" else (torch.float16, 1)
                # Each row is scaled: gradients are too small for float16, and inputs not worth its range.
                scale = rows.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / top  # (B,)
                scaled = rows / scale.unsqueeze(1)
                sent[name] = (scaled.round() if form == "int8" else scaled).to(dtype).view(tensor.shape)
                sent[name + SCALE] = scale
        return sent


def decompress(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Tensors that have traveled, in float32 again; others as they are.

    Raises:
        DataError: a scale without its tensor, or not one for each row.

    >>> decompress({"x": torch.tensor([[50, -127]], dtype=torch.int8), "x:scale": torch.tensor([0.01])})["x"]
    tensor([[ 0.5000, -1.2700]])
    """
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            if name.removesuffix(SCALE) not in tensors:
                raise DataError(f"tensor {name} came without {name.removesuffix(SCALE)}")
            continue
        scale = tensors.get(name + SCALE)
        if scale is not None:
            if scale.shape != (tensor.shape[:1] or (1,)) or not tensor.numel():
                raise DataError(
                    f"tensor {name} of shape {tuple(tensor.shape)} came with {tuple(scale.shape)} scales"
                )
            whole[name] = (tensor.reshape(len(scale), -1) * scale.unsqueeze(1)).view(tensor.shape)
        else:
            whole[name] = tensor
    return whole


def kind_of(name: str, kinds: Mapping[str, str]) -> str:
    """The kind of a tensor as it travels: a scale is of the kind of what it scales."""
    return kinds[name.removesuffix(SCALE)]  # KeyError: undeclared


def as_text(value: Any) -> torch.Tensor:
    """A JSON value as it travels: the bytes of its text, ``(n,)`` uint8, the same for equal values.

    Raises:
        ArgumentError: what JSON does not hold.

    >>> as_text({"b": 1, "a": None}).shape
    torch.Size([16])
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        # Whoever reads the error may not read the value: at a node it is what an answer would have held.
        allowed = "what JSON holds: tables by text, lists, texts, finite numbers, true, false and none"
        raise ArgumentError("a JSON value", type(value).__name__, allowed) from error
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def from_text(tensor: torch.Tensor) -> Any:
    """The JSON value that :func:`as_text` made bytes of.

    Raises:
        DataError: it is none.

    >>> from_text(as_text({"b": [1, 2.5, "x"]}))
    {'b': [1, 2.5, 'x']}
    """
    if tensor.dtype != torch.uint8 or tensor.ndim != 1:
        raise DataError(f"it is {tensor.dtype} of shape {tuple(tensor.shape)}, and no JSON text")
    try:
        text = tensor.cpu().numpy().tobytes().decode()
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise DataError("it is no JSON text") from error


def _finite(word: str) -> float:
    """A number; NaN and infinities, which Python writes and reads, are none that JSON has."""
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word} is no finite number")
    return value


def size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's numbers."""
    return tensor.numel() * tensor.element_size()


def sizes(tensors: Tensors, kinds: Mapping[str, str]) -> dict[str, int]:
    """Bytes of tensors as they travel, by kind.

    >>> sizes({"x": torch.zeros(2, dtype=torch.int8), "x:scale": torch.zeros(2)}, {"x": "inputs"})
    {'inputs': 10}
    """
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        kind = kind_of(name, kinds)
        found[kind] = found.get(kind, 0) + size(tensor)
    return found


def pack(header: Mapping[str, Any], tensors: Tensors | None = None) -> bytes:
    """One message: JSON values and named tensors.

    >>> unpack(pack({"op": "hello"}, {"x": torch.tensor([1, 2])}))
    ({'op': 'hello'}, {'x': tensor([1, 2])})
    """
    plain = {name: tensor.detach().cpu() for name, tensor in (tensors or {}).items()}
    # How a tensor lies in memory decides which kernel computes it, and so its last digits.
    strides = {name: tensor.stride() for name, tensor in sorted(plain.items()) if tensor.ndim == 4}
    return to_bytes(plain, {HEADER: json.dumps({HEADER: header, STRIDES: strides})})


# What reading bytes can raise that somebody made up; a RuntimeError is torch's, of a shape beyond all memory.
DECODE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError)


def unpack(message: bytes, max_header: int = MAX_HEADER) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What :func:`pack` made a message of, tensors on the CPU.

    Args:
        max_header: bytes before the tensors; 0 is no limit.

    Raises:
        DataError: the bytes are no message, or its header is larger.
    """
    if not isinstance(message, bytes):  # what carries messages may carry other things as well
        raise DataError(f"a message is a {type(message).__name__} (expected bytes)")
    length = header_size(message)
    if 0 < max_header < length:
        raise DataError(f"its header has {length} bytes (expected {max_header} (max_header))")
    try:
        names = decode_header(message)
        told = json.loads(names[METADATA][HEADER])
        header, strides = told[HEADER], told[STRIDES]
        loaded = decode_tensors(message, names)
        tensors = {name: _laid_out(tensor, strides.get(name)) for name, tensor in loaded.items()}
    except DECODE_ERRORS as error:
        raise DataError(f"{len(message)} bytes are no message of fedstill: {error}") from error
    if not isinstance(header, dict):
        raise DataError("a message's header is no table")
    return header, tensors


def _laid_out(tensor: torch.Tensor, strides: Any) -> torch.Tensor:
    """A tensor as it lay in memory before it traveled, if that was channels last."""
    if strides is None or tensor.ndim != 4 or tuple(strides) == tensor.stride():
        return tensor
    last = torch.empty(tensor.shape, dtype=tensor.dtype, memory_format=torch.channels_last)
    return last.copy_(tensor) if tuple(strides) == last.stride() else tensor
