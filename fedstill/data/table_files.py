"""Tables with a header: their rows and columns, what ``cases.csv`` tells of a folder's cases, and tables of
images: of pixels or image files with classes, or of image files with findings.

Tables in Parquet files, as cells. Read by pyarrow (the extra "tables").
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
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.names import (
    class_names,
    has_decimal_comma,
    named_columns,
    number_of,
    ordered,
    plain,
    unknown_name,
)
from fedstill.core.registry import first_line
from fedstill.core.table_schema import EMPTY, named_twice
from fedstill.core.text_format import clip
from fedstill.data.images import read_image_stack
from fedstill.data.raw import Images, RawImages, encode_labels, require_full_scale
from fedstill.data.stratified_sampling import Ints

CASES_FILE = "cases.csv"
DECIMAL_HINT = "numbers with a decimal point and no comma"
TABULAR_HINT = "columns of numbers are learned by task.name = 'tabular'"
SPLIT_CODES = {"train": 0, "training": 0, "test": 1, "testing": 1, "val": 2, "valid": 2, "validation": 2}


def read_delimited_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a ``.csv`` or ``.tsv``, which may end in ``.gz``, with their lines: the header first.

    Cells come without blanks around them; empty lines are passed over.

    Raises:
        DataError: it cannot be read, has nothing below a header, a row of another length, or a quote that is
            not closed or that has text behind it.
    """
    begins = 1  # the line on which the row that is read begins: a quoted cell may have several
    try:
        endings = [suffix.lower() for suffix in path.suffixes]
        opened = gzip.open if endings[-1:] == [".gz"] else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, delimiter="\t" if ".tsv" in endings else ",", strict=True)
            header = [plain(cell) for cell in next(reader, [])]
            if len(header) == 1 and ";" in header[0]:
                first = [cell.strip() for cell in ",".join(next(reader, [])).split(";")]
                told = "its cells are divided by ';': allowed are commas, or tabs in a .tsv"
                point = f"; and {DECIMAL_HINT}" if any(map(has_decimal_comma, first)) else ""
                raise DataError(f"{path}: {told}{point}")
            yield 1, header
            empty, begins = True, reader.line_num + 1
            for row in reader:
                begins = reader.line_num + 1
                if not row:
                    continue
                if len(row) != len(header):
                    told = f"line {reader.line_num} has {len(row)} cells: allowed are {len(header)}"
                    raise DataError(f"{path}: {told}")
                empty = False
                yield reader.line_num, [cell.strip() for cell in row]
            if empty:
                raise DataError(f"{path}: there are no examples (expected one line or more below the header)")
    except UnicodeDecodeError as error:
        told = "it is not UTF-8: a spreadsheet saves it so as 'CSV UTF-8'"
        raise DataError(f"{path}: cannot be read as a table ({told})") from error
    except csv.Error as error:
        told = first_line(error)
        if told == "unexpected end of data":
            told = "a quote is not closed"
        raise DataError(f"{path}: the row that begins on line {begins} cannot be read ({told})") from error
    except (OSError, EOFError, zlib.error) as error:
        told = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{path}: cannot be read as a table ({told})") from error


def find_column(header: Sequence[str], column: str, option: str, path: Path) -> int:
    """The place of a column that an option names; an ArgumentError if there is none, or there are several."""
    if header.count(column) != 1:
        raise ArgumentError(option, column, f"one column of {path}, which has {_format_header(header)}")
    return header.index(column)


def read_csv(path: Path, *needed: str) -> dict[str, list[str]]:
    """A table by columns, some of which it must have; a DataError if one is missing, or two have one name."""
    (_, header), *below = read_delimited_rows(path)
    for column in needed:
        if column not in header:
            raise DataError(f"{path}: has no column {column!r}, only {_format_header(header)}")
    for column in header:
        if header.count(column) > 1:
            raise DataError(f"{path}: has column {column!r} twice (expected once)")
    return {column: [row[place] for _, row in below] for place, column in enumerate(header)}


def pop_split_column(table: dict[str, list[str]], path: Path) -> Ints | None:
    """Which rows are for training (0), testing (1) and validation (2), by a column "split", which is taken
    out; None where there is none."""
    if "split" not in table:
        return None
    numbers = SPLIT_CODES | {"dev": 2, "0": 0, "1": 1, "2": 2}
    cells = [plain(cell).lower() for cell in table.pop("split")]
    wrong = next((cell for cell in cells if cell not in numbers), None)
    if wrong is not None:
        told = "allowed are train, test and validation (or 0, 1 and 2)"
        raise DataError(f"{path}: split has {wrong!r}: {told}")
    return np.array([numbers[cell] for cell in cells])


def read_case_table(folder: Path, names: Sequence[str]) -> tuple[dict[str, Column], Ints | None]:
    """What ``cases.csv`` of a folder says of its cases: columns ``(N,)``, and which part each is in.

    The table has a column ``name``, and any others: ``patient``, ``site``, ``split``. It names each case,
    once.
    """
    path = folder / CASES_FILE
    if not path.is_file():
        return {}, None
    table = read_csv(path, "name")
    listed, wanted = [plain(each) for each in table.pop("name")], list(map(plain, names))
    place = {each: row for row, each in enumerate(listed)}
    if len(place) < len(listed):
        twice = next(each for each in listed if listed.count(each) > 1)
        raise DataError(f"{path}: names {twice!r} twice (expected once)")
    missing = next((each for each in wanted if each not in place), None)
    if missing is not None:
        raise DataError(f"{path}: does not name {missing!r}, which is in {folder}")
    at = [place[each] for each in wanted]
    test = pop_split_column(table, path)
    columns = named_columns({key: np.array(cells)[at] for key, cells in table.items()})
    return columns, None if test is None else test[at]


def _format_header(header: Sequence[str]) -> str:
    return (", ".join(header[:8]) or "none") + ", ..." * (len(header) > 8)


METADATA_COLUMNS = ("patient", "site", "split")
WHITE = 255  # of pixels; black is 0
NO_FINDING = "No Finding"  # in whatever case
_FINDING_VALUES = {"1": 1, "1.0": 1, "0": 0, "0.0": 0, "-1": -1, "-1.0": -1, "": -1}


@dataclass(frozen=True)
class CsvColumns:
    """What the columns of a table mean.

    Args:
        label: the column of classes, or of all findings divided by ``|``.
        image: the column of image files, from the folder of the csv; empty: "image" where there is one, else
            all other columns are pixels.
        group: a column that is neither pixels nor a finding; empty: none.
    """

    label: str = "label"
    image: str = ""
    group: str = ""

    def __post_init__(self) -> None:
        for option in ("label", "image", "group"):
            object.__setattr__(self, option, plain(getattr(self, option)))


# --- classes ------------------------------------------------------------------------------------------


def read_class_csv(
    path: Path,
    columns: CsvColumns,
    shape: tuple[int, ...] = (),
    size: int = 0,
    channels: int = 0,
    on_count: Callable[[int], None] = lambda count: None,
) -> RawImages:
    """Images of classes: a column of labels, and one of image files or some of pixels of a ``shape``.

    Beside image files a table may say of each where it belongs: ``split``, ``patient``, ``site`` and others.
    Other arguments as :func:`fedstill.data.user_data.read_raw_images`.
    """
    found = read_delimited_rows(path)
    _, header = next(found)
    if image := columns.image or ("image" if "image" in header else ""):
        find_column(header, image, "data.image", path)
        find_column(header, columns.label, "data.label", path)
        if columns.label == image:
            raise ArgumentError("data.label", image, "another column than that of the images")
        if columns.group:
            find_column(header, columns.group, "data.group", path)
        table = read_csv(path)
        names = table.pop(image)
        on_count(len(names))
        labels, classes = encode_labels(table.pop(columns.label), str(path))
        test = pop_split_column(table, path)
        known = {column: np.array(cells) for column, cells in table.items()}
        images = _read_listed_images(path, names, size, channels)
        return RawImages(images, labels, classes, test, known, file_names=np.array(names))
    options = {option: column for option, column in asdict(columns).items() if column or option == "label"}
    if columns.label not in header:
        allowed = f"one column of {path}, which has {_format_header(header)}; {TABULAR_HINT}"
        raise ArgumentError("data.label", columns.label, allowed)
    places = {option: find_column(header, own, f"data.{option}", path) for option, own in options.items()}
    cells: dict[str, list[str]] = {option: [] for option in places}
    rest = [column for column in range(len(header)) if column not in places.values()]
    pixels: list[npt.NDArray[np.float32]] = []
    for line, row in found:  # pixels become numbers row by row: as texts they would take far more memory
        for option, place in places.items():
            cells[option].append(row[place])
        pixels.append(
            parse_pixel_row([row[column] for column in rest], f"{path}: line {line}", f"; {TABULAR_HINT}")
        )
    labels, classes = encode_labels(cells["label"], str(path))
    images = reshape_pixel_rows(np.stack(pixels), path, shape)
    groups = {columns.group: np.array(cells["group"])} if columns.group else {}
    return RawImages(images, labels, classes, columns=groups)


def parse_pixel_row(cells: Sequence[str], where: str, hint: str = "") -> npt.NDArray[np.float32]:
    """A line of pixels as numbers; a DataError, begun by ``where``, names the first cell that is none."""
    odd = (cell for cell in cells if not (cell.isascii() and cell.isdigit()))
    wrong = next((cell for cell in odd if number_of(cell) is None), None)
    if wrong is not None:
        allowed = f"allowed are numbers, or a column of image files{hint}"
        raise DataError(f"{where} has {clip(repr(wrong), 60)}: {allowed}")
    return np.array(cells, dtype=np.float32)


def reshape_pixel_rows(
    table: npt.NDArray[np.float32], path: Path, shape: tuple[int, ...]
) -> npt.NDArray[np.float32]:
    """Rows of pixels as images from 0 to 1: ``(N, C * H * W)`` to ``(N, C, H, W)``."""
    count = table.shape[1]
    if not shape or np.prod(shape) != count:
        side = round(count**0.5)
        if count == 0 or side**2 != count:
            allowed = f"allowed is a square number of them; {TABULAR_HINT}"
            raise DataError(f"{path}: has {count} pixels a line: {allowed}")
        shape = (1, side, side)
    bad = np.flatnonzero(~((table >= 0) & (table <= WHITE)).all(axis=1))
    if len(bad):
        told = f"{len(bad)} examples hold NaN or values outside 0..{WHITE}"
        raise DataError(f"{path}: {told}, the first is example {bad[0]}")
    require_full_scale(table, str(path))
    return (table / np.float32(WHITE)).reshape(-1, *shape)


# --- findings -----------------------------------------------------------------------------------------


def read_finding_csv(
    path: Path,
    columns: CsvColumns | None = None,
    classes: Sequence[str] = (),
    size: int = 0,
    channels: int = 0,
    on_count: Callable[[int], None] = lambda count: None,
) -> RawImages:
    """Images and findings that a csv names.

    Findings stand in a column each, with 1, 0, and -1 or nothing where it is not known, or all in one column
    divided by ``|``, with "No Finding" for none. ``classes`` are the findings wanted, in order; those without
    a column are unknown everywhere. Other arguments as :func:`fedstill.data.user_data.read_raw_images`.
    """
    means = columns or CsvColumns(label="")
    image = means.image or "image"
    table = read_csv(path, image)
    on_count(len(table[image]))
    if means.label not in ("", CsvColumns.label):  # which is a node's default, and need not be there
        find_column(list(table), means.label, "data.label", path)
    listed = means.label if means.label in table else ""
    aside = {image, listed, means.group, *METADATA_COLUMNS}
    if listed:
        labels, names = _parse_finding_lists(table[listed], tuple(classes), path)
    else:
        found = [column for column in table if column not in aside]
        names = class_names(classes, "classes") or tuple(found)
        if not set(names) & set(found):
            raise DataError(f"{path}: has columns {', '.join(table)} (expected one for a finding)")
        unknown = ["-1"] * len(table[image])
        labels = np.stack(
            [_parse_finding_column(table.get(each, unknown), each, path) for each in names], axis=1
        )
    test = pop_split_column(table, path)
    known = {key: np.array(cells) for key, cells in table.items() if key in aside - {image, listed}}
    images = _read_listed_images(path, table[image], size, channels)
    return RawImages(images, labels, names, test, known, file_names=np.array(table[image]))


def _parse_finding_lists(
    cells: Sequence[str], classes: tuple[str, ...], path: Path
) -> tuple[Ints, tuple[str, ...]]:
    parts = [{plain(part) for part in cell.split("|")} for cell in cells]
    sets = [{part for part in of if part.lower() not in ("", NO_FINDING.lower())} for of in parts]
    met = ordered(set().union(*sets))
    names = class_names(classes, "classes") or tuple(met)
    for each in (each for each in met if each not in classes):
        if each.lower() in EMPTY:
            raise DataError(f"{path}: has a finding {each!r} (expected a name, or {NO_FINDING!r} for none)")
        known = [part in met for part in re.split(" *[;,] *", each)]
        if len(known) > 1 and (all(known) or (";" in each and any(known))):  # "Fracture, old" is one
            raise DataError(f"{path}: has {each!r} as one finding (expected '|' between findings)")
    unknown = next((each for each in met if each not in names), None)
    if unknown is not None:
        raise DataError(f"{path}: has a finding {unknown_name(unknown, names)}")
    if not names:
        raise DataError(f"{path}: has no finding at all (expected one or more)")
    return np.array([[int(each in found) for each in names] for found in sets], dtype=np.int64), names


def _parse_finding_column(cells: Sequence[str], finding: str, path: Path) -> Ints:
    wrong = next((cell for cell in cells if plain(cell) not in _FINDING_VALUES), None)
    if wrong is not None:
        told = f"finding {finding!r} has {wrong!r}"
        raise DataError(f"{path}: {told} (expected 1, 0, and -1 or nothing (unknown))")
    return np.array([_FINDING_VALUES[plain(cell)] for cell in cells], dtype=np.int64)


def _read_listed_images(path: Path, names: Sequence[str], size: int, channels: int) -> Images:
    """The image files that a csv names, of one form: ``(N, C, H, W)``."""
    return read_image_stack(
        ((path.parent / file, f"{path}: image {file!r}") for file in names), size, channels
    )


PARQUET_SUFFIX = ".parquet"


def read_parquet(path: Path) -> dict[str, list[Any]]:
    """The columns of a table: numbers, texts, None where there is none.

    Raises:
        DataError: it cannot be read, has no rows, or has a column twice; pyarrow is not installed.
    """
    try:
        pyarrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path}: only pyarrow reads this: pip install 'fedstill[tables]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            table = file.read()
            names, columns = (
                [plain(each) for each in table.column_names],
                [column.to_pylist() for column in table.columns],
            )
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as a table ({first_line(error)})") from error
    if twice := named_twice(names):
        raise DataError(f"{path}: has column {twice!r} twice (expected once)")
    if not table.num_rows:
        raise DataError(f"{path}: there are no examples (expected one row or more)")
    return dict(zip(names, columns, strict=True))
