"""Drafted schemas fit their rows, and list what they leave out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core.errors import ArgumentError, DataError
from fedstill.data.schema_draft import draft_schema, round_outwards
from fedstill.data.table_data import encode_rows

Main = Callable[..., tuple[int, str, str]]  # arguments to exit code, stdout and stderr

ROWS = {
    "patient": ["a", "b", "c", "d"],
    "age": ["18", "97", "40.5", "63"],
    "bp": ["120", "", "na", "130"],
    "ward": ["x", "x", "y", ""],
    "note": ["same"] * 4,
    "nothing": [""] * 4,
    "grade": ["2", "10", "2", "1"],
}


def test_columns_become_numbers_or_categories() -> None:
    schema, left_out = draft_schema(ROWS, "grade")
    result = {column.name: column for column in schema.columns}
    assert list(result) == ["age", "bp", "ward", "grade"], "who a row is of is not learned from"
    assert (result["age"].range, result["age"].missing) == ((15.0, 100.0), False)
    assert (result["bp"].range, result["bp"].missing) == ((120.0, 130.0), True)
    assert (result["ward"].categories, result["ward"].missing) == (("x", "y"), True)
    assert schema.classes == ("1", "2", "10"), "few whole numbers are classes, in their order"
    assert left_out == {
        "patient": "it is metadata",
        "note": "it is 'same' throughout",
        "nothing": "it is empty",
    }
    assert encode_rows(ROWS, schema, "rows", str).targets.tolist() == [1, 2, 1, 0]


def test_numeric_targets_and_survival_times() -> None:
    many = {
        "x": [str(n) for n in range(30)],
        "months": [f"{n}.5" for n in range(30)],
        "died": ["0", "1"] * 15,
    }
    amount, _ = draft_schema(many, "months")
    assert amount.target_column.range == (0.0, 30.0)
    time, _ = draft_schema(many, "months", "died")
    assert (time.event, time.columns[2].categories) == ("died", ("0", "1"))


@pytest.mark.parametrize("numbers", [["-1e308", "1e308"], ["0", "5e-324"]])
def test_extreme_numbers_get_a_range_or_a_reason(numbers: list[str]) -> None:
    schema, _ = draft_schema({"": ["0", "1"], "x": numbers, "y": ["a", "b"]}, "y")
    assert [column.name for column in schema.columns] == ["x", "y"], "numbering has no name"
    assert schema.columns[0].range == (float(numbers[0]), float(numbers[1]))


def test_free_text_is_left_out() -> None:
    cells = {"x": ["1", "2"] * 30, "note": [f"text {n}" for n in range(60)], "y": ["a", "b"] * 30}
    assert draft_schema(cells, "y")[1] == {"note": "it has 60 different texts"}
    cells["note"] = ["1,234", *map(str, range(59))]
    assert "'1,234'" in draft_schema(cells, "y")[1]["note"]


@pytest.mark.parametrize("rows", [4, 400])
def test_leaves_out_numbers_with_decimal_commas(rows: int) -> None:
    numbers = [f"3,{n}" for n in range(rows - 1)]
    cells = {"x": ["1", "2"] * (rows // 2), "dose": [*numbers, "4"], "y": ["a", "b"] * (rows // 2)}
    schema, left_out = draft_schema(cells, "y")
    assert [column.name for column in schema.columns] == ["x", "y"]
    assert "'3,0'" in left_out["dose"]
    with pytest.raises(DataError, match="'dose' cannot be the target: its numbers have commas"):
        draft_schema(cells, "dose")


@pytest.mark.parametrize("rows", [8, 400])
def test_reads_question_signs_as_missing_values(rows: int) -> None:
    cells = {"x": [*map(str, range(rows - 2)), "?", "?"], "y": ["a", "b"] * (rows // 2)}
    schema, left_out = draft_schema(cells, "y")
    assert (schema.columns[0].missing, schema.columns[0].type, left_out) == (True, "number", {})


def test_merges_categories_1_and_1_0() -> None:
    cells = {"x": ["1", "2", "1.0", "4"], "y": ["1", "0", "1.0", "0.0"]}
    schema, _ = draft_schema(cells, "y")
    assert schema.classes == ("0", "1")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gread", r"invalid --target = 'gread' \(expected one of the columns patient, age"),
        ("bp", r"row \d+: column 'bp' is empty, but is the target \(1 more such\)"),
        ("note", "column 'note' cannot be the target: it is 'same' throughout"),
    ],
)
def test_error_names_an_unusable_target(target: str, message: str) -> None:
    with pytest.raises((ArgumentError, DataError), match=message):
        draft_schema(ROWS, target)


def test_rejects_tables_without_usable_inputs() -> None:
    with pytest.raises(DataError, match="no column except 'y' is usable"):
        draft_schema({"x": ["1", "1"], "y": ["a", "b"]}, "y")


@given(st.lists(st.integers(-(10**9), 10**9).map(lambda n: n / 1000), min_size=2, unique=True))
def test_rounded_range_is_tight(numbers: list[float]) -> None:
    minimum, maximum = round_outwards(numbers)
    assert minimum <= min(numbers) < max(numbers) <= maximum
    assert maximum - minimum <= 2.1 * (max(numbers) - min(numbers))


def test_command_writes_a_schema_that_a_run_reads(
    tmp_path: Path, command: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, first in (("berlin", 0), ("paris", 40)):
        lines = [
            f"{n % 50},{'fm'[n % 3 == 0]},{'yes' if n % 50 > 24 else 'no'}" for n in range(first, first + 40)
        ]
        Path(f"{name}.csv").write_text("\n".join(["age,sex,ill", *lines]))
    code, out, _ = command("data", "schema", "berlin.csv", "paris.csv", "--target", "ill")
    assert code == 0
    assert "schema.toml: 3 columns, from 80 rows." in out
    assert "  age: 0 to 50\n  sex: f, m\n  ill: no, yes\n" in out
    assert "widen them" in out
    by_files = "--split.name column --split.column site --split.nodes 0"
    assert f"Try: fedstill run wine-fediod --data . {by_files} --name mine\n" in out, "each file is a node"
    assert "misspelt" not in out
    code, message, _ = command("config", "wine-fediod", "--data", "berlin.csv")
    assert code == 0, message
    assert command("data", "schema", "berlin.csv", "--target", "ill")[2].startswith(
        "fedstill: invalid --out = 'schema.toml'"
    )
    Path("other.csv").write_text("age\n3\n")
    message = command("data", "schema", "berlin.csv", "other.csv", "--target", "ill", "--out", "new.toml")[2]
    assert message == "fedstill: other.csv: has other columns than berlin.csv (expected the same)\n"
    assert not Path("new.toml").exists()
    text = Path("paris.csv").read_text()
    Path("paris.csv").write_text(f"{text}\n30,F,no")
    out = command("data", "schema", "berlin.csv", "paris.csv", "--target", "ill", "--out", "new.toml")[1]
    assert "Once only, perhaps misspelt: 'F' of sex.\n" in out
    Path("paris.csv").write_text(f"{text}\n30,f,\n31,f,")
    message = command("data", "schema", "berlin.csv", "paris.csv", "--target", "ill", "--out", "newer.toml")[
        2
    ]
    where = "fedstill: paris.csv, line 42: column 'ill' is empty, but is the target (1 more such)\n"
    assert message == where
