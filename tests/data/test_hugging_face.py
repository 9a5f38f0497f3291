"""Hugging Face data sets from Python, by a stand-in with the documented interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Picture
from torch import nn

import fedstill
from fedstill.core.errors import DataError
from fedstill.data.hugging_face import require_one_order, tensors
from fedstill.data.python_examples import inputs_and_targets
from fedstill.models import MLP
from fedstill.tasks.classification import ClassificationConfig, TextConfig
from fedstill.tasks.reconstruction import ReconstructionConfig
from fedstill.tasks.segmentation import SegmentationConfig

CLASSES = ClassificationConfig().make(2)


class ClassLabel:
    """A feature: names of classes."""


class Image:
    """A feature: rows hold pictures of PIL."""


class Sequence:
    """A feature: rows hold lists."""


class Dataset:
    """As ``datasets.Dataset``: rows are dictionaries."""

    def __init__(self, features: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.features, self.column_names, self._rows = features, list(features), rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


def pictures(count: int = 6, mode: str = "L", **more: Any) -> Dataset:
    """Picture i is of brightness 50 i, of class i % 2, in a column of any name."""
    rows = [{"scan": Picture.new("L", (8, 8), 50 * i).convert(mode), "kind": i % 2} for i in range(count)]
    return Dataset({"scan": Image(), "kind": ClassLabel(), **more}, rows)


def test_class_labels_are_numbered_as_the_named_classes() -> None:
    data = pictures(4)
    feature = ClassLabel()
    feature.names = ["cat", "dog"]  # type: ignore[attr-defined]
    data.features["kind"] = feature
    for classes, wanted in ((("cat", "dog"), [0, 1, 0, 1]), (("dog", "cat"), [1, 0, 1, 0])):
        assert tensors(data, "data", CLASSES, classes=classes)[1].tolist() == wanted
    assert tensors(data, "data", CLASSES, classes=("Katze", "Hund"))[1].tolist() == [0, 1, 0, 1]
    with pytest.raises(DataError, match="has a class 'cat': allowed are dog, eel"):
        tensors(data, "data", CLASSES, classes=("dog", "eel"))


def test_a_column_of_texts_is_numbered_by_the_named_classes() -> None:
    rows = [{"image": Picture.new("L", (8, 8)), "label": name} for name in ("dog", "cat\u200b")]
    data = Dataset({"image": Image(), "label": object()}, rows)
    assert tensors(data, "data", CLASSES, classes=("cat", "dog"))[1].tolist() == [1, 0]
    with pytest.raises(DataError, match="labels are texts, as 'dog'"):
        tensors(data, "data", CLASSES)


def test_pictures_and_class_labels_are_found_by_their_features() -> None:
    for mode, channels in (("L", 1), ("1", 1), ("RGBA", 3)):
        inputs, targets = tensors(pictures(5, mode), "data", CLASSES)
        assert inputs.shape == (5, channels, 8, 8)
        assert targets.tolist() == [0, 1, 0, 1, 0]
    inputs, _ = tensors(pictures(), "data", CLASSES)
    torch.testing.assert_close(inputs[:, 0, 0, 0], torch.arange(6) * 50 / 127.5 - 1)
    inputs, _ = tensors(pictures(), "data", CLASSES, (0.0,), (1.0,))
    torch.testing.assert_close(inputs[:, 0, 0, 0], torch.arange(6) * 50 / 255)


def test_masks_keep_their_numbers_and_tokens_are_inputs_of_texts() -> None:
    mask = Picture.fromarray(np.eye(8, dtype=np.uint8))
    rows = [{"image": Picture.new("RGB", (8, 8)), "annotation": mask} for _ in range(2)]
    maps = Dataset({"image": Image(), "annotation": Image()}, rows)
    inputs, targets = tensors(maps, "data", SegmentationConfig().make(2))
    assert inputs.shape == (2, 3, 8, 8)
    assert torch.equal(targets[0], torch.eye(8, dtype=torch.int64))
    texts = Dataset({"input_ids": Sequence(), "label": ClassLabel()}, [{"input_ids": [5, 6, 0], "label": 1}])
    assert [part.tolist() for part in tensors(texts, "data", TextConfig().make(2))] == [[[5, 6, 0]], [1]]


# As RoBERTa has them: <s> is 0, padding is 1.
ROBERTA = [
    {"input_ids": [0, 5, 2, 1], "attention_mask": [1, 1, 1, 0], "label": 1},
    {"input_ids": [0, 2, 1, 1], "attention_mask": [1, 1, 0, 0], "label": 0},
]
TOKENS = {"input_ids": Sequence(), "attention_mask": Sequence(), "label": ClassLabel()}
PADDED = [[1, 5, 2, 0], [1, 2, 0, 0]]


def test_the_padding_of_token_ids_is_the_one_of_the_attention_mask() -> None:
    data = Dataset(TOKENS, ROBERTA)
    assert tensors(data, "data", TextConfig().make(2))[0].tolist() == PADDED
    assert inputs_and_targets(ROBERTA, "data")[0].tolist() == PADDED
    columns = {key: [row[key] for row in ROBERTA] for key in TOKENS}
    assert inputs_and_targets(columns, "data")[0].tolist() == PADDED


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        ([0, 5, 2, 7], [1, 1, 1, 1]),  # without padding its id is not known
        ([9, 5, 9, 9], [1, 1, 1, 0]),  # padded with a token that is attended to
        ([4, 5, 0, 1], [1, 1, 0, 0]),
        ([4, 5, 0, 0], [1, 1, 0]),
    ],
)
def test_rejects_token_ids_whose_padding_is_not_one_id(ids: list[int], mask: list[int]) -> None:
    row = {"input_ids": ids, "attention_mask": mask, "label": 1}
    with pytest.raises(DataError, match="attention_mask"):
        tensors(Dataset(TOKENS, [row]), "data", TextConfig().make(2))


def test_numbers_are_not_cut_to_whole_or_real_ones() -> None:
    """Values that are no class index reach the caller, who refuses them; complex numbers never do."""
    rows = [{"image": Picture.new("L", (8, 8), row), "label": row / 2} for row in range(4)]
    halves = Dataset({"image": Image(), "label": Sequence()}, rows)
    assert tensors(halves, "data", CLASSES)[1].tolist() == [0, 0.5, 1, 1.5]
    torch.manual_seed(0)
    models: list[nn.Module] = [MLP((1, 8, 8), 2)]
    with pytest.raises(DataError, match="no whole numbers"):
        fedstill.distil([halves], models, MLP((1, 8, 8), 2), halves, 2)
    rows = [{"image": Picture.new("L", (8, 8)), "label": 1 + 1j}]
    with pytest.raises(DataError, match="data: 'label': values are complex128"):
        tensors(Dataset({"image": Image(), "label": Sequence()}, rows), "data", CLASSES)


def test_what_cannot_be_told_is_one_line() -> None:
    for given, said in (
        (pictures(other=ClassLabel()), r"data does not tell its targets: allowed is one called label,"),
        (Dataset({"text": Sequence(), "label": ClassLabel()}, []), "data does not tell its inputs"),
        (pictures(0), "data has no rows"),
        (pictures(2, "I"), "data: 'scan': image 0: is an image of mode I: allowed are 8 bits"),
        (
            Dataset(pictures().features, [{"scan": Picture.new("L", (s, 8)), "kind": 0} for s in (8, 4)]),
            "one size",
        ),
    ):
        with pytest.raises(DataError, match=said):
            tensors(given, "data", CLASSES)
    with pytest.raises(DataError, match="allowed for task reconstruction are tensors"):
        tensors(pictures(), "data", ReconstructionConfig().make(1))


def test_distil_takes_them() -> None:
    torch.manual_seed(0)
    models: list[nn.Module] = [MLP((1, 8, 8), 2), MLP((1, 8, 8), 2)]
    quick: dict[str, Any] = {"method": fedstill.FedIOD(steps=2), "local": fedstill.LocalConfig(epochs=1)}
    outcome = fedstill.distil([pictures(), pictures(4)], models, MLP((1, 8, 8), 2), pictures(), 2, **quick)
    assert [node["examples"] for node in outcome.figures["nodes"]] == [6, 4]


def test_rejects_data_sets_that_number_their_classes_differently() -> None:
    def named(*names: str) -> Dataset:
        feature = ClassLabel()
        feature.names = list(names)  # type: ignore[attr-defined]
        return Dataset({"scan": Image(), "kind": feature}, [])

    require_one_order(
        {"data[0]": named("cat", "dog"), "data[1]": pictures(), "test": named("cat", "dog\u200b")}
    )
    with pytest.raises(DataError, match=r"data\[1\].*data\[0\]"):
        require_one_order({"data[0]": named("cat", "dog"), "data[1]": named("dog", "cat")})
