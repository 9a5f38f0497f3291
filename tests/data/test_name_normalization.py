"""Equivalent spellings and Unicode forms of a name are one patient, site, class or category."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.table_schema import SchemaColumn, TableSchema
from fedstill.data import load, make_data_config
from fedstill.data.data_spec import DataSpec
from fedstill.data.image_folders import find_image_files, read_class_folders
from fedstill.data.instance_images import InstanceImage, unit_and_owner_index
from fedstill.data.new_data import EvaluationDataOptions, load_labeled, load_unlabeled
from fedstill.data.node_data import NodeDataConfig
from fedstill.data.node_data import load_node_data as load_node
from fedstill.data.partitioners import ByColumn
from fedstill.data.raw_images import RawImages, raw_images_from_arrays
from fedstill.data.table_data import encode_rows, read_cells
from fedstill.data.table_data import read_table_folder as read_tables
from fedstill.data.table_files import CsvColumns, read_finding_csv
from fedstill.data.text_data import read_labeled_texts
from fedstill.methods.fedavg import FedAvg
from fedstill.runs.build import split_data
from fedstill.runs.spec import RunSpec
from fedstill.tasks.classification import ClassificationConfig
from tests.support.errors import raises_invalid

COMPOSED, PARTED, HIDDEN, BLANK = "M\u00fcller", "Mu\u0308ller", "M\u00fc\u200bller", "M\u00fcller\u00a0"
ONE = [COMPOSED, PARTED, HIDDEN, BLANK]
PIXELS = np.random.default_rng(0).integers(0, 256, (16, 8, 8), dtype=np.uint8)


def write_png(path: Path, row: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(PIXELS[row]).save(path)


def write_npz(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "mine.npz", **{"images": PIXELS, "labels": ["a", "b"] * 8, **arrays})
    return str(folder / "mine.npz")


def csv_of_images(folder: Path, **columns: list[str]) -> str:
    columns = {"image": [f"{row}.png" for row in range(16)], "label": ["a", "b"] * 8, **columns}
    for row in range(16):
        write_png(folder / f"{row}.png", row)
    lines = [",".join(columns), *(",".join(cells) for cells in zip(*columns.values(), strict=True))]
    (folder / "mine.csv").write_text("\n".join(lines), encoding="utf-8")
    return str(folder / "mine.csv")


def folder_of_images(folder: Path, patient: list[str], site: list[str] | None = None) -> str:
    lines = ["name,patient" + (",site" if site else "")]
    for row in range(16):
        write_png(folder / "in" / "ab"[row % 2] / f"\u00fc{row}.png", row)
        options = [f"{'ab'[row % 2]}/u\u0308{row}", patient[row], *([site[row]] if site else [])]
        lines.append(",".join(options))
    (folder / "in" / "cases.csv").write_text("\n".join(lines), encoding="utf-8")
    return str(folder / "in")


READERS: list[Callable[..., str]] = [write_npz, csv_of_images, folder_of_images]


@pytest.mark.parametrize("reader", READERS)
def test_counts_a_patient_in_several_spellings_once(tmp_path: Path, reader: Callable[..., str]) -> None:
    patients = [*ONE, *ONE, *("b", "b ", "c", "d") * 2]
    data = load(make_data_config(reader(tmp_path, patient=patients)))
    both = [{*part.tolist()} for part in (data.columns["patient"], data.test_columns["patient"])]
    assert both[0] | both[1] == {COMPOSED, "b", "c", "d"}
    assert not both[0] & both[1]
    assert data.train.groups is not None
    assert len(set(data.train.groups.tolist())) == len(both[0])


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("one", "other"), [("P1", "p1"), ("P1", "P\uff11"), ("7", "7.0"), ("7", "07")])
def test_rejects_patients_that_differ_by_case(
    tmp_path: Path, reader: Callable[..., str], one: str, other: str
) -> None:
    path = reader(tmp_path, patient=[one, other, "a", "b"] * 4)
    with pytest.raises(DataError, match="'patient' has"):
        load(make_data_config(path))


def test_node_groups_ignore_spelling_of_one_name(tmp_path: Path) -> None:
    write_npz(tmp_path, patient=[*ONE, *"abcdefghijkl"])
    spec = DataSpec(ClassificationConfig(), ("a", "b"), (1, 8, 8), (0.5,), (0.5,))
    data, _ = load_node(NodeDataConfig(path="mine.npz", group="patient"), tmp_path, spec)
    assert data.groups is not None
    assert len(set(data.groups[:4].tolist())) == 1
    write_npz(tmp_path, patient=["P1", "p1", *"abcdefghijklmn"])
    with pytest.raises(DataError, match="'P1' and 'p1'"):
        load_node(NodeDataConfig(path="mine.npz", group="patient"), tmp_path, spec)


@pytest.mark.parametrize("reader", READERS)
def test_site_in_two_normal_forms_is_one_node(tmp_path: Path, reader: Callable[..., str]) -> None:
    path = reader(tmp_path, patient=[*"abcdefghijklmnop"], site=[*ONE, *ONE, *("Ulm",) * 8])
    config = RunSpec(
        data=make_data_config(path, test_fraction=0.25),
        split=ByColumn(column="site", nodes=0, minimum=1),
        method=FedAvg(),
    )
    assert len(split_data(config, load(config.data))[0]) == 2


def test_notes_sites_and_classes_that_differ_by_case(tmp_path: Path) -> None:
    path = write_npz(tmp_path, labels=["cat", "Cat"] * 8, site=["Ulm", "Ulm", "ulm", "ulm"] * 4)
    note = load(make_data_config(path)).note
    assert "classes 'Cat' and 'cat' differ by case only" in note
    assert "sites 'Ulm' and 'ulm' differ by case only" in note


def test_rejects_columns_named_nearly_patient(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'Patient' .*'patient'"):
        load(make_data_config(write_npz(tmp_path, Patient=[*"abcdefgh"] * 2)))


@pytest.mark.parametrize("reader", [write_npz, csv_of_images])
def test_class_in_two_normal_forms_is_one_class(tmp_path: Path, reader: Callable[..., str]) -> None:
    assert load(
        make_data_config(
            reader(tmp_path, label=[*ONE, *"xxxx"] * 2)
            if reader is csv_of_images
            else reader(tmp_path, labels=[*ONE, *"xxxx"] * 2)
        )
    ).classes == (COMPOSED, "x")


def test_class_folders_of_one_name_are_merged(tmp_path: Path) -> None:
    for row, name in enumerate([COMPOSED, PARTED, "x", "x"]):
        write_png(tmp_path / "train" / name / f"{row}.png", row)
    write_png(tmp_path / "test" / PARTED / "t.png")
    raw = read_class_folders(tmp_path)
    assert raw.classes == (COMPOSED, "x")
    assert raw.labels.tolist() == [0, 0, 1, 1, 0]


def test_images_match_masks_in_either_normal_form(tmp_path: Path) -> None:
    write_png(tmp_path / "images" / f"{COMPOSED}.png")
    write_png(tmp_path / "masks" / f"{PARTED}.png")
    assert find_image_files(tmp_path, masks=True).names == (COMPOSED,)


def test_instance_image_normalizes_its_patient() -> None:
    nothing = np.zeros((8, 8), np.int32)
    image_list = [InstanceImage(PIXELS[:1], nothing, str(row), patient=each) for row, each in enumerate(ONE)]
    assert unit_and_owner_index(image_list)[1].tolist() == [0, 0, 0, 0]


def test_text_labels_are_matched_by_name(tmp_path: Path) -> None:
    lines = ["text,label,patient", *(f"t,{name},{name}" for name in [*ONE, "x"])]
    (tmp_path / "t.csv").write_text("\n".join(lines), encoding="utf-8")
    result = read_labeled_texts(tmp_path / "t.csv")
    assert (result.labels.tolist(), result.classes) == ([0, 0, 0, 0, 1], (COMPOSED, "x"))
    assert set(result.columns["patient"].tolist()) == {COMPOSED, "x"}
    lines = ["text,label", *(f"t,{number}" for number in range(1, 11))]
    (tmp_path / "t.csv").write_text("\n".join(lines), encoding="utf-8")
    assert read_labeled_texts(tmp_path / "t.csv").classes == tuple(map(str, range(1, 11)))


def ward(*categories: str) -> TableSchema:
    age = SchemaColumn(name="age", range=(0.0, 100.0))
    return TableSchema("ward", (age, SchemaColumn(name="ward", type="category", categories=categories)))


def test_category_in_two_normal_forms_is_one_category() -> None:
    schema = ward(PARTED, "b")
    cells = {"age": ["1"] * 5, "ward": [*ONE, "b"]}
    assert encode_rows(cells, schema, "here", str).targets.tolist() == [0, 0, 0, 0, 1]
    cells = {"age": ["1"] * 4, "ward": ["1", "1.0", "2", 2.0]}
    assert encode_rows(cells, ward("1", "2"), "here", str).targets.tolist() == [0, 0, 1, 1]
    for twice in ((COMPOSED, PARTED), ("1", "1.0")):
        normalized = [COMPOSED if each == PARTED else each for each in twice]
        with raises_invalid("categories of column 'ward'", normalized, "different"):
            ward(*twice)


@pytest.mark.parametrize("cell", ["6_3", "\u0666", "nan", "infinity", "6,3"])
def test_rejects_cells_that_only_python_parses_as_numbers(cell: str) -> None:
    with pytest.raises(DataError, match="'age' is"):
        encode_rows({"age": [cell], "ward": ["a"]}, ward("a", "b"), "here", lambda row: f"line {row}")


def test_rejects_two_tables_of_one_site(tmp_path: Path) -> None:
    for name in (COMPOSED, PARTED):
        (tmp_path / f"{name}.csv").write_text("age,ward\n1,a\n", encoding="utf-8")
    with pytest.raises(DataError, match="each site"):
        read_tables(tmp_path, ward("a", "b"))


@pytest.mark.parametrize("cell", ["6_3", "\u0663"])
def test_rejects_pixels_that_only_python_parses_as_numbers(tmp_path: Path, cell: str) -> None:
    (tmp_path / "p.csv").write_text(f"label,a,b,c,d\nx,1,2,3,{cell}\ny,1,2,3,4\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 2 has"):
        load(make_data_config(str(tmp_path / "p.csv")))


def test_semicolon_table_error_mentions_decimal_commas(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("age;ward\n3,14;a\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"';'.*decimal"):
        read_cells(tmp_path / "t.csv")


@pytest.mark.parametrize("cell", ['"a', '"5" a', '"a\nb"c'])
def test_rejects_unclosed_quotes_with_the_line(tmp_path: Path, cell: str) -> None:
    (tmp_path / "t.csv").write_text(f'label,text\n0,"one\ntwo"\n1,{cell}\n0,b\n1,c\n')
    with pytest.raises(DataError, match=r"t\.csv: .*line 4 "):
        read_labeled_texts(tmp_path / "t.csv")


# --- order of classes --------------------------------------------------------------------------------------


def test_numbered_class_folders_are_sorted_by_value(tmp_path: Path) -> None:
    for number in range(11):
        write_png(tmp_path / str(number) / "0.png", number)
    raw = read_class_folders(tmp_path)
    assert raw.classes == tuple(map(str, range(11)))
    assert np.array_equal(raw.images[:, 0], PIXELS[:11])


def test_numbered_findings_are_sorted_by_value(tmp_path: Path) -> None:
    write_png(tmp_path / "0.png")
    (tmp_path / "mine.csv").write_text("image,label\n0.png,10|9\n")
    assert read_finding_csv(tmp_path / "mine.csv", CsvColumns("label")).classes == ("9", "10")


@pytest.mark.parametrize("value", [{}, {"classes": [*map(str, range(11))]}])
def test_numbered_labels_are_matched_by_name_if_classes_are_reordered(
    tmp_path: Path, value: dict[str, list[str]]
) -> None:
    path = write_npz(tmp_path, labels=[*range(11), *range(5)], **value)
    classes = tuple(sorted(map(str, range(11))))
    spec = DataSpec(ClassificationConfig(), classes, (1, 8, 8), (0.5,), (0.5,))
    private = load_node(NodeDataConfig(path="mine.npz"), tmp_path, spec)[0].targets
    for result in (load_labeled(path, spec, EvaluationDataOptions()).targets, private):
        assert [classes[label] for label in result.tolist()] == [*map(str, [*range(11), *range(5)])]


# --- number of classes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [[*range(1, 9)] * 2, [*range(8), *range(7), 57]])
def test_rejects_numbered_labels_with_gaps(tmp_path: Path, labels: list[int]) -> None:
    with pytest.raises(DataError, match=r"label .* 'classes'"):
        load(make_data_config(write_npz(tmp_path, labels=labels)))
    with pytest.raises(DataError, match="has label"):
        load_node(NodeDataConfig(path="mine.npz"), tmp_path)
    named_all = [f"class {number}" for number in range(58)]
    assert len(load(make_data_config(write_npz(tmp_path, labels=labels, classes=named_all))).classes) == 58


def test_node_and_new_data_may_lack_classes(tmp_path: Path) -> None:
    path = write_npz(tmp_path, labels=[1, 3] * 8)
    spec = DataSpec(ClassificationConfig(), tuple("0123"), (1, 8, 8), (0.5,), (0.5,))
    assert set(load_node(NodeDataConfig(path="mine.npz"), tmp_path, spec)[0].targets.tolist()) == {1, 3}
    assert set(load_labeled(path, spec, EvaluationDataOptions()).targets.tolist()) == {1, 3}


@pytest.mark.parametrize("label", ["", "nan", "\u200b", "NA", "n/a", "None", "NULL"])
def test_rejects_missing_labels(label: str) -> None:
    arrays = {"images": PIXELS[:2], "labels": np.array(["a", label])}
    with pytest.raises(DataError, match="example 1 is"):
        raw_images_from_arrays(Path("x"), arrays, "class")


def test_declared_class_may_be_named_none() -> None:
    arrays = {
        "images": PIXELS[:2],
        "labels": np.array(["mild", "none"]),
        "classes": np.array(["none", "mild"]),
    }
    assert raw_images_from_arrays(Path("x"), arrays, "class").labels.tolist() == [1, 0]


def test_rejects_an_empty_path() -> None:
    spec = DataSpec(ClassificationConfig(), ("a", "b"), (1, 8, 8), (0.5,), (0.5,))
    with raises_invalid("data", ""):
        load_unlabeled("", spec, EvaluationDataOptions())


def write_findings(folder: Path, *cells: str) -> RawImages:
    for row in range(len(cells)):
        write_png(folder / f"{row}.png", row)
    lines = [f'{row}.png,"{cell}"\n' for row, cell in enumerate(cells)]
    (folder / "mine.csv").write_text("image,label\n" + "".join(lines))
    return read_finding_csv(folder / "mine.csv", CsvColumns("label"))


@pytest.mark.parametrize("cells", [("Mass", "nan"), ("Mass", "NA|Mass"), ("a", "b", "a, b"), ("a", "a;b")])
def test_rejects_empty_or_joined_findings(tmp_path: Path, cells: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=r"mine\.csv: has "):
        write_findings(tmp_path, *cells)


def test_no_finding_is_recognized_in_any_case(tmp_path: Path) -> None:
    read = write_findings(tmp_path, "Fracture", "No finding", "", "Fracture, old")
    assert read.classes == ("Fracture", "Fracture, old")
    assert read.labels.tolist() == [[1, 0], [0, 0], [0, 0], [0, 1]]


def test_integer_classes_have_no_decimal_point() -> None:
    arrays = {"images": PIXELS[:3], "labels": np.array(["1", "1.0", "2.0"])}
    assert raw_images_from_arrays(Path("x"), arrays, "class").classes == ("1", "2")


def test_spec_and_node_classes_are_normalized_and_distinct() -> None:
    value = (ClassificationConfig(), (PARTED, "b"), (1, 8, 8), (0.5,), (0.5,))
    assert DataSpec(*value).classes == NodeDataConfig(classes=(HIDDEN, "b")).classes == (COMPOSED, "b")
    with pytest.raises(ArgumentError, match=r"spec\.classes"):
        DataSpec(ClassificationConfig(), (PARTED, COMPOSED), (1, 8, 8), (0.5,), (0.5,))
    with pytest.raises(ArgumentError, match=r"data\.classes"):
        NodeDataConfig(classes=("a", "a "))


def test_array_names_are_normalized(tmp_path: Path) -> None:
    """Otherwise the split, class names and patients would be ignored."""
    images, labels = np.zeros((4, 8, 8), np.float32), np.array([0, 1, 0, 1])
    split, patient = np.array([0, 0, 1, 1]), np.array(["a", "b", "c", "c"])
    value = {"images": images, "labels": labels, "split ": split, "classes\u200b": np.array(["cat", "dog"])}
    raw = raw_images_from_arrays(tmp_path, {**value, " patient": patient}, "class")
    assert raw.split is not None
    assert raw.split.tolist() == split.tolist()
    assert raw.classes == ("cat", "dog")
    assert raw.columns["patient"].tolist() == patient.tolist()
    with pytest.raises(DataError, match="patient"):
        raw_images_from_arrays(tmp_path, {**value, "patient ": patient[:3]}, "class")
    with pytest.raises(DataError, match="one name"):
        raw_images_from_arrays(tmp_path, {**value, "split": split}, "class")
