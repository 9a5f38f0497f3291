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
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data folder of the person who runs the tests."""
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def pairs(*parts: TensorData) -> list[tuple[int, bytes]]:
    """Label and pixels of each example, in an order that does not depend on theirs."""
    return sorted(
        (int(label), image.numpy().tobytes())
        for part in parts
        for image, label in zip(part.inputs, part.targets, strict=True)
    )


def npz(path: Path, n: int = 40, **arrays: Any) -> Path:
    """Example i is a flat image of brightness i with label i % 4."""
    images = np.arange(n, dtype=np.uint8)[:, None, None].repeat(8, axis=1).repeat(8, axis=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{"images": images, "labels": np.arange(n) % 4, **arrays})
    return path


def numbers(data: TensorData) -> list[int]:
    """Which of ``npz``'s examples these are."""
    return [round(float(x) * 127.5 + 127.5) for x in data.inputs[:, 0, 0, 0]]


# Digits, and what holds for every source


def test_digits_are_complete_and_rightly_paired() -> None:
    source, data = load_digits(), load(Digits())
    expected = TensorData(
        torch.tensor(source.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(source.target)
    )
    assert pairs(data.train, data.test) == pairs(expected)
    assert (len(data.train), len(data.test)) == (1438, 359)  # a fifth of 1797
    assert (data.mean, data.std, data.name) == ((0.5,), (0.5,), "digits")
    assert data.classes == tuple("0123456789")
    assert data.train.inputs.dtype == torch.float32
    assert data.train.targets.dtype == torch.int64
    assert "no official split" in data.note
    assert "359 of 1797" in data.note


def test_the_seed_draws_the_split() -> None:
    first, again, other = (load(Digits(seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first.test.inputs, again.test.inputs)
    assert pairs(first.test) != pairs(other.test)


def test_a_limit_draws_with_shares_from_the_train_part_alone() -> None:
    full, part = load(Digits()), load(Digits(train_limit=100))
    assert len(part.train) == 100
    assert set(pairs(part.train)) <= set(pairs(full.train))
    assert torch.equal(part.test.inputs, full.test.inputs)
    exact = full.train.targets.bincount() * 100 / len(full.train)
    assert ((part.train.targets.bincount() - exact).abs() < 1).all()
    assert "trained on 100 of 1438" in part.note


@pytest.mark.parametrize(
    ("name", "options", "said"),
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
def test_settings_that_are_not_allowed(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        load(make_data_config(name, **options))
    assert caught.value.name == said
    if said == "data.name":
        assert all(known in str(caught.value) for known in DATA)


# Files of one's own


def test_npz_keeps_its_split_and_the_columns_of_the_train_part(tmp_path: Path) -> None:
    part = np.arange(40) % 5 == 0
    site = np.array([f"site {i % 3}" for i in range(40)])
    path = npz(tmp_path / "mine.npz", split=part.astype(int), site=site)
    data = load(make_data_config(str(path)))
    assert data.name == "mine"
    assert numbers(data.test) == list(range(0, 40, 5))
    assert data.columns["site"].tolist() == [f"site {i % 3}" for i in numbers(data.train)]
    assert data.train.targets.tolist() == [i % 4 for i in numbers(data.train)]
    assert data.note == ""


# Where files are looked for


def test_places_are_tried_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The three files differ in the number of their examples.
    npz(tmp_path / "env" / "mnist.npz", 60, split=np.arange(60) % 2)
    monkeypatch.setenv("FEDSTILL_DATA", os.pathsep.join(["/far/away", str(tmp_path / "env")]))
    assert len(load(make_data_config("mnist")).train) == 30
    npz(tmp_path / "data" / "mnist.npz", 50, split=np.arange(50) % 2)
    assert len(load(make_data_config("mnist")).train) == 25
    npz(tmp_path / "own" / "mnist.npz", 40, split=np.arange(40) % 2)
    assert len(load(make_data_config("mnist", root=str(tmp_path / "own"))).train) == 20
    with pytest.raises(DataError, match="elsewhere"):  # a root that is named is the only one
        load(make_data_config("mnist", root="elsewhere"))


def test_what_was_looked_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_DATA", "/far/away")
    with pytest.raises(DataError, match=r"no torchvision's MNIST or mnist\.npz in data or /far/away"):
        load(make_data_config("mnist"))
    with pytest.raises(DataError, match=r"there is no some/file.npz or data/some/file.npz or /far"):
        load(make_data_config("some/file.npz"))


# torchvision, of which a stand-in is enough


@pytest.fixture
def vision(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A torchvision that gives 8 train and 4 test images and keeps the arguments it was called with."""
    calls: list[dict[str, Any]] = []

    def source(color: bool) -> Any:
        def build(root: str, train: bool, download: bool) -> SimpleNamespace:
            calls.append({"root": root, "train": train, "download": download})
            n, start = (8, 0) if train else (4, 100)
            data = np.arange(start, start + n, dtype=np.uint8).repeat(8 * 8).reshape(n, 8, 8)
            targets, classes = [i % 2 for i in range(n)], ["a", "b"]
            if color:  # CIFAR has arrays and lists there, MNIST tensors
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
def test_torchvision_gives_both_parts(vision: SimpleNamespace, name: str, channels: int) -> None:
    data = load(make_data_config(name, root="own", download=True))
    assert vision.calls == [
        {"root": "own", "train": True, "download": True},
        {"root": "own", "train": False, "download": True},
    ]
    assert data.train.inputs.shape == (8, channels, 8, 8)
    assert numbers(data.train) == list(range(8))
    assert numbers(data.test) == list(range(100, 104))
    assert data.train.targets.tolist() == [0, 1] * 4
    assert (data.classes, data.note) == (("a", "b"), "official split")


def test_torchvision_files_that_are_there_need_no_download(vision: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "data" / "MNIST").mkdir(parents=True)
    assert len(load(make_data_config("mnist")).train) == 8
    assert [call["download"] for call in vision.calls] == [False, False]
    npz(tmp_path / "data" / "mnist.npz", split=np.arange(40) % 2)
    assert len(load(make_data_config("mnist")).train) == 20  # our own file comes first


def test_without_torchvision_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'fedstill\[vision\]'"):
        load(make_data_config("mnist", download=True))


def test_what_torchvision_says_is_passed_on_in_one_line(vision: SimpleNamespace) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("Dataset not found.\nYou can use download=True")

    vision.MNIST = fails
    with pytest.raises(DataError, match=r"MNIST in own: .*Dataset not found\. You can"):
        load(make_data_config("mnist", root="own", download=True))


# The real file


@pytest.mark.skipif(not (PACKS / "mnist.npz").is_file(), reason="needs mnist.npz in FEDSTILL_DATA")
def test_mnist() -> None:
    data = load(make_data_config("mnist", root=str(PACKS)))
    assert data.train.inputs.shape == (60000, 1, 28, 28)
    assert data.test.inputs.shape == (10000, 1, 28, 28)
    assert data.train.targets[:5].tolist() == [5, 0, 4, 1, 9]  # as the official files begin
    assert data.test.targets[:5].tolist() == [7, 2, 1, 0, 4]
    mean = (data.train.inputs.mean().item() + 1) / 2
    assert mean == pytest.approx(0.1307, abs=1e-4)  # the well-known figure
    assert data.note == "official split"


@pytest.mark.parametrize("name", ["patient", "site"])
@pytest.mark.parametrize("gap", ["", " NA", float("nan")])
def test_whose_an_example_is_must_be_told_of_all_or_of_none(name: str, gap: Any, tmp_path: Path) -> None:
    """All without would be one patient, never parted and protected as one."""
    column = np.array([gap, *(["a", "b"] if isinstance(gap, str) else [1.0, 2.0]) * 10])
    images, labels = np.zeros((21, 8, 8), dtype=np.uint8), np.arange(21) % 2
    masks = np.indices((21, 8, 8))[2] % 2
    np.savez(tmp_path / "some.npz", images=images, labels=labels, masks=masks, **{name: column})
    for task in (ClassificationConfig(), SegmentationConfig()):  # of which the second chooses sites, too
        with pytest.raises(DataError, match=rf"'{name}' is empty for 1 of 21 .*, the first is example 0"):
            load(make_data_config(str(tmp_path / "some.npz")), task)
