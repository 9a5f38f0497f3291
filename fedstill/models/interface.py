"""Interface of a federation's models: inputs, outputs, and the order of classes.

:class:`Interface` converts inputs to raw values. :class:`ClassMap` maps the classes of an existing model to
those of the federation, by name or number.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedstill.core.errors import ModelError
from fedstill.core.name_normalization import normalize_name
from fedstill.core.table_schema import NO_SCHEMA, SchemaColumn, TableSchema
from fedstill.tasks.task import Task

Floats = npt.NDArray[np.floating[Any]]
MIN_PROBABILITY = 1e-6  # smaller probabilities count as this: a forest's 0 is not infinite certainty


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


class ClassMap(nn.Module):
    """Map logits ``(B, inputs)`` in a model's class order to ``(B, classes)`` in the federation's.

    A class that the model does not know has probability 1e-6. Outputs without a class in the federation are
    dropped. Probabilities of several outputs for one class are added. Gradients pass through.

    Args:
        labels: class of each of the model's outputs: a name, or ``""`` for none. If no entry is a known name,
            all are numbers from 0, as in scikit-learn's ``classes_``.
        classes: names of the federation's classes, in order.

    Raises:
        ModelError: an entry is not a class of the federation, or none is.

    >>> z = torch.tensor([[1.0, 3.0]])
    >>> ClassMap(("ill", "well"), ("well", "ill"))(z)
    tensor([[3., 1.]])
    >>> ClassMap(("ill", ""), ("well", "ill"))(z)
    tensor([[-13.8155,   0.0000]])
    """

    def __init__(self, labels: Sequence[Any], classes: Sequence[str]) -> None:
        super().__init__()
        labels = [normalize_name(label) if isinstance(label, str) else label for label in labels]
        self.input_count, self.outputs_of = (
            len(labels),
            _outputs_by_class(labels, list(map(normalize_name, classes))),
        )

    @property
    def is_nontrivial(self) -> bool:
        """True unless the map is the identity."""
        return self.outputs_of != [[index] for index in range(self.input_count)]

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Return logits in the federation's order.

        Raises:
            ModelError: the model has another number of outputs.
        """
        if z.ndim != 2 or z.shape[1] != self.input_count:
            shape = tuple(z.shape[1:])
            raise ModelError(
                f"the model returns outputs of shape {shape} (expected ({self.input_count},), its classes)"
            )
        if not all(self.outputs_of):  # known classes share the probability
            known = [output for outputs in self.outputs_of for output in outputs]
            z = z - z[:, known].logsumexp(1, keepdim=True)
        unknown = torch.full_like(z[:, 0], math.log(MIN_PROBABILITY))
        return torch.stack([z[:, part].logsumexp(1) if part else unknown for part in self.outputs_of], 1)


class ClassMappedModel(nn.Sequential):
    """A network followed by a map of its classes."""

    def __init__(self, model: nn.Module, classes: ClassMap) -> None:
        super().__init__(model, classes)


def _raw(features: Floats, column: SchemaColumn) -> Floats:
    """Return a column's cells ``(B,)`` float64 from its features ``(B, n)``."""
    if column.categories:
        cells = features[:, : len(column.categories)].argmax(1).astype(np.float64)
    else:
        low, high = column.scaled_range
        cells = low + (features[:, 0].astype(np.float64) + 1) / 2 * (high - low)
    return np.where(features[:, -1] > 0.5, math.nan, cells) if column.missing else cells


def _outputs_by_class(labels: Sequence[Any], classes: list[str]) -> list[list[int]]:
    """Return the indices of the model's outputs for each class of the federation."""
    numbers = not any(str(name) in classes for name in labels)
    outputs: list[list[int]] = [[] for _ in classes]
    for output, name in enumerate(labels):
        if name == "":
            continue
        index: Any = name if numbers else classes.index(str(name)) if str(name) in classes else None
        if index not in range(len(classes)):
            known = f"{', '.join(classes)}, or their numbers from 0"
            raise ModelError(f"unknown class {name!r} of the model (expected {known})")
        outputs[int(index)].append(output)
    if not any(outputs):
        raise ModelError(f"the model knows none of the classes {', '.join(classes)}")
    return outputs
