from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedstill.core.errors import DataError
from fedstill.data import load, make_data_config, node_data
from fedstill.data.image_folders import read_class_folders
from fedstill.data.node_data import NodeDataConfig
from fedstill.data.raw_images import RawImages, raw_images_from_arrays
from fedstill.data.table_files import reshape_pixel_rows
from fedstill.data.user_data import read_raw_images
from fedstill.tasks.multi_label import MultiLabelConfig


def read_npz(path: Path) -> RawImages:
    return read_raw_images(path, "npz", "class")


def save_npz(tmp_path: Path, **arrays: Any) -> Path:
    path = tmp_path / "some.npz"
    np.savez(path, **arrays)
    return path


def make_pixels(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


# Arrays


def test_three_image_layouts_agree(tmp_path: Path) -> None:
    channels_last = make_pixels(5, 8, 12, 3)
    labels = [0, 1, 2, 1, 0]
    last = read_npz(save_npz(tmp_path, images=channels_last, labels=labels))
    first = read_npz(save_npz(tmp_path, images=channels_last.transpose(0, 3, 1, 2), labels=labels))
    assert last.images.shape == (5, 3, 8, 12)
    assert (last.images == first.images).all()
    assert last.images[4, 2, 7, 11] == channels_last[4, 7, 11, 2]
    gray = read_npz(save_npz(tmp_path, images=channels_last[..., 1], labels=labels))
    assert (gray.images == last.images[:, 1:2]).all()


def test_reads_split_classes_and_columns(tmp_path: Path) -> None:
    raw = read_npz(
        save_npz(
            tmp_path,
            images=make_pixels(3, 8, 8),
            labels=np.array([2, 0, 2], dtype=np.uint8),
            split=[0, 1, 0],
            classes=["cat", "dog", "fox"],
            site=["x", "y", "x"],
            age=[40, 50, 60],
            masks=make_pixels(3, 8, 8),
            channels=["gray"],
        )
    )
    assert raw.labels.tolist() == [2, 0, 2]
    assert raw.labels.dtype == np.int64
    assert raw.split is not None
    assert raw.split.tolist() == [False, True, False]
    assert raw.classes == ("cat", "dog", "fox")
    assert {name: column.tolist() for name, column in raw.columns.items()} == {
        "site": ["x", "y", "x"],
        "age": [40, 50, 60],
    }
    assert raw.columns["site"].dtype.kind == "U"


def test_class_names_keep_the_order_of_the_file(tmp_path: Path) -> None:
    """Ordinal tasks depend on the order. Without names, classes are sorted alphabetically."""
    grades: dict[str, Any] = {"images": make_pixels(3, 8, 8), "labels": ["low", "high", "low"]}
    raw = read_npz(save_npz(tmp_path, **grades, classes=["low", "medium", "high"]))
    assert (raw.classes, raw.labels.tolist()) == (("low", "medium", "high"), [0, 2, 0])
    raw = read_npz(save_npz(tmp_path, **grades))
    assert (raw.classes, raw.labels.tolist()) == (("high", "low"), [1, 0, 1])


GOOD: dict[str, Any] = {"images": make_pixels(4, 8, 8), "labels": [0, 1, 0, 1]}


def with_change(image: int, value: float) -> np.ndarray[Any, Any]:
    images = np.full((4, 8, 8), 0.5)
    images[image, 2, 2] = images[3, 1, 1] = value
    return images


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": None}, "no array 'images', only labels"),
        ({"labels": [0, 1, 0]}, "4 images and 3 labels"),
        ({"images": make_pixels(0, 8, 8), "labels": np.zeros(0, dtype=int)}, "there are no images"),
        ({"labels": [0.0, 1.0, 0.0, 1.0]}, "labels are float64"),
        ({"labels": np.zeros((4, 2), dtype=int)}, r"labels are int64 of shape \(4, 2\)"),
        ({"labels": [0, 1, -1, 1]}, r"label -1 of example 2 is outside 0\.\.1"),
        ({"labels": [-1, -1, -1, -1]}, r"label -1 of example 0 is outside 0\.\.0 \(4 such"),
        ({"labels": [0, 1, 2**40, 1]}, "label 1099511627776 with no array 'classes'"),
        ({"labels": np.array(3)}, r"labels are int64 of shape \(\)"),
        ({"classes": ["only"]}, r"label 1 of example 1 is outside 0\.\.0 \(2 such"),
        ({"classes": [7, 8]}, "classes are int64"),
        ({"classes": ["dog", "dog"]}, "classes: 'dog' and 'dog' are one name"),
        (
            {"labels": ["cat", "", "dog", "cat"]},
            "label of example 1 is empty",
        ),
        (
            {"labels": ["cat", "dog", "cta", "cat"], "classes": ["dog", "cat"]},
            r"the label of example 2 is 'cta'.* dog, cat",
        ),
        ({"split": [0, 1, 3, 0]}, r"split is not 0 \(train\), 1 \(test\) or 2 \(validation\)"),
        ({"patient": [7, 7, 8]}, r"patient is \(3,\) \(expected one for each of 4 images"),
        ({"images": make_pixels(4, 8, 8).astype(np.int16)}, "images are int16"),
        ({"images": make_pixels(4, 8)}, r"shape \(4, 8\)"),
        ({"images": make_pixels(4, 8, 8, 5)}, r"shape \(4, 8, 8, 5\)"),
        ({"images": make_pixels(4, 3, 8, 3)}, r"shape \(4, 3, 8, 3\)"),
        (
            {"images": with_change(1, 1.01)},
            r"2 images have invalid pixels, the first is image 1, which has values .*expected .* from 0 to 1",
        ),
        (
            {"images": with_change(0, float("nan"))},
            "2 images have .* the first is image 0, which has NaN ",
        ),
        ({"names": np.array([{}, 1, None, "x"], dtype=object)}, "'names' cannot .*pickle is never read"),
    ],
)
def test_npz_errors_are_one_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    arrays = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    path = save_npz(tmp_path, **arrays)
    with pytest.raises(DataError, match=words) as caught:
        read_npz(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


class Bomb:
    """Ends the test run when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('a pickle was read')",))


@pytest.mark.parametrize("content", [pickle.dumps(Bomb()), b"", b"text", b"PK\x03\x04 cut off"])
def test_rejects_pickles_and_other_formats(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"some\.npz cannot"):
        read_npz(path)


def test_rejects_a_single_array(tmp_path: Path) -> None:
    with (tmp_path / "some.npz").open("wb") as file:
        np.save(file, make_pixels(2, 8, 8))
    with pytest.raises(DataError, match="single array"):
        read_npz(tmp_path / "some.npz")


def test_error_names_a_damaged_array(tmp_path: Path) -> None:
    path = save_npz(tmp_path, **GOOD)
    content = bytearray(path.read_bytes())
    content[content.index(GOOD["images"].tobytes()[:16])] ^= 255
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"array 'images' .*CRC"):
        read_npz(path)


# Folders


def save_image(path: Path, image: np.ndarray[Any, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return path


def test_reads_class_folders(tmp_path: Path) -> None:
    images = make_pixels(3, 8, 12)
    save_image(tmp_path / "dog" / "b.png", images[2])
    save_image(tmp_path / "dog" / "a.PNG", images[1])
    save_image(tmp_path / "cat" / "z.png", images[0])
    (tmp_path / "cat" / "readme.txt").write_text("not an image")
    (tmp_path / "cat" / ".hidden.png").write_text("not an image")
    (tmp_path / ".git").mkdir()
    raw = read_class_folders(tmp_path)
    assert raw.classes == ("cat", "dog")
    assert raw.labels.tolist() == [0, 1, 1]
    assert (raw.images == images[:, None]).all()
    assert raw.split is None


def test_class_folders_may_have_a_cases_csv(tmp_path: Path) -> None:
    images = make_pixels(3, 8, 12)
    for name, image in zip(("cat/z", "dog/a", "dog/z"), images, strict=True):
        save_image(tmp_path / f"{name}.png", image)
    cases = tmp_path / "cases.csv"
    cases.write_text("name,patient,split\ndog/z,p1,test\ncat/z,p2,train\ndog/a,p3,train\n")
    raw = read_class_folders(tmp_path)
    assert raw.columns["patient"].tolist() == ["p2", "p3", "p1"]
    assert raw.split is not None
    assert raw.split.tolist() == [False, False, True]
    cases.write_text("name,patient\ndog/z,p1\ncat/z,p2\n")
    with pytest.raises(DataError, match="'dog/a'"):
        read_class_folders(tmp_path)


def test_reads_train_and_test_class_folders(tmp_path: Path) -> None:
    images = make_pixels(3, 8, 8, 3)
    save_image(tmp_path / "train" / "cat" / "1.png", images[0])
    save_image(tmp_path / "train" / "dog" / "1.png", images[1])
    save_image(tmp_path / "test" / "dog" / "1.png", images[2])  # classes may be missing in the test part
    raw = read_class_folders(tmp_path)
    assert raw.labels.tolist() == [0, 1, 1]
    assert raw.split is not None
    assert raw.split.tolist() == [False, False, True]
    assert (raw.images == images.transpose(0, 3, 1, 2)).all()


def test_palettes_become_color_and_bilevel_gray(tmp_path: Path) -> None:
    (tmp_path / "c" / "a").mkdir(parents=True)
    Image.new("P", (8, 8)).save(tmp_path / "c" / "a" / "1.png")
    Image.new("RGBA", (8, 8), (9, 8, 7, 0)).save(tmp_path / "c" / "a" / "2.png")
    raw = read_class_folders(tmp_path / "c")
    assert raw.images.shape == (2, 3, 8, 8)
    assert raw.images[1, :, 0, 0].tolist() == [255, 255, 255]  # transparent pixels are white
    (tmp_path / "g" / "a").mkdir(parents=True)
    Image.new("1", (8, 8), 1).save(tmp_path / "g" / "a" / "1.png")
    assert (read_class_folders(tmp_path / "g").images == 255).all()
    assert read_class_folders(tmp_path / "g").images.shape == (1, 1, 8, 8)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (make_pixels(8, 16), r"b.png: is 8 x 16, but .*a.png is 8 x 8"),
        (make_pixels(8, 8).astype(np.uint16), r"b.png: is an image of mode I;16"),
    ],
)
def test_error_names_an_image_of_another_size(
    tmp_path: Path, other: np.ndarray[Any, Any], words: str
) -> None:
    save_image(tmp_path / "c" / "a.png", make_pixels(8, 8))
    save_image(tmp_path / "c" / "b.png", other)
    with pytest.raises(DataError, match=words):
        read_class_folders(tmp_path)


def test_error_names_a_broken_image(tmp_path: Path) -> None:
    path = save_image(tmp_path / "c" / "a.png", make_pixels(64, 64))
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(DataError, match=r"a\.png: .* \([^)]*\)$"):
        read_class_folders(tmp_path)
    save_image(tmp_path / "c" / "b.png", make_pixels(64, 64))
    (tmp_path / "c" / "c.png").write_text("none")
    with pytest.raises(DataError, match=r"a\.png: .*\(1 more"):
        read_class_folders(tmp_path)


def test_rejects_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no folders"):
        read_class_folders(tmp_path)
    save_image(tmp_path / "cat" / "1.png", make_pixels(8, 8))
    (tmp_path / "dog").mkdir()
    with pytest.raises(DataError, match=r"dog: .*no image"):
        read_class_folders(tmp_path)


def test_rejects_test_classes_without_training_folder(tmp_path: Path) -> None:
    save_image(tmp_path / "train" / "cat" / "1.png", make_pixels(8, 8))
    save_image(tmp_path / "test" / "dog" / "1.png", make_pixels(8, 8))
    with pytest.raises(DataError, match=r"test/dog: .*train"):
        read_class_folders(tmp_path)


SIZES = {"train": 12, "val": 4, "test": 6}
START = {"train": 0, "val": 100, "test": 200}


def medmnist(path: Path, labels: int = 1, **changes: Any) -> Path:
    """Write MedMNIST arrays: the color of an image encodes its part and number; labels have two axes."""
    arrays: dict[str, Any] = {}
    for part, count in SIZES.items():
        number = (START[part] + np.arange(count)).astype(np.uint8)
        arrays[f"{part}_images"] = np.broadcast_to(number[:, None, None, None], (count, 28, 28, 3))
        arrays[f"{part}_labels"] = np.stack([(number + k) % 2 for k in range(labels)], axis=1)
    arrays.update(changes)
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def numbered_images(data: Any) -> list[int]:
    return [round(float(x) * 127.5 + 127.5) for x in data.inputs[:, 0, 0, 0]]


def test_medmnist_parts_are_kept(tmp_path: Path) -> None:
    path = str(medmnist(tmp_path / "pathmnist.npz"))
    data = load(make_data_config(path))
    assert (data.name, data.classes, data.train.inputs.shape[1:]) == ("pathmnist", ("0", "1"), (3, 28, 28))
    assert (numbered_images(data.train), numbered_images(data.test)) == (
        list(range(12)),
        list(range(200, 206)),
    )
    assert data.train.targets.tolist() == [n % 2 for n in range(12)]
    assert data.note == "4 validation examples are not used (data.validation)"
    chosen = load(make_data_config(path, validation=0.1))
    assert (numbered_images(chosen.train), numbered_images(chosen.test)) == (
        list(range(12)),
        list(range(100, 104)),
    )
    assert chosen.note == "evaluated on its validation part of 4; the test part is not used"


def test_medmnist_multi_label_and_gray_images(tmp_path: Path) -> None:
    gray = {f"{part}_images": np.zeros((count, 28, 28), np.uint8) for part, count in SIZES.items()}
    data = load(
        make_data_config(str(medmnist(tmp_path / "chestmnist.npz", labels=3, **gray))), MultiLabelConfig()
    )
    assert data.train.inputs.shape == (12, 1, 28, 28)
    assert data.test.targets[:2].tolist() == [[0, 1, 0], [1, 0, 1]]


def test_node_uses_the_training_part_only(tmp_path: Path) -> None:
    medmnist(tmp_path / "data.npz")
    data, spec = node_data.load_node_data(NodeDataConfig(), tmp_path)
    assert (numbered_images(data), spec.shape) == (list(range(12)), (3, 28, 28))


def test_error_names_a_missing_part(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'val_labels', .*test_images"):
        load(make_data_config(str(medmnist(tmp_path / "part.npz", val_labels=None))))


VALIDATION: dict[str, None] = {"val_images": None, "val_labels": None}
TEST: dict[str, None] = {"test_images": None, "test_labels": None}


def test_missing_validation_part_is_sampled(tmp_path: Path) -> None:
    path = str(medmnist(tmp_path / "part.npz", **VALIDATION))
    data = load(make_data_config(path))
    assert (numbered_images(data.train), numbered_images(data.test)) == (
        list(range(12)),
        list(range(200, 206)),
    )
    chosen = load(make_data_config(path, validation=0.25))
    assert (len(chosen.train), len(chosen.test)) == (9, 3)
    assert sorted(numbered_images(chosen.train) + numbered_images(chosen.test)) == list(range(12))


def test_missing_test_part_is_sampled(tmp_path: Path) -> None:
    data = load(make_data_config(str(medmnist(tmp_path / "train.npz", **VALIDATION, **TEST))))
    assert sorted(numbered_images(data.train) + numbered_images(data.test)) == list(range(12))
    with pytest.raises(DataError, match=r"no_test\.npz: .*val_images .*test_images"):
        load(make_data_config(str(medmnist(tmp_path / "no_test.npz", **TEST))))


def test_other_arrays_of_medmnist_files_are_kept(tmp_path: Path) -> None:
    patients = {f"{part}_patient": START[part] + np.arange(count) // 2 for part, count in SIZES.items()}
    path = medmnist(tmp_path / "more.npz", classes=np.array(["healthy", "ill"]), **patients)
    data = load(make_data_config(str(path)))
    assert data.classes == ("healthy", "ill")
    assert data.columns["patient"].tolist() == [n // 2 for n in range(12)]
    del patients["val_patient"]
    with pytest.raises(DataError, match="array 'val_patient'"):
        load(make_data_config(str(medmnist(tmp_path / "some.npz", **patients))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # The total number of labels is correct, but they would be assigned to other images.
        ({"train_labels": np.zeros((11, 1), int), "test_labels": np.zeros((7, 1), int)}, "train_labels"),
        ({"test_images": np.zeros((6, 8, 8, 3), np.uint8)}, "test_images"),
        ({"test_labels": np.zeros(6, int)}, "test_labels"),
    ],
)
def test_rejects_inconsistent_medmnist_parts(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"odd\.npz: {message} is of shape"):
        load(make_data_config(str(medmnist(tmp_path / "odd.npz", **changes))))


def test_rejects_bytes_of_0_and_1() -> None:
    binary = np.eye(8, dtype=np.uint8)[None].repeat(2, axis=0)
    for pixels in (binary, binary * np.float32(0.5)):
        with pytest.raises(DataError, match=r"here: .*above 1"):
            reshape_pixel_rows(pixels.reshape(2, 64).astype(np.float32), Path("here"), ())
    with pytest.raises(DataError, match=r"here: .*above 1"):
        raw_images_from_arrays(Path("here"), {"images": binary, "labels": np.array([0, 1])}, "class")
    for sound in (binary * np.uint8(255), binary * np.uint8(0), binary.astype(np.float32)):
        raw = raw_images_from_arrays(Path("here"), {"images": sound, "labels": np.array([0, 1])}, "class")
        assert np.array_equal(raw.images[:, 0], sound)
