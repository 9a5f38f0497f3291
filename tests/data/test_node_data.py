"""Data of one owner: conversion to tensors, and one-line errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, DataError, FedstillError, UnknownInputFormatError
from fedstill.data.data_spec import DataSpec
from fedstill.data.node_data import NodeDataConfig, check_pixel_range, load_node_data
from fedstill.tasks.classification import ClassificationConfig, TextConfig
from fedstill.tasks.reconstruction import ReconstructionConfig
from tests.support.errors import raises_invalid

HALF = (0.5,)
PETS = DataSpec(ClassificationConfig(), ("cat", "dog", "eel"), (1, 4, 8), HALF, HALF)
DIGITS = DataSpec(ClassificationConfig(), tuple(map(str, range(10))), (1, 4, 8), HALF, HALF)
PIXELS = np.arange(2 * 32, dtype=np.uint8).reshape(2, 4, 8)  # (N, H, W)
NORMALIZED = torch.tensor(PIXELS / 255 * 2 - 1).float().view(2, 1, 4, 8)


def write_npz(folder: Path, **arrays: Any) -> NodeDataConfig:
    np.savez(folder / "mine.npz", **arrays)
    return NodeDataConfig(path="mine.npz")


def write_png(path: Path, image: np.ndarray[Any, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def write_pixel_csv(
    folder: Path, labels: list[str], scale: float = 1.0, name: str = "label"
) -> NodeDataConfig:
    header = ",".join([name, *(f"p{i}" for i in range(32))])
    rows = [
        ",".join([label, *(f"{value * scale:g}" for value in PIXELS[n].flatten())])
        for n, label in enumerate(labels)
    ]
    (folder / "mine.csv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return NodeDataConfig(source="csv", path="mine.csv")


# --- npz ----------------------------------------------------------------------------------------------


def test_npz_bytes_and_floats_give_equal_tensors(tmp_path: Path) -> None:
    as_bytes, spec = load_node_data(write_npz(tmp_path, images=PIXELS, labels=[2, 0]), tmp_path, PETS)
    as_floats, _ = load_node_data(write_npz(tmp_path, images=PIXELS / 255, labels=[2, 0]), tmp_path, PETS)
    assert spec == PETS
    assert as_bytes.inputs.dtype == torch.float32
    torch.testing.assert_close(as_bytes.inputs, NORMALIZED)
    torch.testing.assert_close(as_floats.inputs, NORMALIZED)
    assert as_bytes.targets.tolist() == [2, 0]
    assert as_bytes.targets.dtype == torch.int64


def test_uses_the_normalization_of_the_server(tmp_path: Path) -> None:
    spec = DataSpec(ClassificationConfig(), PETS.classes, (1, 4, 8), (0.25,), (0.125,))
    data, _ = load_node_data(write_npz(tmp_path, images=PIXELS, labels=[1, 1]), tmp_path, spec)
    torch.testing.assert_close(data.inputs[1, 0, 0, 0].item(), (32 / 255 - 0.25) / 0.125)


def test_classes_are_matched_by_name_and_may_be_missing(tmp_path: Path) -> None:
    config = write_npz(tmp_path, images=PIXELS, labels=[0, 1], classes=["eel", "cat"])
    assert load_node_data(config, tmp_path, PETS)[0].targets.tolist() == [2, 0]
    config = write_npz(tmp_path, images=PIXELS, labels=[0, 1], classes=["eel", "cow"])
    with pytest.raises(DataError, match=r"'cow'.* cat, dog, eel"):
        load_node_data(config, tmp_path, PETS)
    # Declared classes need not occur.
    config = write_npz(tmp_path, images=PIXELS, labels=[0, 0], classes=["eel", "cow"])
    assert load_node_data(config, tmp_path, PETS)[0].targets.tolist() == [2, 2]


def test_numeric_labels_are_class_indices_even_if_classes_have_numeric_names(tmp_path: Path) -> None:
    spec = DataSpec(ClassificationConfig(), ("1", "2", "3"), (1, 4, 8), HALF, HALF)
    config = write_npz(tmp_path, images=PIXELS, labels=[1, 2])
    assert load_node_data(config, tmp_path, spec)[0].targets.tolist() == [1, 2]
    with pytest.raises(DataError, match=r"label 3 of example 0.* 0..2"):
        load_node_data(write_npz(tmp_path, images=PIXELS, labels=[3, 0]), tmp_path, spec)


def test_rejects_or_fits_another_size(tmp_path: Path) -> None:
    spec = DataSpec(ClassificationConfig(), PETS.classes, (3, 8, 8), (0.5,) * 3, (0.5,) * 3)
    flat = np.full((2, 4, 8), 51, dtype=np.uint8)
    config = write_npz(tmp_path, images=flat, labels=[0, 1])
    allowed = r"images are 1 x 4 x 8 \(channels, height, width\) \(expected 3 x 8 x 8; data.fit = true"
    with pytest.raises(DataError, match=allowed):
        load_node_data(config, tmp_path, spec)
    data, _ = load_node_data(NodeDataConfig(path="mine.npz", fit=True), tmp_path, spec)
    assert data.inputs.shape == (2, 3, 8, 8)
    torch.testing.assert_close(data.inputs, torch.full((2, 3, 8, 8), 0.2 * 2 - 1))


def test_derives_the_spec_from_data_without_a_server(tmp_path: Path) -> None:
    config = write_npz(tmp_path, images=PIXELS, labels=[0, 1], classes=["a", "b"])
    data, spec = load_node_data(config, tmp_path)
    assert spec == DataSpec(ClassificationConfig(), ("a", "b"), (1, 4, 8), HALF, HALF)
    torch.testing.assert_close(data.inputs, NORMALIZED)
    with pytest.raises(DataError, match="one class"):
        load_node_data(write_npz(tmp_path, images=PIXELS, labels=[0, 0]), tmp_path)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("npz", "data.path 'none.here': file not found: "),
        ("csv", "data.path 'none.here': file not found: "),
        ("folder", "data.path 'none.here': folder not found: "),
    ],
)
def test_missing_file_error_names_the_path(tmp_path: Path, source: str, line: str) -> None:
    with pytest.raises(DataError, match=line):
        load_node_data(NodeDataConfig(source=source, path="none.here"), tmp_path, PETS)


# --- csv ----------------------------------------------------------------------------------------------


def test_reads_a_csv_of_pixels(tmp_path: Path) -> None:
    data, _ = load_node_data(write_pixel_csv(tmp_path, ["dog", "cat"]), tmp_path, PETS)
    torch.testing.assert_close(data.inputs, NORMALIZED)
    assert data.targets.tolist() == [1, 0]
    data, _ = load_node_data(write_pixel_csv(tmp_path, ["7", "3"]), tmp_path, DIGITS)
    assert data.targets.tolist() == [7, 3]
    data, _ = load_node_data(
        write_pixel_csv(tmp_path, ["2", "0"]), tmp_path, PETS
    )  # labels are indices if no class has a numeric name
    assert data.targets.tolist() == [2, 0]


def test_csv_pixels_are_bytes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1 examples.* 0..255.* 1"):
        load_node_data(write_pixel_csv(tmp_path, ["dog", "cat"], scale=5.0), tmp_path, PETS)
    with pytest.raises(DataError, match="above 1"):
        load_node_data(write_pixel_csv(tmp_path, ["dog", "cat"], scale=1 / 255), tmp_path, PETS)


def test_reads_a_csv_of_image_files(tmp_path: Path) -> None:
    write_png(tmp_path / "in" / "one.png", PIXELS[0])
    write_png(tmp_path / "in" / "two.png", PIXELS[1])
    (tmp_path / "in" / "list.csv").write_text(
        "file,age,kind\none.png,40,eel\ntwo.png,50,cat\n\n", encoding="utf-8"
    )
    config = NodeDataConfig(source="csv", path="in/list.csv", label="kind", image="file")
    data, _ = load_node_data(config, tmp_path, PETS)
    torch.testing.assert_close(data.inputs, NORMALIZED)
    assert data.targets.tolist() == [2, 0]
    write_png(tmp_path / "in" / "two.png", PIXELS[1][:2])
    with pytest.raises(DataError, match=r"'two.png': is 2 x 8.* 'one.png' is 4 x 8 .*data\.fit"):
        load_node_data(config, tmp_path, PETS)
    fitted, _ = load_node_data(replace(config, fit=True), tmp_path, replace(PETS, shape=(1, 4, 4)))
    assert fitted.inputs.shape == (2, 1, 4, 4)
    with pytest.raises(UnknownInputFormatError, match="in size"):
        load_node_data(replace(config, fit=True), tmp_path)
    (tmp_path / "in" / "two.png").unlink()
    with pytest.raises(DataError, match=r"'two.png': cannot be"):
        load_node_data(config, tmp_path, PETS)


def test_csv_determines_its_shape_without_a_server(tmp_path: Path) -> None:
    square = PIXELS[:, :, :4]
    rows = [
        f"{label},{','.join(map(str, image.flatten()))}" for label, image in zip("20", square, strict=True)
    ]
    header = ",".join(["label", *(f"p{i}" for i in range(16))])
    (tmp_path / "mine.csv").write_text("\n".join([header, *rows]), encoding="utf-8")
    data, spec = load_node_data(NodeDataConfig(source="csv", path="mine.csv"), tmp_path)
    assert (spec.shape, spec.classes) == ((1, 4, 4), ("0", "2"))
    assert data.targets.tolist() == [1, 0]
    torch.testing.assert_close(data.inputs, NORMALIZED[..., :4])
    config = write_pixel_csv(tmp_path, ["dog", "cat"])
    with pytest.raises(DataError, match=r"32 pixels .*a square"):
        load_node_data(config, tmp_path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("kind,a\ncat,1\n", r"invalid data.label = 'label' \(expected one column of .*, which has kind, a"),
        ("label,a,label\ncat,1,cat\n", r"invalid data.label = 'label' \(expected one column"),
        ("", "which has none"),
        ("label,a\n", "there are no examples"),
        ("label,a\ncat,1,2\n", r"line 2 has 3 cells \(expected 2"),
        ("label,a\ncat,x\n", r"line 2 has 'x' \(expected numbers"),
        ("label," + "a," * 31 + "b\ncow" + ",9" * 32, "has a class 'cow'"),
        ("label," + "a," * 31 + "b\ncat" + ",nan" * 32, "line 2 has 'nan'"),
    ],
)
def test_csv_errors_are_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "mine.csv").write_text(text, encoding="utf-8")
    with pytest.raises(FedstillError, match=line):
        load_node_data(NodeDataConfig(source="csv", path="mine.csv"), tmp_path, PETS)


# --- tensors ------------------------------------------------------------------------------------------


def test_loads_tensors_in_the_form_of_the_spec(tmp_path: Path) -> None:
    config = NodeDataConfig(source="tensors", path="mine.safetensors", group="patient")
    sound = {"inputs": NORMALIZED, "targets": torch.tensor([2, 0]), "patient": torch.tensor([7, 7])}

    def loaded(**changed: torch.Tensor) -> TensorData:
        save_file({**sound, **changed}, tmp_path / "mine.safetensors")
        return load_node_data(config, tmp_path, PETS)[0]

    data = loaded()
    assert torch.equal(data.inputs, NORMALIZED)
    assert data.targets.tolist() == [2, 0]
    assert data.groups is not None
    assert data.groups[0] == data.groups[1]
    check_pixel_range(config, data, PETS)
    with pytest.raises(DataError, match=r"from -3 .*-1 to 1 .*0.5 .*0.5"):
        check_pixel_range(config, loaded(inputs=3 * NORMALIZED), PETS)
    for changed, message in (
        ({"inputs": NORMALIZED[:, :, :, :4].clone()}, r"shape \(1, 4, 4\) \(expected \(1, 4, 8\)"),
        ({"patient": torch.tensor([7])}, r"patient is of shape \(1,\) \(expected one an example"),
        ({"age": torch.tensor([7])}, r"holds age, inputs, patient, targets \(expected just inputs, patient"),
    ):
        with pytest.raises(DataError, match=message):
            loaded(**changed)


def test_declared_vocabulary_reveals_no_word(tmp_path: Path) -> None:
    """Ids outside of the vocabulary become unknown words; an error would reveal them."""
    ids = torch.tensor([[2, 777, 4, 0]])
    save_file({"inputs": ids, "targets": torch.tensor([0])}, tmp_path / "mine.safetensors")
    config = NodeDataConfig(source="tensors", path="mine.safetensors")
    for vocabulary, expected in ((1000, ids), (777, torch.tensor([[2, 1, 4, 0]]))):
        spec = DataSpec(TextConfig(), ("a", "b"), (4,), (), (), vocabulary)
        assert torch.equal(load_node_data(config, tmp_path, spec)[0].inputs, expected)


def test_declared_normalization_reveals_no_extreme_pixel() -> None:
    """Image targets are in [-1, 1]; with other constants, errors would reveal extreme pixels."""
    DataSpec(ReconstructionConfig(), ("image",), (1, 8, 8), (0.5,), (0.5,))
    for mean, std in ((0.0, 0.5), (0.5, 0.49)):
        with raises_invalid("spec.mean and spec.std", ANY, "0.5", "task reconstruction"):
            DataSpec(ReconstructionConfig(), ("image",), (1, 8, 8), (mean,), (std,))


def test_loaded_tensors_are_aligned_like_those_of_a_simulation(tmp_path: Path) -> None:
    """On some processors, sums depend on the memory alignment."""
    config, path = NodeDataConfig(source="tensors", path="mine.safetensors"), tmp_path / "mine.safetensors"
    as_in_the_file = set()
    for count in range(1, 9):  # in the file, inputs follow these targets of 8 bytes each
        save_file(
            {"inputs": NORMALIZED[:1].repeat(count, 1, 1, 1), "targets": torch.zeros(count).long()}, path
        )
        as_in_the_file.add(load_file(path)["inputs"].data_ptr() % 64)
        assert (
            load_node_data(config, tmp_path, PETS)[0].inputs.data_ptr() % 64
            == torch.empty(64).data_ptr() % 64
        )
    assert len(as_in_the_file) > 1


# --- functions of the owner -------------------------------------------------------------------------------

LOADERS = """
import numpy as np
import torch

PIXELS = np.arange(64, dtype=np.uint8).reshape(2, 4, 8)

def pair(path):
    return PIXELS, [2, 0]

def names(path):
    return torch.from_numpy(PIXELS), ["eel", "cat"]

def arrays(path):
    return {"images": PIXELS, "labels": [0, 1], "classes": ["eel", "cat"], "split": [0, 0]}

class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.from_numpy(PIXELS[index]), (2, 0)[index]

def data_set(path):
    return Pairs()

def reads(path):
    return PIXELS, np.loadtxt(path, dtype=int)

def pictures(path):
    from PIL import Image

    return [{"image": Image.fromarray(PIXELS[index]), "label": (2, 0)[index]} for index in range(2)]

def loader(path):
    return torch.utils.data.DataLoader(Pairs(), batch_size=1)

def backwards(path):
    pixels = PIXELS[::-1].astype(">f4") / 255
    return pixels.astype(">f4")[::-1], np.array([0, 2], dtype=">i8")[::-1]

def sizes(path):
    from PIL import Image

    return [(Image.fromarray(PIXELS[0]), 0), (Image.fromarray(PIXELS[1, :2]), 1)]

def imaginary(path):
    return PIXELS + 1j, [2, 0]

def fails(path):
    raise KeyError("no such patient")

def nothing(path):
    return None
"""


@pytest.mark.parametrize(
    "function",
    ["pair", "names", "arrays", "data_set", "reads", "pictures", "loader", "backwards"],
)
def test_calls_the_owners_function(tmp_path: Path, function: str) -> None:
    (tmp_path / "my_private_loaders.py").write_text(LOADERS, encoding="utf-8")
    (tmp_path / "labels.txt").write_text("2\n0\n", encoding="utf-8")
    config = NodeDataConfig(source=f"my_private_loaders:{function}", path="labels.txt")
    with fresh("my_private_loaders"):
        data, _ = load_node_data(config, tmp_path, PETS)
    torch.testing.assert_close(data.inputs, NORMALIZED)
    assert data.targets.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("my_private_loaders:fails", "the function failed, or returned no .*: 'no such patient'"),
        ("my_private_loaders:nothing", "data.source 'my_private_loaders:nothing': .* is a NoneType"),
        ("my_private_loaders:sizes", "images: image 1 is 2 x 8, but image 0 is 4 x 8"),
        ("my_private_loaders:imaginary", r"images are complex128 \(expected uint8, or floats"),
        ("my_private_loaders:none", r"data.source = .* \(expected a name in .*, which has no 'none'"),
        ("my_private_nothing:load", r"data.source = .* \(expected a module in .* or an installed one"),
        (
            "my_broken_loaders:load",
            "expected an importable module; importing it fails: No module named 'not_here'",
        ),
    ],
)
def test_owner_function_errors_are_one_line(tmp_path: Path, source: str, line: str) -> None:
    (tmp_path / "my_private_loaders.py").write_text(LOADERS, encoding="utf-8")
    (tmp_path / "my_broken_loaders.py").write_text("import not_here\n", encoding="utf-8")
    with fresh("my_private_loaders", "my_broken_loaders"), pytest.raises(FedstillError, match=line):
        load_node_data(NodeDataConfig(source=source), tmp_path, PETS)


def test_owner_module_comes_from_the_owners_folder(tmp_path: Path) -> None:
    for owner in ("a", "b"):
        (tmp_path / owner).mkdir()
        (tmp_path / owner / "my_shared_name.py").write_text(LOADERS, encoding="utf-8")
    config = NodeDataConfig(source="my_shared_name:pair")
    with fresh("my_shared_name"):
        load_node_data(config, tmp_path / "a", PETS)
        with raises_invalid("data.source", "my_shared_name:pair", "b/my_shared_name.py"):
            load_node_data(config, tmp_path / "b", PETS)


# --- options ------------------------------------------------------------------------------------------


def test_rejects_unknown_sources() -> None:
    allowed = "expected npz, folder, csv, parquet, nifti, tensors or package"
    with pytest.raises(ArgumentError, match=rf"data.source = .zip. \({allowed}"):
        NodeDataConfig(source="zip")


@contextmanager
def fresh(*names: str) -> Iterator[None]:
    """Remove modules and their folders from the import system before and after a test."""
    positions = list(sys.path)
    for name in names:
        sys.modules.pop(name, None)
    yield
    sys.path[:] = positions
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("more", ["gray", "color"])
@pytest.mark.parametrize("shape", [(1, 12, 12), (3, 12, 12), (1, 8, 8), (3, 8, 4), (1, 8, 4)])
@pytest.mark.parametrize("source", ["folder", "csv"])
def test_images_are_converted_independently(
    tmp_path: Path, source: str, shape: tuple[int, int, int], more: str
) -> None:
    """Otherwise a record would change the last digits of others, which breaks per-record guarantees."""
    draws = np.random.default_rng(0)
    lines = ["image,label"]
    for name in ("cat", "dog"):
        for number in range(8):
            form = (12, 12) if more == "color" or number % 2 else (12, 12, 3)
            write_png(tmp_path / name / f"{number}.png", draws.integers(0, 256, form, dtype=np.uint8))
            lines.append(f"{name}/{number}.png,{name}")

    def read() -> torch.Tensor:
        (tmp_path / "list.csv").write_text("\n".join(lines))
        path = "." if source == "folder" else "list.csv"
        config = NodeDataConfig(source=source, path=path, fit=True)
        spec = replace(PETS, shape=shape, mean=HALF * shape[0], std=HALF * shape[0])
        return load_node_data(config, tmp_path, spec)[0].inputs

    without = read()
    added = draws.integers(0, 256, (12, 12, 3) if more == "color" else (12, 12), dtype=np.uint8)
    write_png(tmp_path / "dog" / "9.png", added)
    lines.append("dog/9.png,dog")
    assert torch.equal(read()[:-1], without)
