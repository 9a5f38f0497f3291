"""Features of a table's rows: numbers are scaled to -1..1, each category, or gap, has a place of its own.

Rows of a table as features: checked against a schema, scaled by its ranges or by what it says beside them.

Nothing is measured on the rows: what a row's features are follows from this row and the schema alone.

Tables as data sets: whoever writes a reader gives the rows and their schema.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import tomli_w
import torch
from torch import nn

from fedstill.core import toml
from fedstill.core.config_tables import as_table, read_table
from fedstill.core.dataset import Column, DataSet, TensorData
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.names import has_decimal_comma, name_of, named_columns, number_of, plain
from fedstill.core.table_schema import EMPTY, Schema, SchemaColumn, named_twice
from fedstill.core.text_format import clip, more_such
from fedstill.data.config import DataConfig
from fedstill.data.loading import PATIENT, SITE, ExampleSource, prepare_data_set
from fedstill.data.stratified_sampling import Ints, hash_groups, reject_misspelled_columns, require_unit_names
from fedstill.data.table_files import PARQUET_SUFFIX, pop_split_column, read_delimited_rows, read_parquet
from fedstill.tasks import Targets, TaskConfig


class RowFeatures(nn.Module):
    """Cells as numbers ``(N, columns)``, a category by its place and NaN for nothing, to features ``(N, F)``.

    A module, so that exports hold it.

    Args:
        columns: of the cells, in their order.
        dtype: of the cells.
    """

    place: torch.Tensor
    numeric: torch.Tensor
    missing: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    code: torch.Tensor

    def __init__(self, columns: Sequence[SchemaColumn], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        place: list[int] = []  # of each feature: its column, whether it says a number or that there is none,
        numeric, missing, low, high, code = ([] for _ in range(5))  # what becomes -1 and 1, and the category
        for number, column in enumerate(columns):
            width = len(column.features)
            numbers = column.type == "number"
            place += [number] * width
            missing += [False] * (width - column.missing) + [True] * column.missing
            numeric += [numbers] * width
            low += [column.span[0] if numbers else 0.0] * width
            high += [column.span[1] if numbers else 1.0] * width
            code += [float(each) for each in range(width)]
        for name, facts in (("place", place), ("numeric", numeric), ("missing", missing)):
            self.register_buffer(name, torch.tensor(facts))
        for name, numbers_of in (("low", low), ("high", high), ("code", code)):
            self.register_buffer(name, torch.tensor(numbers_of, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features, of the dtype of the cells."""
        cells = x[:, self.place]
        none = cells.isnan()
        scaled = (2 * (cells - self.low) / (self.high - self.low) - 1).clamp(-1, 1)
        scaled = torch.where(none, 0.0, scaled)
        own = torch.where(self.numeric, scaled, (cells == self.code).to(x.dtype))
        return torch.where(self.missing, none.to(x.dtype), own)


SCHEMA_FILE = "schema.toml"
Floats = npt.NDArray[np.float64]
TABLE_ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", PARQUET_SUFFIX)
MAX_FAULTS = 5  # columns with wrong cells that an error names
RowLocation = Callable[[int], str]  # in which file and line a row stands


@dataclass(frozen=True, eq=False)
class TableRows:
    """Rows as features, and what stands beside them.

    Args:
        data: features ``(N, F)`` and targets.
        test: 1 for testing, 2 for validation, 0 for training, ``(N,)``; None where the source does not say.
        columns: ``(N,)`` each, by name: what nodes can be made by.
    """

    schema: Schema
    data: TensorData
    split: Ints | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", named_columns(self.columns))


# --- schema files -----------------------------------------------------------------------------------------


def read_schema(path: str | Path) -> Schema:
    """A schema from TOML.

    Raises:
        ArgumentError: there is no such file.
        DataError: it describes no schema; names the fault.
    """
    path = Path(path)
    if not path.is_file():
        missing = "one that is there, which says what columns a table has: `fedstill data schema` drafts it"
        raise ArgumentError("data.schema", str(path), missing)
    try:
        schema = read_table(Schema, toml.read(path))
    except ArgumentError as error:
        raise DataError(f"{path}: {error}") from error
    if not schema:
        raise DataError(f"{path}: has no columns: `fedstill data schema` drafts them")
    return schema


def schema_text(schema: Schema) -> str:
    """A schema as TOML, which :func:`read_schema` reads back to an equal one."""
    table = as_table(schema)
    table["columns"] = [{key: value for key, value in each.items() if value} for each in table["columns"]]
    if not schema.event:
        del table["event"], table["intervals"]
    return tomli_w.dumps(table)


# --- cells ------------------------------------------------------------------------------------------------


def encode_rows(
    cells: Mapping[str, Sequence[Any]], schema: Schema, what: str, where: RowLocation
) -> TensorData:
    """Columns of cells as features ``(N, F)`` and targets: classes ``(N,)``, numbers ``(N, 1)`` in -1..1, or
    times until an event, in intervals, and whether it came ``(N, 2)``.

    Columns that the schema does not have are passed over.

    Args:
        cells: by column; texts, numbers, None or NaN.
        what: they are, for errors about all of them.
        where: for errors: in which file and line a row stands.

    Raises:
        DataError: a column is missing; or cells are not what the schema allows: by column, where the first
            is, what it is and what it may be.

    >>> sex = SchemaColumn(name="sex", type="category", categories=("f", "m"))
    >>> age = SchemaColumn(name="age", range=(0.0, 100.0), missing=True)
    >>> cells = {"age": ["75", ""], "sex": ["m", "f"], "id": [7, 8]}
    >>> data = encode_rows(cells, Schema("sex", (age, sex)), "clinic", lambda row: f"line {row}")
    >>> data.inputs.tolist(), data.targets.tolist()
    ([[0.5, 0.0], [0.0, 1.0]], [1, 0])
    """
    cells = _select_columns(cells, schema.columns, what)
    numbers = _parse_cells(cells, schema.columns, where)

    def features(columns: Sequence[SchemaColumn]) -> torch.Tensor:
        """Of some columns, ``(N, features)`` float64."""
        places = [schema.columns.index(column) for column in columns]
        made: torch.Tensor = RowFeatures(columns, torch.float64)(torch.from_numpy(numbers[:, places]))
        return made

    return TensorData(features(schema.inputs).float(), _targets(schema, features))


def _targets(schema: Schema, features: Callable[[Sequence[SchemaColumn]], torch.Tensor]) -> torch.Tensor:
    target = features([schema.answer])
    if schema.answer.categories:
        return target.argmax(1)
    if not schema.event:
        return target.float()
    event = next(column for column in schema.columns if column.name == schema.event)
    came = features([event])[:, 1:]
    # Rounded to float32 only now: a time at which two intervals meet is a whole number of them.
    return torch.cat([(target + 1) / 2 * schema.intervals, came], 1).float()


def encode_cells(
    cells: Mapping[str, Sequence[Any]], schema: Schema, what: str, where: RowLocation
) -> npt.NDArray[np.float32]:
    """Columns of cells, without the target, as numbers ``(N, columns)``: a number as it is, a category by its
    place, NaN for nothing.

    Arguments and errors as :func:`encode_rows`.
    """
    cells = _select_columns(cells, schema.inputs, what)
    return _parse_cells(cells, schema.inputs, where).astype(np.float32)


def _select_columns(
    cells: Mapping[str, Sequence[Any]], columns: Sequence[SchemaColumn], what: str
) -> dict[str, Sequence[Any]]:
    """The cells of a schema's columns; a DataError if one is missing, or two have its name."""
    found: dict[str, Sequence[Any]] = {}
    wanted = {column.name for column in columns}
    for key, column in cells.items():
        own = plain(key)
        if own in found:
            raise DataError(f"{what}: has column {own!r} twice (expected once)")
        if own in wanted:
            found[own] = column
    if missing := [column.name for column in columns if column.name not in found]:
        raise DataError(f"{what}: has no column {missing[0]!r} (expected those of the schema)")
    return found


def _parse_cells(
    cells: Mapping[str, Sequence[Any]], columns: Sequence[SchemaColumn], where: RowLocation
) -> Floats:
    """``(N, columns)``, as :func:`encode_cells` says; of cells that are wrong the error has each column's first."""
    numbers: list[list[float]] = []
    faults = []
    for column in columns:
        read = [_parse_cell(cell, column) for cell in cells[column.name]]
        wrong = [row for row, number in enumerate(read) if number is None]
        if wrong:
            text = _cell_text(cells[column.name][wrong[0]])
            found = clip(text if column.type == "number" else repr(text), 60) if text else "nothing"
            comma = column.type == "number" and has_decimal_comma(text)
            point = ", with a decimal point and no comma" if comma else ""
            told = f"column {column.name!r} is {found}: allowed is {column.allowed}{point}"
            faults.append(f"{where(wrong[0])}: {told}{more_such(len(wrong))}")
        numbers.append([math.nan if number is None else number for number in read])
    if faults:
        more = f"; and {len(faults) - MAX_FAULTS} more columns" if faults[MAX_FAULTS:] else ""
        raise DataError("; ".join(faults[:MAX_FAULTS]) + more)
    return np.stack(numbers, axis=1, dtype=np.float64)


def _parse_cell(cell: Any, column: SchemaColumn) -> float | None:
    """A cell as a number; None: it is not what the schema allows."""
    text = _cell_text(cell)
    if (place := column.place(text)) is not None:
        return place
    if text.lower() in EMPTY:
        return math.nan if column.missing else None
    if column.type != "number":
        return None
    least, most = column.range
    value = number_of(text)
    return value if value is not None and least <= value <= most else None


def _cell_text(cell: Any) -> str:
    """A cell as a file would have it: whole numbers without a point, nothing for what is missing."""
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return name_of(cell)


# --- sources ----------------------------------------------------------------------------------------------


def read_rows(path: Path, schema: Schema) -> TableRows:
    """The rows of one csv or Parquet file, which its ending tells apart.

    Beside the schema's columns it may have ``split`` (train, test, validation) and any others, of which
    ``patient`` and ``site`` are heeded.

    Raises:
        DataError: it cannot be read, or breaks the schema.
    """
    cells, where = read_cells(path)
    data = encode_rows(cells, schema, str(path), where)
    test = pop_split_column(cells, path)
    return TableRows(schema, data, test, {key: np.array(column) for key, column in cells.items()})


def read_cells(path: Path) -> tuple[dict[str, list[str]], RowLocation]:
    """The cells of a csv or Parquet file, by column, and where each row stands.

    Raises:
        DataError: it cannot be read.
    """
    return _read_parquet_cells(path) if table_ending(path) == PARQUET_SUFFIX else _read_csv_cells(path)


def table_ending(file: Path) -> str:
    """The ending that makes a file a table, in lower case; empty: it is none.

    >>> table_ending(Path("St. Mary.CSV.gz")), table_ending(Path("schema.toml"))
    ('.csv.gz', '')
    """
    return next((ending for ending in TABLE_ENDINGS if file.name.lower().endswith(ending)), "")


def _read_csv_cells(path: Path) -> tuple[dict[str, list[str]], RowLocation]:
    (_, header), *below = read_delimited_rows(path)
    if twice := named_twice(header):
        raise DataError(f"{path}: has column {twice!r} twice (expected once)")
    cells = {column: [row[place] for _, row in below] for place, column in enumerate(header)}
    lines = [line for line, _ in below]
    return cells, lambda row: f"{path}, line {lines[row]}"


def _read_parquet_cells(path: Path) -> tuple[dict[str, list[str]], RowLocation]:
    cells = {key: [_cell_text(cell) for cell in column] for key, column in read_parquet(path).items()}
    return cells, lambda row: f"{path}, row {row + 1}"


def read_table_folder(path: Path, schema: Schema) -> TableRows:
    """The rows of all csv and Parquet files of a folder, each a site by its name.

    Raises:
        DataError: there are none, or two of one site, or as :func:`read_rows`; some with a column ``split``,
            ``patient`` or ``site``, and some without.
    """
    seen = (file for file in path.iterdir() if not file.name.startswith("."))
    files = sorted(file for file in seen if table_ending(file))
    if not files:
        raise DataError(f"{path}: has no csv or Parquet file (expected one for each site)")
    sites = [plain(file.name[: -len(table_ending(file))]) for file in files]
    if twice := named_twice(sites):
        two = " and ".join(ascii(file.name) for file, site in zip(files, sites, strict=True) if site == twice)
        raise DataError(f"{path}: has {two} (expected one file for each site)")
    parts = [read_rows(file, schema) for file in files]
    tests = [part.split for part in parts if part.split is not None]
    _require_in_all("split", files, [part.split is not None for part in parts])
    for heeded in ("patient", "site"):  # by which rows are kept together
        _require_in_all(heeded, files, [heeded in part.columns for part in parts])
    in_all = [key for key in parts[0].columns if all(key in part.columns for part in parts)]
    columns = {key: np.concatenate([part.columns[key] for part in parts]) for key in in_all}
    columns["site"] = np.repeat(sites, [len(part.data) for part in parts])
    data = TensorData.joined([part.data for part in parts])
    return TableRows(schema, data, np.concatenate(tests) if tests else None, columns)


def _require_in_all(column: str, files: Sequence[Path], found: Sequence[bool]) -> None:
    """Refuse a column that some files have and others have not, which would be lost."""
    if any(found) and not all(found):
        told = f"has no column {column!r}, which {files[found.index(True)].name} has"
        raise DataError(f"{files[found.index(False)]}: {told} (expected in all files or in none)")


def is_data_frame(given: Any) -> bool:
    """Whether an object is a DataFrame, of pandas or polars, neither of which is imported here."""
    return all(hasattr(given, name) for name in ("columns", "shape", "__getitem__", "to_numpy"))


def encode_frame(frame: Any, schema: Schema, what: str) -> TensorData:
    """The rows of a DataFrame; of one patient's, by a column ``patient``, each group is protected as one.

    Raises:
        DataError: it breaks the schema, or has a patient without a name or in two spellings.
    """
    cells = {str(column): list(frame[column]) for column in frame.columns}
    data = encode_rows(cells, schema, what, lambda row: f"{what}, row {row}")
    beside = {plain(key): column for key, column in cells.items()}
    for column in schema.columns:
        beside.pop(column.name, None)
    reject_misspelled_columns(beside, what)
    if "patient" not in beside:
        return data
    patients = np.array([name_of(cell) for cell in beside["patient"]], dtype=np.str_)
    require_unit_names("patient", patients, what)
    return replace(data, groups=hash_groups(patients.tolist()))


def check_features(inputs: torch.Tensor, schema: Schema, what: str) -> None:
    """Refuse features ``(N, F)`` that no row has which the schema allows.

    Raises:
        DataError: another number of features; numbers outside -1..1; others than 0 and 1 for categories.
    """
    names = schema.features
    if inputs.shape[1:] != (len(names),):
        told = f"rows have {tuple(inputs.shape[1:])} features"
        raise DataError(f"{what}: {told}: allowed by the schema are {len(names)}")
    number = torch.zeros(len(names), dtype=torch.bool)
    for column, place in schema.places():
        number[place.start] = column.type == "number"
    number = number.to(inputs.device)
    sound = torch.where(number, inputs.abs() <= 1 + 1e-3, (inputs == 0) | (inputs == 1))
    if not bool(sound.all()):
        row, feature = torch.nonzero(~sound)[0].tolist()
        told = f"row {row} has {float(inputs[row, feature]):.4g} for {names[feature]!r}"
        allowed = "from -1 to 1, by the schema's range" if number[feature] else "0 or 1"
        raise DataError(f"{what}: {told} (expected {allowed})")


def sample_rows(schema: Schema, count: int, generator: torch.Generator) -> torch.Tensor:
    """Rows ``(count, F)`` of which each cell is drawn evenly from what the schema allows."""
    made = torch.zeros(count, len(schema.features))
    for column, place in schema.places():
        width = place.stop - place.start
        if column.type == "number":
            made[:, place.start] = 2 * torch.rand(count, generator=generator) - 1
            if column.missing:
                empty = torch.rand(count, generator=generator) < 0.5
                made[empty, place.start], made[empty, place.start + 1] = 0, 1
        else:
            which = torch.randint(width, (count,), generator=generator)
            made[torch.arange(count), place.start + which] = 1
    return made


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
        data = encode_rows(self.cells(), schema, name, lambda row: f"{name}, row {row}")
        return prepare_table(TableRows(schema, data), self, task, name, self.note)


def prepare_table(table: TableRows, config: DataConfig, task: TaskConfig, name: str, note: str) -> DataSet:
    """The data set that a table and a configuration make: inputs (N, F) float32, targets as the task's.

    Raises:
        DataError: the schema's target is not what the task learns.
    """
    schema, data = table.schema, table.data
    wanted = {"number": "number", "time": "time until an event"}.get(task.task_class.kind, "category")
    if schema.teaches != wanted:
        told = f"target {schema.target!r} of the schema is a {schema.teaches}"
        hint = ", by event = in the schema" if task.task_class.kind == "time" else ""
        raise DataError(f"{name}: {told}: allowed for task {task.called} is a {wanted}{hint}")
    made = prepare_data_set(
        ExampleSource(
            name=name,
            targets=data.targets.numpy(),
            classes=schema.classes,
            make_tensors=lambda rows: data.subset(torch.from_numpy(rows)),
            split=table.split,
            columns=table.columns,
            note=note,
            sites=table.columns.get(SITE),
            unit=PATIENT if PATIENT in table.columns else "",
            ignore_sites=True,
        ),
        config,
    )
    return replace(made, schema=schema)
