"""Tables: schemas, rows as features, and tables as data sets.

A schema lists the columns with their ranges and categories. Numbers are scaled to -1..1 by these ranges; each
category, and an empty cell, gets its own feature. No statistics of the rows are used: the features of a
row depend on this row and the schema only. Custom tables derive from :class:`TableData`.

Drafts of schemas are measured on rows, which the schema of a federation must not be: a person widens ranges
and categories to all values possible at any node.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import tomli_w
import torch
from torch import nn

from fedstill.core.config_tables import read_table, read_toml, to_table
from fedstill.core.dataset import Column, DataSet, TensorData
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.name_normalization import (
    has_decimal_comma,
    normalize_columns,
    normalize_name,
    parse_number,
    similar_names_note,
    strip_decimal_zeros,
    to_name,
)
from fedstill.core.table_schema import EMPTY_CELLS, SchemaColumn, TableSchema, first_duplicate
from fedstill.core.text_format import more_suffix, to_printable_line
from fedstill.data.config import DataConfig
from fedstill.data.loading import PATIENT, SITE, UnsplitExamples, prepare_data_set
from fedstill.data.stratified_sampling import Ints, hash_groups, reject_misspelled_columns, require_unit_names
from fedstill.data.table_files import PARQUET_SUFFIX, pop_split_column, read_delimited_rows, read_parquet
from fedstill.tasks import Targets, TaskConfig

Floats = npt.NDArray[np.float64]
RowLocation = Callable[[int], str]  # file and line of a row
SCHEMA_FILE = "schema.toml"
TABLE_ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", PARQUET_SUFFIX)
MAX_FAULTS = 5  # columns with invalid cells that an error lists
METADATA_COLUMNS = ("split", "patient", "site")  # in drafts never inputs
MAX_CATEGORIES = 50  # drafts: columns with more distinct texts are likely names or free text
MIN_SPAN = 1e-300  # drafts: smaller spans cannot be rounded
MAX_TARGET_CLASSES = 20  # drafts: distinct whole numbers of a target that are classes, not quantities


# --- schema files -------------------------------------------------------------------------------------------


def read_schema(path: str | Path) -> TableSchema:
    """Read a schema from a TOML file.

    Raises:
        ArgumentError: the file does not exist.
        DataError: it is not a valid schema.
    """
    path = Path(path)
    if not path.is_file():
        expected = "an existing file; `fedstill data schema` drafts one"
        raise ArgumentError("data.schema", str(path), expected)
    try:
        schema = read_table(TableSchema, read_toml(path))
    except ArgumentError as error:
        raise DataError(f"{path}: {error}") from error
    if not schema:
        raise DataError(f"{path}: has no columns; `fedstill data schema` drafts them")
    return schema


def schema_text(schema: TableSchema) -> str:
    """Return a schema as TOML, from which :func:`read_schema` restores it."""
    table = to_table(schema)
    table["columns"] = [{key: value for key, value in column.items() if value} for column in table["columns"]]
    if not schema.event:
        del table["event"], table["intervals"]
    return tomli_w.dumps(table)


# --- features -----------------------------------------------------------------------------------------------


class RowFeatures(nn.Module):
    """Convert cells ``(N, columns)`` to features ``(N, F)``.

    A cell is a number, the index of a category, or NaN if empty. A module, so that exported models contain
    it.

    Args:
        columns: of the cells, in order.
        dtype: of the cells.
    """

    column_index: torch.Tensor
    is_numeric: torch.Tensor
    is_missing_flag: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    category: torch.Tensor

    def __init__(self, columns: Sequence[SchemaColumn], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        # Of each feature: its column, whether it is a number or flags an empty cell, the values that become
        # -1 and 1, and its category.
        column_index: list[int] = []
        is_numeric, is_missing_flag, low, high, category = ([] for _ in range(5))
        for index, column in enumerate(columns):
            width = len(column.feature_names)
            is_number_column = column.type == "number"
            column_index += [index] * width
            is_missing_flag += [False] * (width - column.missing) + [True] * column.missing
            is_numeric += [is_number_column] * width
            low += [column.scaled_range[0] if is_number_column else 0.0] * width
            high += [column.scaled_range[1] if is_number_column else 1.0] * width
            category += [float(value) for value in range(width)]
        for name, flags in (
            ("column_index", column_index),
            ("is_numeric", is_numeric),
            ("is_missing_flag", is_missing_flag),
        ):
            self.register_buffer(name, torch.tensor(flags))
        for name, values in (("low", low), ("high", high), ("category", category)):
            self.register_buffer(name, torch.tensor(values, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features, with the dtype of the cells."""
        cells = x[:, self.column_index]
        is_empty = cells.isnan()
        scaled = (2 * (cells - self.low) / (self.high - self.low) - 1).clamp(-1, 1)
        scaled = torch.where(is_empty, 0.0, scaled)
        values = torch.where(self.is_numeric, scaled, (cells == self.category).to(x.dtype))
        return torch.where(self.is_missing_flag, is_empty.to(x.dtype), values)


def encode_rows(
    cells: Mapping[str, Sequence[Any]], schema: TableSchema, source: str, locate: RowLocation
) -> TensorData:
    """Encode cells as features ``(N, F)`` and targets.

    Targets are classes ``(N,)``, numbers ``(N, 1)`` in [-1, 1], or ``(N, 2)``: the time until an event, in
    intervals, and whether it occurred. Columns that are not in the schema are ignored.

    Args:
        cells: texts, numbers, None or NaN by column.
        source: start of error messages about all cells.
        locate: returns file and line of a row, for errors.

    Raises:
        DataError: a column is missing; or cells violate the schema (the message has the first of each
            column).

    >>> sex = SchemaColumn(name="sex", type="category", categories=("f", "m"))
    >>> age = SchemaColumn(name="age", range=(0.0, 100.0), missing=True)
    >>> cells = {"age": ["75", ""], "sex": ["m", "f"], "id": [7, 8]}
    >>> data = encode_rows(cells, TableSchema("sex", (age, sex)), "clinic", lambda row: f"line {row}")
    >>> data.inputs.tolist(), data.targets.tolist()
    ([[0.5, 0.0], [0.0, 1.0]], [1, 0])
    """
    cells = _select_columns(cells, schema.columns, source)
    numbers = _parse_cells(cells, schema.columns, locate)

    def features(columns: Sequence[SchemaColumn]) -> torch.Tensor:
        """Return the features of some columns, ``(N, features)`` float64."""
        indices = [schema.columns.index(column) for column in columns]
        row_features: torch.Tensor = RowFeatures(columns, torch.float64)(
            torch.from_numpy(numbers[:, indices])
        )
        return row_features

    return TensorData(features(schema.input_columns).float(), _encode_targets(schema, features))


def _encode_targets(
    schema: TableSchema, features: Callable[[Sequence[SchemaColumn]], torch.Tensor]
) -> torch.Tensor:
    target = features([schema.target_column])
    if schema.target_column.categories:
        return target.argmax(1)
    if not schema.event:
        return target.float()
    event = next(column for column in schema.columns if column.name == schema.event)
    event_occurred = features([event])[:, 1:]
    # Rounded to float32 only now, so that the boundary of two intervals is an integer.
    return torch.cat([(target + 1) / 2 * schema.intervals, event_occurred], 1).float()


def encode_cells(
    cells: Mapping[str, Sequence[Any]], schema: TableSchema, source: str, locate: RowLocation
) -> npt.NDArray[np.float32]:
    """Encode cells, without the target, as ``(N, columns)``: numbers, category indices, NaN if empty.

    Arguments and errors: see :func:`encode_rows`.
    """
    cells = _select_columns(cells, schema.input_columns, source)
    return _parse_cells(cells, schema.input_columns, locate).astype(np.float32)


def _select_columns(
    cells: Mapping[str, Sequence[Any]], columns: Sequence[SchemaColumn], source: str
) -> dict[str, Sequence[Any]]:
    """Return the cells of a schema's columns.

    Raises:
        DataError: a column is missing, or two have its name.
    """
    selected: dict[str, Sequence[Any]] = {}
    required = {column.name for column in columns}
    for key, column in cells.items():
        name = normalize_name(key)
        if name in selected:
            raise DataError(f"{source}: has column {name!r} twice (expected once)")
        if name in required:
            selected[name] = column
    if missing_columns := [column.name for column in columns if column.name not in selected]:
        raise DataError(
            f"{source}: has no column {missing_columns[0]!r} (expected all columns of the schema)"
        )
    return selected


def _parse_cells(
    cells: Mapping[str, Sequence[Any]], columns: Sequence[SchemaColumn], locate: RowLocation
) -> Floats:
    """Parse cells to ``(N, columns)``, as described in :func:`encode_cells`.

    Raises:
        DataError: cells are invalid; names the first of each column.
    """
    numbers: list[list[float]] = []
    faults = []
    for column in columns:
        parsed = [_parse_cell(cell, column) for cell in cells[column.name]]
        invalid_rows = [row for row, number in enumerate(parsed) if number is None]
        if invalid_rows:
            text = _cell_text(cells[column.name][invalid_rows[0]])
            shown = (
                to_printable_line(text if column.type == "number" else repr(text), 60) if text else "nothing"
            )
            has_comma = column.type == "number" and has_decimal_comma(text)
            hint = ", with a decimal point and no comma" if has_comma else ""
            problem = f"column {column.name!r} is {shown} (expected {column.allowed_values}{hint})"
            faults.append(f"{locate(invalid_rows[0])}: {problem}{more_suffix(len(invalid_rows))}")
        numbers.append([math.nan if number is None else number for number in parsed])
    if faults:
        other_columns = f"; and {len(faults) - MAX_FAULTS} more columns" if faults[MAX_FAULTS:] else ""
        raise DataError("; ".join(faults[:MAX_FAULTS]) + other_columns)
    return np.stack(numbers, axis=1, dtype=np.float64)


def _parse_cell(cell: Any, column: SchemaColumn) -> float | None:
    """Return a cell as a number; None if it violates the schema."""
    text = _cell_text(cell)
    if (category := column.category_index(text)) is not None:
        return category
    if text.lower() in EMPTY_CELLS:
        return math.nan if column.missing else None
    if column.type != "number":
        return None
    lowest, highest = column.range
    value = parse_number(text)
    return value if value is not None and lowest <= value <= highest else None


def _cell_text(cell: Any) -> str:
    """Return a cell as a file would have it: whole numbers without a point, nothing if empty."""
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return to_name(cell)


def check_features(inputs: torch.Tensor, schema: TableSchema, source: str) -> None:
    """Check that features ``(N, F)`` can come from rows that the schema allows.

    Raises:
        DataError: the number of features is wrong, a number is outside [-1, 1], or a category is not 0 or 1.
    """
    names = schema.feature_names
    if inputs.shape[1:] != (len(names),):
        problem = f"rows have {tuple(inputs.shape[1:])} features"
        raise DataError(f"{source}: {problem} (expected {len(names)}, as in the schema)")
    is_number = torch.zeros(len(names), dtype=torch.bool)
    for column, feature_range in schema.feature_slices():
        is_number[feature_range.start] = column.type == "number"
    is_number = is_number.to(inputs.device)
    is_valid = torch.where(is_number, inputs.abs() <= 1 + 1e-3, (inputs == 0) | (inputs == 1))
    if not bool(is_valid.all()):
        row, feature = torch.nonzero(~is_valid)[0].tolist()
        problem = f"row {row} has {float(inputs[row, feature]):.4g} for {names[feature]!r}"
        expected = "from -1 to 1, by the schema's range" if is_number[feature] else "0 or 1"
        raise DataError(f"{source}: {problem} (expected {expected})")


def sample_rows(schema: TableSchema, count: int, generator: torch.Generator) -> torch.Tensor:
    """Sample rows ``(count, F)``, each cell uniformly from the values that the schema allows."""
    features = torch.zeros(count, len(schema.feature_names))
    for column, feature_range in schema.feature_slices():
        width = feature_range.stop - feature_range.start
        if column.type == "number":
            features[:, feature_range.start] = 2 * torch.rand(count, generator=generator) - 1
            if column.missing:
                is_empty = torch.rand(count, generator=generator) < 0.5
                features[is_empty, feature_range.start], features[is_empty, feature_range.start + 1] = 0, 1
        else:
            category = torch.randint(width, (count,), generator=generator)
            features[torch.arange(count), feature_range.start + category] = 1
    return features


# --- tables -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class EncodedRows:
    """Rows of a table as features, with metadata.

    Args:
        data: features ``(N, F)`` and targets.
        split: 0 for training, 1 for testing, 2 for validation, ``(N,)``; None if the source has no split.
        columns: metadata ``(N,)`` by name, which can define the nodes.
    """

    schema: TableSchema
    data: TensorData
    split: Ints | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", normalize_columns(self.columns))


def read_rows(path: Path, schema: TableSchema) -> EncodedRows:
    """Read the rows of one csv or Parquet file.

    It may have metadata columns: ``split`` (train, test, validation), ``patient``, ``site`` and others.

    Raises:
        DataError: it cannot be read, or violates the schema.
    """
    cells, locate = read_cells(path)
    data = encode_rows(cells, schema, str(path), locate)
    split = pop_split_column(cells, path)
    return EncodedRows(schema, data, split, {key: np.array(column) for key, column in cells.items()})


def read_table_folder(path: Path, schema: TableSchema) -> EncodedRows:
    """Read all csv and Parquet files of a folder; each file is a site, by its name.

    Raises:
        DataError: there are none, two of one site, or as in :func:`read_rows`; or only some have a column
            ``split``, ``patient`` or ``site``.
    """
    visible = (file for file in path.iterdir() if not file.name.startswith("."))
    files = sorted(file for file in visible if table_ending(file))
    if not files:
        raise DataError(f"{path}: has no csv or Parquet file (expected one for each site)")
    sites = [normalize_name(file.name[: -len(table_ending(file))]) for file in files]
    if duplicate := first_duplicate(sites):
        duplicates = " and ".join(
            ascii(file.name) for file, site in zip(files, sites, strict=True) if site == duplicate
        )
        raise DataError(f"{path}: has {duplicates} (expected one file for each site)")
    tables = [read_rows(file, schema) for file in files]
    splits = [table.split for table in tables if table.split is not None]
    _require_in_all("split", files, [table.split is not None for table in tables])
    for column in ("patient", "site"):  # which keep rows together
        _require_in_all(column, files, [column in table.columns for table in tables])
    shared_columns = [key for key in tables[0].columns if all(key in table.columns for table in tables)]
    columns = {key: np.concatenate([table.columns[key] for table in tables]) for key in shared_columns}
    columns["site"] = np.repeat(sites, [len(table.data) for table in tables])
    data = TensorData.concat([table.data for table in tables])
    return EncodedRows(schema, data, np.concatenate(splits) if splits else None, columns)


def _require_in_all(column: str, files: Sequence[Path], has_column: Sequence[bool]) -> None:
    """Refuse a column that only some files have, as it would be dropped."""
    if any(has_column) and not all(has_column):
        problem = f"has no column {column!r}, which {files[has_column.index(True)].name} has"
        raise DataError(f"{files[has_column.index(False)]}: {problem} (expected in all files or in none)")


def read_cells(path: Path) -> tuple[dict[str, list[str]], RowLocation]:
    """Read the cells of a csv or Parquet file, by column; also return a function that locates rows.

    Raises:
        DataError: it cannot be read.
    """
    return _read_parquet_cells(path) if table_ending(path) == PARQUET_SUFFIX else _read_csv_cells(path)


def table_ending(file: Path) -> str:
    """Return the ending that makes a file a table, in lower case; empty if it is not a table.

    >>> table_ending(Path("St. Mary.CSV.gz")), table_ending(Path("schema.toml"))
    ('.csv.gz', '')
    """
    return next((ending for ending in TABLE_ENDINGS if file.name.lower().endswith(ending)), "")


def _read_csv_cells(path: Path) -> tuple[dict[str, list[str]], RowLocation]:
    (_, header), *rows_below = read_delimited_rows(path)
    if duplicate := first_duplicate(header):
        raise DataError(f"{path}: has column {duplicate!r} twice (expected once)")
    cells = {column: [row[index] for _, row in rows_below] for index, column in enumerate(header)}
    lines = [line for line, _ in rows_below]
    return cells, lambda row: f"{path}, line {lines[row]}"


def _read_parquet_cells(path: Path) -> tuple[dict[str, list[str]], RowLocation]:
    cells = {key: [_cell_text(cell) for cell in column] for key, column in read_parquet(path).items()}
    return cells, lambda row: f"{path}, row {row + 1}"


def is_data_frame(value: Any) -> bool:
    """Return whether a value is a DataFrame of pandas or polars, neither of which is imported."""
    return all(hasattr(value, name) for name in ("columns", "shape", "__getitem__", "to_numpy"))


def encode_frame(frame: Any, schema: TableSchema, source: str) -> TensorData:
    """Encode the rows of a DataFrame; a column ``patient`` becomes the groups.

    Raises:
        DataError: a row violates the schema, or a patient has no name or two spellings.
    """
    cells = {str(column): list(frame[column]) for column in frame.columns}
    data = encode_rows(cells, schema, source, lambda row: f"{source}, row {row}")
    metadata = {normalize_name(key): column for key, column in cells.items()}
    for column in schema.columns:
        metadata.pop(column.name, None)
    reject_misspelled_columns(metadata, source)
    if "patient" not in metadata:
        return data
    patients = np.array([to_name(cell) for cell in metadata["patient"]], dtype=np.str_)
    require_unit_names("patient", patients, source)
    return replace(data, groups=hash_groups(patients.tolist()))


# --- data sets ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TableData(DataConfig):
    """Custom table. A subclass implements :meth:`schema` and :meth:`cells`.

    Example::

        @dataclass(frozen=True, kw_only=True)
        class Heights(TableData):
            def schema(self):
                height = SchemaColumn(name="height", range=(0.5, 2.5))
                sex = SchemaColumn(name="sex", type="category", categories=("f", "m"))
                return TableSchema("sex", (height, sex))

            def cells(self):
                return {"height": [1.6, 1.8] * 50, "sex": ["f", "m"] * 50}
    """

    targets: ClassVar[tuple[Targets, ...]] = ("rows",)

    @abstractmethod
    def schema(self) -> TableSchema:
        """Return the columns, their ranges and categories, and the target."""

    @abstractmethod
    def cells(self) -> Mapping[str, Sequence[Any]]:
        """Return the rows, by column: texts or numbers, None if empty.

        Columns that are not in the schema are ignored.
        """

    def read(self, task: TaskConfig) -> DataSet:
        """Return the rows as features, divided into training and test parts."""
        name, schema = self.title or self.registered_name, self.schema()
        data = encode_rows(self.cells(), schema, name, lambda row: f"{name}, row {row}")
        return prepare_table(EncodedRows(schema, data), self, task, name, self.note)


def prepare_table(table: EncodedRows, config: DataConfig, task: TaskConfig, name: str, note: str) -> DataSet:
    """Return the data set of a table: inputs (N, F) float32, targets of the task.

    Raises:
        DataError: the target of the schema does not fit the task.
    """
    schema, data = table.schema, table.data
    expected = {"number": "number", "time": "time until an event"}.get(task.task_class.kind, "category")
    if schema.target_kind != expected:
        problem = f"target {schema.target!r} of the schema is a {schema.target_kind}"
        hint = ", by event = in the schema" if task.task_class.kind == "time" else ""
        raise DataError(f"{name}: {problem} (expected a {expected} for task {task.registered_name}{hint})")
    data_set = prepare_data_set(
        UnsplitExamples(
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
    return replace(data_set, schema=schema)


# --- drafts of schemas --------------------------------------------------------------------------------------


def draft_schema(
    cells: Mapping[str, Sequence[str]],
    target: str,
    event: str = "",
    locate: Callable[[int], str] = "row {}".format,
) -> tuple[TableSchema, dict[str, str]]:
    """Return a schema that fits some rows, and why it leaves out columns.

    The range of a numeric column is its span, rounded outwards; other columns have their texts as categories.

    Args:
        cells: by column.
        target: column to be predicted.
        event: survival: column that says whether the event occurred.
        locate: returns the position of a row, for errors.

    Raises:
        ArgumentError: there is no such column.
        DataError: the target is empty somewhere or constant, or no other column is usable.

    >>> cells = {"age": ["63", "48"], "id": ["a", "a"], "ill": ["no", "yes"]}
    >>> schema, left_out = draft_schema(cells, "ill")
    >>> schema.columns[0].range, schema.classes, left_out
    ((45.0, 65.0), ('no', 'yes'), {'id': "it is 'a' throughout"})
    """
    cells = {normalize_name(key): [normalize_name(cell) for cell in column] for key, column in cells.items()}
    target, event = normalize_name(target), normalize_name(event)
    for option, requested in (("--target", target), *((("--event", event),) if event else ())):
        if requested not in cells:
            raise ArgumentError(option, requested, f"one of the columns {', '.join(cells)}")
    columns, left_out = [], dict[str, str]()
    for key, column in cells.items():
        is_target = key in (target, event)
        if not key or (key in METADATA_COLUMNS and not is_target):  # a column without a name numbers the rows
            left_out |= {key: "it is metadata"} if key else {}
            continue
        filled = [cell for cell in column if cell.lower() not in EMPTY_CELLS]
        if is_target and len(filled) < len(column):
            empty_rows = [row for row, cell in enumerate(column) if cell.lower() in EMPTY_CELLS]
            others = more_suffix(len(empty_rows))
            raise DataError(f"{locate(empty_rows[0])}: column {key!r} is empty, but is the target{others}")
        are_classes = key == event or (key == target and not event)
        column_draft = _draft_column(key, filled, len(filled) < len(column), are_classes=are_classes)
        if isinstance(column_draft, SchemaColumn):
            columns.append(column_draft)
        elif is_target:
            raise DataError(f"column {key!r} cannot be the target: {column_draft}")
        else:
            left_out[key] = column_draft
    if all(column.name in (target, event) for column in columns):
        raise DataError(f"no column except {target!r} is usable")
    return TableSchema(target, tuple(columns), event), left_out


def round_outwards(numbers: Sequence[float]) -> tuple[float, float]:
    """Return minimum and maximum, rounded outwards to half a digit of their span.

    >>> round_outwards([18, 97]), round_outwards([0.0312, 0.0388]), round_outwards([-3, 4])
    ((15.0, 100.0), (0.031, 0.039), (-3.0, 4.0))
    """
    lowest, highest = min(numbers), max(numbers)
    if not MIN_SPAN < highest - lowest < math.inf:
        return lowest, highest
    digit = math.floor(math.log10(highest - lowest))
    step = 0.5 * 10.0**digit
    low = round(math.floor(lowest / step) * step, 1 - digit)
    high = round(math.ceil(highest / step) * step, 1 - digit)
    return min(low, lowest), max(high, highest)  # if floats are too coarse


def find_rare_categories(schema: TableSchema, cells: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return categories that occur once, by column, if most categories of the column are common.

    >>> cells = {"ward": [*"aaabbb", "B"], "ill": [*"yyynnny"]}
    >>> find_rare_categories(draft_schema(cells, "ill")[0], cells)
    {'ward': ['B']}
    """
    rare = {}
    for column in schema.columns:
        counts = Counter(strip_decimal_zeros(normalize_name(cell)) for cell in cells[column.name])
        single = [category for category in column.categories if counts[category] == 1]
        if 0 < 2 * len(single) < len(column.categories):
            rare[column.name] = single
    return rare


def similar_category_notes(schema: TableSchema) -> list[str]:
    """Return notes on categories that differ only by case, width or number format.

    >>> cells = {"ward": ["a", "A", "b"], "ill": ["y", "n", "y"]}
    >>> similar_category_notes(draft_schema(cells, "ill")[0])
    ["categories of 'ward' 'A' and 'a' differ by case only, and count as two"]
    """
    notes = [
        similar_names_note(f"categories of {column.name!r}", column.categories) for column in schema.columns
    ]
    return [note for note in notes if note]


def _draft_column(key: str, cells: Sequence[str], missing: bool, *, are_classes: bool) -> SchemaColumn | str:
    """Return a column of the schema, or the reason why there is none."""
    texts = sorted(set(map(strip_decimal_zeros, cells)))
    with_comma = [cell for cell in texts if has_decimal_comma(cell)]
    if with_comma and all(has_decimal_comma(cell) or parse_number(cell) is not None for cell in texts):
        return f"its numbers have commas, as {with_comma[0]!r}: write a decimal point, and no other separator"
    if len(texts) < 2:
        return f"it is {texts[0]!r} throughout" if texts else "it is empty"
    numbers = [_parse_number(cell) for cell in texts]
    numbers_found = [number for number in numbers if number is not None]
    is_categorical = (
        are_classes
        and len(texts) <= MAX_TARGET_CLASSES
        and all(number.is_integer() for number in numbers_found)
    )
    if len(numbers_found) == len(texts) and not is_categorical and min(numbers_found) < max(numbers_found):
        return SchemaColumn(name=key, range=round_outwards(numbers_found), missing=missing)
    if len(texts) > MAX_CATEGORIES:
        not_numbers = [cell for cell, number in zip(texts, numbers, strict=True) if number is None]
        detail = (
            f", of which {len(numbers_found)} are numbers and {not_numbers[0]!r} is none"
            if numbers_found and not_numbers
            else ""
        )
        return f"it has {len(texts)} different texts{detail}"
    if len(numbers_found) == len(texts):
        texts.sort(key=float)
    return SchemaColumn(name=key, type="category", categories=tuple(texts), missing=missing)


def _parse_number(cell: str) -> float | None:
    value = parse_number(cell)
    return value if value is not None and math.isfinite(value) else None
