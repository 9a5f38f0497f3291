from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedstill.core.errors import ArgumentError, DataError
from fedstill.data import DATA, Digits, TensorData, load, make_data_config
from fedstill.tasks.classification import ClassificationConfig
from fedstill.tasks.segmentation import SegmentationConfig

PACKS = Path(os.environ.get("FEDSTILL_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


@pytest.fixture(autouse=True)
def _no_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the data folders of the machine."""
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def sorted_pairs(*parts: TensorData) -> list[tuple[int, bytes]]:
    """Return label and pixels of each example, sorted."""
    return sorted(
        (int(label), image.numpy().tobytes())
        for part in parts
        for image, label in zip(part.inputs, part.targets, strict=True)
    )


def write_npz(path: Path, n: int = 40, **arrays: Any) -> Path:
    """Write flat images: example i has brightness i and label i % 4."""
    images = np.arange(n, dtype=np.uint8)[:, None, None].repeat(8, axis=1).repeat(8, axis=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{"images": images, "labels": np.arange(n) % 4, **arrays})
    return path


def example_numbers(data: TensorData) -> list[int]:
    """Return the numbers of examples written by ``write_npz``."""
    return [round(float(x) * 127.5 + 127.5) for x in data.inputs[:, 0, 0, 0]]


# Digits, and properties of all sources


def test_digits_match_scikit_learn() -> None:
    source, data = load_digits(), load(Digits())
    expected = TensorData(
        torch.tensor(source.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(source.target)
    )
    assert sorted_pairs(data.train, data.test) == sorted_pairs(expected)
    assert (len(data.train), len(data.test)) == (1438, 359)  # 20 % of 1797
    assert (data.mean, data.std, data.name) == ((0.5,), (0.5,), "digits")
    assert data.classes == tuple("0123456789")
    assert data.train.inputs.dtype == torch.float32
    assert data.train.targets.dtype == torch.int64
    assert "no official split" in data.note
    assert "359 of 1797" in data.note


def test_seed_determines_the_test_split() -> None:
    first, again, other = (load(Digits(seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first.test.inputs, again.test.inputs)
    assert sorted_pairs(first.test) != sorted_pairs(other.test)


def test_train_limit_is_stratified_and_keeps_the_test_part() -> None:
    full, part = load(Digits()), load(Digits(train_limit=100))
    assert len(part.train) == 100
    assert set(sorted_pairs(part.train)) <= set(sorted_pairs(full.train))
    assert torch.equal(part.test.inputs, full.test.inputs)
    exact = full.train.targets.bincount() * 100 / len(full.train)
    assert ((part.train.targets.bincount() - exact).abs() < 1).all()
    assert "trained on 100 of 1438" in part.note


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits", {"train_limit": -1}, "data.train_limit"),
        ("digits", {"test_fraction": 0.0}, "data.test_fraction"),
        ("digits", {"test_fraction": 1.0}, "data.test_fraction"),
        ("digits", {"test_fraction": float("nan")}, "data.test_fraction"),
        ("digits", {"download": True}, "data.download"),
        ("", {}, "data.name"),
        ("imagenet", {}, "data.name"),
    ],
)
def test_rejects_invalid_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        load(make_data_config(name, **options))
    assert caught.value.name == message
    if message == "data.name":
        assert all(known in str(caught.value) for known in DATA)


# User files


def test_npz_keeps_its_split_and_columns(tmp_path: Path) -> None:
    part = np.arange(40) % 5 == 0
    site = np.array([f"site {i % 3}" for i in range(40)])
    path = write_npz(tmp_path / "mine.npz", split=part.astype(int), site=site)
    data = load(make_data_config(str(path)))
    assert data.name == "mine"
    assert example_numbers(data.test) == list(range(0, 40, 5))
    assert data.columns["site"].tolist() == [f"site {i % 3}" for i in example_numbers(data.train)]
    assert data.train.targets.tolist() == [i % 4 for i in example_numbers(data.train)]
    assert data.note == ""


# Data folders


def test_data_folders_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The three files differ in the number of their examples.
    write_npz(tmp_path / "env" / "mnist.npz", 60, split=np.arange(60) % 2)
    monkeypatch.setenv("FEDSTILL_DATA", os.pathsep.join(["/far/away", str(tmp_path / "env")]))
    assert len(load(make_data_config("mnist")).train) == 30
    write_npz(tmp_path / "data" / "mnist.npz", 50, split=np.arange(50) % 2)
    assert len(load(make_data_config("mnist")).train) == 25
    write_npz(tmp_path / "own" / "mnist.npz", 40, split=np.arange(40) % 2)
    assert len(load(make_data_config("mnist", root=str(tmp_path / "own"))).train) == 20
    with pytest.raises(DataError, match="elsewhere"):  # data.root replaces the other folders
        load(make_data_config("mnist", root="elsewhere"))


def test_missing_data_error_lists_searched_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_DATA", "/far/away")
    with pytest.raises(DataError, match=r"MNIST or mnist\.npz .*data or /far/away"):
        load(make_data_config("mnist"))
    with pytest.raises(DataError, match=r"not found: some/file.npz.*data/some/file.npz.*/far"):
        load(make_data_config("some/file.npz"))


# torchvision (a stub)


@pytest.fixture
def torchvision_stub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace torchvision by a stub with 8 train and 4 test images, which records its arguments."""
    calls: list[dict[str, Any]] = []

    def source(color: bool) -> Any:
        def build(root: str, train: bool, download: bool) -> SimpleNamespace:
            calls.append({"root": root, "train": train, "download": download})
            n, start = (8, 0) if train else (4, 100)
            data = np.arange(start, start + n, dtype=np.uint8).repeat(8 * 8).reshape(n, 8, 8)
            targets, classes = [i % 2 for i in range(n)], ["a", "b"]
            if color:  # torchvision has arrays and lists for CIFAR, tensors for MNIST
                return SimpleNamespace(data=np.stack([data] * 3, axis=3), targets=targets, classes=classes)
            return SimpleNamespace(
                data=torch.from_numpy(data), targets=torch.tensor(targets), classes=classes
            )

        return build

    module = SimpleNamespace(MNIST=source(False), CIFAR10=source(True), calls=calls)
    monkeypatch.setitem(sys.modules, "torchvision", module)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", module)
    return module


@pytest.mark.parametrize(("name", "channels"), [("mnist", 1), ("cifar10", 3)])
def test_reads_both_parts_from_torchvision(
    torchvision_stub: SimpleNamespace, name: str, channels: int
) -> None:
    data = load(make_data_config(name, root="own", download=True))
    assert torchvision_stub.calls == [
        {"root": "own", "train": True, "download": True},
        {"root": "own", "train": False, "download": True},
    ]
    assert data.train.inputs.shape == (8, channels, 8, 8)
    assert example_numbers(data.train) == list(range(8))
    assert example_numbers(data.test) == list(range(100, 104))
    assert data.train.targets.tolist() == [0, 1] * 4
    assert (data.classes, data.note) == (("a", "b"), "official split")


def test_existing_torchvision_files_need_no_download(
    torchvision_stub: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "data" / "MNIST").mkdir(parents=True)
    assert len(load(make_data_config("mnist")).train) == 8
    assert [call["download"] for call in torchvision_stub.calls] == [False, False]
    write_npz(tmp_path / "data" / "mnist.npz", split=np.arange(40) % 2)
    assert len(load(make_data_config("mnist")).train) == 20  # the npz is preferred


def test_missing_torchvision_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'fedstill\[vision\]'"):
        load(make_data_config("mnist", download=True))


def test_torchvision_errors_become_one_line(torchvision_stub: SimpleNamespace) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("Dataset not found.\nYou can use download=True")

    torchvision_stub.MNIST = fails
    with pytest.raises(DataError, match="MNIST in own: "):
        load(make_data_config("mnist", root="own", download=True))


# The real file


@pytest.mark.skipif(not (PACKS / "mnist.npz").is_file(), reason="needs mnist.npz in FEDSTILL_DATA")
def test_mnist_has_the_official_split() -> None:
    data = load(make_data_config("mnist", root=str(PACKS)))
    assert data.train.inputs.shape == (60000, 1, 28, 28)
    assert data.test.inputs.shape == (10000, 1, 28, 28)
    assert data.train.targets[:5].tolist() == [5, 0, 4, 1, 9]  # the first labels of the official file
    assert data.test.targets[:5].tolist() == [7, 2, 1, 0, 4]
    mean = (data.train.inputs.mean().item() + 1) / 2
    assert mean == pytest.approx(0.1307, abs=1e-4)  # the published mean
    assert data.note == "official split"


@pytest.mark.parametrize("name", ["patient", "site"])
@pytest.mark.parametrize("gap", ["", " NA", float("nan")])
def test_rejects_gaps_in_patient_and_site_columns(name: str, gap: Any, tmp_path: Path) -> None:
    """Examples without a patient would count as one patient."""
    column = np.array([gap, *(["a", "b"] if isinstance(gap, str) else [1.0, 2.0]) * 10])
    images, labels = np.zeros((21, 8, 8), dtype=np.uint8), np.arange(21) % 2
    masks = np.indices((21, 8, 8))[2] % 2
    np.savez(tmp_path / "some.npz", images=images, labels=labels, masks=masks, **{name: column})
    for task in (ClassificationConfig(), SegmentationConfig()):  # segmentation also selects sites
        with pytest.raises(DataError, match=rf"'{name}' is empty for 1 of 21 .*, the first is example 0"):
            load(make_data_config(str(tmp_path / "some.npz")), task)
