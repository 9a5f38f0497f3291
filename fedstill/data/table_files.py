"""Tables in csv, tsv and Parquet files: their rows and columns, and tables that list images.

Tables of images have pixels or image files with classes, or image files with findings. ``cases.csv`` of a
folder has metadata of its cases. Parquet files are read by pyarrow (the extra "tables").
"""

from __future__ import annotations

import csv
import gzip
import importlib
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstill.core.dataset import Column
from fedstill.core.errors import ArgumentError, DataError, format_option
from fedstill.core.name_normalization import (
    has_decimal_comma,
    normalize_class_names,
    normalize_columns,
    normalize_name,
    parse_number,
    sort_class_names,
    unknown_name_text,
)
from fedstill.core.registry import first_line
from fedstill.core.table_schema import EMPTY_CELLS, first_duplicate
from fedstill.core.text_format import to_printable_line
from fedstill.data.images import read_image_stack
from fedstill.data.raw_images import Images, RawImages, encode_labels, require_full_scale
from fedstill.data.stratified_sampling import Ints

CASES_FILE = "cases.csv"
DECIMAL_HINT = "numbers with a decimal point and no comma"
PARQUET_SUFFIX = ".parquet"
SPLIT_CODES = {"train": 0, "training": 0, "test": 1, "testing": 1, "val": 2, "valid": 2, "validation": 2}
METADATA_COLUMNS = ("patient", "site", "split")
WHITE = 255  # pixel value of white
NO_FINDING = "No Finding"  # in any case
_FINDING_VALUES = {"1": 1, "1.0": 1, "0": 0, "0.0": 0, "-1": -1, "-1.0": -1, "": -1}


# --- tables as texts ----------------------------------------------------------------------------------------


def tabular_hint() -> str:
    """Return advice on tables whose columns are not pixels."""
    return f"for columns of numbers use {format_option('task.name', 'tabular')}"


def read_delimited_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of each row of a ``.csv`` or ``.tsv``, also with ``.gz``; the header first.

    Cells are stripped of blanks; empty lines are skipped.

    Raises:
        DataError: the file cannot be read, has no rows, a row of another length, or a quote that is not
            closed or followed by text.
    """
    first_line_number = 1  # of the current row, as quoted cells can span several lines
    try:
        suffixes = [suffix.lower() for suffix in path.suffixes]
        open_file = gzip.open if suffixes[-1:] == [".gz"] else open
        with open_file(path, "rt", encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, delimiter="\t" if ".tsv" in suffixes else ",", strict=True)
            header = [normalize_name(cell) for cell in next(reader, [])]
            if len(header) == 1 and ";" in header[0]:
                first_cells = [cell.strip() for cell in ",".join(next(reader, [])).split(";")]
                hint = f"; and {DECIMAL_HINT}" if any(map(has_decimal_comma, first_cells)) else ""
                expected = f"commas, or tabs in a .tsv{hint}"
                raise DataError(f"{path}: its cells are separated by ';' (expected {expected})")
            yield 1, header
            is_empty, first_line_number = True, reader.line_num + 1
            for row in reader:
                first_line_number = reader.line_num + 1
                if not row:
                    continue
                if len(row) != len(header):
                    problem = f"line {reader.line_num} has {len(row)} cells"
                    raise DataError(f"{path}: {problem} (expected {len(header)})")
                is_empty = False
                yield reader.line_num, [cell.strip() for cell in row]
            if is_empty:
                raise DataError(f"{path}: there are no examples (expected one or more below the header)")
    except UnicodeDecodeError as error:
        problem = "it is not UTF-8: a spreadsheet saves it so as 'CSV UTF-8'"
        raise DataError(f"{path}: cannot be read as a table ({problem})") from error
    except csv.Error as error:
        problem = first_line(error)
        if problem == "unexpected end of data":
            problem = "a quote is not closed"
        raise DataError(
            f"{path}: the row that begins on line {first_line_number} cannot be read ({problem})"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        problem = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{path}: cannot be read as a table ({problem})") from error


def read_csv(path: Path, *required: str) -> dict[str, list[str]]:
    """Read a table by columns.

    Args:
        required: columns that it must have.

    Raises:
        DataError: a required column is missing, or two columns have one name.
    """
    (_, header), *rows = read_delimited_rows(path)
    for column in required:
        if column not in header:
            raise DataError(f"{path}: has no column {column!r}, only {_format_header(header)}")
    for column in header:
        if header.count(column) > 1:
            raise DataError(f"{path}: has column {column!r} twice (expected once)")
    return {column: [row[index] for _, row in rows] for index, column in enumerate(header)}


def read_parquet(path: Path) -> dict[str, list[Any]]:
    """Read the columns of a Parquet file: numbers, texts, and None for empty cells.

    Raises:
        DataError: it cannot be read, has no rows, has two columns of one name, or pyarrow is not installed.
    """
    try:
        pyarrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install 'fedstill[tables]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            table = file.read()
            names, columns = (
                [normalize_name(each) for each in table.column_names],
                [column.to_pylist() for column in table.columns],
            )
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as a table ({first_line(error)})") from error
    if twice := first_duplicate(names):
        raise DataError(f"{path}: has column {twice!r} twice (expected once)")
    if not table.num_rows:
        raise DataError(f"{path}: there are no examples (expected one row or more)")
    return dict(zip(names, columns, strict=True))


def find_column_index(header: Sequence[str], column: str, option: str, path: Path) -> int:
    """Return the index of a column that an option names.

    Raises:
        ArgumentError: there is no such column, or several.
    """
    if header.count(column) != 1:
        raise ArgumentError(option, column, f"one column of {path}, which has {_format_header(header)}")
    return header.index(column)


def _format_header(header: Sequence[str]) -> str:
    return (", ".join(header[:8]) or "none") + ", ..." * (len(header) > 8)


def pop_split_column(table: dict[str, list[str]], path: Path) -> Ints | None:
    """Remove the column "split" and return its codes ``(N,)``; None if there is none.

    Codes: 0 for training, 1 for testing, 2 for validation.

    Raises:
        DataError: a cell is none of the known names.
    """
    if "split" not in table:
        return None
    codes = SPLIT_CODES | {"dev": 2, "0": 0, "1": 1, "2": 2}
    cells = [normalize_name(cell).lower() for cell in table.pop("split")]
    unknown = next((cell for cell in cells if cell not in codes), None)
    if unknown is not None:
        expected = "train, test and validation, or 0, 1 and 2"
        raise DataError(f"{path}: split has {unknown!r} (expected {expected})")
    return np.array([codes[cell] for cell in cells])


def read_case_table(folder: Path, names: Sequence[str]) -> tuple[dict[str, Column], Ints | None]:
    """Read metadata of cases from ``cases.csv``: columns ``(N,)``, and split codes ``(N,)`` or None.

    The table has a column ``name``, which lists each case once, and any others, such as ``patient``, ``site``
    and ``split``.

    Args:
        names: cases in the wanted order.

    Raises:
        DataError: a case is missing or listed twice.
    """
    path = folder / CASES_FILE
    if not path.is_file():
        return {}, None
    table = read_csv(path, "name")
    case_names, requested = (
        [normalize_name(name) for name in table.pop("name")],
        list(map(normalize_name, names)),
    )
    row_of = {name: row for row, name in enumerate(case_names)}
    if len(row_of) < len(case_names):
        duplicate = next(name for name in case_names if case_names.count(name) > 1)
        raise DataError(f"{path}: names {duplicate!r} twice (expected once)")
    unnamed = next((name for name in requested if name not in row_of), None)
    if unnamed is not None:
        raise DataError(f"{path}: does not name {unnamed!r}, which is in {folder}")
    rows = [row_of[name] for name in requested]
    split = pop_split_column(table, path)
    columns = normalize_columns({key: np.array(cells)[rows] for key, cells in table.items()})
    return columns, None if split is None else split[rows]


# --- tables of images with classes --------------------------------------------------------------------------


@dataclass(frozen=True)
class CsvColumns:
    """Roles of the columns of a csv.

    Args:
        label: column of classes, or of all findings separated by ``|``.
        image: column of image files, relative to the folder of the csv; empty: "image" if there is one, else
            all other columns are pixels.
        group: column of groups, which is neither pixels nor a finding; empty: none.
    """

    label: str = "label"
    image: str = ""
    group: str = ""

    def __post_init__(self) -> None:
        for option in ("label", "image", "group"):
            object.__setattr__(self, option, normalize_name(getattr(self, option)))


def read_class_csv(
    path: Path,
    columns: CsvColumns,
    shape: tuple[int, ...] = (),
    size: int = 0,
    channels: int = 0,
    on_count: Callable[[int], None] = lambda count: None,
) -> RawImages:
    """Read images with classes from a csv with a label column, and image files or pixels.

    A table with image files may have metadata columns: ``split``, ``patient``, ``site`` and others.

    Args:
        shape: of the pixels, if it fits their number.

    Other arguments: see :func:`fedstill.data.user_data.read_raw_images`.
    """
    lines = read_delimited_rows(path)
    _, header = next(lines)
    if image := columns.image or ("image" if "image" in header else ""):
        find_column_index(header, image, "data.image", path)
        find_column_index(header, columns.label, "data.label", path)
        if columns.label == image:
            raise ArgumentError("data.label", image, "another column than that of the images")
        if columns.group:
            find_column_index(header, columns.group, "data.group", path)
        table = read_csv(path)
        names = table.pop(image)
        on_count(len(names))
        labels, classes = encode_labels(table.pop(columns.label), str(path))
        split = pop_split_column(table, path)
        metadata = {column: np.array(cells) for column, cells in table.items()}
        images = _read_listed_images(path, names, size, channels)
        return RawImages(images, labels, classes, split, metadata, file_names=np.array(names))
    options = {option: column for option, column in asdict(columns).items() if column or option == "label"}
    if columns.label not in header:
        expected = f"one column of {path}, which has {_format_header(header)}; {tabular_hint()}"
        raise ArgumentError("data.label", columns.label, expected)
    indices = {
        option: find_column_index(header, name, f"data.{option}", path) for option, name in options.items()
    }
    cells: dict[str, list[str]] = {option: [] for option in indices}
    pixel_indices = [column for column in range(len(header)) if column not in indices.values()]
    pixels: list[npt.NDArray[np.float32]] = []
    for line, row in lines:  # converted row by row, as texts need far more memory
        for option, index in indices.items():
            cells[option].append(row[index])
        pixels.append(
            parse_pixel_row(
                [row[column] for column in pixel_indices], f"{path}: line {line}", f"; {tabular_hint()}"
            )
        )
    labels, classes = encode_labels(cells["label"], str(path))
    images = reshape_pixel_rows(np.stack(pixels), path, shape)
    groups = {columns.group: np.array(cells["group"])} if columns.group else {}
    return RawImages(images, labels, classes, columns=groups)


def parse_pixel_row(cells: Sequence[str], label: str, hint: str = "") -> npt.NDArray[np.float32]:
    """Return pixels of a row as numbers.

    Raises:
        DataError: a cell is not a number; the message starts with ``label``.
    """
    suspicious = (cell for cell in cells if not (cell.isascii() and cell.isdigit()))
    invalid = next((cell for cell in suspicious if parse_number(cell) is None), None)
    if invalid is not None:
        expected = f"numbers, or a column of image files{hint}"
        raise DataError(f"{label} has {to_printable_line(repr(invalid), 60)} (expected {expected})")
    return np.array(cells, dtype=np.float32)


def reshape_pixel_rows(
    table: npt.NDArray[np.float32], path: Path, shape: tuple[int, ...]
) -> npt.NDArray[np.float32]:
    """Reshape rows of pixels ``(N, C * H * W)`` in 0..255 to images ``(N, C, H, W)`` in [0, 1]."""
    count = table.shape[1]
    if not shape or np.prod(shape) != count:
        side = round(count**0.5)
        if count == 0 or side**2 != count:
            expected = f"a square number; {tabular_hint()}"
            raise DataError(f"{path}: has {count} pixels a line (expected {expected})")
        shape = (1, side, side)
    out_of_range = np.flatnonzero(~((table >= 0) & (table <= WHITE)).all(axis=1))
    if len(out_of_range):
        problem = f"{len(out_of_range)} examples hold NaN or values outside 0..{WHITE}"
        raise DataError(f"{path}: {problem}, the first is example {out_of_range[0]}")
    require_full_scale(table, str(path))
    return (table / np.float32(WHITE)).reshape(-1, *shape)


def _read_listed_images(path: Path, names: Sequence[str], size: int, channels: int) -> Images:
    """Read the image files that a csv lists: ``(N, C, H, W)``."""
    return read_image_stack(
        ((path.parent / file, f"{path}: image {file!r}") for file in names), size, channels
    )


# --- tables of images with findings -------------------------------------------------------------------------


def read_finding_csv(
    path: Path,
    columns: CsvColumns | None = None,
    classes: Sequence[str] = (),
    size: int = 0,
    channels: int = 0,
    on_count: Callable[[int], None] = lambda count: None,
) -> RawImages:
    """Read image files with findings (multi-label) from a csv.

    Findings have one column each, with 1, 0, and -1 or nothing if unknown; or one column lists them separated
    by ``|``, with "No Finding" for none.

    Args:
        classes: wanted findings, in order; those without a column are unknown everywhere. Empty: all.

    Other arguments: see :func:`fedstill.data.user_data.read_raw_images`.
    """
    csv_columns = columns or CsvColumns(label="")
    image = csv_columns.image or "image"
    table = read_csv(path, image)
    on_count(len(table[image]))
    if csv_columns.label not in ("", CsvColumns.label):  # the default, which may be missing
        find_column_index(list(table), csv_columns.label, "data.label", path)
    list_column = csv_columns.label if csv_columns.label in table else ""
    non_findings = {image, list_column, csv_columns.group, *METADATA_COLUMNS}
    if list_column:
        labels, names = _parse_finding_lists(table[list_column], tuple(classes), path)
    else:
        finding_columns = [column for column in table if column not in non_findings]
        names = normalize_class_names(classes, "classes") or tuple(finding_columns)
        if not set(names) & set(finding_columns):
            raise DataError(f"{path}: has columns {', '.join(table)} (expected one for a finding)")
        unknown = ["-1"] * len(table[image])
        labels = np.stack(
            [_parse_finding_column(table.get(name, unknown), name, path) for name in names], axis=1
        )
    split = pop_split_column(table, path)
    metadata = {
        key: np.array(cells) for key, cells in table.items() if key in non_findings - {image, list_column}
    }
    images = _read_listed_images(path, table[image], size, channels)
    return RawImages(images, labels, names, split, metadata, file_names=np.array(table[image]))


def _parse_finding_lists(
    cells: Sequence[str], classes: tuple[str, ...], path: Path
) -> tuple[Ints, tuple[str, ...]]:
    split_cells = [{normalize_name(part) for part in cell.split("|")} for cell in cells]
    finding_sets = [
        {part for part in cell_parts if part.lower() not in ("", NO_FINDING.lower())}
        for cell_parts in split_cells
    ]
    all_findings = sort_class_names(set().union(*finding_sets))
    names = normalize_class_names(classes, "classes") or tuple(all_findings)
    for name in (name for name in all_findings if name not in classes):
        if name.lower() in EMPTY_CELLS:
            raise DataError(f"{path}: has a finding {name!r} (expected a name, or {NO_FINDING!r} for none)")
        is_known = [part in all_findings for part in re.split(" *[;,] *", name)]
        if len(is_known) > 1 and (
            all(is_known) or (";" in name and any(is_known))
        ):  # but "Fracture, old" is one finding
            raise DataError(f"{path}: has {name!r} as one finding (expected '|' between findings)")
    unknown = next((name for name in all_findings if name not in names), None)
    if unknown is not None:
        raise DataError(f"{path}: has a finding {unknown_name_text(unknown, names)}")
    if not names:
        raise DataError(f"{path}: has no finding at all (expected one or more)")
    return np.array(
        [[int(name in findings) for name in names] for findings in finding_sets], dtype=np.int64
    ), names


def _parse_finding_column(cells: Sequence[str], finding: str, path: Path) -> Ints:
    invalid = next((cell for cell in cells if normalize_name(cell) not in _FINDING_VALUES), None)
    if invalid is not None:
        problem = f"finding {finding!r} has {invalid!r}"
        raise DataError(f"{path}: {problem} (expected 1, 0, and -1 or nothing (unknown))")
    return np.array([_FINDING_VALUES[normalize_name(cell)] for cell in cells], dtype=np.int64)
