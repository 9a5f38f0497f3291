"""Conversion of arrays of other libraries to tensors, in any memory order, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedstill.core.dataset import as_tensor
from fedstill.core.errors import DataError

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    copy = array.copy()
    copy.setflags(write=False)
    return copy


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "given",
    [
        VALUES,
        VALUES[::-1, ::-1].copy()[::-1, ::-1],  # negative strides
        VALUES.astype(">f4"),
        VALUES.astype(">i2"),
        VALUES.astype(np.longdouble),
        np.asfortranarray(VALUES),
        read_only(VALUES),
        VALUES.tolist(),
        list(torch.from_numpy(VALUES)),
        list(torch.from_numpy(VALUES).bfloat16()),
        torch.from_numpy(VALUES),
    ],
)
def test_numbers_keep_values_in_any_memory_and_byte_order(given: Any) -> None:
    assert as_tensor(given, "data[0]").tolist() == VALUES.tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (VALUES.astype(np.complex64), "complex64"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        ([1j, 2], "complex"),
        (["a", "b"], "<U1"),
        (VALUES.astype(object), "object"),
        ([np.zeros((1, 4)), np.zeros((1, 8))], r"several shapes \(\(1, 4\), \(1, 8\)\)"),
        ([torch.zeros(1, 4), torch.zeros(1, 8)], r"several shapes \(\(1, 4\), \(1, 8\)\)"),
        ([[1, 2], [3]], "several shapes"),
    ],
)
def test_rejects_arrays_without_real_numbers(given: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"^data\[0\]: values (are|have) .*{message}"):
        as_tensor(given, "data[0]")
