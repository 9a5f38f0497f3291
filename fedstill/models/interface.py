"""Inputs and outputs of a federation's models, and conversion of inputs to raw values."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstill.core.errors import ModelError
from fedstill.core.table_schema import NO_SCHEMA, SchemaColumn, TableSchema
from fedstill.tasks.task import Task

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Interface:
    """Inputs and outputs of every model in a federation.

    Args:
        task: the task.
        classes: names of classes, labels or output channels, in the order of their indices.
        shape: ``(C, H, W)`` of an image, ``(L,)`` of a text, ``(F,)`` of a row of a table.
        vocabulary: number of token ids if inputs are texts.
        mean: mean of the normalization ``(pixel - mean) / std`` of pixels in 0..1, per channel.
        std: standard deviation of the normalization, per channel.
        schema: columns of the table if inputs are rows and the schema is known.
    """

    task: Task
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    vocabulary: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    schema: TableSchema = NO_SCHEMA

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of a model's output for one input."""
        return self.task.output_shape(self.shape)

    def to_raw(self, x: Floats) -> Floats:
        """Return raw values of inputs ``(B, ...)``: pixels in 0..1, or a table's columns in their own units.

        Numbers of a table are in their own unit, within the declared range. Categories are indices from 0.
        Missing values are NaN. The result has shape ``(B, columns)`` for tables.

        Raises:
            ModelError: inputs are texts, or rows without a schema.
        """
        if self.task.form == "images":
            channels = self.shape[0]
            mean, std = (
                np.array(values or (0.5,) * channels, dtype=np.float32).reshape(-1, 1, 1)
                for values in (self.mean, self.std)
            )
            return x * std + mean
        if not self.schema:
            form = "a table without a schema" if self.task.form == "rows" else self.task.form
            raise ModelError(f"no raw inputs for {form} (expected input_format = inputs)")
        return np.stack(
            [_raw(x[:, features], column) for column, features in self.schema.feature_slices()], 1
        )

    def to_dataframe(self, x: Floats) -> Any:
        """Return rows ``(B, F)`` as a pandas DataFrame of the table's columns, categories as texts.

        Raises:
            ModelError: inputs are not rows with a schema, or pandas is not installed.
        """
        if self.task.form == "images":
            raise ModelError("no DataFrame for images (expected rows of a table)")
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise ModelError("pandas is not installed: pip install pandas") from error
        columns = {}
        for (column, _), cells in zip(self.schema.feature_slices(), self.to_raw(x).T, strict=True):
            categories = column.categories
            columns[column.name] = (
                [None if math.isnan(cell) else categories[int(cell)] for cell in cells]
                if categories
                else cells
            )
        return pandas.DataFrame(columns)


def _raw(features: Floats, column: SchemaColumn) -> Floats:
    """Return a column's cells ``(B,)`` float64 from its features ``(B, n)``."""
    if column.categories:
        cells = features[:, : len(column.categories)].argmax(1).astype(np.float64)
    else:
        low, high = column.scaled_range
        cells = low + (features[:, 0].astype(np.float64) + 1) / 2 * (high - low)
    return np.where(features[:, -1] > 0.5, math.nan, cells) if column.missing else cells
