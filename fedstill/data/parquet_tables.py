"""Tables in Parquet files, as cells. Read by pyarrow (the extra "tables")."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from fedstill.core.errors import DataError
from fedstill.core.names import plain
from fedstill.core.table_schema import named_twice
from fedstill.core.user_functions import first_line

SUFFIX = ".parquet"


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
        raise DataError(f"{path}: has column {twice!r} twice: allowed is once")
    if not table.num_rows:
        raise DataError(f"{path}: there are no examples: allowed is one row or more")
    return dict(zip(names, columns, strict=True))
