"""Data given by a path, including data that resemble another format."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedstill.core.errors import ArgumentError, DataError
from fedstill.data import load, make_data_config
from fedstill.tasks import TaskConfig
from fedstill.tasks.classification import ClassificationConfig
from fedstill.tasks.instances import InstancesConfig
from fedstill.tasks.multi_label import MultiLabelConfig
from fedstill.tasks.segmentation import SegmentationConfig
from tests.support.errors import raises_invalid

SEGMENTATION, FINDINGS = SegmentationConfig(), MultiLabelConfig()


def write_folder(root: Path, count: int = 6) -> Path:
    """Write dark images of 8 x 8 pixels, with background only."""
    for part in ("images", "masks"):
        (root / part).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(root / part / f"i{i}.png")
    return root


@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize(("scale", "listed"), [(1, "0, 1, 7"), (255, "0, 7, 255")])
def test_rejects_stray_mask_values(tmp_path: Path, scale: int, listed: str, size: int) -> None:
    root = write_folder(tmp_path / "scans")
    for i in range(6):
        mask = (np.arange(64) <= i).reshape(8, 8).astype(np.uint8) * scale
        mask[7, 7] = 7 if i == 3 else 0
        Image.fromarray(mask).save(root / "masks" / f"i{i}.png")
    message = rf"masks/i3\.png: has value 7, and all masks together have {listed} .*without gaps"
    with pytest.raises(DataError, match=message):
        load(make_data_config(str(root), size=size), SEGMENTATION)


def test_mask_gaps_need_class_names(tmp_path: Path) -> None:
    images, masks = np.zeros((6, 8, 8), dtype=np.uint8), np.zeros((6, 8, 8), dtype=np.uint8)
    masks[:, 0], masks[4, 1, 2] = 1, 3
    path = tmp_path / "mine.npz"
    np.savez(path, images=images, masks=masks)
    with pytest.raises(DataError, match=r"mine\.npz: masks: .* 4 .*value 3.* 0, 1, 3"):
        load(make_data_config(str(path)), SEGMENTATION)
    np.savez(path, images=images, masks=masks, classes=np.array(["none", "a", "b", "c"]))
    assert load(make_data_config(str(path)), SEGMENTATION).classes == ("none", "a", "b", "c")
    masks[4, 1, 2] = 1
    np.savez(path, images=images, masks=masks[:, :1].repeat(8, 1))  # all of class 1, without background
    assert load(make_data_config(str(path)), SEGMENTATION).classes == ("background", "foreground")


@pytest.mark.parametrize(
    ("task", "kinds"),
    [
        (SEGMENTATION, r"\.npz or a folder"),
        (InstancesConfig(), r"\.npz or a folder"),
        (
            ClassificationConfig(),
            r"\.npz or \.csv or a folder; for columns of numbers use --task.name tabular",
        ),
        (FINDINGS, r"\.npz or \.csv"),
    ],
)
def test_rejects_unsupported_file_formats(tmp_path: Path, task: TaskConfig, kinds: str) -> None:
    path = tmp_path / ("table.csv" if task in (SEGMENTATION, InstancesConfig()) else "table.parquet")
    path.write_text("image,Mass\n")
    message = rf"^{path}: unsupported format for task {task.registered_name} \(expected {kinds}\)$"
    with pytest.raises(DataError, match=message):
        load(make_data_config(str(path)), task)
    path.unlink()
    with pytest.raises((DataError, ArgumentError)) as missing:
        load(make_data_config(str(path.with_suffix(".npz"))), task)
    # as the requested and as the searched path
    assert str(missing.value).count(str(path.with_suffix(".npz"))) == 2


def test_images_and_masks_are_not_two_classes(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "scans")
    with pytest.raises(DataError, match=r"scans: .*task segmentation"):
        load(make_data_config(str(root)))
    (root / "masks").rename(root / "drawings")
    assert load(make_data_config(str(root))).classes == ("drawings", "images")


def make_image(path: Path, height: int, width: int, channels: int, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    form = (height, width) if channels == 1 else (height, width, channels)
    Image.fromarray(np.full(form, value, dtype=np.uint8)).save(path)


def test_mixed_images_become_one_size_and_color(tmp_path: Path) -> None:
    sizes = [(30, 41), (8, 8), (17, 12), (9, 100)]
    for name, value in (("cat", 0), ("dog", 255)):
        for number, (height, width) in enumerate(sizes):
            make_image(
                tmp_path / "pets" / name / f"{number}.png", height, width, 3 if number % 2 else 1, value
            )
    with pytest.raises(DataError, match=r"cat/1\.png: is 8 x 8.*cat/0\.png is 30 x 41 .*data\.size"):
        load(make_data_config(str(tmp_path / "pets")))
    data = load(make_data_config(str(tmp_path / "pets"), size=8))
    assert data.train.inputs.shape[1:] == data.test.inputs.shape[1:] == (3, 8, 8)
    assert len(data.train) + len(data.test) == 8
    for part in (data.train, data.test):
        white = part.targets.float() * 2 - 1  # cats are black and dogs are white, at any size
        torch.testing.assert_close(part.inputs, white.view(-1, 1, 1, 1).expand_as(part.inputs))


def test_reads_a_csv_of_image_files_and_classes(tmp_path: Path) -> None:
    lines = ["file,diagnosis,site,patient,split"]
    for number in range(8):
        make_image(tmp_path / "scans" / f"{number}.png", 8, 8, 1, 255 * (number % 2))
        part = "test" if number > 5 else "train"
        lines.append(
            f"scans/{number}.png,{('well', 'ill')[number % 2]},{'ab'[number % 3 > 0]},p{number},{part}"
        )
    table = tmp_path / "list.csv"
    table.write_text("\n".join(lines) + "\n")
    data = load(make_data_config(str(table), image="file", label="diagnosis"))
    assert data.classes == ("ill", "well")
    assert data.test.targets.tolist() == [1, 0]
    assert data.train.inputs[:, 0, 0, 0].tolist() == [-1, 1] * 3
    assert data.columns["site"].tolist() == ["a", "b", "b"] * 2
    assert data.group_column == "patient"
    lines[0] = "image,label,site,patient,split"
    table.write_text("\n".join(lines) + "\n")
    assert torch.equal(load(make_data_config(str(table))).train.inputs, data.train.inputs)
    with raises_invalid("data.label", "kind", "one column", "list.csv"):
        load(make_data_config(str(table), label="kind"))


def test_numeric_table_error_names_the_tabular_task(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    for cells in ("age,ward,label\n3,2,a\n4,1,b\n", "age,ward,x,y,label\n3,north,1,2,a\n4,south,1,2,b\n"):
        table.write_text(cells)
        with pytest.raises(DataError, match=r"rows\.csv: .*--task"):
            load(make_data_config(str(table)))


def test_reads_all_images_of_a_class(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        make_image(tmp_path / "pets" / name / "1.png", 8, 8, 1, 0)
        make_image(tmp_path / "pets" / name / "more" / "2.png", 8, 8, 1, 0)
        make_image(tmp_path / "pets" / name / "3.gif", 8, 8, 1, 0)
        (tmp_path / "pets" / name / "notes.txt").write_text("none")
        make_image(tmp_path / "pets" / name / ".ipynb_checkpoints" / "1-checkpoint.png", 8, 8, 1, 0)
    data = load(make_data_config(str(tmp_path / "pets")))
    assert len(data.train) + len(data.test) == 6
    for number in range(3):
        make_image(tmp_path / "elsewhere" / f"{number}.png", 8, 8, 1, 0)
    (tmp_path / "pets" / "dog" / "more" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "round").symlink_to(tmp_path / "elsewhere")
    data = load(make_data_config(str(tmp_path / "pets")))
    assert len(data.train) + len(data.test) == 9
    # images of cats would be labeled as dogs
    (tmp_path / "pets" / "dog" / "up").symlink_to(tmp_path / "pets")
    with pytest.raises(DataError, match=r"dog/up: .*a link"):
        load(make_data_config(str(tmp_path / "pets")))
    (tmp_path / "pets" / "dog" / "up").unlink()
    (tmp_path / "pets" / "dog" / "4.HEIC").write_bytes(b"none")
    with pytest.raises(DataError, match=r"dog/4\.HEIC: .*\.bmp, "):
        load(make_data_config(str(tmp_path / "pets")))


def test_reads_train_test_and_validation_folders(tmp_path: Path) -> None:
    for part in ("train", "test", "val"):
        for name in ("cat", "dog"):
            for number in range(2):
                make_image(tmp_path / "pets" / part / name / f"{number}.png", 8, 8, 1, 255 * (part == "val"))
    position = str(tmp_path / "pets")
    assert [
        len(part) for part in (load(make_data_config(position)).train, load(make_data_config(position)).test)
    ] == [4, 4]
    measured = load(make_data_config(position, validation=0.5))
    assert len(measured.test) == 4
    assert bool((measured.test.inputs == 1).all())  # the images of the validation part
    (tmp_path / "pets" / "test").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"pets: .*train, val .*train, test"):
        load(make_data_config(position))
    for name in ("bus", "car"):
        make_image(tmp_path / "traffic" / name / "1.png", 8, 8, 1, 0)
    make_image(tmp_path / "traffic" / "train" / "1.png", 8, 8, 1, 0)
    assert load(make_data_config(str(tmp_path / "traffic"))).classes == ("bus", "car", "train")


def exif_image(position: Path, pixels: np.ndarray[Any, Any]) -> None:
    """Write an image file with EXIF orientation 6 and a malformed width."""
    position.parent.mkdir(parents=True, exist_ok=True)
    width = struct.pack("<HHI4s", 256, 2, 4, b"two\0")
    tags = width + struct.pack("<HHIHH", 274, 3, 1, 6, 0)
    exif = b"Exif\0\0" + struct.pack("<2sHIH", b"II", 42, 8, 2) + tags + struct.pack("<I", 0)
    image, mode = Image.fromarray(pixels), {"quality": 100} if position.suffix == ".jpg" else {}
    if position.suffix == ".tif":
        image.save(position, tiffinfo={274: 6})
    else:
        image.save(position, exif=exif, **mode)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_photograph_is_rotated_by_exif(tmp_path: Path, suffix: str) -> None:
    pixels = np.zeros((8, 12, 3), dtype=np.uint8)
    pixels[:, :4] = 255
    for name in ("a", "b"):
        exif_image(tmp_path / "photos" / name / f"1.{suffix}", pixels)
    inputs = load(make_data_config(str(tmp_path / "photos"))).train.inputs
    assert inputs.shape[1:] == (3, 12, 8)
    assert inputs[:, :, :3].min() > 0.8 > -0.8 > inputs[:, :, 5:].max()


def test_rejects_masks_with_another_orientation(tmp_path: Path) -> None:
    pixels = np.zeros((8, 12), dtype=np.uint8)
    pixels[:, :4] = 255
    for number in range(2):
        exif_image(tmp_path / "images" / f"{number}.png", pixels)
        exif_image(tmp_path / "masks" / f"{number}.png", pixels)
    data = load(make_data_config(str(tmp_path)), SEGMENTATION)
    assert data.train.targets[0].tolist() == [[1] * 8] * 4 + [[0] * 8] * 8
    assert bool(((data.train.inputs[:, 0] > 0) == (data.train.targets == 1)).all())
    Image.fromarray(pixels.T).save(tmp_path / "masks" / "1.png")
    with pytest.raises(DataError, match=r"images/1\.png: .*EXIF"):
        load(make_data_config(str(tmp_path)), SEGMENTATION)


@pytest.mark.parametrize("outer", [("site-a", "site-b"), ("one", "two")])
def test_rejects_site_folders_as_classes(tmp_path: Path, outer: tuple[str, str]) -> None:
    for position in outer:
        for name in ("cat", "dog"):
            make_image(tmp_path / position / name / "1.png", 8, 8, 1, 0)
    message = f"{outer[0]} and {outer[1]} have a folder cat and no images"
    with pytest.raises(DataError, match=message):
        load(make_data_config(str(tmp_path)))
    (tmp_path / outer[0]).rename(tmp_path / "Training")
    (tmp_path / outer[1]).rename(tmp_path / "Testing")
    assert load(make_data_config(str(tmp_path))).classes == ("cat", "dog")


def test_csv_columns_can_be_renamed(tmp_path: Path) -> None:
    for number in range(4):
        make_image(tmp_path / f"{number}.png", 8, 8, 1, 0)
    table = tmp_path / "list.csv"
    table.write_text("image,Mass\n" + "".join(f"{number}.png,1\n" for number in range(4)))
    with raises_invalid("data.label", "Findngs", "one column of"):
        load(make_data_config(str(table), label="Findngs"), FINDINGS)
    table.write_text("image,label\n0.png,a\n1.png,b\n")
    with raises_invalid("data.label", "image", "another column"):
        load(make_data_config(str(table), label="image"))
    np.savez(tmp_path / "mine.npz", images=np.zeros((4, 8, 8)), labels=np.arange(4) % 2)
    with raises_invalid("data.label", "kind", "empty", "csv"):
        load(make_data_config(str(tmp_path / "mine.npz"), label="kind"))


def test_table_folder_error_names_the_tabular_task(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text("")
    with pytest.raises(DataError, match=r"tables.* schema\.toml; .*tabular"):
        load(make_data_config(str(tmp_path)))


def test_missing_path_error_lists_searched_paths(tmp_path: Path) -> None:
    with raises_invalid("data.name", "potos", "one of digits", "not found", "/potos"):
        load(make_data_config("potos", root=str(tmp_path)))


def test_rejects_two_masks_of_one_name(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "scans")
    Image.fromarray(np.ones((8, 8), dtype=np.uint8)).save(root / "masks" / "i3.tif")
    with pytest.raises(DataError, match=r"i3\.tif: i3\.png "):
        load(make_data_config(str(root)), SEGMENTATION)


@pytest.mark.parametrize("part", ["images", "masks"])
def test_rejects_broken_links_to_images(tmp_path: Path, part: str) -> None:
    root = write_folder(tmp_path / "scans")
    file = root / part / "i3.png"
    file.rename(tmp_path / "moved.png")
    file.symlink_to(tmp_path / "not fetched.png")
    with pytest.raises(DataError, match=rf"{part}/i3\.png: is a broken link"):
        load(make_data_config(str(root)), SEGMENTATION)
