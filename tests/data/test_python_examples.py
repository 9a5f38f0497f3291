"""Examples as Python has them: every usual form gives the same tensors, and others are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils import data as torch_data

import fedstill
from fedstill.core.errors import DataError
from fedstill.data.python_examples import input_tensor, inputs_and_targets, target_tensor
from fedstill.models import MLP

PIXELS = np.random.default_rng(0).integers(0, 255, (6, 8, 8), dtype=np.uint8)
INPUTS = (torch.tensor(PIXELS) / 127.5 - 1).view(6, 1, 8, 8)
LABELS = [0, 1, 1, 0, 1, 0]
TENSORS = torch_data.TensorDataset(INPUTS, torch.tensor(LABELS))
PICTURES = [(Image.fromarray(image), label) for image, label in zip(PIXELS, LABELS, strict=True)]


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
    inputs, targets = inputs_and_targets(FORMS[form], "data[0]")
    torch.testing.assert_close(input_tensor(inputs, "data[0]"), INPUTS)
    assert target_tensor(targets, "data[0]").tolist() == LABELS


@pytest.mark.parametrize("form", ["pictures", "mappings", "data set"])
def test_two_examples_are_not_inputs_and_targets(form: str) -> None:
    two = [FORMS[form][row] for row in range(2)]
    inputs, targets = inputs_and_targets(two, "data[0]")
    torch.testing.assert_close(input_tensor(inputs, "data[0]"), INPUTS[:2])
    assert target_tensor(targets, "data[0]").tolist() == LABELS[:2]


def test_masks_of_pictures_are_numbers_of_classes() -> None:
    masks = [Image.fromarray((image > 99).astype(np.uint8), "P") for image in PIXELS]
    pairs = [{"image": image, "mask": mask} for (image, _), mask in zip(PICTURES, masks, strict=True)]
    _, targets = inputs_and_targets(pairs, "data[0]")
    assert np.array_equal(target_tensor(targets, "data[0]").numpy(), PIXELS > 99)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (named("picture", "label"), "examples have picture, label, and so no one name of inputs"),
        (named("image", "label", "mask"), "examples have image, label, mask, and so no one name of targets"),
        (
            [*named("image", "label"), {"image": INPUTS[0]}],
            "example 6 has image: allowed are image and label",
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
        inputs_and_targets(given, "data[0]")


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
    wanted = distilled(FORMS["tensors"]).figures["nodes"]
    assert distilled(FORMS["data set of pictures"], public=INPUTS.numpy()).figures["nodes"] == wanted


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
