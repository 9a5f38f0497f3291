"""Tables as data sets: whoever writes a reader gives the rows and their schema."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from fedstill.core.dataset import DataSet
from fedstill.core.errors import DataError
from fedstill.core.table_schema import Schema
from fedstill.data.config import DataConfig
from fedstill.data.preparation import PATIENT, SITE, Source, prepared
from fedstill.data.tables import TableRows, encoded
from fedstill.tasks import Targets, TaskConfig


@dataclass(frozen=True, kw_only=True)
class TableData(DataConfig):
    """Rows of a table. A subclass gives its schema and its columns of cells."""

    targets: ClassVar[tuple[Targets, ...]] = ("rows",)

    @abstractmethod
    def schema(self) -> Schema:
        """Its columns, what they may be, and which is learned."""

    @abstractmethod
    def cells(self) -> Mapping[str, Sequence[Any]]:
        """The rows, by column: texts or numbers, None where there is none. Columns beside the schema's are
        passed over."""

    def read(self, task: TaskConfig) -> DataSet:
        """These rows as features, divided into training and test parts."""
        name, schema = self.title or self.called, self.schema()
        data = encoded(self.cells(), schema, name, lambda row: f"{name}, row {row}")
        return data_set(TableRows(schema, data), self, task, name, self.note)


def data_set(table: TableRows, config: DataConfig, task: TaskConfig, name: str, note: str) -> DataSet:
    """The data set that a table and a configuration make: inputs (N, F) float32, targets as the task's.

    Raises:
        DataError: the schema's target is not what the task learns.
    """
    schema, data = table.schema, table.data
    wanted = {"number": "number", "time": "time until an event"}.get(task.makes.kind, "category")
    if schema.teaches != wanted:
        told = f"target {schema.target!r} of the schema is a {schema.teaches}"
        hint = ", by event = in the schema" if task.makes.kind == "time" else ""
        raise DataError(f"{name}: {told}: allowed for task {task.called} is a {wanted}{hint}")
    made = prepared(
        Source(
            name=name,
            targets=data.targets.numpy(),
            classes=schema.classes,
            tensors=lambda rows: data.subset(torch.from_numpy(rows)),
            test=table.test,
            columns=table.columns,
            note=note,
            sites=table.columns.get(SITE),
            unit=PATIENT if PATIENT in table.columns else "",
            one_by_one=True,
        ),
        config,
    )
    return replace(made, schema=schema)
