"""What inputs a model is given and what it must give, and how to bring inputs back to what they were."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstill.core.errors import ModelError
from fedstill.core.table_schema import NO_SCHEMA, Schema, SchemaColumn
from fedstill.tasks.task import Task

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Interface:
    """What a federation gives to every model, and wants of it.

    Args:
        classes: names of classes, labels or channels of an output, in the order of their numbers.
        shape: ``(C, H, W)`` of an image, ``(L,)`` of a text, ``(F,)`` of a row of a table.
        vocabulary: how many token ids there are, where inputs are texts.
        mean, std: the normalization ``(pixel - mean) / std`` of pixels from 0 to 1, per channel.
        schema: what the columns may be, where inputs are rows of a table and it is known.
    """

    task: Task
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    vocabulary: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    schema: Schema = NO_SCHEMA

    @property
    def outputs(self) -> tuple[int, ...]:
        """The shape of a model's output for one input."""
        return self.task.output_shape(self.shape)

    def raw(self, x: Floats) -> Floats:
        """Inputs ``(B, ...)`` as they were: pixels from 0 to 1, or a table's columns in their own units.

        A column of numbers is in its own unit, within its scale if it has one; a category is its place among
        the categories from 0, and what is missing is NaN: ``(B, columns)``.

        Raises:
            ModelError: texts, or a table without a schema.
        """
        if self.task.form == "images":
            channels = self.shape[0]
            mean, std = (
                np.array(given or (0.5,) * channels, dtype=np.float32).reshape(-1, 1, 1)
                for given in (self.mean, self.std)
            )
            return x * std + mean
        if not self.schema:
            told = "a table without a schema" if self.task.form == "rows" else self.task.form
            raise ModelError(f"the model takes raw inputs, and they are {told} (expected its inputs)")
        return np.stack([_raw(x[:, place], column) for column, place in self.schema.feature_slices()], 1)

    def frame(self, x: Floats) -> Any:
        """A table's rows ``(B, F)`` as a pandas DataFrame of its columns, categories as texts.

        Raises:
            ModelError: as :meth:`raw`; images; or pandas is not installed.
        """
        if self.task.form == "images":
            raise ModelError("the model takes a frame, and inputs are images (expected rows of a table)")
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            line = "the model takes a frame, and pandas is not installed: pip install pandas"
            raise ModelError(line) from error
        columns = {}
        for (column, _), cells in zip(self.schema.feature_slices(), self.raw(x).T, strict=True):
            known = column.categories
            columns[column.name] = (
                [None if math.isnan(cell) else known[int(cell)] for cell in cells] if known else cells
            )
        return pandas.DataFrame(columns)


def _raw(features: Floats, column: SchemaColumn) -> Floats:
    """A column's cells ``(B,)`` float64 from its features ``(B, n)``."""
    if column.categories:
        cells = features[:, : len(column.categories)].argmax(1).astype(np.float64)
    else:
        low, high = column.scaled_range
        cells = low + (features[:, 0].astype(np.float64) + 1) / 2 * (high - low)
    return np.where(features[:, -1] > 0.5, math.nan, cells) if column.missing else cells
