"""Arrays of any library as tensors."""

from __future__ import annotations

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
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(_numbers(values, what))
    if tensor.is_complex():
        raise DataError(f"{what}: values are {_name(tensor.dtype)}: {_ALLOWED}")
    return tensor


def _numbers(values: Any, what: str) -> np.ndarray[Any, Any]:
    if isinstance(values, list | tuple) and any(isinstance(part, torch.Tensor) for part in values):
        values = [as_tensor(part, what).detach().cpu().numpy() for part in values]
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # nested lists of several lengths
        shapes = list(dict.fromkeys(str(np.shape(part)) for part in values if hasattr(part, "shape")))
        found = f"values have several shapes{' (' + ', '.join(shapes[:3]) + ')' if shapes else ''}"
        raise DataError(f"{what}: {found}: allowed is one shape") from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"{what}: values are {array.dtype}: {_ALLOWED}")
    native = array.dtype.newbyteorder("=")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:  # torch has no longer floats
        native = np.dtype(np.float64)
    return np.require(array, dtype=native, requirements=["C", "W"])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
