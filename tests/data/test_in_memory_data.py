"""Examples given as Python objects: common forms give equal tensors, others are refused.

Hugging Face data sets are replaced by a stub with their documented interface.
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
from fedstill.data.in_memory_data import (
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
    """Map-style data set of arbitrary items."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Stream(torch_data.IterableDataset[Any]):
    """Data set without a length."""

    def __iter__(self) -> Any:
        return iter(PICTURES)


def hugging_face_data(*names: str) -> list[dict[str, Any]]:
    return [dict(zip(names, (INPUTS[row], LABELS[row], row), strict=False)) for row in range(6)]


FORMS: dict[str, Any] = {
    "tensors": (INPUTS, torch.tensor(LABELS)),
    "arrays in a list": [INPUTS.numpy(), np.array(LABELS)],
    "backwards": (INPUTS.numpy()[::-1].copy()[::-1], np.array(LABELS[::-1], dtype=">i4")[::-1]),
    "data set": TENSORS,
    "pictures": PICTURES,
    "data set of pictures": Items(PICTURES),
    "two lists": ([image for image, _ in PICTURES], LABELS),
    "mappings": Items(hugging_face_data("image", "label", "id")),
    "mappings of pictures": [{"img": image, "target": label} for image, label in PICTURES],
    "one mapping": {"pixel_values": INPUTS, "labels": LABELS},
    "loader": torch_data.DataLoader(TENSORS, batch_size=4),
    "loader in random order": torch_data.DataLoader(TENSORS, batch_size=4, shuffle=True),
    "loader of pictures": torch_data.DataLoader(Items(PICTURES), batch_size=4),
}


@pytest.mark.parametrize("form", FORMS)
def test_common_forms_give_equal_tensors(form: str) -> None:
    inputs, targets = extract_inputs_and_targets(FORMS[form], "data[0]")
    torch.testing.assert_close(to_input_tensor(inputs, "data[0]"), INPUTS)
    assert to_target_tensor(targets, "data[0]").tolist() == LABELS


@pytest.mark.parametrize("form", ["pictures", "mappings", "data set"])
def test_list_of_two_examples_is_not_a_pair(form: str) -> None:
    two = [FORMS[form][row] for row in range(2)]
    inputs, targets = extract_inputs_and_targets(two, "data[0]")
    torch.testing.assert_close(to_input_tensor(inputs, "data[0]"), INPUTS[:2])
    assert to_target_tensor(targets, "data[0]").tolist() == LABELS[:2]


def test_pil_masks_are_class_indices() -> None:
    masks = [Picture.fromarray((image > 99).astype(np.uint8), "P") for image in PIXELS]
    pairs = [{"image": image, "mask": mask} for (image, _), mask in zip(PICTURES, masks, strict=True)]
    _, targets = extract_inputs_and_targets(pairs, "data[0]")
    assert np.array_equal(to_target_tensor(targets, "data[0]").numpy(), PIXELS > 99)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            hugging_face_data("picture", "label"),
            "examples have picture, label, so their inputs are not clear",
        ),
        (
            hugging_face_data("image", "label", "mask"),
            "examples have image, label, mask, so their targets are not clear",
        ),
        (
            [*hugging_face_data("image", "label"), {"image": INPUTS[0]}],
            r"example 6 has image \(expected image and label",
        ),
        (Stream(), "is a Stream"),
        (torch_data.DataLoader(Stream()), "is a Stream"),
        (torch_data.DataLoader(TENSORS, collate_fn=list), "a custom collate_fn"),
        (
            torch_data.DataLoader(TENSORS, sampler=torch_data.WeightedRandomSampler([1.0] * 6, 6)),
            "a custom sampler",
        ),
        (
            torch_data.DataLoader(TENSORS, sampler=torch_data.RandomSampler(TENSORS, num_samples=2)),
            "a custom sampler",
        ),
        (torch_data.DataLoader(TENSORS, batch_sampler=[[0, 1], [2]]), "a custom batch_sampler"),
        ([], "has no examples"),
        (None, "is a NoneType"),
    ],
)
def test_rejects_other_forms(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"^data\[0\].* ?{message}"):
        extract_inputs_and_targets(value, "data[0]")


def run_distil(data: Any, **more: Any) -> fedstill.Outcome:
    torch.manual_seed(0)
    quick: dict[str, Any] = {
        "method": fedstill.FedMD(rounds=1),
        "local": fedstill.LocalConfig(epochs=1),
        "public": INPUTS,
    }
    models = [MLP((1, 8, 8), 2), MLP((1, 8, 8), 2)]
    return fedstill.distil([data, data], models, MLP((1, 8, 8), 2), data, 2, **quick | more)


def test_distil_gives_equal_results_for_pil_images_and_tensors() -> None:
    expected = run_distil(FORMS["tensors"]).result["nodes"]
    assert run_distil(FORMS["data set of pictures"], public=INPUTS.numpy()).result["nodes"] == expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"data": (INPUTS.permute(0, 2, 3, 1), LABELS)}, r"\(6, 8, 8, 1\) .*channels seem to be"),
        ({"public": INPUTS.permute(0, 2, 3, 1).numpy()}, r"public.*8, 1\) .*channels seem to be"),
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
def test_distil_errors_name_the_argument(more: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        run_distil(**{"data": FORMS["tensors"]} | more)


CLASSES = ClassificationConfig().make(2)


class ClassLabel:
    """Feature with class names."""


class Image:
    """Feature with PIL images."""


class Sequence:
    """Feature with lists."""


class Dataset:
    """Stub of ``datasets.Dataset`` with rows as dictionaries."""

    def __init__(self, features: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.features, self.column_names, self._rows = features, list(features), rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


def pil_images(count: int = 6, mode: str = "L", **more: Any) -> Dataset:
    """Return a data set in which image i has brightness 50 i and class i % 2."""
    rows = [{"scan": Picture.new("L", (8, 8), 50 * i).convert(mode), "kind": i % 2} for i in range(count)]
    return Dataset({"scan": Image(), "kind": ClassLabel(), **more}, rows)


def test_class_labels_are_renumbered_to_the_given_classes() -> None:
    data = pil_images(4)
    feature = ClassLabel()
    feature.names = ["cat", "dog"]  # type: ignore[attr-defined]
    data.features["kind"] = feature
    for classes, expected in ((("cat", "dog"), [0, 1, 0, 1]), (("dog", "cat"), [1, 0, 1, 0])):
        assert hugging_face_tensors(data, "data", CLASSES, classes=classes)[1].tolist() == expected
    assert hugging_face_tensors(data, "data", CLASSES, classes=("Katze", "Hund"))[1].tolist() == [0, 1, 0, 1]
    with pytest.raises(DataError, match=r"'cat'.* dog, eel"):
        hugging_face_tensors(data, "data", CLASSES, classes=("dog", "eel"))


def test_text_labels_are_numbered_by_the_given_classes() -> None:
    rows = [{"image": Picture.new("L", (8, 8)), "label": name} for name in ("dog", "cat\u200b")]
    data = Dataset({"image": Image(), "label": object()}, rows)
    assert hugging_face_tensors(data, "data", CLASSES, classes=("cat", "dog"))[1].tolist() == [1, 0]
    with pytest.raises(DataError, match=r"texts .*'dog'"):
        hugging_face_tensors(data, "data", CLASSES)


def test_finds_columns_by_their_features() -> None:
    for mode, channels in (("L", 1), ("1", 1), ("RGBA", 3)):
        inputs, targets = hugging_face_tensors(pil_images(5, mode), "data", CLASSES)
        assert inputs.shape == (5, channels, 8, 8)
        assert targets.tolist() == [0, 1, 0, 1, 0]
    inputs, _ = hugging_face_tensors(pil_images(), "data", CLASSES)
    torch.testing.assert_close(inputs[:, 0, 0, 0], torch.arange(6) * 50 / 127.5 - 1)
    inputs, _ = hugging_face_tensors(pil_images(), "data", CLASSES, (0.0,), (1.0,))
    torch.testing.assert_close(inputs[:, 0, 0, 0], torch.arange(6) * 50 / 255)


def test_reads_masks_and_token_ids() -> None:
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


# Like RoBERTa: <s> is 0, padding is 1.
ROBERTA = [
    {"input_ids": [0, 5, 2, 1], "attention_mask": [1, 1, 1, 0], "label": 1},
    {"input_ids": [0, 2, 1, 1], "attention_mask": [1, 1, 0, 0], "label": 0},
]
TOKENS = {"input_ids": Sequence(), "attention_mask": Sequence(), "label": ClassLabel()}
PADDED = [[1, 5, 2, 0], [1, 2, 0, 0]]


def test_padding_follows_the_attention_mask() -> None:
    data = Dataset(TOKENS, ROBERTA)
    assert hugging_face_tensors(data, "data", TextConfig().make(2))[0].tolist() == PADDED
    assert extract_inputs_and_targets(ROBERTA, "data")[0].tolist() == PADDED
    columns = {key: [row[key] for row in ROBERTA] for key in TOKENS}
    assert extract_inputs_and_targets(columns, "data")[0].tolist() == PADDED


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        ([0, 5, 2, 7], [1, 1, 1, 1]),  # the padding id is unknown without padding
        ([9, 5, 9, 9], [1, 1, 1, 0]),  # the padding id is also a token
        ([4, 5, 0, 1], [1, 1, 0, 0]),
        ([4, 5, 0, 0], [1, 1, 0]),
    ],
)
def test_rejects_ambiguous_padding_ids(ids: list[int], mask: list[int]) -> None:
    row = {"input_ids": ids, "attention_mask": mask, "label": 1}
    with pytest.raises(DataError, match="attention_mask"):
        hugging_face_tensors(Dataset(TOKENS, [row]), "data", TextConfig().make(2))


def test_rejects_fractional_and_complex_labels() -> None:
    """Fractional labels are refused by the caller, complex ones here."""
    rows = [{"image": Picture.new("L", (8, 8), row), "label": row / 2} for row in range(4)]
    halves = Dataset({"image": Image(), "label": Sequence()}, rows)
    assert hugging_face_tensors(halves, "data", CLASSES)[1].tolist() == [0, 0.5, 1, 1.5]
    torch.manual_seed(0)
    models: list[nn.Module] = [MLP((1, 8, 8), 2)]
    with pytest.raises(DataError, match="not integers"):
        fedstill.distil([halves], models, MLP((1, 8, 8), 2), halves, 2)
    rows = [{"image": Picture.new("L", (8, 8)), "label": 1 + 1j}]
    with pytest.raises(DataError, match=r"'label'.* complex128"):
        hugging_face_tensors(Dataset({"image": Image(), "label": Sequence()}, rows), "data", CLASSES)


def test_ambiguous_columns_are_one_line() -> None:
    for value, message in (
        (pil_images(other=ClassLabel()), r"data has no unambiguous targets \(expected one called label,"),
        (Dataset({"text": Sequence(), "label": ClassLabel()}, []), "data has no unambiguous inputs"),
        (pil_images(0), "data has no rows"),
        (pil_images(2, "I"), r"data: 'scan': image 0: is an image of mode I \(expected 8 bits"),
        (
            Dataset(pil_images().features, [{"scan": Picture.new("L", (s, 8)), "kind": 0} for s in (8, 4)]),
            "one size",
        ),
    ):
        with pytest.raises(DataError, match=message):
            hugging_face_tensors(value, "data", CLASSES)
    with pytest.raises(DataError, match="task reconstruction"):
        hugging_face_tensors(pil_images(), "data", ReconstructionConfig().make(1))


def test_distil_accepts_hugging_face_data_sets() -> None:
    torch.manual_seed(0)
    models: list[nn.Module] = [MLP((1, 8, 8), 2), MLP((1, 8, 8), 2)]
    quick: dict[str, Any] = {"method": fedstill.FedIOD(steps=2), "local": fedstill.LocalConfig(epochs=1)}
    outcome = fedstill.distil(
        [pil_images(), pil_images(4)], models, MLP((1, 8, 8), 2), pil_images(), 2, **quick
    )
    assert [node["examples"] for node in outcome.result["nodes"]] == [6, 4]


def test_rejects_data_sets_with_different_class_orders() -> None:
    def hugging_face_data(*names: str) -> Dataset:
        feature = ClassLabel()
        feature.names = list(names)  # type: ignore[attr-defined]
        return Dataset({"scan": Image(), "kind": feature}, [])

    require_same_class_order(
        {
            "data[0]": hugging_face_data("cat", "dog"),
            "data[1]": pil_images(),
            "test": hugging_face_data("cat", "dog\u200b"),
        }
    )
    with pytest.raises(DataError, match=r"data\[1\].*data\[0\]"):
        require_same_class_order(
            {"data[0]": hugging_face_data("cat", "dog"), "data[1]": hugging_face_data("dog", "cat")}
        )
