"""Arrays of any library as tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from fedstill.core.errors import DataError

_ALLOWED = "allowed are real numbers, in one array or tensor"


def as_tensor(values: Any, what: str) -> torch.Tensor:
    """Real numbers as a tensor: of a numpy array in any memory order and byte order, or of nested lists.

    A tensor is returned as it is.

    Args:
        values: numbers; lists may hold tensors or arrays of one shape.
        what: they are, the first words of an error.

    Raises:
        DataError: complex numbers, texts, objects, or parts of several shapes.

    >>> as_tensor(np.arange(3, dtype=">i2")[::-1], "labels").tolist()
    [2, 1, 0]
    """
    if isinstance(values, torch.Tensor):
        tensor = values
    elif isinstance(values, list | tuple) and any(isinstance(part, torch.Tensor) for part in values):
        parts = [as_tensor(part, what) for part in values]
        if len({part.shape for part in parts}) > 1:
            raise _several_shapes(parts, what)
        tensor = torch.stack(parts)
    else:
        tensor = torch.from_numpy(_numbers(values, what))
    if tensor.is_complex():
        raise DataError(f"{what}: values are {str(tensor.dtype).removeprefix('torch.')}: {_ALLOWED}")
    return tensor


def _numbers(values: Any, what: str) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:  # nested lists of several lengths
        raise _several_shapes(values, what) from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"{what}: values are {array.dtype}: {_ALLOWED}")
    native = array.dtype.newbyteorder("=")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:  # torch has no longer floats
        native = np.dtype(np.float64)
    return np.require(array, dtype=native, requirements=["C", "W"])


def _several_shapes(parts: Iterable[Any], what: str) -> DataError:
    shapes = dict.fromkeys(str(tuple(part.shape)) for part in parts if hasattr(part, "shape"))
    some = f" ({', '.join(list(shapes)[:3])})" if shapes else ""
    return DataError(f"{what}: values have several shapes{some}: allowed is one shape")
