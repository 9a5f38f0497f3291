"""Messages between server and nodes as bytes, and compact encodings of their tensors.

A message is one safetensors blob with a JSON header in its metadata; no pickle, nothing executable. Compact
encodings are chosen by :class:`WireConfig` and are applied by every engine, in-process too, so that a run's
metrics do not depend on where its nodes run.

Messages come from other parties and have any size. The safetensors library is in Rust: if it runs out of
memory, it ends the process or raises no ``Exception``. This module decodes the format in Python, where that
is an ordinary error. Files that are not sent, such as states and students, are read and written with the
library.
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
from fedstill.core.options import CheckedOptions
from fedstill.protocol.payload_kinds import INPUTS, payload_kind

MAX_ELEMENTS = 2**62  # of a shape, within the limits of torch
LENGTH_BYTES = 8  # bytes of the header's length
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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def encode_tensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return CPU tensors as one safetensors blob, each aligned to its element size; equal tensors give equal
    bytes.

    >>> blob = encode_tensors({"x": torch.tensor([1.5, 2.0])}, {"note": "two"})
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
        flat = tensor.contiguous().as_strided(
            (tensor.numel(),), (1,)
        )  # a tensor with one element may have any stride
        raw = flat.view(torch.uint8).numpy()
        end = start + raw.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        parts.append(raw.data)
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return b"".join([len(text).to_bytes(LENGTH_BYTES, "little"), text, *parts])


def header_size(blob: bytes) -> int:
    """Return the declared length of the header in bytes; 0 if the blob is shorter."""
    length = int.from_bytes(blob[:LENGTH_BYTES], "little")
    return length if length <= len(blob) - LENGTH_BYTES else 0


def decode_header(blob: bytes) -> dict[str, Any]:
    """Return the header of a blob.

    Raises:
        ValueError: no header, or one that is not a table.
    """
    length = header_size(blob)
    if not length:
        raise ValueError("cut short")
    header = json.loads(blob[LENGTH_BYTES : LENGTH_BYTES + length])
    if not isinstance(header, dict):
        raise ValueError("its header is not a table")
    return header


def decode_tensors(blob: bytes, header: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of a header, in memory aligned by torch.

    Raises:
        ValueError, KeyError, TypeError: a malformed header, or one whose tensors do not cover the blob's
            bytes in order.
        RuntimeError: torch does not support such a shape, or there is not enough memory.
    """
    start = LENGTH_BYTES + header_size(blob)
    entries = sorted(((*entry["data_offsets"], name) for name, entry in header.items() if name != METADATA))
    tensors, position = {}, 0
    for begin, end, name in entries:
        dtype, shape = DTYPES[header[name]["dtype"]], header[name]["shape"]
        integers = all(type(number) is int and number >= 0 for number in (begin, end, *shape))
        possible = integers and math.prod(max(side, 1) for side in shape) < MAX_ELEMENTS
        if not possible or begin != position or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"tensor {name} does not have the declared bytes")
        position = end
        raw = torch.empty(end - begin, dtype=torch.uint8)
        raw.numpy()[:] = np.frombuffer(blob, np.uint8, end - begin, start + begin)
        if dtype == torch.bool:
            raw = (raw != 0).view(torch.uint8)  # bytes other than 0 and 1 are not booleans
        tensors[name] = raw.view(dtype).reshape(shape)
    if start + position != len(blob):
        raise ValueError("bytes that belong to no tensor")
    return tensors


Tensors = Mapping[str, torch.Tensor]
WireDtype = Literal["float32", "float16", "int8"]
SCALE = ":scale"  # "x:scale" has the factors of each row of an int8 or float16 tensor "x"
SCALED_DTYPES = (torch.int8, torch.float16)
HEADER, STRIDES = "fedstill", "strides"  # in the metadata of a message
MAX_HEADER = 1_000_000  # bytes of a message before its tensors; parsing takes fifty times as much memory


@dataclass(frozen=True)
class WireConfig(CheckedOptions):
    """Encoding of sent tensors. Shorter types round their values, in every engine alike.

    Args:
        inputs: type of the server's inputs.
        gradients: type of gradients.

    >>> WireConfig(inputs="int8").wire_dtype("inputs")
    'int8'
    """

    section: ClassVar[str] = "wire"

    inputs: WireDtype = "float32"
    """Type of the inputs of queries; shorter types have a scale for each input."""
    gradients: WireDtype = "float32"
    """Type of gradients, in both directions."""

    def wire_dtype(self, kind: str) -> WireDtype:
        """Return the type in which a payload kind is sent."""
        if payload_kind(kind).category == "gradients":
            return self.gradients
        return self.inputs if kind == INPUTS else "float32"

    def compress(self, tensors: Tensors, kinds: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return tensors as they are sent; :func:`decompress` is the inverse, to float32.

        Args:
            tensors: tensors by name.
            kinds: payload kind of each.

        >>> wire = WireConfig(inputs="int8")
        >>> sent = wire.compress({"x": torch.tensor([[0.5, -1.27], [2.54, 0.0]])}, {"x": "inputs"})
        >>> sent["x"].tolist(), [round(scale, 4) for scale in sent["x:scale"].tolist()]
        ([[50, -127], [127, 0]], [0.01, 0.02])
        """
        if self.inputs == self.gradients == "float32":
            return dict(tensors)
        sent: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            dtype_name = self.wire_dtype(kinds.get(name, ""))
            if dtype_name == "float32" or not tensor.is_floating_point() or not tensor.numel():
                sent[name] = tensor
            else:
                rows = tensor.reshape(len(tensor), -1) if tensor.ndim else tensor.reshape(1, 1)
                dtype, top = (torch.int8, 127) if dtype_name == "int8" else (torch.float16, 1)
                # Each row is scaled: gradients are too small for float16, and int8 has a small range.
                scale = rows.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / top  # (B,)
                scaled = rows / scale.unsqueeze(1)
                sent[name] = (scaled.round() if dtype_name == "int8" else scaled).to(dtype).view(tensor.shape)
                sent[name + SCALE] = scale
        return sent


def decompress(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return received tensors in float32; tensors without scale are unchanged.

    Raises:
        DataError: a scale without its tensor, another number of scales than rows, or a dtype that
            :meth:`WireConfig.compress` does not make.

    >>> decompress({"x": torch.tensor([[50, -127]], dtype=torch.int8), "x:scale": torch.tensor([0.01])})["x"]
    tensor([[ 0.5000, -1.2700]])
    """
    decoded: dict[str, torch.Tensor] = {}
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
            if tensor.dtype not in SCALED_DTYPES or scale.dtype != torch.float32:
                raise DataError(
                    f"tensor {name} {tensor.dtype} came with scales {scale.dtype} "
                    "(expected torch.int8 or torch.float16, with scales torch.float32)"
                )
            decoded[name] = (tensor.reshape(len(scale), -1) * scale.unsqueeze(1)).view(tensor.shape)
        else:
            decoded[name] = tensor
    return decoded


def wire_kind(name: str, kinds: Mapping[str, str]) -> str:
    """Return the payload kind of a sent tensor; a scale has the kind of its tensor."""
    return kinds[name.removesuffix(SCALE)]  # KeyError: an undeclared tensor


def json_to_tensor(value: Any) -> torch.Tensor:
    """Return a JSON value as the bytes of its text, ``(n,)`` uint8; equal values give equal bytes.

    Raises:
        ArgumentError: a value that JSON cannot represent.

    >>> json_to_tensor({"b": 1, "a": None}).shape
    torch.Size([16])
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        # The error does not contain the value, which at a node is private.
        expected = "a JSON value: tables with text keys, lists, texts, finite numbers, true, false and null"
        raise ArgumentError("JSON value", type(value).__name__, expected) from error
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def json_from_tensor(tensor: torch.Tensor) -> Any:
    """Return the JSON value that :func:`json_to_tensor` encoded.

    Raises:
        DataError: invalid JSON text.

    >>> json_from_tensor(json_to_tensor({"b": [1, 2.5, "x"]}))
    {'b': [1, 2.5, 'x']}
    """
    if tensor.dtype != torch.uint8 or tensor.ndim != 1:
        raise DataError(f"a tensor {tensor.dtype} of shape {tuple(tensor.shape)} is not JSON text")
    try:
        text = tensor.cpu().numpy().tobytes().decode()
        return json.loads(text, parse_constant=_parse_finite, parse_float=_parse_finite)
    except (ValueError, RecursionError) as error:
        raise DataError("invalid JSON text") from error


def _parse_finite(word: str) -> float:
    """Return a number. NaN and infinity, which Python's json module accepts, are errors."""
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word} is not finite")
    return value


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the size of a tensor's elements in bytes."""
    return tensor.numel() * tensor.element_size()


def bytes_by_kind(tensors: Tensors, kinds: Mapping[str, str]) -> dict[str, int]:
    """Return the bytes of sent tensors by payload kind.

    >>> bytes_by_kind({"x": torch.zeros(2, dtype=torch.int8), "x:scale": torch.zeros(2)}, {"x": "inputs"})
    {'inputs': 10}
    """
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        kind = wire_kind(name, kinds)
        sizes[kind] = sizes.get(kind, 0) + tensor_bytes(tensor)
    return sizes


def pack(header: Mapping[str, Any], tensors: Tensors | None = None) -> bytes:
    """Return one message of JSON values and named tensors as bytes.

    >>> unpack(pack({"operation": "identify"}, {"x": torch.tensor([1, 2])}))
    ({'operation': 'identify'}, {'x': tensor([1, 2])})
    """
    plain = {name: tensor.detach().cpu() for name, tensor in (tensors or {}).items()}
    # The memory layout decides which kernel computes with a tensor, and so the last digits of the results.
    strides = {name: tensor.stride() for name, tensor in sorted(plain.items()) if tensor.ndim == 4}
    return encode_tensors(plain, {HEADER: json.dumps({HEADER: header, STRIDES: strides})})


# Errors of decoding malformed bytes. torch raises a RuntimeError for a shape that exceeds all memory.
DECODE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError)


def unpack(message: bytes, max_header: int = MAX_HEADER) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return header and tensors, on the CPU, of a message made with :func:`pack`.

    Args:
        message: the bytes.
        max_header: largest number of bytes before the tensors; 0 is no limit.

    Raises:
        DataError: the bytes are not a message, or its header is too large.
    """
    if not isinstance(message, bytes):  # transports may carry other objects
        raise DataError(f"a message is a {type(message).__name__} (expected bytes)")
    length = header_size(message)
    if 0 < max_header < length:
        raise DataError(f"its header has {length} bytes (expected {max_header} (max_header))")
    try:
        file_header = decode_header(message)
        content = json.loads(file_header[METADATA][HEADER])
        header, strides = content[HEADER], content[STRIDES]
        loaded = decode_tensors(message, file_header)
        tensors = {name: _restore_strides(tensor, strides.get(name)) for name, tensor in loaded.items()}
    except DECODE_ERRORS as error:
        raise DataError(f"{len(message)} bytes are not a message of fedstill: {error}") from error
    if not isinstance(header, dict):
        raise DataError("a message's header is not a table")
    return header, tensors


def _restore_strides(tensor: torch.Tensor, strides: Any) -> torch.Tensor:
    """Return a tensor in channels-last layout if it had that layout when it was packed."""
    if strides is None or tensor.ndim != 4 or tuple(strides) == tensor.stride():
        return tensor
    last = torch.empty(tensor.shape, dtype=tensor.dtype, memory_format=torch.channels_last)
    return last.copy_(tensor) if tuple(strides) == last.stride() else tensor
