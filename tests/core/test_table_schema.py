"""Table schemas: features of columns, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from fedstill.core.errors import ArgumentError
from fedstill.core.table_schema import SchemaColumn, TableSchema, first_duplicate

AGE = SchemaColumn(name="age", range=(0.0, 100.0), missing=True)
SEX = SchemaColumn(name="sex", type="category", categories=("f", "m"), missing=True)
ILL = SchemaColumn(name="ill", type="category", categories=("no", "yes"))


def test_features_follow_column_order_without_target() -> None:
    schema = TableSchema("ill", (AGE, ILL, SEX))
    assert schema.feature_names == ("age", "age: missing", "sex: f", "sex: m", "sex: missing")
    assert [(column.name, span.start, span.stop) for column, span in schema.feature_slices()] == [
        ("age", 0, 2),
        ("sex", 2, 5),
    ]
    assert TableSchema("age", (ILL, SchemaColumn(name="age", range=(0.0, 1.0)))).classes == ("age",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "name"),
        (
            {"range": (1.0,)},
            r"invalid range of column 'a' = \[1.0\] \(expected the lowest and a higher number",
        ),
        ({"range": (1.0, 1.0)}, "range"),
        ({"range": (0.0, float("inf"))}, "range"),
        ({"range": (0.0, 1.0), "categories": ("x", "y")}, "categories"),
        ({"type": "category", "range": (0.0, 1.0), "categories": ("x", "y")}, "range"),
        ({"type": "category", "categories": ("x",)}, "two or more different texts"),
        ({"type": "category", "categories": ("x", "y", "x")}, "two or more different texts"),
    ],
)
def test_rejects_invalid_columns(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SchemaColumn(**{"name": "a", **options})


@pytest.mark.parametrize(
    ("target", "columns", "message"),
    [
        ("ill", (AGE, SEX), r"invalid target = 'ill' \(expected one of the columns age, sex"),
        ("ill", (AGE, AGE, ILL), r"invalid columns = 'age' \(expected each name once"),
        ("sex", (AGE, SEX), r"invalid missing of column 'sex' = True \(expected false, as it is the target"),
        ("ill", (ILL,), "one or more besides the target"),
    ],
)
def test_rejects_invalid_schemas(target: str, columns: tuple[SchemaColumn, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TableSchema(target, columns)


def test_duplicate_check_takes_linear_time() -> None:
    """A server may send 100,000 names, for which pairwise comparison would block the node."""

    class Name(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    names = [Name(number) for number in range(1000)]
    assert first_duplicate(names) == ""
    assert first_duplicate([*names, Name(3), Name(2)]) == "3"
    assert Name.compared < 2000
