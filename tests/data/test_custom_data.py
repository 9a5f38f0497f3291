"""Custom data sets, by name and by path, and their errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import ANY

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fedstill.core.config_tables import to_table
from fedstill.core.errors import ArgumentError, DataError, UnknownName
from fedstill.data import DATA, Digits, ImageArrayData, Targets, UserFiles, load, make_data_config, node_data
from fedstill.data.node_data import NodeDataConfig
from fedstill.data.text_data import LabeledTexts, TextData
from fedstill.runs.presets import parse
from fedstill.runs.spec import from_dict, to_dict
from fedstill.tasks.classification import TextConfig
from fedstill.tasks.segmentation import SegmentationConfig
from fedstill.tasks.task import TASKS
from tests.support.errors import raises_invalid

HERE = __name__
PRESETS = Path(__file__).parents[2] / "experiments" / "presets"


@dataclass(frozen=True, kw_only=True)
class Scans(ImageArrayData):
    """Images with value i, patient i // 2, and a text label."""

    targets: ClassVar[tuple[Targets, ...]] = ("class",)

    count: int = 20

    def arrays(self) -> Mapping[str, npt.ArrayLike]:
        """Return all arrays, as lists where possible."""
        number = np.arange(self.count)
        images = np.zeros((self.count, 8, 8), dtype=np.uint8) + number[:, None, None].astype(np.uint8)
        return {
            "images": images,
            "labels": [("dog", "cat")[n % 2] for n in number],
            "patient": [f"p{n // 2}" for n in number],
        }


@dataclass(frozen=True, kw_only=True)
class Masks(Scans):
    """The same images with binary masks."""

    targets: ClassVar[tuple[Targets, ...]] = ("map", "image")

    def arrays(self) -> Mapping[str, npt.ArrayLike]:
        """Return images with masks."""
        arrays: dict[str, Any] = {**super().arrays()}
        return {**arrays, "masks": (arrays["images"] % 2).astype(np.int64)}


@dataclass(frozen=True, kw_only=True)
class Letters(TextData):
    """Two alternating texts."""

    def labeled_texts(self) -> LabeledTexts:
        """Return ten texts of each class."""
        labels = np.arange(20) % 2
        return LabeledTexts([("good film", "bad")[n] for n in labels], labels, ("good", "bad"))


class Loose(ImageArrayData):
    """A class that is not a dataclass."""


@dataclass(frozen=True)
class Empty(ImageArrayData):
    """A class without arrays()."""

    targets: ClassVar[tuple[Targets, ...]] = ("class",)


@dataclass(frozen=True)
class Wordless(Digits):
    """A class whose ``targets`` is not a tuple."""

    targets = "class"  # type: ignore[assignment]


@dataclass(frozen=True)
class Failing(Digits):
    """A class whose arrays() raises an error."""

    def arrays(self) -> Mapping[str, npt.ArrayLike]:
        """Raise an error."""
        raise KeyError("no such plate")


@dataclass(frozen=True)
class Odd(Digits):
    """A class with labels of a wrong shape."""

    def arrays(self) -> Mapping[str, npt.ArrayLike]:
        """Return three labels per image."""
        return {"images": np.zeros((3, 8, 8)), "labels": np.eye(3, dtype=int)}


def test_arrays_become_a_data_set_for_each_kind_of_target() -> None:
    data = load(make_data_config(f"{HERE}:Scans", test_fraction=0.25, train_limit=10))
    assert (data.name, data.classes, data.group_column) == (f"{HERE}:Scans", ("cat", "dog"), "patient")
    pixels = (data.train.inputs[:, 0, 0, 0] * 127.5 + 127.5).round().long()
    assert torch.equal(data.train.targets, 1 - pixels % 2)
    assert data.columns["patient"].tolist() == [f"p{n // 2}" for n in pixels]
    assert (len(data.train), len(data.test)) == (10, 4)
    maps = load(make_data_config(f"{HERE}:Masks"), SegmentationConfig())
    assert maps.train.targets.shape == (16, 8, 8)
    assert maps.classes == ("background", "foreground")


def test_custom_texts_have_the_options_of_texts() -> None:
    data = load(make_data_config(f"{HERE}:Letters", length=3, words=50), TextConfig())
    assert (data.classes, data.vocabulary, data.train.inputs.shape) == (("good", "bad"), 51, (16, 3))
    with raises_invalid("data.name", ANY, "a path", "task text"):
        load(make_data_config(f"{HERE}:Scans"), TextConfig())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Loose", "expected a frozen dataclass"),
        ("Empty", "expected a class with a method arrays"),
        ("Wordless", "expected one with targets, a tuple of some of class, labels"),
        ("Failing", "KeyError: 'no such plate'"),
        ("Odd", ":Odd: labels are int64 of shape (3, 3)"),
        ("Targets", "expected a subclass of DataConfig"),
    ],
)
def test_custom_data_errors_are_one_line(name: str, message: str) -> None:
    with pytest.raises((ArgumentError, DataError)) as caught:
        load(make_data_config(f"{HERE}:{name}"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_name_is_a_path() -> None:
    run = from_dict({"method": {"name": "fedavg"}, "data": {"name": "scans/mine.npz", "patch": 64}})
    assert run.data == UserFiles(name="scans/mine.npz", patch=64)
    assert to_dict(run)["data"]["name"] == "scans/mine.npz"
    assert from_dict(to_dict(run)) == run
    assert to_table(Digits())["name"] == "digits"
    with raises_invalid("data.patch", 64, "none", "data set 'digits'"):
        from_dict({"method": {"name": "fedavg"}, "data": {"name": "digits", "patch": 64}})
    with pytest.raises(UnknownName, match=r"unknown key 'data\.pitch': did you mean 'data\.patch'"):
        make_data_config("mine.npz", pitch=64)


def test_path_keeps_preset_options_that_it_has() -> None:
    """For example, presets of brain MRI also resize user images."""
    for preset, other, expected in (
        ("mri-segmentation-fediod", "volumes", {"size": 64}),
        ("text-sst2-fedkd", "letters.csv", {"length": 40}),
        ("xray-fedkd", "films.npz", {"size": 32, "test_fraction": 0.3}),
    ):
        text = f'extends = "{PRESETS}/{preset}.toml"\n[data]\nname = "{other}"\n'
        data = from_dict(parse(text, kind=type(from_dict({"method": {"name": "fedavg"}})))).data
        assert {name: getattr(data, name) for name in expected} == expected
        assert isinstance(data, UserFiles)


@pytest.mark.parametrize(("kind", "task"), [("Scans", "classification"), ("Masks", "segmentation")])
def test_node_reads_a_custom_data_class(tmp_path: Path, kind: str, task: Any) -> None:
    config = NodeDataConfig(source=f"{HERE}:{kind}", group="patient")
    data, form = node_data.load_node_data(config, tmp_path, task=TASKS[task]())
    assert (len(data), form.shape) == (20, (1, 8, 8))
    assert data.groups is not None
    assert len(set(data.groups.tolist())) == 10
    expected = ("cat", "dog") if task == "classification" else ("background", "foreground")
    assert form.classes == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("digits", r"invalid data.source = 'digits' \(expected npz, folder"),
        ("plate", r"invalid data.source = 'plate' \(expected npz, folder"),
        ("fedstill.data.builtin:MNIST", "expected a data set that derives from ImageArrayData"),
    ],
)
def test_rejects_node_sources_that_are_not_arrays(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        node_data.load_node_data(NodeDataConfig(source=source), tmp_path)


def test_all_registered_data_sets_can_be_constructed() -> None:
    created: dict[str, Any] = {name: DATA[name]() for name in DATA.builtin}
    assert {name: each.registered_name for name, each in created.items()} == {name: name for name in created}
    assert created["digits"].targets == ("class",)
