"""Tables with a header: of findings, or of what is known of cases."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedstill.core.dataset import Column
from fedstill.core.errors import DataError
from fedstill.core.imports import first_line

CASES = "cases.csv"
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")
_PARTS = {"train": False, "test": True, "0": False, "1": True}


def read_csv(path: Path) -> dict[str, list[str]]:
    """A table by columns, cells without blanks around them; empty lines are passed over.

    Raises:
        DataError: it cannot be read, has no lines, or a line of another length; two columns of one name.
    """
    lines: list[list[str]] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream)
            header = [name.strip() for name in next(reader, [])]
            for line in reader:
                if not line:
                    continue
                if len(line) != len(header):
                    told = f"line {reader.line_num} has {len(line)} cells: allowed are {len(header)}"
                    raise DataError(f"{path}: {told}")
                lines.append([cell.strip() for cell in line])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a csv ({first_line(error)})") from error
    if not lines:
        raise DataError(f"{path}: there are no lines: allowed is one or more below the header")
    for name in header:
        if header.count(name) > 1:
            raise DataError(f"{path}: has column {name!r} twice: allowed is once")
    return {name: [line[place] for line in lines] for place, name in enumerate(header)}


def parts(cells: Sequence[str], path: Path) -> npt.NDArray[np.bool_]:
    """A column "split": which are for testing.

    Raises:
        DataError: a cell that is neither train (or 0) nor test (or 1).
    """
    wrong = next((cell for cell in cells if cell not in _PARTS), None)
    if wrong is not None:
        raise DataError(f"{path}: split has {wrong!r}: allowed are train and test")
    return np.array([_PARTS[cell] for cell in cells])


def about(folder: Path, names: Sequence[str]) -> tuple[dict[str, Column], npt.NDArray[np.bool_] | None]:
    """What ``cases.csv`` of a folder says of its cases: columns ``(N,)``, and which are for testing.

    The table has a column ``name``, and any others: ``patient``, ``site``, ``split``. Further columns of
    numbers are numbers, so that nodes can be made by their order.

    Args:
        folder: which may have none.
        names: the cases found, ``(N,)``.

    Raises:
        DataError: a table without names, or that does not name one of the cases, or names one twice.
    """
    path = folder / CASES
    if not path.is_file():
        return {}, None
    table = read_csv(path)
    listed = table.pop("name", None)
    if listed is None:
        raise DataError(f"{path}: has no column 'name', only {', '.join(table) or 'none'}")
    place = {name: row for row, name in enumerate(listed)}
    if len(place) < len(listed):
        twice = next(name for name in listed if listed.count(name) > 1)
        raise DataError(f"{path}: names {twice!r} twice: allowed is once")
    missing = next((name for name in names if name not in place), None)
    if missing is not None:
        raise DataError(f"{path}: does not name {missing!r}, which is in {folder}")
    rows = [place[name] for name in names]
    test = parts([table["split"][row] for row in rows], path) if "split" in table else None
    table.pop("split", None)
    return {key: _column(key, cells)[rows] for key, cells in table.items()}, test


def _column(name: str, cells: Sequence[str]) -> Column:
    """Cells as numbers where all are, but for names of patients and sites, which only look so."""
    if name not in ("patient", "site") and all(NUMBER.fullmatch(cell) for cell in cells):
        return np.array([float(cell) for cell in cells])
    return np.array(cells)
