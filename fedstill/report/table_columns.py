"""The columns of a run on tables: what its schema allows, and rows that the server has made."""

from __future__ import annotations

from pathlib import Path

from fedstill.core.table_schema import decode_row
from fedstill.report.result import Result
from fedstill.report.run_files import Array, read_tensors
from fedstill.report.table_formats import Cell, Column, Row, Table

MOST = 5  # rows that were made


def section(folder: Path, result: Result) -> Table | None:
    """One line a column of the schema; None for a run without. Raises RunFolderError for a broken file."""
    schema = result.data.schema
    if not schema:
        return None
    made = [decode_row(row.tolist(), schema) for row in last_generated_rows(folder)[:MOST]]
    rows = []
    for column in schema.columns:
        values = [Cell(row.get(column.name, ""), style="r") for row in made]
        note = {schema.target: "the target", schema.event: "whether it was reached"}.get(column.name, "")
        rows.append(Row(column.name, [Cell(column.allowed_values), *values], note))
    heads = [Column("Allowed", ""), *(Column(f"made {number}") for number in range(1, len(made) + 1))]
    return Table("Columns of the table", "Column", heads, rows, style="columns")


def last_generated_rows(folder: Path) -> list[Array]:
    """The rows ``(F,)`` that the server made last."""
    tensors = read_tensors(folder / "samples.safetensors") or {}
    keys = sorted((key for key, rows in tensors.items() if key.isdecimal() and rows.ndim == 2), key=int)
    return list(tensors[keys[-1]]) if keys else []
