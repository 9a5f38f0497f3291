"""What a server declares about inputs and classes, and every node's data and model must have; and what
examples of that take of a node's memory, before any is read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fedstill.core.config_tables import as_table, read_table
from fedstill.core.dataset import AXES, DataSet
from fedstill.core.errors import ArgumentError, DataError, TooLarge
from fedstill.core.names import class_names
from fedstill.core.table_schema import NO_SCHEMA, Schema
from fedstill.models.interface import Interface
from fedstill.tasks import TASKS, Task, TaskConfig

COPIES = 3  # of a node's data while they are read: as they come, as they are brought into spec, and joined


@dataclass(frozen=True)
class InputSpec:
    """What inputs, labels and outputs of a federation look like.

    Args:
        task: what is learned, as in :mod:`fedstill.tasks`.
        classes: names of classes, labels or channels of an output, in the order of their numbers.
        shape: ``(C, H, W)`` of an image, ``(L,)`` of a text, ``(F,)`` of a row of a table.
        mean, std: the normalization ``(pixel - mean) / std`` of pixels from 0 to 1, per channel; empty where
            inputs are no images.
        vocabulary: how many token ids there are, where inputs are texts.
        schema: what the columns may be, where inputs are rows of a table.

    Raises:
        ArgumentError: another shape than the task's inputs have; not one mean and one standard deviation for
            each channel, or wild ones, or others than 0.5 where the images are the targets; fewer than two
            classes where there are classes.
    """

    task: TaskConfig
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    vocabulary: int = 0
    schema: Schema = NO_SCHEMA

    def __post_init__(self) -> None:
        kind = self.task.task_class
        axes = AXES[kind.form][1:]
        if len(self.shape) != len(axes) or not all(1 <= size < 2**31 for size in self.shape):
            raise ArgumentError("spec.shape", self.shape, f"{', '.join(axes)}, each 1 or more, below 2**31")
        if not self.schema:  # which names its classes itself
            try:
                object.__setattr__(self, "classes", class_names(self.classes, "spec.classes"))
            except DataError as error:
                raise ArgumentError("spec.classes", self.classes, "different names") from error
        if len(self.classes) < kind.min_classes:
            raise ArgumentError("spec.classes", self.classes, f"{kind.min_classes} or more")
        texts = kind.form == "texts"
        if (self.vocabulary > 1) != texts or self.vocabulary > 2**31:
            allowed = "2 or more, for texts" if texts else f"0, for {kind.form}"
            raise ArgumentError("spec.vocabulary", self.vocabulary, allowed)
        self._check_schema()
        channels = self.shape[0] if kind.form == "images" else 0
        for name in ("mean", "std"):
            if len(getattr(self, name)) != channels:
                raise ArgumentError(
                    f"spec.{name}", getattr(self, name), f"one value for each of {channels} channels"
                )
        # Wilder ones would train a node on constants, or on numbers without end.
        if not all(1e-3 <= value <= 1e3 for value in self.std):
            raise ArgumentError("spec.std", self.std, "from 0.001 to 1000")
        if not all(abs(value) <= 1e3 for value in self.mean):
            raise ArgumentError("spec.mean", self.mean, "from -1000 to 1000")
        # Targets must lie from -1 to 1: which normalization they break would tell a record's extreme pixels.
        if kind.kind == "image" and {*self.mean, *self.std} != {0.5}:
            told = [*self.mean, *self.std]
            raise ArgumentError("spec.mean and spec.std", told, f"0.5 for task {self.task.called}")

    def _check_schema(self) -> None:
        rows, schema = self.task.task_class.form == "rows", self.schema
        if bool(schema) != rows:
            allowed = "a table's columns, for rows" if rows else f"none, for {self.task.task_class.form}"
            raise ArgumentError("spec.schema", schema.target, allowed)
        if rows and (schema.classes, (len(schema.features),)) != (self.classes, self.shape):
            allowed = f"one of {self.shape[0]} features and classes {', '.join(self.classes)}, as the spec"
            raise ArgumentError("spec.schema", schema.target, allowed)

    @classmethod
    def from_data(cls, task: TaskConfig, data: DataSet) -> InputSpec:
        """The spec that a server's own data have."""
        part = data.test if len(data.test) else data.train
        shape = tuple(part.inputs.shape[1:])
        return cls(task, data.classes, shape, data.mean, data.std, data.vocabulary, data.schema)

    @classmethod
    def from_schema(cls, task: TaskConfig, schema: Schema) -> InputSpec:
        """The spec of rows of a table, of which no more is known than their schema."""
        return cls(task, schema.classes, (len(schema.features),), (), (), 0, schema)

    def make_task(self) -> Task:
        """The task, with as many classes."""
        return self.task.make(self.classes)

    def interface(self) -> Interface:
        """What every model is given, and must give."""
        seen = (self.shape, self.vocabulary, self.mean, self.std, self.schema)
        return Interface(self.make_task(), self.classes, *seen)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of a model's output for one input."""
        return self.make_task().output_shape(self.shape)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; :meth:`from_dict` gives the same spec back."""
        table: dict[str, Any] = as_table(self)
        return table

    @classmethod
    def from_dict(cls, table: Any, tasks: Collection[str] = ()) -> InputSpec:
        """The spec that JSON values describe; nothing is imported for names beside the package's own and
        ``tasks``.
        """
        check_task_allowed(table, tasks)
        return read_table(cls, table, "spec.")


def check_task_allowed(spec: Any, tasks: Collection[str] = ()) -> None:
    """Refuse (ArgumentError) a spec that somebody sent, before it is read, if reading it would import a
    stranger's task: one that is neither the package's own nor one of ``tasks``.
    """
    task = spec.get("task") if isinstance(spec, Mapping) else None
    if not isinstance(task, Mapping):
        raise ArgumentError("spec", type(spec).__name__, "a table, with a table task in it")
    named = task.get(TaskConfig.key, TaskConfig.default)
    TASKS.require(named, tasks, "task.name", "policy.tasks")


def example_bytes(spec: InputSpec) -> int:
    """Bytes of one input with its target, in a spec.

    >>> from fedstill.tasks.classification import ClassificationConfig
    >>> example_bytes(InputSpec(ClassificationConfig(), ("a", "b"), (1, 8, 8), (0.5,), (0.5,)))
    264
    """
    task = spec.make_task()
    target = {"class": 1, "number": 1, "time": 1, "labels": task.classes, "map": math.prod(spec.shape[1:])}
    inputs = math.prod(spec.shape) * (8 if task.form == "texts" else 4)
    return inputs + (8 * target[task.kind] if task.kind in target else inputs)


def require_memory(what: str, need: float, most: int) -> None:
    """Refuse (TooLarge) what would take more bytes than are allowed; 0 is no limit."""
    if most and need > most:
        raise TooLarge(what, need, most)


def round_up_to_power_of_two(count: int) -> int:
    """The power of two that so many reach at most. What is refused for their memory tells a server no more,
    however it varies what it asks for.

    >>> round_up_to_power_of_two(1), round_up_to_power_of_two(1000), round_up_to_power_of_two(1024), round_up_to_power_of_two(1025)
    (1, 1024, 1024, 2048)
    """
    return 1 << max(count - 1, 0).bit_length()


def require_memory_for_examples(count: int, spec: InputSpec, most: int) -> None:
    """Refuse (TooLarge) to bring so many examples into a spec, if they, or as many as :func:`round_up_to_power_of_two`, took
    more bytes than are allowed."""
    sizes = " x ".join(map(str, spec.shape))
    need = COPIES * round_up_to_power_of_two(count) * example_bytes(spec)
    require_memory(f"its data as inputs of {sizes} with {len(spec.classes)} classes", need, most)
