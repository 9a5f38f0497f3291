"""Tables: rows, schemas, drafts of schemas, and features; CSV files and folders; rows of a node."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.dataset import DataSet
from fedstill.core.errors import ArgumentError, DataError, FedstillError, MemoryLimitExceeded
from fedstill.core.seeds import torch_generator
from fedstill.core.table_schema import SchemaColumn, TableSchema
from fedstill.data import Dirichlet, make_data_config, node_data, split, table_files
from fedstill.data.data_spec import DataSpec
from fedstill.data.loading import load
from fedstill.data.node_data import NodeDataConfig
from fedstill.data.public import PublicConfig, load_public
from fedstill.data.table_data import (
    check_features,
    draft_schema,
    encode_rows,
    read_schema,
    read_table_folder,
    round_outwards,
    sample_rows,
)
from fedstill.tasks.classification import ClassificationConfig, TabularConfig
from fedstill.tasks.regression import RegressionConfig
from tests.support.errors import raises_invalid

SCHEMA = """
target = "ill"

[[columns]]
name = "age"
range = [0, 100]
missing = true

[[columns]]
name = "ward"
type = "category"
categories = ["1", "2", "NA"]

[[columns]]
name = "ill"
type = "category"
categories = ["no", "yes"]
"""
NUMBERS = """
target = "dose"
columns = [{ name = "age", range = [0, 100], missing = true }, { name = "dose", range = [0, 1] }]
"""
BERLIN = "ill,id,age,ward,split\nyes,7,75,2,train\nno,8,,NA,train\nno,9,0,1,test\n"
PARIS = "ward,age,ill,split\n1,100,yes,train\n1, 50 ,no,test\n"
TASK = TabularConfig()


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    folder = tmp_path / "hospitals"
    folder.mkdir()
    for name, text in {"schema.toml": SCHEMA, "berlin.csv": BERLIN, "paris.csv": PARIS}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def of(path: Path, **options: object) -> DataSet:
    return load(make_data_config(str(path), **options), TASK)


# --- rows -----------------------------------------------------------------------------------------------


def test_reads_a_folder_of_csv_files(hospitals: Path) -> None:
    data = of(hospitals)
    rows = [[0.5, 0, 0, 1, 0], [0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]
    assert data.train.inputs.tolist() == rows
    assert data.train.targets.tolist() == [1, 0, 1]
    assert data.test.inputs.tolist() == [[-1, 0, 1, 0, 0], [0, 0, 1, 0, 0]]
    assert (data.name, data.classes, data.mean, data.vocabulary) == ("hospitals", ("no", "yes"), (), 0)
    assert data.columns["site"].tolist() == ["berlin", "berlin", "paris"]
    assert "id" not in data.columns, "paris.csv has no such column"
    assert data.schema == read_schema(hospitals / "schema.toml")


@pytest.mark.parametrize("column", ["patient", "site"])
def test_rejects_metadata_columns_that_some_tables_lack(hospitals: Path, column: str) -> None:
    (hospitals / "berlin.csv").write_text(BERLIN.replace("id", column))
    with pytest.raises(DataError, match=rf"paris\.csv: has no column '{column}'"):
        of(hospitals)


def test_folder_reads_all_table_suffixes_but_no_hidden_files(hospitals: Path) -> None:
    schema = read_schema(hospitals / "schema.toml")
    (hospitals / "berlin.csv").rename(hospitals / "St. Ber.CSV")
    (hospitals / "rome.tsv").write_text(PARIS.replace(",", "\t"))
    (hospitals / "oslo.CSV.GZ").write_bytes(gzip.compress(PARIS.encode()))
    (hospitals / "._berlin.csv").write_bytes(b"\x00\x05\x16\x07\xff")
    rows = read_table_folder(hospitals, schema)
    sites = dict.fromkeys(rows.columns["site"].tolist())
    assert list(sites) == ["St. Ber", "oslo", "paris", "rome"]
    assert len(rows.data) == 3 + 2 + 2 + 2
    for name, count in {"rome.tsv": 2, "oslo.CSV.GZ": 2, "St. Ber.CSV": 3}.items():
        data = of(hospitals / name)
        assert len(data.train) + len(data.test) == count


def test_reads_one_csv_with_a_separate_schema(hospitals: Path) -> None:
    moved = hospitals.parent / "columns.toml"
    (hospitals / "schema.toml").rename(moved)
    data = of(hospitals / "berlin.csv", schema=str(moved))
    assert (len(data.train), len(data.test), data.name) == (2, 1, "berlin")
    with pytest.raises(ArgumentError, match=r"data\.schema .*schema\.toml"):
        of(hospitals)


def test_parquet_and_csv_agree(hospitals: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    as_csv = of(hospitals)
    (hospitals / "paris.csv").unlink()
    columns = {
        "ward": [1, 1],  # integers, a column with a missing value, and numeric categories
        "age": [100.0, 50.0],
        "ill": arrow.array(["yes", "no"]).dictionary_encode(),
        "split": ["train", "test"],
    }
    parquet.write_table(arrow.table(columns), hospitals / "paris.parquet")
    table = of(hospitals)
    assert torch.equal(table.train.inputs, as_csv.train.inputs)
    assert torch.equal(table.test.targets, as_csv.test.targets)
    assert table.columns["site"].tolist() == ["berlin", "berlin", "paris"]
    alone = of(hospitals / "paris.parquet")
    assert (len(alone.train), alone.name) == (1, "paris")
    parquet.write_table(arrow.table({**columns, "age": [None, 101]}), hospitals / "own.parquet")
    spec = DataSpec.from_data(TASK, as_csv)
    with pytest.raises(DataError, match=r"own\.parquet, row 2: .*'age' is 101 .*0 to 100"):
        node_data.load_node_data(NodeDataConfig("parquet", "own.parquet"), hospitals, spec)
    parquet.write_table(arrow.table({**columns, "age": [None, 7]}), hospitals / "own.parquet")
    specific, _ = node_data.load_node_data(NodeDataConfig("parquet", "own.parquet"), hospitals, spec)
    assert specific.inputs.tolist() == [[0, 1, 1, 0, 0]]


def test_parquet_errors_are_one_line(hospitals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = hospitals / "berlin.parquet"
    parquet.write_table(arrow.table({"age": []}), path)
    with pytest.raises(DataError, match=r"'berlin\.csv' and 'berlin\.parquet'"):
        of(hospitals)
    with pytest.raises(DataError, match="no examples"):
        of(path)
    path.write_bytes(b"age,ill")
    with pytest.raises(DataError, match=r"berlin\.parquet: .*a table"):
        of(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pyarrow: .*'fedstill\[tables\]'"):
        of(path)


def test_rows_of_one_patient_stay_together(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA, encoding="utf-8")
    lines = [f"{n % 9},{n % 9},{1 + n % 2},{('no', 'yes')[n % 2]}" for n in range(54)]
    (tmp_path / "a.csv").write_text("\n".join(["patient,age,ward,ill", *lines]), encoding="utf-8")
    data = of(tmp_path, test_fraction=0.3)
    train, test = (set(part.inputs[:, 0].tolist()) for part in (data.train, data.test))
    assert (len(train), len(test)) == (6, 3)
    assert not train & test


@pytest.mark.parametrize(
    ("line", "error_text"),
    [
        ("no,9,101,1,train", r"berlin\.csv, line 5: column 'age' is 101 \(expected 0 to 100, or nothing"),
        ("no,9,old,1,train", r"line 5: column 'age' is old \(expected 0 to 100"),
        ("no,9,inf,1,train", r"line 5: column 'age' is inf"),
        ("no,9,1,3,train", r"line 5: column 'ward' is '3' \(expected 1, 2, NA"),
        ("no,9,1,,train", r"line 5: column 'ward' is nothing"),
        ("maybe,9,1,1,train", r"line 5: column 'ill' is 'maybe' \(expected no, yes\)"),
        ("no,9,1,1", r"line 5 has 4 cells \(expected 5"),
        ("no,9,1,1,later", r"split has 'later'"),
    ],
)
def test_schema_violation_names_file_line_and_column(hospitals: Path, line: str, error_text: str) -> None:
    (hospitals / "berlin.csv").write_text(BERLIN + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=error_text):
        of(hospitals)


def test_schema_violations_are_listed_by_column_and_counted(hospitals: Path) -> None:
    wrong = "no,9,old,1,train\nmaybe,9,101,1,train\nno,9,5,1,train\nno,9,-1,1,train\n"
    (hospitals / "berlin.csv").write_text(BERLIN + wrong, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        of(hospitals)
    first, second = str(caught.value).split("; ")
    assert first.endswith(r"line 5: column 'age' is old (expected 0 to 100, or nothing) (2 more such)")
    assert second.endswith(r"line 6: column 'ill' is 'maybe' (expected no, yes)")
    many = "".join(f'[[columns]]\nname = "c{n}"\nrange = [0, 1]\n' for n in range(7))
    (hospitals / "schema.toml").write_text(f'target = "c0"\n{many}', encoding="utf-8")
    for name in ("berlin", "paris"):
        row = ",".join(f"c{n}" for n in range(7)) + "\n" + ",".join(["x" * 3000] * 7)
        (hospitals / f"{name}.csv").write_text(row, encoding="utf-8")
    with pytest.raises(DataError, match=r"'c1' is x{57}\.\.\..*2 more") as caught:
        read_table_folder(hospitals, read_schema(hospitals / "schema.toml"))
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("name", "text", "error_text"),
    [
        ("berlin.csv", "age,ill\n1,no\n", r"berlin\.csv: has no column 'ward'"),
        ("berlin.csv", "age,age,ward,ill\n1,1,1,no\n", "has column 'age' twice"),
        ("paris.csv", "age,ward,ill\n1,1,no\n", r"paris\.csv: has no column 'split'"),
        ("schema.toml", "target = 'ill'\ncolumns = 3", r"schema\.toml: invalid columns = 3"),
        ("schema.toml", "", r"schema\.toml: has no columns"),
        ("schema.toml", "target = 'ill'", r"schema\.toml: has no columns"),
        (
            "schema.toml",
            SCHEMA.replace("[0, 100]", "[100, 0]"),
            r"schema\.toml: invalid range of column 'age'",
        ),
        ("schema.toml", SCHEMA + "unit = 'mg'", r"schema\.toml: unknown key 'columns\[2\]\.unit'"),
        ("schema.toml", NUMBERS, "target 'dose' of the schema is a number .*for task tabular"),
    ],
)  # fmt: skip
def test_table_errors_are_one_line(hospitals: Path, name: str, text: str, error_text: str) -> None:
    (hospitals / name).write_text(text, encoding="utf-8")
    if text == NUMBERS:
        (hospitals / "berlin.csv").write_text("age,dose,split\n1,1,train\n", encoding="utf-8")
        (hospitals / "paris.csv").write_text("age,dose,split\n1,1,test\n", encoding="utf-8")
    with pytest.raises(FedstillError, match=error_text):
        of(hospitals)


def test_rejects_tables_for_image_tasks_and_vice_versa(hospitals: Path) -> None:
    with pytest.raises(ArgumentError, match=r"data\.name = 'wine'"):
        load(make_data_config("wine"), ClassificationConfig())
    with raises_invalid("data.name", "digits", "breast-cancer, wine", "task tabular"):
        load(make_data_config("digits"), TASK)
    with pytest.raises(ArgumentError, match=r"data\.size = 8"):
        of(hospitals, size=8)


def test_regression_targets_are_scaled_and_stratified(hospitals: Path) -> None:
    (hospitals / "schema.toml").write_text(NUMBERS, encoding="utf-8")
    (hospitals / "paris.csv").unlink()
    cells = "\n".join(f"{age},{age / 100}" for age in range(100))
    (hospitals / "berlin.csv").write_text(f"age,dose\n{cells}\n", encoding="utf-8")
    data = load(make_data_config(str(hospitals)), RegressionConfig())
    assert data.classes == ("dose",)
    assert torch.allclose(data.train.targets, data.train.inputs[:, :1], atol=1e-6)
    assert torch.bincount((data.test.targets[:, 0] * 2.5 + 2.5).floor().long()).tolist() == [4] * 5
    parts = split(data.train.targets, 1, Dirichlet(nodes=3, alpha=0.1), np.random.default_rng(0))
    means = [data.train.targets[part].mean().item() for part in parts]
    assert max(means) - min(means) > 0.3


# --- features depend on their row only ------------------------------------------------------------------

ROW = st.tuples(st.one_of(st.none(), st.floats(0, 100)), st.sampled_from(("1", "2", "NA")))


@given(st.lists(ROW, min_size=1, max_size=6), st.lists(ROW, max_size=6))
@settings(max_examples=50, deadline=None)
def test_features_of_a_row_depend_on_that_row_only(
    some: list[tuple[float | None, str]], others: list[tuple[float | None, str]]
) -> None:
    columns = tuple(read_columns())
    schema = TableSchema("ill", columns)

    def features(rows: list[tuple[float | None, str]]) -> torch.Tensor:
        cells = {
            "age": [age for age, _ in rows],
            "ward": [ward for _, ward in rows],
            "ill": ["no"] * len(rows),
        }
        return encode_rows(cells, schema, "rows", str).inputs

    assert torch.equal(features(some + others)[: len(some)], features(some))
    check_features(features(some), schema, "rows")


def read_columns() -> list[SchemaColumn]:
    return [
        SchemaColumn(name="age", range=(0.0, 100.0), missing=True),
        SchemaColumn(name="ward", type="category", categories=("1", "2", "NA")),
        SchemaColumn(name="ill", type="category", categories=("no", "yes")),
    ]


def test_numeric_cells_match_integer_categories() -> None:
    cells = {"age": [1, float("nan")], "ward": [1.0, np.float64(2)], "ill": ["no", "yes"]}
    data = encode_rows(cells, TableSchema("ill", tuple(read_columns())), "rows", str)
    assert data.inputs[:, 1:].tolist() == [[0, 1, 0, 0], [1, 0, 1, 0]]


@pytest.mark.parametrize(
    ("row", "error_text"),
    [
        ([1.2, 0, 1, 0, 0], r"row 0 has 1.2 for 'age' \(expected from -1 to 1"),
        ([0, 0.5, 1, 0, 0], r"has 0.5 for 'age: missing' \(expected 0 or 1"),
        ([0, 0, 0.5, 0.5, 0], r"for 'ward: 1' \(expected 0 or 1"),
        ([0, 0, 1, 0], r"have \(4,\) features \(expected 5"),
    ],
)
def test_rejects_features_outside_the_schema(row: list[float], error_text: str) -> None:
    with pytest.raises(DataError, match=error_text):
        check_features(torch.tensor([row]), TableSchema("ill", tuple(read_columns())), "public data")


def test_sampled_rows_cover_the_schema() -> None:
    schema = TableSchema("ill", tuple(read_columns()))
    rows = sample_rows(schema, 500, torch_generator(0, "drawn"))
    check_features(rows, schema, "drawn")
    assert rows[:, 2:].sum(1).eq(1).all()
    assert rows.amin(0).lt(0).tolist() == [True, False, False, False, False]
    assert rows.mean(0)[1:].sub(torch.tensor([1 / 2, 1 / 3, 1 / 3, 1 / 3])).abs().max() < 0.08
    assert (rows[rows[:, 1] == 1, 0] == 0).all()


# --- public data ------------------------------------------------------------------------------------------


def test_public_rows_are_sampled_or_from_a_table_of_the_same_schema(hospitals: Path) -> None:
    data = of(hospitals)
    _, noise = load_public(PublicConfig("noise", limit=7), data, TASK)
    assert noise is not None
    assert (noise.inputs.shape, noise.labels) == ((7, 5), None)
    _, other = load_public(PublicConfig(str(hospitals / "berlin.csv")), data, TASK)
    assert other is not None
    assert other.labels is not None
    assert (len(other), other.labels.tolist()) == (2, [1, 0])
    with raises_invalid("public.name", "wine", "same schema", "hospitals"):
        load_public(PublicConfig("wine"), data, TASK)


# --- nodes ------------------------------------------------------------------------------------------------


def test_node_checks_rows_against_the_servers_schema(hospitals: Path) -> None:
    data = of(hospitals)
    spec = DataSpec.from_data(TASK, data)
    assert DataSpec.from_dict(spec.to_dict()) == spec
    specific, _ = node_data.load_node_data(NodeDataConfig("csv", "berlin.csv", group="id"), hospitals, spec)
    assert specific.inputs.tolist() == [[0.5, 0, 0, 1, 0], [0, 1, 0, 0, 1]], "test rows are excluded"
    assert specific.groups is not None
    assert len(specific.groups.unique()) == 2
    narrow = replace(
        data.schema, columns=(replace(data.schema.columns[0], range=(0.0, 70.0)), *data.schema.columns[1:])
    )
    with pytest.raises(DataError, match=r"berlin\.csv, line 2: .*'age' is 75 .*0 to 70"):
        node_data.load_node_data(NodeDataConfig("csv", "berlin.csv"), hospitals, replace(spec, schema=narrow))
    with pytest.raises(MemoryLimitExceeded):
        node_data.load_node_data(NodeDataConfig("csv", "berlin.csv"), hospitals, spec, max_bytes=100)


@pytest.mark.parametrize(
    ("options", "error_text"),
    [
        (
            {"source": "npz"},
            r"invalid data\.source = 'npz' \(expected csv or parquet for task tabular: the columns of",
        ),
        ({"fit": True}, r"invalid data\.fit = True \(expected false for task tabular"),
        ({"group": "name"}, r"invalid data\.group = 'name' \(expected a column .*: ill, id, age"),
    ],
)
def test_rejects_node_options_without_effect_on_tables(
    hospitals: Path, options: dict[str, object], error_text: str
) -> None:
    config = NodeDataConfig(**{"source": "csv", "path": "berlin.csv", **options})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=error_text):
        node_data.load_node_data(config, hospitals, DataSpec.from_data(TASK, of(hospitals)))


def test_rejects_specs_without_a_matching_schema(hospitals: Path) -> None:
    data = of(hospitals)
    spec = DataSpec.from_data(TASK, data)
    with pytest.raises(ArgumentError, match=r"spec\.schema"):
        replace(spec, schema=TableSchema())
    with raises_invalid("spec.schema", "ill", "one of 6 features"):
        replace(spec, shape=(6,))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"age;weight;ill\n41;70;0\n", r"its cells are separated by ';' \(expected commas"),
        ("age,größe,ill\n41,170,0\n".encode("latin-1"), "it is not UTF-8: a spreadsheet saves it so"),
    ],
)
def test_spreadsheet_errors_explain_how_to_save(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(table_files.read_delimited_rows(tmp_path / "own.csv"))


Main = Callable[..., tuple[int, str, str]]  # arguments -> exit code, stdout, stderr

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
    assert list(result) == ["age", "bp", "ward", "grade"], "patient ids are not features"
    assert (result["age"].range, result["age"].missing) == ((15.0, 100.0), False)
    assert (result["bp"].range, result["bp"].missing) == ((120.0, 130.0), True)
    assert (result["ward"].categories, result["ward"].missing) == (("x", "y"), True)
    assert schema.classes == ("1", "2", "10"), "integers with few values are ordered classes"
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
    assert [column.name for column in schema.columns] == ["x", "y"], "row numbers have no column name"
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
    with pytest.raises(DataError, match=r"'dose' .*target.* commas"):
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
    with pytest.raises(DataError, match=r"no column .*'y'"):
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
