"""Tables with a header: rows of a csv, whole columns, and what ``cases.csv`` tells of a folder's cases."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedstill.core.dataset import Column
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.imports import first_line

CASES = "cases.csv"
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")
_TRAIN, _TEST, _DEV = ("train", "0"), ("test", "1"), ("dev", "valid", "validation")


def rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a ``.csv`` or ``.tsv``, which may end in ``.gz``, with their lines: the header first.

    Cells come without blanks around them; empty lines are passed over.

    Raises:
        DataError: it cannot be read, has nothing below a header, or a row of another length.
    """
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, delimiter="\t" if ".tsv" in path.suffixes else ",")
            header = [name.strip() for name in next(reader, [])]
            yield 1, header
            empty = True
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    told = f"line {reader.line_num} has {len(row)} cells: allowed are {len(header)}"
                    raise DataError(f"{path}: {told}")
                empty = False
                yield reader.line_num, [cell.strip() for cell in row]
            if empty:
                raise DataError(
                    f"{path}: there are no examples: allowed is one line or more below the header"
                )
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as a table ({first_line(error)})") from error


def column_of(header: Sequence[str], name: str, option: str, path: Path) -> int:
    """The place of a column that an option names; an ArgumentError if there is none, or there are several."""
    if header.count(name) != 1:
        raise ArgumentError(option, name, f"one column of {path}, which has {_listed(header)}")
    return header.index(name)


def read_csv(path: Path, *needed: str) -> dict[str, list[str]]:
    """A table by columns, some of which it must have; a DataError if one is missing, or two have one name."""
    (_, header), *below = rows(path)
    for name in needed:
        if name not in header:
            raise DataError(f"{path}: has no column {name!r}, only {_listed(header)}")
    for name in header:
        if header.count(name) > 1:
            raise DataError(f"{path}: has column {name!r} twice: allowed is once")
    return {name: [row[place] for _, row in below] for place, name in enumerate(header)}


def told_part(table: dict[str, list[str]], path: Path, dev: bool = False) -> npt.NDArray[np.bool_] | None:
    """Which rows are for testing, by a column "split", which is taken out; None where there is none.

    With ``dev`` a source's own validation part is for training, too, as is usual with texts.
    """
    if "split" not in table:
        return None
    cells = [cell.lower() for cell in table.pop("split")]
    train = (*_TRAIN, *_DEV) if dev else _TRAIN
    wrong = next((cell for cell in cells if cell not in (*train, *_TEST)), None)
    if wrong is not None:
        told = "train, dev and test" if dev else "train and test"
        raise DataError(f"{path}: split has {wrong!r}: allowed are {told}")
    return np.array([cell in _TEST for cell in cells])


def about(folder: Path, names: Sequence[str]) -> tuple[dict[str, Column], npt.NDArray[np.bool_] | None]:
    """What ``cases.csv`` of a folder says of its cases: columns ``(N,)``, and which are for testing.

    The table has a column ``name``, and any others: ``patient``, ``site``, ``split``. Further columns of
    numbers are numbers, so that nodes can be made by their order. It names each case, once.
    """
    path = folder / CASES
    if not path.is_file():
        return {}, None
    table = read_csv(path, "name")
    listed = table.pop("name")
    place = {name: row for row, name in enumerate(listed)}
    if len(place) < len(listed):
        twice = next(name for name in listed if listed.count(name) > 1)
        raise DataError(f"{path}: names {twice!r} twice: allowed is once")
    missing = next((name for name in names if name not in place), None)
    if missing is not None:
        raise DataError(f"{path}: does not name {missing!r}, which is in {folder}")
    at = [place[name] for name in names]
    test = told_part(table, path)
    return {key: _column(key, cells)[at] for key, cells in table.items()}, None if test is None else test[at]


def _listed(header: Sequence[str]) -> str:
    return (", ".join(header[:8]) or "none") + ", ..." * (len(header) > 8)


def _column(name: str, cells: Sequence[str]) -> Column:
    """Cells as numbers where all are, but for names of patients and sites, which only look so."""
    if name not in ("patient", "site") and all(NUMBER.fullmatch(cell) for cell in cells):
        return np.array([float(cell) for cell in cells])
    return np.array(cells)
