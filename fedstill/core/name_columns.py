"""Arrays of names, each in the one form of :mod:`fedstill.core.names`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstill.core.names import class_names, name_of

TEXTS = "USOT"  # kinds of arrays that hold texts


def named_column(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A column in which texts, and values of mixed types, are names; numbers stay as they are.

    >>> named_column(np.array(["a ", "a"])).tolist(), named_column(np.array([1, 2])).tolist()
    (['a', 'a'], [1, 2])
    """
    if column.dtype.kind not in TEXTS:
        return column
    cells = column.ravel().tolist()
    return np.array([name_of(cell) for cell in cells], dtype=np.str_).reshape(column.shape)


def named_columns(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Columns by their names, each as :func:`named_column`.

    Raises:
        DataError: two of one name.
    """
    keys = class_names(columns, "columns")
    return {key: named_column(column) for key, column in zip(keys, columns.values(), strict=True)}
