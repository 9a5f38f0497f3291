"""Invalid data are rejected in one line that names the first fault."""

from __future__ import annotations

import math

import pytest
import torch

from fedstill.core.dataset import TensorData
from fedstill.core.errors import DataError
from fedstill.tasks import Task
from fedstill.tasks.classification import Classification, TextClassification
from fedstill.tasks.instances import Instances
from fedstill.tasks.multi_label import MultiLabel
from fedstill.tasks.reconstruction import Reconstruction
from fedstill.tasks.segmentation import Segmentation

IMAGES, MAP_SHAPE = torch.zeros(2, 1, 8, 12), (2, 8, 12)
CLASSES, FINDINGS, MAPS = (
    torch.tensor([0, 2]),
    torch.tensor([[0, 1, -1], [-1, -1, -1]]),
    torch.zeros(MAP_SHAPE).long(),
)
IDS = torch.tensor([[4, 1, 0], [0, 0, 0]])  # an empty text among them
CLASSIFICATION, MULTI_LABEL, SEGMENTATION = Classification(3), MultiLabel(3), Segmentation(3)
TEXT, RECONSTRUCTION = TextClassification(3), Reconstruction()
NAN_IMAGES = IMAGES.clone()
NAN_IMAGES[1, 0, 3, 3] = math.nan
MAP_5, MAP_NEGATIVE = MAPS.clone(), MAPS.clone()
MAP_5[1, 2:4, 2:4], MAP_NEGATIVE[0, 0, 0] = 5, -1


@pytest.mark.parametrize(
    ("task", "inputs", "targets"),
    [
        (CLASSIFICATION, IMAGES, CLASSES),
        (MULTI_LABEL, IMAGES, FINDINGS),
        (SEGMENTATION, IMAGES, MAPS),
        (Instances(), IMAGES, MAPS),
        (TEXT, IDS, CLASSES),
        (RECONSTRUCTION, IMAGES, IMAGES),
        (CLASSIFICATION, torch.zeros(2, 3, 8, 12), CLASSES),
    ],
)
def test_accepts_valid_data(task: Task, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    task.check(TensorData(inputs, targets), "train")


@pytest.mark.parametrize(
    ("task", "inputs", "targets", "message"),
    [
        (CLASSIFICATION, IMAGES[:0], CLASSES[:0], "there are no examples"),
        (
            CLASSIFICATION,
            IMAGES[:, 0],
            CLASSES,
            r"inputs are float32 of shape \(2, 8, 12\) \(expected float32",
        ),
        (CLASSIFICATION, IMAGES.double(), CLASSES, "inputs are float64"),
        (
            CLASSIFICATION,
            IMAGES[:, :, :6],
            CLASSES,
            r"images are 6 x 12",
        ),
        (SEGMENTATION, IMAGES[..., :10], MAPS[..., :10], "images are 8 x 10"),
        (CLASSIFICATION, IMAGES[:, :0], CLASSES, r"\(2, 0, 8, 12\) \(expected one or more of each"),
        (CLASSIFICATION, IMAGES, CLASSES[:1], "2 inputs but 1 targets"),
        (MULTI_LABEL, NAN_IMAGES, FINDINGS, "1 examples hold NaN or infinity, the first is example 1"),
        (
            CLASSIFICATION,
            -1 / IMAGES.abs(),
            CLASSES,
            "2 examples hold NaN or infinity, the first is example 0",
        ),
        (
            CLASSIFICATION,
            IMAGES,
            CLASSES.int(),
            r"targets are int32 of shape .* \(expected one int64 class index",
        ),
        (CLASSIFICATION, IMAGES, CLASSES[:, None], r"targets are int64 of shape \(2, 1\)"),
        (CLASSIFICATION, IMAGES, CLASSES + 1, r"label 3 of example 1 is outside 0\.\.2 \(1 such"),
        (CLASSIFICATION, IMAGES, CLASSES - 1, r"label -1 of example 0 is outside 0\.\.2"),
        (
            MULTI_LABEL,
            IMAGES,
            CLASSES,
            r"targets are int64 of shape \(2,\) \(expected int64 of shape \(2, 3\)",
        ),
        (MULTI_LABEL, IMAGES, FINDINGS + 1, r"label 2 of example 0 is outside -1\.\.1 \(1 such"),
        (MULTI_LABEL, IMAGES, FINDINGS - 1, r"label -2 of example 0 is outside -1\.\.1 \(4 such"),
        (
            SEGMENTATION,
            IMAGES,
            MAPS.float(),
            r"targets are float32 of shape \(2, 8, 12\) \(expected int64 of shape",
        ),
        (SEGMENTATION, IMAGES, MAPS.transpose(1, 2), r"\(2, 12, 8\) \(expected int64 of shape \(2, 8, 12\)"),
        (SEGMENTATION, IMAGES, MAP_5, r"label 5 of example 1 is outside 0\.\.2 \(4 such"),
        (SEGMENTATION, IMAGES, MAP_NEGATIVE, r"label -1 of example 0 is outside 0\.\.2 \(1 such"),
        (TEXT, IDS.float(), CLASSES, r"inputs are float32 of shape \(2, 3\) \(expected int64 ids"),
        (TEXT, IDS[:, :0], CLASSES, r"\(2, 0\) \(expected one or more of each"),
        (TEXT, IDS - 1, CLASSES, "2 examples hold ids below 0, the first is example 0"),
        (TEXT, IDS, CLASSES + 1, r"label 3 of example 1 is outside 0\.\.2"),
        (RECONSTRUCTION, IMAGES.expand(2, 3, 8, 12), IMAGES, r"expected equal ones, \(N, 1, H, W\)"),
        (RECONSTRUCTION, IMAGES, IMAGES[:, 0], "targets as inputs: inputs are float32 of shape"),
        (RECONSTRUCTION, IMAGES, IMAGES[..., :8], "expected equal ones"),
        (RECONSTRUCTION, IMAGES[:, :, :4], IMAGES[:, :, :4], r"images are 4 x 12 \(expected 8 x 8 or more"),
        (RECONSTRUCTION, IMAGES, IMAGES + 1.5, r"targets lie in 1\.5\.\.1\.5"),
        (RECONSTRUCTION, IMAGES, NAN_IMAGES, "targets as inputs: 1 examples hold NaN"),
    ],
)
def test_rejects_invalid_data_in_one_line(
    task: Task, inputs: torch.Tensor, targets: torch.Tensor, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        task.check(TensorData(inputs, targets), "train of x")
    assert str(caught.value).startswith("train of x: ")
    assert "\n" not in str(caught.value)
