"""Section on the columns of tabular data: allowed values of the schema, and generated rows."""

from __future__ import annotations

from pathlib import Path

from fedstill.core.table_schema import decode_row
from fedstill.report.result import Result
from fedstill.report.run_files import Array, read_tensors
from fedstill.report.table_formats import Cell, Column, Row, Table

MAX_GENERATED_ROWS = 5


def columns_table(folder: Path, result: Result) -> Table | None:
    """Return one row per column of the schema; None for a run on other data.

    Raises:
        RunFolderError: a file is broken.
    """
    schema = result.data.schema
    if not schema:
        return None
    generated = [decode_row(row.tolist(), schema) for row in last_generated_rows(folder)[:MAX_GENERATED_ROWS]]
    rows = []
    for column in schema.columns:
        values = [Cell(row.get(column.name, ""), style="r") for row in generated]
        note = {schema.target: "target", schema.event: "event indicator"}.get(column.name, "")
        rows.append(Row(column.name, [Cell(column.allowed_values), *values], note))
    numbered = (Column(f"generated {number}") for number in range(1, len(generated) + 1))
    return Table(
        "Columns of the table", "Column", [Column("Allowed values", ""), *numbered], rows, style="columns"
    )


def last_generated_rows(folder: Path) -> list[Array]:
    """Return the rows ``(F,)`` of the server's last generated batch."""
    tensors = read_tensors(folder / "samples.safetensors") or {}
    keys = sorted((key for key, rows in tensors.items() if key.isdecimal() and rows.ndim == 2), key=int)
    return list(tensors[keys[-1]]) if keys else []
