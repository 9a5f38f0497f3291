"""NIfTI volumes, written by the tests."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstill.core.errors import DataError
from fedstill.data import load, make_data_config
from fedstill.data.nifti import read_volumes
from fedstill.data.partitioners import SortedByColumn, split
from fedstill.tasks.reconstruction import ReconstructionConfig
from fedstill.tasks.segmentation import SegmentationConfig

nibabel = pytest.importorskip("nibabel")
SEGMENTATION, RECONSTRUCTION = SegmentationConfig(), ReconstructionConfig()


def write(path: Path, volume: np.ndarray[Any, Any], axes: str = "RAS") -> None:
    """Write a volume with the given axes; its arrays run left to right, back to front, bottom to top."""
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
    """Return a normalized slice with rows from front to back and columns from left to right."""
    low, high = np.percentile(scan, (1, 99))
    scaled = np.clip((scan - low) / (high - low), 0, 1)
    return np.array([[scaled[x, y, z] for x in range(scan.shape[0])] for y in reversed(range(scan.shape[1]))])


@pytest.mark.parametrize("axes", ["RAS", "LPS", "PIR"])
def test_slices_do_not_depend_on_the_axes_of_the_file(tmp_path: Path, axes: str) -> None:
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


def test_case_files_match_in_either_normal_form(tmp_path: Path) -> None:
    composed, parted = "M\u00fcller", "Mu\u0308ller"
    write(tmp_path / f"{composed}_image.nii.gz", volume(0))
    write(tmp_path / f"{parted}_mask.nii.gz", (volume(0) > 500).astype(np.int16))
    raw = read_volumes(tmp_path, masks=True, slices=2)
    assert raw.columns["patient"].tolist() == [composed] * 2
    write(tmp_path / f"{parted}_image.nii.gz", volume(1))
    with pytest.raises(DataError, match="each image"):
        read_volumes(tmp_path, masks=True)


def test_reads_case_folders_with_modalities(tmp_path: Path) -> None:
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
    with pytest.raises(DataError, match=r"P2 has flair.* P1 flair, t1"):
        read_volumes(tmp_path, masks=True)


def test_fourth_axis_becomes_channels(tmp_path: Path) -> None:
    write(tmp_path / "a_image.nii.gz", np.stack([volume(0), volume(1)], axis=3))
    raw = read_volumes(tmp_path, masks=False)
    assert raw.images.shape == (6, 2, 8, 12)
    assert raw.images[2, 1] == pytest.approx(expected(volume(1), 2), abs=1e-5)


def test_empty_slices_at_the_ends_are_left_out(tmp_path: Path) -> None:
    scan = volume(0)
    scan[:, :, :2] = 0
    write(tmp_path / "a_image.nii.gz", scan)
    assert read_volumes(tmp_path, masks=False).columns["slice"].tolist() == [2, 3, 4, 5]


def test_reads_a_data_set_of_volumes(tmp_path: Path) -> None:
    """Data sets have squares of one size, disjoint patients in both parts, and sites from the table."""
    for n in range(6):
        shape = (12, 8 + 2 * n, 6)  # cases of different sizes
        write(tmp_path / f"c{n}_image.nii.gz", volume(n, shape))
        write(tmp_path / f"c{n}_mask.nii.gz", (volume(n, shape) > 500).astype(np.uint8))
    (tmp_path / "cases.csv").write_text("name,site\n" + "\n".join(f"c{n},{'ab'[n % 2]}" for n in range(6)))
    data = load(make_data_config(str(tmp_path), size=8, slices=3), SEGMENTATION)
    assert data.train.inputs.shape == (12, 1, 8, 8)
    assert data.train.targets.shape == (12, 8, 8)
    assert data.test.cases is not None
    tested = {data.test.cases.names[n] for n in data.test.cases.present_ids()}
    assert len(tested) == 2
    assert not tested & set(data.columns["patient"])
    assert set(data.columns["site"]) == {"a", "b"}
    images = load(make_data_config(str(tmp_path), size=8), RECONSTRUCTION)
    assert images.train.targets.shape == (24, 1, 8, 8)
    assert images.group_column == "patient"
    with pytest.raises(DataError, match=r"c1_image\.nii\.gz: .*data\.size"):
        load(make_data_config(str(tmp_path)), SEGMENTATION)


def test_splits_patients_by_a_numeric_column(tmp_path: Path) -> None:
    """FedIOD divides patients over ten nodes by tumor size in the same way."""
    for n in range(6):
        write(tmp_path / f"c{n}_image.nii.gz", volume(n, (8, 8, 6)))
    lines = [f"c{n},0{n % 2},{(9, 100, 20.5, 3, 1000, 30)[n]}" for n in range(6)]
    (tmp_path / "cases.csv").write_text("name,site,tumor\n" + "\n".join(lines))
    raw = read_volumes(tmp_path, masks=False, slices=2)
    assert raw.columns["site"][::2].tolist() == ["00", "01"] * 3
    parts = split(torch.zeros(12, 1), 1, SortedByColumn(nodes=2, column="tumor", minimum=1),
                  np.random.default_rng(0), raw.columns, raw.columns["patient"])  # fmt: skip
    assert [sorted(set(raw.columns["patient"][part])) for part in parts] == [
        ["c0", "c2", "c3"],
        ["c1", "c4", "c5"],
    ]


def test_slices_are_padded_to_squares_before_resizing(tmp_path: Path) -> None:
    scan = np.full((8, 4, 3), 500, dtype=np.int16)
    scan[0, 0, 0], scan[1, 0, 0] = 0, 1000
    write(tmp_path / "a_image.nii.gz", scan)
    write(tmp_path / "a_mask.nii.gz", np.ones((8, 4, 3), dtype=np.uint8))
    raw = read_volumes(tmp_path, masks=True, size=4)
    assert torch.from_numpy(raw.labels[2]).tolist() == [[0] * 4, [1] * 4, [1] * 4, [0] * 4]


def test_rejects_stray_labels_of_a_volume(tmp_path: Path) -> None:
    for name in "ab":
        mask = (volume(0) > 500).astype(np.uint8)
        mask[0, 0, 3] = 4 if name == "b" else 1
        write(tmp_path / f"{name}_image.nii.gz", volume(0))
        write(tmp_path / f"{name}_mask.nii.gz", mask)
    with pytest.raises(DataError, match=r"b_mask\.nii\.gz: has value 4, .* 0, 1, 4 "):
        read_volumes(tmp_path, masks=True)
    assert read_volumes(tmp_path, masks=True, gaps=True).labels.max() == 4


GRID = np.diag([1.0, 1.0, 2.0, 1.0])


def scan_of(
    values: np.ndarray[Any, Any],
    affine: np.ndarray[Any, Any] = GRID,
    codes: tuple[int, int] = (1, 1),
    qform: np.ndarray[Any, Any] | None = None,
) -> Any:
    """Return a volume in voxel order, with sform_code and qform_code in its header."""
    image = nibabel.Nifti1Image(values, affine)
    image.set_sform(affine, codes[0])
    image.set_qform(affine if qform is None else qform, codes[1])
    return image


def put(path: Path, position: int, form: str, *values: float) -> None:
    """Overwrite bytes of a header with values that nibabel would not write."""
    content = bytearray(gzip.decompress(path.read_bytes()))
    struct.pack_into(form, content, position, *values)
    path.write_bytes(gzip.compress(bytes(content)))


def moved(**positions: float) -> np.ndarray[Any, Any]:
    """Return GRID with changed entries: x_z is the x component of the z axis, x that of the origin."""
    affine = GRID.copy()
    for name, value in positions.items():
        row, _, column = name.partition("_")
        affine["xyz".index(row), "xyz".index(column) if column else 3] = value
    return affine


@pytest.mark.parametrize(
    ("affine", "codes", "message"),
    [
        (moved(x_x=-1), (1, 1), r"its axes are LAS, and those of .*P_t1\.nii\.gz RAS"),
        (moved(x_x=-1, x=11), (1, 1), "its axes are LAS"),  # the same space with mirrored voxels
        (np.eye(4), (1, 1), r"its voxels are 1 x 1 x 1 mm, and those of .*P_t1\.nii\.gz 1 x 1 x 2 mm"),
        (moved(x=50), (1, 1), r"its origin is \(50, 0, 0\), and that of .*P_t1\.nii\.gz \(0, 0, 0\)"),
        (moved(x_y=0.2, y_x=-0.2), (1, 1), r"its voxels are"),
        (GRID, (0, 0), r"its axes are LAS.*nii\.gz, sform_code and qform_code are 0"),
    ],
)
@pytest.mark.parametrize("other", ["P_mask", "P_t2"])
def test_rejects_case_files_on_different_grids(
    tmp_path: Path, affine: np.ndarray[Any, Any], codes: tuple[int, int], message: str, other: str
) -> None:
    (tmp_path / "P").mkdir()
    values = {"P_t1": volume(0), "P_t2": volume(1), "P_mask": (volume(0) > 700).astype(np.uint8)}
    for name, each in values.items():
        chosen = (affine, codes) if name == other else (GRID, (1, 1))
        nibabel.save(scan_of(each, *chosen), tmp_path / "P" / f"{name}.nii.gz")
    with pytest.raises(DataError, match=rf"{other}\.nii\.gz: {message}"):
        read_volumes(tmp_path, masks=True)


def test_rounded_affines_are_one_grid(tmp_path: Path) -> None:
    """At a rotation of 45 degrees, rounding of the affine may change the closest axes."""
    values = volume(0, (8, 8, 6))
    for name, angle in (("image", np.pi / 4 - 1e-5), ("mask", np.pi / 4 + 1e-5)):
        affine = GRID.copy()
        affine[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
        given_value = values if name == "image" else (values > 700).astype(np.uint8)
        nibabel.save(scan_of(given_value, affine), tmp_path / f"a_{name}.nii.gz")
    raw = read_volumes(tmp_path, masks=True)
    assert raw.images[:, 0][raw.labels == 1].min() > raw.images[:, 0][raw.labels == 0].max()


def test_header_without_orientation_is_read_right_to_left_with_a_note(tmp_path: Path) -> None:
    for name in "abc":
        codes = (0, 0) if name == "a" else (1, 0)
        nibabel.save(scan_of(volume(0), codes=codes), tmp_path / f"{name}_image.nii.gz")
    raw = read_volumes(tmp_path, masks=False)
    assert np.array_equal(raw.images[:6, :, :, ::-1], raw.images[6:12])
    data = load(make_data_config(str(tmp_path)), RECONSTRUCTION)
    assert "1 of 3 volumes have no orientation (sform_code and qform_code 0)" in data.note


def test_rejects_contradictory_headers(tmp_path: Path) -> None:
    file = tmp_path / "a_image.nii.gz"
    nibabel.save(scan_of(volume(0), qform=moved(x_x=-1)), file)
    with pytest.raises(DataError, match=r"a_image\.nii\.gz: .*sform .*RAS .*qform .*LAS"):
        read_volumes(tmp_path, masks=False)
    for codes in ((0, 1), (0, 0)):
        for edge in (0.0, -2.0, np.nan):
            nibabel.save(scan_of(volume(0), codes=codes), file)
            put(file, 76 + 12, "<f", edge)
            with pytest.raises(DataError, match=rf"a_image\.nii\.gz: its pixdim is 1, 1, {edge:g}"):
                read_volumes(tmp_path, masks=False)
    nibabel.save(scan_of(volume(0), codes=(1, 0)), file)
    put(file, 312, "<4f", 0, 0, 0, 0)
    with pytest.raises(DataError, match=r"a_image\.nii\.gz: its affine is singular"):
        read_volumes(tmp_path, masks=False)
    nibabel.save(scan_of(volume(0)), file)
    put(file, 116, "<f", np.nan)  # scl_inter
    with pytest.raises(DataError, match=r"a_image\.nii\.gz: .*intercept nan"):
        read_volumes(tmp_path, masks=False)


def test_nan_scale_factor_is_ignored(tmp_path: Path) -> None:
    for name in "ab":
        nibabel.save(scan_of(volume(0)), tmp_path / f"{name}_image.nii.gz")
    put(tmp_path / "b_image.nii.gz", 112, "<f", np.nan)
    raw = read_volumes(tmp_path, masks=False)
    assert np.array_equal(raw.images[:6], raw.images[6:])


@pytest.mark.parametrize("which", ["image", "mask"])
@pytest.mark.parametrize("kind", ["complex", "color"])
def test_rejects_complex_and_rgb_voxels(tmp_path: Path, which: str, kind: str) -> None:
    colors = np.zeros((12, 8, 6), dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")])
    unusual = (volume(0) * (1 + 1j)).astype(np.complex64) if kind == "complex" else colors
    for name in ("image", "mask"):
        plain = volume(0) if name == "image" else (volume(0) > 700).astype(np.uint8)
        nibabel.save(scan_of(unusual if name == which else plain), tmp_path / f"a_{name}.nii.gz")
    with pytest.raises(DataError, match=rf"a_{which}\.nii\.gz: holds {kind}"):
        read_volumes(tmp_path, masks=True)


def test_reads_upper_case_names_and_singleton_axes(tmp_path: Path) -> None:
    for name in "ab":
        nibabel.save(scan_of(volume(0)), tmp_path / f"{name}_IMAGE.NII.GZ")
        mask = (volume(0) > 700).astype(np.uint8)[..., None]  # some tools write a fourth axis of length 1
        nibabel.save(scan_of(mask), tmp_path / f"{name}_Mask.NII")
    data = load(make_data_config(str(tmp_path)), SEGMENTATION)
    assert (len(data.train), len(data.test)) == (6, 6)
    assert int(data.train.targets.sum()) == int((volume(0) > 700).sum())


@pytest.mark.parametrize("more", ["a_image.nii", "a_seg.nii.gz"])
def test_rejects_two_files_of_one_role(tmp_path: Path, more: str) -> None:
    for name in ("a_image.nii.gz", "a_mask.nii.gz", more):
        nibabel.save(scan_of(volume(0)), tmp_path / name)
    with pytest.raises(DataError, match=r"case 'a' has .*, too") as result:
        read_volumes(tmp_path, masks=True)
    assert more in str(result.value)


def test_rejects_nnunet_folders(tmp_path: Path) -> None:
    for case in range(2):
        write(tmp_path / "imagesTr" / f"liver_{case}.nii.gz", volume(case))
    with pytest.raises(DataError, match=r"imagesTr: .*nnU-Net"):
        read_volumes(tmp_path, masks=False)


def test_errors_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a_image.nii.gz", volume(0))
    with pytest.raises(DataError, match=r"a_image\.nii\.gz: case 'a' .*mask"):
        read_volumes(tmp_path, masks=True)
    write(tmp_path / "a_mask.nii.gz", volume(0)[:4])
    with pytest.raises(DataError, match=r"a_mask\.nii\.gz: .*\(4, 8, 6\).*a_image\.nii\.gz \(12, 8, 6\)"):
        read_volumes(tmp_path, masks=True)
    write(tmp_path / "a_mask.nii.gz", np.full((12, 8, 6), 0.5, dtype=np.float32))
    with pytest.raises(DataError, match=r"a_mask\.nii\.gz: .*fractional"):
        read_volumes(tmp_path, masks=True)
    (tmp_path / "a_image.nii.gz").write_bytes(b"not a volume")
    with pytest.raises(DataError, match=r"a_image\.nii\.gz: .*NIfTI"):
        read_volumes(tmp_path, masks=False)
    write(tmp_path / "a_image.nii.gz", np.zeros((4, 4, 4), dtype=np.int16))
    with pytest.raises(DataError, match=r"a_image\.nii\.gz: .*one value"):
        read_volumes(tmp_path, masks=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no <case>_image"):
        read_volumes(tmp_path / "empty", masks=False)
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(DataError, match=r"pip install 'fedstill\[medical\]'"):
        read_volumes(tmp_path, masks=False)
