"""Images of patients: parts without common patients, targets of each task, and user files."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedstill.core.errors import ArgumentError, DataError
from fedstill.data import Digits, load, make_data_config
from fedstill.data.loading import prepare_images
from fedstill.data.partitioners import IID, split
from fedstill.data.public import PublicConfig, load_public
from fedstill.data.raw_images import RawImages
from fedstill.tasks import TASKS
from fedstill.tasks.multi_label import MultiLabelConfig
from fedstill.tasks.reconstruction import ReconstructionConfig
from fedstill.tasks.segmentation import SegmentationConfig
from tests.support.errors import raises_invalid

SEGMENTATION, FINDINGS = SegmentationConfig(), MultiLabelConfig()
RECONSTRUCTION = ReconstructionConfig()


def patient_slices(patients: int = 12, each: int = 3, side: int = 8) -> RawImages:
    """Return slices in which patient p has brightness p, a tumor of p + 1 pixels, and site p % 3.

    Patient 0 is the only one of site d.
    """
    of = np.repeat(np.arange(patients), each)
    images = np.broadcast_to(of[:, None, None, None], (len(of), 2, side, side)).astype(np.uint8)
    masks = (np.arange(side * side)[None] <= of[:, None]).astype(np.int64).reshape(-1, side, side)
    site = np.where(of == 0, "d", np.array(["a", "b", "c"])[of % 3])
    columns = {"patient": np.array([f"p{p:02d}" for p in of]), "site": site}
    return RawImages(images, masks, ("background", "tumor"), columns=columns)


def patients_in(data: Any) -> set[int]:
    """Return the patients of a part, decoded from its pixels."""
    return {round(float(x) * 127.5 + 127.5) for x in data.inputs[:, 0, 0, 0]}


@given(st.integers(0, 10**6), st.floats(0.1, 0.6))
def test_no_patient_is_in_two_parts(seed: int, fraction: float) -> None:
    """Checks training, test, public and node data by pixels instead of columns."""
    config = make_data_config("mine", seed=seed, test_fraction=fraction, train_limit=20)
    data = prepare_images(patient_slices(), config, SEGMENTATION, "mine")
    assert data.group_column == "patient"
    tested = patients_in(data.test)
    assert not patients_in(data.train) & tested
    assert {p % 3 for p in tested} == {0, 1, 2}  # all sites
    assert len(data.train) <= 20
    train, public = load_public(PublicConfig("held-out", share=0.4, seed=seed), data, SEGMENTATION)
    assert public is not None
    known = patients_in(public)
    assert not known & tested
    assert not known & patients_in(train)
    unit = data.columns["patient"]
    parts = split(
        data.train.targets,
        2,
        IID(nodes=2, minimum=1),
        np.random.default_rng(seed),
        {},
        unit,
    )
    first, second = (patients_in(data.train.subset(part)) for part in parts)
    assert not first & second


def test_site_with_one_patient_is_left_out_with_a_note() -> None:
    data = prepare_images(patient_slices(), Digits(), SEGMENTATION, "mine")
    assert "left out, with one patient each: d" in data.note
    assert 0 not in patients_in(data.train) | patients_in(data.test)
    assert set(data.columns["site"]) == {"a", "b", "c"}
    with pytest.raises(ArgumentError, match=r"data\.sites = 'd'"):
        prepare_images(patient_slices(), Digits(), SEGMENTATION, "mine", sites=("a", "d"))
    with raises_invalid("data.sites", "z", "some of a, b, c, d"):
        prepare_images(patient_slices(), Digits(), SEGMENTATION, "mine", sites=("z",))
    only = prepare_images(patient_slices(), Digits(), SEGMENTATION, "mine", sites=("b",))
    assert {p % 3 for p in patients_in(only.train) | patients_in(only.test)} == {1}


def test_cases_are_patients_with_their_sites() -> None:
    data = prepare_images(patient_slices(), Digits(), SEGMENTATION, "mine")
    for part in (data.train, data.test):
        assert part.cases is not None
        names = [part.cases.names[n] for n in part.cases.case_ids.tolist()]
        assert names == [f"p{round(float(x) * 127.5 + 127.5):02d}" for x in part.inputs[:, 0, 0, 0]]
        assert all(
            part.cases.sites[n] == "abc"[int(part.cases.names[n][1:]) % 3] for n in part.cases.present_ids()
        )


def test_masks_are_resized_with_their_images() -> None:
    data = prepare_images(patient_slices(), Digits(), SEGMENTATION, "mine", size=4, channels=(1,))
    assert data.train.inputs.shape[1:] == (1, 4, 4)
    assert data.train.targets.shape[1:] == (4, 4)
    patient = round(float(data.test.inputs[0, 0, 0, 0]) * 127.5 + 127.5)
    whole = torch.from_numpy(patient_slices().labels[3 * patient].reshape(4, 2, 4, 2).mean((1, 3)) >= 0.5)
    assert torch.equal(data.test.targets[0], whole.long())


def test_reconstruction_targets_are_images_and_inputs_are_measurements() -> None:
    rng = np.random.default_rng(0)
    raw = RawImages(rng.random((12, 2, 16, 16)).astype(np.float32), np.zeros(12, dtype=np.int64), ("image",))
    data = prepare_images(raw, Digits(), RECONSTRUCTION, "mine", channels=(1,))
    task = RECONSTRUCTION.make(1)
    assert data.classes == ("image",)
    assert torch.equal(data.test.inputs, task.observe(data.test.targets))
    assert not torch.equal(data.test.inputs, data.test.targets)
    pixels = {round(float(x), 4) for x in (data.test.targets[:, 0, 0, 0] + 1) / 2}
    assert pixels <= {round(float(x), 4) for x in raw.images[:, 1, 0, 0]}
    with raises_invalid("data.channels", ANY, "one image"):
        prepare_images(raw, Digits(), RECONSTRUCTION, "mine", channels=(0, 1))
    with raises_invalid("data.channels", ANY, "from 0 to 1"):
        prepare_images(raw, Digits(), RECONSTRUCTION, "mine", channels=(2,))


# Data and tasks


@pytest.mark.parametrize(
    ("option", "task"),
    [
        ({"slices": 8}, "classification"),
        ({"channels": (0,)}, "multi-label"),
        ({"patch": 64}, "segmentation"),
        ({"scale": 0.5}, "reconstruction"),
        ({"slices": 3}, "instances"),
        ({"sites": ("a",)}, "classification"),
        ({"words": 100}, "segmentation"),
    ],
)
def test_rejects_options_without_effect_on_the_task(option: dict[str, Any], task: Any) -> None:
    with pytest.raises(ArgumentError, match=f"data.{next(iter(option))} = .*no such option for task {task}"):
        load(make_data_config("mine.npz", **option), TASKS[task]())


@pytest.mark.parametrize("option", [{"size": 6}, {"size": -4}, {"patch": 3}, {"scale": 0.0}, {"slices": -1}])
def test_rejects_numbers_out_of_range(option: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"data.{next(iter(option))}"):
        make_data_config("mine", **option)


# User files


def write_folder(root: Path, count: int = 6, side: int = 8) -> Path:
    """Write images: image i has brightness 10 i and a mask of i + 1 pixels with value 255."""
    for part in ("images", "masks"):
        (root / part).mkdir(parents=True, exist_ok=True)
    for i in range(count):
        Image.fromarray(np.full((side, side), 10 * i, dtype=np.uint8)).save(root / "images" / f"i{i}.png")
        mask = (np.arange(side * side) <= i).reshape(side, side)
        Image.fromarray(mask.astype(np.uint8) * 255).save(root / "masks" / f"i{i}.png")
    return root


def test_reads_a_folder_of_images_and_masks(tmp_path: Path) -> None:
    data = load(make_data_config(str(write_folder(tmp_path / "scans"))), SEGMENTATION)
    assert (data.name, data.classes, len(data.train), len(data.test)) == (
        "scans",
        ("background", "foreground"),
        5,
        1,
    )
    for part in (data.train, data.test):
        numbers = ((part.inputs[:, 0, 0, 0] * 127.5 + 127.5) / 10).round().long()
        assert torch.equal(part.targets.sum((1, 2)), numbers + 1)


def test_cases_csv_has_patients_sites_and_split(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "scans")
    lines = [
        f"i{i},p{i // 2},{'ab'[i // 4]},{'test' if i // 2 == 1 else 'train'}" for i in reversed(range(6))
    ]
    (root / "cases.csv").write_text("\n".join(["name,patient,site,split", *lines]))
    data = load(make_data_config(str(root)), SEGMENTATION)
    assert data.columns["patient"].tolist() == ["p0", "p0", "p2", "p2"]
    assert data.columns["site"].tolist() == ["a", "a", "b", "b"]
    assert [round(float(x) * 12.75 + 12.75) for x in data.test.inputs[:, 0, 0, 0]] == [2, 3]
    (root / "cases.csv").write_text("name,site\ni0,a\n")
    with pytest.raises(DataError, match="name 'i1'"):
        load(make_data_config(str(root)), SEGMENTATION)
    parts = ("train", "0", "test", "1", "Validation", "dev")
    (root / "cases.csv").write_text("name,split\n" + "\n".join(f"i{i},{p}" for i, p in enumerate(parts)))
    loaded = load(make_data_config(str(root)), SEGMENTATION)
    assert (len(loaded.train), len(loaded.test), loaded.note) == (
        2,
        2,
        "2 validation examples are not used (data.validation)",
    )
    (root / "cases.csv").write_text("name,split\n" + "\n".join(f"i{i},maybe" for i in range(6)))
    with pytest.raises(DataError, match=r"cases\.csv: split .*'maybe'"):
        load(make_data_config(str(root)), SEGMENTATION)


def test_reads_train_and_test_folders(tmp_path: Path) -> None:
    write_folder(tmp_path / "scans" / "train", 3)
    write_folder(tmp_path / "more", 4)
    (tmp_path / "scans" / "test").mkdir()
    for part in ("images", "masks"):
        (tmp_path / "scans" / "test" / part).mkdir()
        (tmp_path / "more" / part / "i3.png").rename(tmp_path / "scans" / "test" / part / "i3.png")
    data = load(make_data_config(str(tmp_path / "scans")), SEGMENTATION)
    assert (len(data.train), data.test.targets.sum().item()) == (3, 4)


def test_folder_errors_name_the_file(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "scans")
    Image.fromarray(np.zeros((4, 8), dtype=np.uint8)).save(root / "masks" / "i1.png")
    with pytest.raises(DataError, match=r"masks/i1\.png: .*4 x 8.* 8 x 8"):
        load(make_data_config(str(root)), SEGMENTATION)
    (root / "masks" / "i1.png").unlink()
    with pytest.raises(DataError, match=r"images/i1\.png: has no mask"):
        load(make_data_config(str(root)), SEGMENTATION)
    Image.fromarray(np.zeros((8, 4), dtype=np.uint8)).save(root / "images" / "i1.png")
    with pytest.raises(DataError, match=r"images/i1\.png: is 8 x 4.*i0\.png is 8 x 8"):
        load(make_data_config(str(root)), RECONSTRUCTION)
    data = load(make_data_config(str(root), size=8), RECONSTRUCTION)
    assert data.train.targets.shape == (5, 1, 8, 8)


def test_reads_an_npz_of_masks(tmp_path: Path) -> None:
    raw = patient_slices()
    arrays = {"images": raw.images, "masks": raw.labels, "patient": raw.columns["patient"]}
    np.savez(tmp_path / "mine.npz", **arrays)
    data = load(make_data_config(str(tmp_path / "mine.npz")), SEGMENTATION)
    assert not patients_in(data.train) & patients_in(data.test)
    assert data.train.inputs.shape[1:] == (2, 8, 8)
    np.savez(tmp_path / "mine.npz", **arrays | {"masks": raw.labels[:, :4]})
    with pytest.raises(DataError, match=r"masks are \(36, 4, 8\)"):
        load(make_data_config(str(tmp_path / "mine.npz")), SEGMENTATION)
    np.savez(tmp_path / "mine.npz", **arrays | {"masks": raw.labels * 0.5})
    with pytest.raises(DataError, match=r"masks: .*float64 .*whole"):
        load(make_data_config(str(tmp_path / "mine.npz")), SEGMENTATION)
    np.savez(tmp_path / "mine.npz", **arrays | {"masks": raw.labels - 1})
    with pytest.raises(DataError, match="from -1 to 0"):
        load(make_data_config(str(tmp_path / "mine.npz")), SEGMENTATION)


def test_reads_an_npz_of_findings(tmp_path: Path) -> None:
    labels = np.random.default_rng(0).integers(-1, 2, (30, 3))
    images = np.arange(30, dtype=np.uint8)[:, None, None].repeat(8, 1).repeat(8, 2)
    arrays = {
        "images": images,
        "labels": labels,
        "patient": np.arange(30) // 2,
        "classes": np.array(list("xyz")),
    }
    np.savez(tmp_path / "mine.npz", **arrays)
    data = load(make_data_config(str(tmp_path / "mine.npz")), FINDINGS)
    assert data.classes == ("x", "y", "z")
    for part in (data.train, data.test):
        numbers = (part.inputs[:, 0, 0, 0] * 127.5 + 127.5).round().long()
        assert torch.equal(part.targets, torch.from_numpy(labels)[numbers])
    assert not {n // 2 for n in patients_in(data.train)} & {n // 2 for n in patients_in(data.test)}
    np.savez(tmp_path / "mine.npz", **arrays | {"labels": labels * 2})
    row, column = np.argwhere(labels != 0)[0]  # the first label that is 2 or -2
    position = rf"example {row} has {2 * labels[row, column]} in column {column} \('{'xyz'[column]}'\)"
    with pytest.raises(DataError, match=rf"mine.npz: labels: {position} \(expected 1, 0 and -1"):
        load(make_data_config(str(tmp_path / "mine.npz")), FINDINGS)
