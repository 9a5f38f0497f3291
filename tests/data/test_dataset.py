from __future__ import annotations

import numpy as np
import pytest
import torch

from fedstill.core.dataset import TensorData, check_classification, normalised
from fedstill.core.errors import DataError


def images(n: int = 4, c: int = 1, h: int = 8, w: int = 8) -> torch.Tensor:
    return torch.zeros(n, c, h, w)


def labels(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_good_data_passes_even_where_a_class_is_missing() -> None:
    check_classification(TensorData(images(4, 3, 12, 8), labels(0, 1, 1, 0)), 5, "train")


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        (images(0), labels(), "no examples"),
        (images()[:, 0], labels(0, 0, 0, 0), r"shape \(4, 8, 8\)"),
        (images().double(), labels(0, 0, 0, 0), "float64"),
        (images(h=6), labels(0, 0, 0, 0), "6 x 8"),
        (images(w=10), labels(0, 0, 0, 0), "8 x 10"),
        (images(h=0), labels(0, 0, 0, 0), "0 x 8"),
        (images(c=0), labels(0, 0, 0, 0), "no channels"),
        (images(), labels(0, 0, 0), "4 inputs but 3 targets"),
        (images(), labels(0, 0, 0, 0).int(), "int32"),
        (images(), labels(0, 0, 0, 0)[:, None], r"shape \(4, 1\)"),
        (images(), labels(0, 3, 1, 4), r"label 3 of example 1 is outside 0\.\.2 \(2 such"),
        (images(), labels(0, 1, 2, -1), r"label -1 of example 3 is outside 0\.\.2 \(1 such"),
    ],
)
def test_each_fault_has_its_line(inputs: torch.Tensor, targets: torch.Tensor, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        check_classification(TensorData(inputs, targets), 3, "train of x")
    assert str(caught.value).startswith("train of x: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_broken_numbers_are_counted_by_example_and_the_first_is_named(value: float) -> None:
    inputs = images()
    inputs[1, 0, 3, 3] = inputs[1, 0, 0, 0] = inputs[3, 0, 7, 7] = value
    with pytest.raises(DataError, match="2 examples hold NaN or infinity, the first is example 1"):
        check_classification(TensorData(inputs, labels(0, 0, 0, 0)), 1, "train")


def test_subset_keeps_the_asked_order_and_pairs_and_owns_its_memory() -> None:
    data = TensorData(torch.arange(3.0).view(3, 1, 1, 1), labels(10, 11, 12))
    part = data.subset(torch.tensor([2, 0]))
    assert len(part) == 2
    assert part.inputs.flatten().tolist() == [2.0, 0.0]
    assert part.targets.tolist() == [12, 10]
    part.inputs.zero_()
    assert data.inputs.flatten().tolist() == [0.0, 1.0, 2.0]


def test_normalised_by_hand() -> None:
    # 51 / 255 = 0.2, so (0.2 - 0.5) / 0.5 = -0.6; second channel: (0.2 - 0.1) / 0.25 = 0.4
    pixels = np.full((1, 2, 1, 1), 51, dtype=np.uint8)
    assert normalised(pixels, (0.5, 0.1), (0.5, 0.25)).flatten().tolist() == pytest.approx([-0.6, 0.4])
    # floats are in [0, 1] already
    floats = np.full((1, 1, 1, 1), 0.75, dtype=np.float64)
    x = normalised(floats, (0.5,), (0.5,))
    assert x.dtype == torch.float32
    assert x.item() == 0.5


def test_normalised_leaves_its_source_alone_and_is_contiguous() -> None:
    pixels = np.ones((2, 4, 4, 3), dtype=np.float32).transpose(0, 3, 1, 2)
    x = normalised(pixels, (0.5,) * 3, (0.5,) * 3)
    assert x.is_contiguous()
    assert (pixels == 1).all()
