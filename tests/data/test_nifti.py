"""Volumes written by the test and read back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstill.core.errors import DataError
from fedstill.data import load, named
from fedstill.data.nifti import read_volumes
from fedstill.data.split_base import split
from fedstill.data.splits import Sorted
from fedstill.tasks.reconstruction import ReconstructionConfig
from fedstill.tasks.segmentation import SegmentationConfig

nibabel = pytest.importorskip("nibabel")
SEGMENTATION, RECONSTRUCTION = SegmentationConfig(), ReconstructionConfig()


def write(path: Path, volume: np.ndarray[Any, Any], axes: str = "RAS") -> None:
    """A volume given from left to right, back to front, bottom to top, kept with other axes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(volume, np.diag([1.0, 1.0, 2.0, 1.0]))
    ornt = nibabel.orientations.axcodes2ornt(axes)
    nibabel.save(
        image.as_reoriented(
            nibabel.orientations.ornt_transform(nibabel.orientations.axcodes2ornt("RAS"), ornt)
        ),
        path,
    )


def volume(seed: int, shape: tuple[int, ...] = (12, 8, 6)) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 1000, shape).astype(np.int16)


def expected(scan: np.ndarray[Any, Any], z: int) -> np.ndarray[Any, Any]:
    """A slice by hand: rows from front to back, columns from left to right."""
    low, high = np.percentile(scan, (1, 99))
    scaled = np.clip((scan - low) / (high - low), 0, 1)
    return np.array([[scaled[x, y, z] for x in range(scan.shape[0])] for y in reversed(range(scan.shape[1]))])


@pytest.mark.parametrize("axes", ["RAS", "LPS", "PIR"])
def test_slices_are_the_patients_whatever_the_axes_of_the_file(tmp_path: Path, axes: str) -> None:
    for n, name in enumerate(["a", "b"]):
        write(tmp_path / f"{name}_image.nii.gz", volume(n), axes)
        write(tmp_path / f"{name}_mask.nii.gz", (volume(n) > 700).astype(np.uint8), axes)
    raw = read_volumes(tmp_path, masks=True)
    assert raw.images.shape == (12, 1, 8, 12)
    assert raw.columns["patient"].tolist() == ["a"] * 6 + ["b"] * 6
    assert raw.columns["slice"].tolist() == [*range(6)] * 2
    for n in range(2):
        for z in range(6):
            assert raw.images[6 * n + z, 0] == pytest.approx(expected(volume(n), z), abs=1e-5)
            mask = (volume(n) > 700)[:, ::-1, z].T
            assert np.array_equal(raw.labels[6 * n + z], mask)


def test_a_folder_a_case_with_modalities(tmp_path: Path) -> None:
    for n, case in enumerate(["P1", "P2"]):
        write(tmp_path / case / f"{case}_t1.nii.gz", volume(n))
        write(tmp_path / case / f"{case}_flair.nii", volume(n + 10))
        write(tmp_path / case / f"{case}_seg.nii.gz", (volume(n) > 500).astype(np.float32))
    raw = read_volumes(tmp_path, masks=True, slices=2)
    assert raw.images.shape == (4, 2, 8, 12)
    assert raw.columns["slice"].tolist() == [1, 4, 1, 4]
    assert raw.images[0, 0] == pytest.approx(expected(volume(10), 1), abs=1e-5)  # flair before t1
    assert raw.images[0, 1] == pytest.approx(expected(volume(0), 1), abs=1e-5)
    (tmp_path / "P2" / "P2_t1.nii.gz").unlink()
    with pytest.raises(DataError, match="P2 has flair, and P1 flair, t1"):
        read_volumes(tmp_path, masks=True)


def test_a_fourth_axis_is_channels(tmp_path: Path) -> None:
    write(tmp_path / "a_image.nii.gz", np.stack([volume(0), volume(1)], axis=3))
    raw = read_volumes(tmp_path, masks=False)
    assert raw.images.shape == (6, 2, 8, 12)
    assert raw.images[2, 1] == pytest.approx(expected(volume(1), 2), abs=1e-5)


def test_empty_slices_at_the_ends_are_left_out(tmp_path: Path) -> None:
    scan = volume(0)
    scan[:, :, :2] = 0
    write(tmp_path / "a_image.nii.gz", scan)
    assert read_volumes(tmp_path, masks=False).columns["slice"].tolist() == [2, 3, 4, 5]


def test_a_data_set_of_volumes(tmp_path: Path) -> None:
    """Through load: squares of one size, no patient in both parts, sites from the table."""
    for n in range(6):
        shape = (12, 8 + 2 * n, 6)  # cases of different sizes
        write(tmp_path / f"c{n}_image.nii.gz", volume(n, shape))
        write(tmp_path / f"c{n}_mask.nii.gz", (volume(n, shape) > 500).astype(np.uint8))
    (tmp_path / "cases.csv").write_text("name,site\n" + "\n".join(f"c{n},{'ab'[n % 2]}" for n in range(6)))
    data = load(named(str(tmp_path), size=8, slices=3), SEGMENTATION)
    assert data.train.inputs.shape == (12, 1, 8, 8)
    assert data.train.targets.shape == (12, 8, 8)
    assert data.test.cases is not None
    tested = {data.test.cases.names[n] for n in data.test.cases.present()}
    assert len(tested) == 2
    assert not tested & set(data.columns["patient"])
    assert set(data.columns["site"]) == {"a", "b"}
    images = load(named(str(tmp_path), size=8), RECONSTRUCTION)
    assert images.train.targets.shape == (24, 1, 8, 8)
    assert images.unit == "patient"
    with pytest.raises(DataError, match=r"c1_image\.nii\.gz: slices are .*data\.size"):
        load(named(str(tmp_path)), SEGMENTATION)


def test_patients_can_be_divided_by_a_number_in_the_table(tmp_path: Path) -> None:
    """As FedIOD's ten nodes by size of tumour; names of patients and sites stay names."""
    for n in range(6):
        write(tmp_path / f"c{n}_image.nii.gz", volume(n, (8, 8, 6)))
    lines = [f"c{n},0{n % 2},{(9, 100, 20.5, 3, 1000, 30)[n]}" for n in range(6)]
    (tmp_path / "cases.csv").write_text("name,site,tumour\n" + "\n".join(lines))
    raw = read_volumes(tmp_path, masks=False, slices=2)
    assert raw.columns["site"][::2].tolist() == ["00", "01"] * 3
    parts = split(torch.zeros(12, 1), 1, Sorted(nodes=2, column="tumour", minimum=1),
                  np.random.default_rng(0), raw.columns, raw.columns["patient"])  # fmt: skip
    assert [sorted(set(raw.columns["patient"][part])) for part in parts] == [
        ["c0", "c2", "c3"],
        ["c1", "c4", "c5"],
    ]


def test_squares_are_filled_up_before_they_are_averaged(tmp_path: Path) -> None:
    scan = np.full((8, 4, 3), 500, dtype=np.int16)
    scan[0, 0, 0], scan[1, 0, 0] = 0, 1000
    write(tmp_path / "a_image.nii.gz", scan)
    write(tmp_path / "a_mask.nii.gz", np.ones((8, 4, 3), dtype=np.uint8))
    raw = read_volumes(tmp_path, masks=True, size=4)
    assert torch.from_numpy(raw.labels[2]).tolist() == [[0] * 4, [1] * 4, [1] * 4, [0] * 4]


def test_a_stray_label_of_a_volume_is_no_class(tmp_path: Path) -> None:
    for name in "ab":
        mask = (volume(0) > 500).astype(np.uint8)
        mask[0, 0, 3] = 4 if name == "b" else 1
        write(tmp_path / f"{name}_image.nii.gz", volume(0))
        write(tmp_path / f"{name}_mask.nii.gz", mask)
    with pytest.raises(DataError, match=r"b_mask\.nii\.gz: has value 4, .* have 0, 1, 4: .* without gaps"):
        read_volumes(tmp_path, masks=True)
    assert read_volumes(tmp_path, masks=True, gaps=True).labels.max() == 4


def test_faults_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a_image.nii.gz", volume(0))
    with pytest.raises(DataError, match=r"a_image\.nii\.gz: case 'a' has no mask"):
        read_volumes(tmp_path, masks=True)
    write(tmp_path / "a_mask.nii.gz", volume(0)[:4])
    with pytest.raises(
        DataError, match=r"a_mask\.nii\.gz: is of shape \(4, 8, 6\), and its image \(12, 8, 6\)"
    ):
        read_volumes(tmp_path, masks=True)
    write(tmp_path / "a_mask.nii.gz", np.full((12, 8, 6), 0.5, dtype=np.float32))
    with pytest.raises(DataError, match=r"a_mask\.nii\.gz: has values that are no whole numbers"):
        read_volumes(tmp_path, masks=True)
    (tmp_path / "a_image.nii.gz").write_bytes(b"not a volume")
    with pytest.raises(DataError, match=r"a_image\.nii\.gz: cannot be read as NIfTI"):
        read_volumes(tmp_path, masks=False)
    write(tmp_path / "a_image.nii.gz", np.zeros((4, 4, 4), dtype=np.int16))
    with pytest.raises(DataError, match=r"a_image\.nii\.gz: has one value everywhere"):
        read_volumes(tmp_path, masks=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no <case>_image"):
        read_volumes(tmp_path / "empty", masks=False)
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(DataError, match=r"pip install 'fedstill\[medical\]'"):
        read_volumes(tmp_path, masks=False)
