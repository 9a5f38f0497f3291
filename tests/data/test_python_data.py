"""Examples as Python has them: every usual form gives the same tensors, and others are refused by name.

Hugging Face data sets from Python, by a stand-in with the documented interface.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Picture
from torch import nn
from torch.utils import data as torch_data

import fedstill
from fedstill.core.errors import DataError
from fedstill.data.python_data import (
    extract_inputs_and_targets,
    hugging_face_tensors,
    require_same_class_order,
    to_input_tensor,
    to_target_tensor,
)
from fedstill.models import MLP
from fedstill.tasks.classification import ClassificationConfig, TextConfig
from fedstill.tasks.reconstruction import ReconstructionConfig
from fedstill.tasks.segmentation import SegmentationConfig

PIXELS = np.random.default_rng(0).integers(0, 255, (6, 8, 8), dtype=np.uint8)
INPUTS = (torch.tensor(PIXELS) / 127.5 - 1).view(6, 1, 8, 8)
LABELS = [0, 1, 1, 0, 1, 0]
TENSORS = torch_data.TensorDataset(INPUTS, torch.tensor(LABELS))
PICTURES = [(Picture.fromarray(image), label) for image, label in zip(PIXELS, LABELS, strict=True)]


class Items(torch_data.Dataset[Any]):
    """A map-style data set of anything."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Stream(torch_data.IterableDataset[Any]):
    """A data set without a length."""

    def __iter__(self) -> Any:
        return iter(PICTURES)


def named(*names: str) -> list[dict[str, Any]]:
    return [dict(zip(names, (INPUTS[row], LABELS[row], row), strict=False)) for row in range(6)]


FORMS: dict[str, Any] = {
    "tensors": (INPUTS, torch.tensor(LABELS)),
    "arrays in a list": [INPUTS.numpy(), np.array(LABELS)],
    "backwards": (INPUTS.numpy()[::-1].copy()[::-1], np.array(LABELS[::-1], dtype=">i4")[::-1]),
    "data set": TENSORS,
    "pictures": PICTURES,
    "data set of pictures": Items(PICTURES),
    "two lists": ([image for image, _ in PICTURES], LABELS),
    "mappings": Items(named("image", "label", "id")),
    "mappings of pictures": [{"img": image, "target": label} for image, label in PICTURES],
    "one mapping": {"pixel_values": INPUTS, "labels": LABELS},
    "loader": torch_data.DataLoader(TENSORS, batch_size=4),
    "loader in random order": torch_data.DataLoader(TENSORS, batch_size=4, shuffle=True),
    "loader of pictures": torch_data.DataLoader(Items(PICTURES), batch_size=4),
}


@pytest.mark.parametrize("form", FORMS)
def test_usual_forms_give_the_same_tensors(form: str) -> None:
    inputs, targets = extract_inputs_and_targets(FORMS[form], "data[0]")
    torch.testing.assert_close(to_input_tensor(inputs, "data[0]"), INPUTS)
    assert to_target_tensor(targets, "data[0]").tolist() == LABELS


@pytest.mark.parametrize("form", ["pictures", "mappings", "data set"])
def test_two_examples_are_not_inputs_and_targets(form: str) -> None:
    two = [FORMS[form][row] for row in range(2)]
    inputs, targets = extract_inputs_and_targets(two, "data[0]")
    torch.testing.assert_close(to_input_tensor(inputs, "data[0]"), INPUTS[:2])
    assert to_target_tensor(targets, "data[0]").tolist() == LABELS[:2]


def test_masks_of_pictures_are_numbers_of_classes() -> None:
    masks = [Picture.fromarray((image > 99).astype(np.uint8), "P") for image in PIXELS]
    pairs = [{"image": image, "mask": mask} for (image, _), mask in zip(PICTURES, masks, strict=True)]
    _, targets = extract_inputs_and_targets(pairs, "data[0]")
    assert np.array_equal(to_target_tensor(targets, "data[0]").numpy(), PIXELS > 99)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (named("picture", "label"), "examples have picture, label, and so no one name of inputs"),
        (named("image", "label", "mask"), "examples have image, label, mask, and so no one name of targets"),
        (
            [*named("image", "label"), {"image": INPUTS[0]}],
            r"example 6 has image \(expected image and label",
        ),
        (Stream(), "is a Stream"),
        (torch_data.DataLoader(Stream()), "is a Stream"),
        (torch_data.DataLoader(TENSORS, collate_fn=list), "a collate_fn of its own"),
        (
            torch_data.DataLoader(TENSORS, sampler=torch_data.WeightedRandomSampler([1.0] * 6, 6)),
            "a sampler of its own",
        ),
        (
            torch_data.DataLoader(TENSORS, sampler=torch_data.RandomSampler(TENSORS, num_samples=2)),
            "a sampler of its own",
        ),
        (torch_data.DataLoader(TENSORS, batch_sampler=[[0, 1], [2]]), "a batch_sampler of its own"),
        ([], "has no examples"),
        (None, "is a NoneType"),
    ],
)
def test_other_forms_are_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises(DataError, match=rf"^data\[0\].* ?{said}"):
        extract_inputs_and_targets(given, "data[0]")


def distilled(data: Any, **more: Any) -> fedstill.Outcome:
    torch.manual_seed(0)
    quick: dict[str, Any] = {
        "method": fedstill.FedMD(rounds=1),
        "local": fedstill.LocalConfig(epochs=1),
        "public": INPUTS,
    }
    models = [MLP((1, 8, 8), 2), MLP((1, 8, 8), 2)]
    return fedstill.distil([data, data], models, MLP((1, 8, 8), 2), data, 2, **quick | more)


def test_distil_gives_the_same_for_pictures_and_tensors() -> None:
    wanted = distilled(FORMS["tensors"]).result["nodes"]
    assert distilled(FORMS["data set of pictures"], public=INPUTS.numpy()).result["nodes"] == wanted


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"data": (INPUTS.permute(0, 2, 3, 1), LABELS)}, r"\(6, 8, 8, 1\): channels seem to be the last"),
        ({"public": INPUTS.permute(0, 2, 3, 1).numpy()}, r"public.*8, 1\): channels seem to be the last"),
        ({"data": (INPUTS + 1j, LABELS)}, "inputs: values are complex64"),
        ({"data": (INPUTS, torch.tensor(LABELS) + 0j)}, "labels: values are complex64"),
        ({"public": INPUTS + 1j}, "public: values are complex64"),
        ({"data": [(INPUTS[0], 0), (INPUTS[1, :, :4], 1), (INPUTS[2], 1)]}, "values have several shapes"),
        (
            {"data": [PICTURES[0], (PICTURES[1][0].resize((4, 4)), 1), PICTURES[2]]},
            "image 1 is 4 x 4, but image 0 is 8 x 8",
        ),
    ],
)  # fmt: skip
def test_distil_names_the_argument_that_it_cannot_take(more: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        distilled(**{"data": FORMS["tensors"]} | more)


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
        assert hugging_face_tensors(data, "data", CLASSES, classes=classes)[1].tolist() == wanted
    assert hugging_face_tensors(data, "data", CLASSES, classes=("Katze", "Hund"))[1].tolist() == [0, 1, 0, 1]
    with pytest.raises(DataError, match=r"has a class 'cat' \(expected dog, eel"):
        hugging_face_tensors(data, "data", CLASSES, classes=("dog", "eel"))


def test_a_column_of_texts_is_numbered_by_the_named_classes() -> None:
    rows = [{"image": Picture.new("L", (8, 8)), "label": name} for name in ("dog", "cat\u200b")]
    data = Dataset({"image": Image(), "label": object()}, rows)
    assert hugging_face_tensors(data, "data", CLASSES, classes=("cat", "dog"))[1].tolist() == [1, 0]
    with pytest.raises(DataError, match="labels are texts, as 'dog'"):
        hugging_face_tensors(data, "data", CLASSES)


def test_pictures_and_class_labels_are_found_by_their_features() -> None:
    for mode, channels in (("L", 1), ("1", 1), ("RGBA", 3)):
        inputs, targets = hugging_face_tensors(pictures(5, mode), "data", CLASSES)
        assert inputs.shape == (5, channels, 8, 8)
        assert targets.tolist() == [0, 1, 0, 1, 0]
    inputs, _ = hugging_face_tensors(pictures(), "data", CLASSES)
    torch.testing.assert_close(inputs[:, 0, 0, 0], torch.arange(6) * 50 / 127.5 - 1)
    inputs, _ = hugging_face_tensors(pictures(), "data", CLASSES, (0.0,), (1.0,))
    torch.testing.assert_close(inputs[:, 0, 0, 0], torch.arange(6) * 50 / 255)


def test_masks_keep_their_numbers_and_tokens_are_inputs_of_texts() -> None:
    mask = Picture.fromarray(np.eye(8, dtype=np.uint8))
    rows = [{"image": Picture.new("RGB", (8, 8)), "annotation": mask} for _ in range(2)]
    maps = Dataset({"image": Image(), "annotation": Image()}, rows)
    inputs, targets = hugging_face_tensors(maps, "data", SegmentationConfig().make(2))
    assert inputs.shape == (2, 3, 8, 8)
    assert torch.equal(targets[0], torch.eye(8, dtype=torch.int64))
    texts = Dataset({"input_ids": Sequence(), "label": ClassLabel()}, [{"input_ids": [5, 6, 0], "label": 1}])
    assert [part.tolist() for part in hugging_face_tensors(texts, "data", TextConfig().make(2))] == [
        [[5, 6, 0]],
        [1],
    ]


# As RoBERTa has them: <s> is 0, padding is 1.
ROBERTA = [
    {"input_ids": [0, 5, 2, 1], "attention_mask": [1, 1, 1, 0], "label": 1},
    {"input_ids": [0, 2, 1, 1], "attention_mask": [1, 1, 0, 0], "label": 0},
]
TOKENS = {"input_ids": Sequence(), "attention_mask": Sequence(), "label": ClassLabel()}
PADDED = [[1, 5, 2, 0], [1, 2, 0, 0]]


def test_the_padding_of_token_ids_is_the_one_of_the_attention_mask() -> None:
    data = Dataset(TOKENS, ROBERTA)
    assert hugging_face_tensors(data, "data", TextConfig().make(2))[0].tolist() == PADDED
    assert extract_inputs_and_targets(ROBERTA, "data")[0].tolist() == PADDED
    columns = {key: [row[key] for row in ROBERTA] for key in TOKENS}
    assert extract_inputs_and_targets(columns, "data")[0].tolist() == PADDED


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
        hugging_face_tensors(Dataset(TOKENS, [row]), "data", TextConfig().make(2))


def test_numbers_are_not_cut_to_whole_or_real_ones() -> None:
    """Values that are no class index reach the caller, who refuses them; complex numbers never do."""
    rows = [{"image": Picture.new("L", (8, 8), row), "label": row / 2} for row in range(4)]
    halves = Dataset({"image": Image(), "label": Sequence()}, rows)
    assert hugging_face_tensors(halves, "data", CLASSES)[1].tolist() == [0, 0.5, 1, 1.5]
    torch.manual_seed(0)
    models: list[nn.Module] = [MLP((1, 8, 8), 2)]
    with pytest.raises(DataError, match="no whole numbers"):
        fedstill.distil([halves], models, MLP((1, 8, 8), 2), halves, 2)
    rows = [{"image": Picture.new("L", (8, 8)), "label": 1 + 1j}]
    with pytest.raises(DataError, match="data: 'label': values are complex128"):
        hugging_face_tensors(Dataset({"image": Image(), "label": Sequence()}, rows), "data", CLASSES)


def test_what_cannot_be_told_is_one_line() -> None:
    for given, said in (
        (pictures(other=ClassLabel()), r"data does not tell its targets \(expected one called label,"),
        (Dataset({"text": Sequence(), "label": ClassLabel()}, []), "data does not tell its inputs"),
        (pictures(0), "data has no rows"),
        (pictures(2, "I"), r"data: 'scan': image 0: is an image of mode I \(expected 8 bits"),
        (
            Dataset(pictures().features, [{"scan": Picture.new("L", (s, 8)), "kind": 0} for s in (8, 4)]),
            "one size",
        ),
    ):
        with pytest.raises(DataError, match=said):
            hugging_face_tensors(given, "data", CLASSES)
    with pytest.raises(DataError, match="allowed for task reconstruction are tensors"):
        hugging_face_tensors(pictures(), "data", ReconstructionConfig().make(1))


def test_distil_takes_them() -> None:
    torch.manual_seed(0)
    models: list[nn.Module] = [MLP((1, 8, 8), 2), MLP((1, 8, 8), 2)]
    quick: dict[str, Any] = {"method": fedstill.FedIOD(steps=2), "local": fedstill.LocalConfig(epochs=1)}
    outcome = fedstill.distil([pictures(), pictures(4)], models, MLP((1, 8, 8), 2), pictures(), 2, **quick)
    assert [node["examples"] for node in outcome.result["nodes"]] == [6, 4]


def test_rejects_data_sets_that_number_their_classes_differently() -> None:
    def named(*names: str) -> Dataset:
        feature = ClassLabel()
        feature.names = list(names)  # type: ignore[attr-defined]
        return Dataset({"scan": Image(), "kind": feature}, [])

    require_same_class_order(
        {"data[0]": named("cat", "dog"), "data[1]": pictures(), "test": named("cat", "dog\u200b")}
    )
    with pytest.raises(DataError, match=r"data\[1\].*data\[0\]"):
        require_same_class_order({"data[0]": named("cat", "dog"), "data[1]": named("dog", "cat")})
