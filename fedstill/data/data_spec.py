"""The data spec: shapes, classes and normalization that a server declares for all nodes.

Also the memory that examples of a spec need, which nodes check before they read data.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fedstill.core.config_tables import read_table, to_table
from fedstill.core.dataset import AXES, DataSet, Form
from fedstill.core.errors import ArgumentError, DataError, MemoryLimitExceeded
from fedstill.core.name_normalization import normalize_class_names
from fedstill.core.table_schema import NO_SCHEMA, TableSchema
from fedstill.models.interface import Interface
from fedstill.tasks import TASKS, Task, TaskConfig

COPIES = 3  # of a node's data in memory while they are read: raw, converted, and joined


@dataclass(frozen=True)
class DataSpec:
    """Form of the inputs, labels and outputs of a federation.

    Args:
        task: see :mod:`fedstill.tasks`.
        classes: names of classes, labels or output channels, in the order of their indices.
        shape: ``(C, H, W)`` of an image, ``(L,)`` of a text, ``(F,)`` of a table row.
        mean, std: normalization ``(pixel - mean) / std`` of pixels in [0, 1], one value per channel; empty if
            inputs are not images.
        vocabulary: number of token ids if inputs are texts.
        schema: columns if inputs are table rows.

    Raises:
        ArgumentError: the shape does not fit the task; mean or std are extreme, not one per channel, or not
            0.5 where images are the targets; fewer than two classes.

    Example::

        DataSpec(ClassificationConfig(), ("cat", "dog"), (3, 32, 32), (0.5,) * 3, (0.5,) * 3)
    """

    task: TaskConfig
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    vocabulary: int = 0
    schema: TableSchema = NO_SCHEMA

    def __post_init__(self) -> None:
        kind = self.task.task_class
        axes = AXES[self.form][1:]
        if len(self.shape) != len(axes) or not all(1 <= size < 2**31 for size in self.shape):
            raise ArgumentError("spec.shape", self.shape, f"{', '.join(axes)}, each 1 or more, below 2**31")
        if not self.schema:  # a schema has normalized its classes
            try:
                object.__setattr__(self, "classes", normalize_class_names(self.classes, "spec.classes"))
            except DataError as error:
                raise ArgumentError("spec.classes", self.classes, "different names") from error
        if len(self.classes) < kind.min_classes:
            raise ArgumentError("spec.classes", self.classes, f"{kind.min_classes} or more")
        are_texts = self.form == "texts"
        if (self.vocabulary > 1) != are_texts or self.vocabulary > 2**31:
            expected = "2 or more, for texts" if are_texts else f"0, for {self.form}"
            raise ArgumentError("spec.vocabulary", self.vocabulary, expected)
        self._check_schema()
        channels = self.shape[0] if self.form == "images" else 0
        for name in ("mean", "std"):
            if len(getattr(self, name)) != channels:
                raise ArgumentError(
                    f"spec.{name}", getattr(self, name), f"one value for each of {channels} channels"
                )
        # More extreme values would make all inputs constant or infinite.
        if not all(1e-3 <= value <= 1e3 for value in self.std):
            raise ArgumentError("spec.std", self.std, "from 0.001 to 1000")
        if not all(abs(value) <= 1e3 for value in self.mean):
            raise ArgumentError("spec.mean", self.mean, "from -1000 to 1000")
        # Targets must be in [-1, 1]: with other constants, refusals would reveal extreme pixels of records.
        if kind.kind == "image" and {*self.mean, *self.std} != {0.5}:
            constants = [*self.mean, *self.std]
            raise ArgumentError(
                "spec.mean and spec.std", constants, f"0.5 for task {self.task.registered_name}"
            )

    def _check_schema(self) -> None:
        are_rows, schema = self.form == "rows", self.schema
        if bool(schema) != are_rows:
            expected = "a table's columns, for rows" if are_rows else f"none, for {self.form}"
            raise ArgumentError("spec.schema", schema.target, expected)
        if are_rows and (schema.classes, (len(schema.feature_names),)) != (self.classes, self.shape):
            expected = f"one of {self.shape[0]} features and classes {', '.join(self.classes)}, as the spec"
            raise ArgumentError("spec.schema", schema.target, expected)

    @property
    def form(self) -> Form:
        """Form of the inputs."""
        return self.task.task_class.form

    def on_features(self, width: int) -> FeatureSpec:
        """Return the spec of models that take ``width`` features of a backbone in place of the inputs.

        Raises:
            ArgumentError: the inputs are rows of a table, or the task has a target at each pixel.
        """
        if self.schema:
            raise ArgumentError("features", width, "none for rows of a table")
        return FeatureSpec(self.task, self.classes, (width,), (), ())

    @classmethod
    def from_data(cls, task: TaskConfig, data: DataSet) -> DataSpec:
        """Return the spec of a server's data."""
        part = data.test if len(data.test) else data.train
        shape = tuple(part.inputs.shape[1:])
        return cls(task, data.classes, shape, data.mean, data.std, data.vocabulary, data.schema)

    @classmethod
    def from_schema(cls, task: TaskConfig, schema: TableSchema) -> DataSpec:
        """Return the spec of table rows, of which only the schema is known."""
        return cls(task, schema.classes, (len(schema.feature_names),), (), (), 0, schema)

    def make_task(self) -> Task:
        """Return the task for these classes."""
        return self.task.make(self.classes)

    def interface(self) -> Interface:
        """Return the input and output interface that every model must have."""
        inputs = (self.shape, self.vocabulary, self.mean, self.std, self.schema)
        return Interface(self.make_task(), self.classes, *inputs)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of a model's output for one input."""
        return self.make_task().output_shape(self.shape)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, from which :meth:`from_dict` restores the spec."""
        table: dict[str, Any] = to_table(self)
        return table

    @classmethod
    def from_dict(cls, table: Any, plugins: Collection[str] = ()) -> DataSpec:
        """Return the spec described by JSON values.

        Args:
            plugins: names of tasks that may be imported, in addition to the built-in ones.
        """
        check_task_allowed(table, plugins)
        return read_table(cls, table, "spec.")


class FeatureSpec(DataSpec):
    """Spec of models on features of a backbone: rows ``(F,)`` without a schema. No server sends one."""

    @property
    def form(self) -> Form:
        return "rows"

    def _check_schema(self) -> None:
        self.make_task()  # raises if the task has a target at each pixel

    def make_task(self) -> Task:
        return super().make_task().on_features()


def check_task_allowed(spec: Any, plugins: Collection[str] = ()) -> None:
    """Refuse a received spec, before it is parsed, if parsing would import an unknown task.

    Raises:
        ArgumentError: the task is neither built in nor one of ``plugins``.
    """
    task = spec.get("task") if isinstance(spec, Mapping) else None
    if not isinstance(task, Mapping):
        raise ArgumentError("spec", type(spec).__name__, "a table, with a table task in it")
    name = task.get(TaskConfig.key, TaskConfig.default)
    TASKS.require_allowed(name, plugins, "task.name")


def example_bytes(spec: DataSpec) -> int:
    """Return the bytes of one input and its target.

    >>> from fedstill.tasks.classification import ClassificationConfig
    >>> example_bytes(DataSpec(ClassificationConfig(), ("a", "b"), (1, 8, 8), (0.5,), (0.5,)))
    264
    """
    task = spec.make_task()
    target_sizes = {
        "class": 1,
        "number": 1,
        "time": 1,
        "labels": task.classes,
        "map": math.prod(spec.shape[1:]),
    }
    inputs = math.prod(spec.shape) * (8 if task.form == "texts" else 4)
    return inputs + (8 * target_sizes[task.kind] if task.kind in target_sizes else inputs)


def require_memory(noun: str, need: float, max_bytes: int) -> None:
    """Check a memory limit.

    Args:
        noun: start of the error message.
        need: bytes.
        max_bytes: the limit; 0: none.

    Raises:
        MemoryLimitExceeded: more bytes are needed than allowed.
    """
    if max_bytes and need > max_bytes:
        raise MemoryLimitExceeded(noun, need, max_bytes)


def round_up_to_power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least ``count``.

    Memory is checked for this number, so a server that varies its requests learns no more from refusals.

    >>> round_up_to_power_of_two(1), round_up_to_power_of_two(1000), round_up_to_power_of_two(1025)
    (1, 1024, 2048)
    """
    return 1 << max(count - 1, 0).bit_length()


def require_memory_for_examples(count: int, spec: DataSpec, max_bytes: int) -> None:
    """Check the memory that ``count`` examples need in a spec, rounded by :func:`round_up_to_power_of_two`.

    Raises:
        MemoryLimitExceeded: more bytes are needed than allowed.
    """
    sizes = " x ".join(map(str, spec.shape))
    need = COPIES * round_up_to_power_of_two(count) * example_bytes(spec)
    require_memory(f"data as inputs of {sizes} with {len(spec.classes)} classes", need, max_bytes)
