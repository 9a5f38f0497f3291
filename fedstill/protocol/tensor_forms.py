"""Dtypes and shapes of the tensors of queries and responses, which follow from their payload kinds.

The server checks what it sends, and blames its method. Each node checks on arrival, before anything is
computed, and blames the server. Scores of a response are checked at the node's gate and at the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import EllipsisType

import torch

from fedstill.protocol.payload_kinds import INDICES, INPUTS, LABEL_MAPS, SCHEDULE, SOURCES, payload_kind
from fedstill.protocol.queries import Query

INTEGERS = (torch.int32, torch.int64)
FLOAT32 = (torch.float32,)
Sides = tuple[int | str | EllipsisType, ...]  # a text stands for any number, ... for any further sides


def sent_query_fault(
    query: Query,
    tensors: Mapping[str, torch.Tensor],
    input_shape: Sequence[int],
    output_shape: Sequence[int] | None = None,
    input_dtype: torch.dtype = torch.float32,
) -> str | None:
    """Return the first fault of :func:`sent_tensor_fault` among a query's tensors, or None."""
    for name in query.sends.keys() & tensors.keys() - {*query.details.json_values}:
        fault = sent_tensor_fault(
            name, tensors[name], query.sends[name], input_shape, output_shape, input_dtype
        )
        if fault is not None:
            return fault
    return None


def sent_tensor_fault(
    name: str,
    tensor: torch.Tensor,
    kind: str,
    input_shape: Sequence[int],
    output_shape: Sequence[int] | None = None,
    input_dtype: torch.dtype = torch.float32,
) -> str | None:
    """Return the fault in dtype or shape of one tensor of a query, or None.

    Args:
        name: name of the tensor.
        tensor: the tensor, decompressed.
        kind: its payload kind.
        input_shape: shape of one input.
        output_shape: shape of the task's outputs for one input; None: unknown.
        input_dtype: dtype of inputs; int64 for token ids.

    >>> sent_tensor_fault("x", torch.zeros(4, 1, 5, 5), INPUTS, (1, 8, 8))
    'the server sent x: torch.float32 (4, 1, 5, 5) (expected float32 (B, 1, 8, 8))'
    """
    expected = _expected_form(kind, tensor, tuple(input_shape), output_shape, input_dtype)
    if expected is None:
        return None
    dtypes, sides = expected
    if tensor.dtype in dtypes and _fits(tuple(tensor.shape), sides):
        return None
    types = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    shape = ", ".join("..." if side is ... else str(side) for side in sides)
    shape = "" if sides == (...,) else f" ({shape}{',' if len(sides) == 1 else ''})"
    return f"the server sent {name}: {tensor.dtype} {tuple(tensor.shape)} (expected {types}{shape})"


def _expected_form(
    kind: str,
    tensor: torch.Tensor,
    input_shape: tuple[int, ...],
    output_shape: Sequence[int] | None,
    input_dtype: torch.dtype,
) -> tuple[tuple[torch.dtype, ...], Sides] | None:
    """Return valid dtypes and the shape of a tensor by its kind; None: any."""
    if kind == INPUTS:
        return (input_dtype,), ("B", *input_shape)
    if kind == INDICES:
        return INTEGERS, ("N",)
    if kind == SOURCES:
        return INTEGERS, ("B", ...)
    if kind == SCHEDULE:  # a tensor in place of the number could be charged as one round and trained as two
        return (torch.int64,), ()
    if kind == LABEL_MAPS:
        return (torch.uint8,), ("B", *input_shape[1:])
    category = payload_kind(kind).category
    if category == "model":
        return FLOAT32, ("P",)
    if category == "scores" and output_shape is not None:
        return FLOAT32, ("B", *output_shape)
    is_measured = category == "gradients" or tensor.is_floating_point() or tensor.is_complex()
    return (FLOAT32, (...,)) if is_measured else None


def _fits(shape: tuple[int, ...], sides: Sides) -> bool:
    if sides[-1:] == (...,):
        shape, sides = shape[: len(sides) - 1], sides[:-1]
    return len(shape) == len(sides) and all(
        isinstance(side, str) or side == size for size, side in zip(shape, sides, strict=True)
    )


def score_shape_fault(
    name: str, shape: tuple[int, ...], rows: int | None, outputs: tuple[int, ...] | None
) -> str | None:
    """Return the fault in the shape of scores ``(B, ...)``, or None.

    Checked at a node's gate and at the server.

    Args:
        name: name of the tensor.
        shape: its shape.
        rows: number of inputs of the query; None: unknown.
        outputs: shape of the task's outputs for one input; None: unknown.

    >>> score_shape_fault("logits", (64, 4), 64, (3,))
    'logits are (64, 4), for 3 classes'
    """
    if rows is not None and shape[:1] != (rows,):
        return f"{name} are {shape}, for {rows} inputs"
    if outputs is not None and shape[1:] != outputs:
        expected = f"{outputs[0]} classes" if len(outputs) == 1 else f"outputs of shape {outputs}"
        return f"{name} are {shape}, for {expected}"
    return None
