"""Selection of example predictions of a run, and their assembly from slices and patches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedstill.core.dataset import CaseIndex, TensorData
from fedstill.runs.evaluation import SIDE, best_median_and_worst, choose_example_predictions
from fedstill.tasks import Task
from fedstill.tasks.classification import ClassificationConfig
from fedstill.tasks.instances import InstancesConfig
from fedstill.tasks.reconstruction import ReconstructionConfig
from fedstill.tasks.segmentation import SegmentationConfig

ONE = ((0.0,), (1.0,))  # a normalization without effect


def segmentation() -> Task:
    return SegmentationConfig().make(2)


def certain(maps: torch.Tensor) -> torch.Tensor:
    """Return logits that predict maps (N, H, W) with certainty."""
    return torch.nn.functional.one_hot(maps, 2).movedim(-1, 1).float() * 20


def strips(columns: list[int]) -> torch.Tensor:
    """Return maps (N, 8, 8) with 1 in the first columns."""
    return torch.stack([(torch.arange(8) < width).long().expand(8, 8) for width in columns])


@pytest.fixture
def patients() -> tuple[TensorData, torch.Tensor]:
    """Return four patients with two slices each, and predictions.

    The true slices have 2 and 4 columns. Instead of 4, the model predicts 4, 3, 1 and 2.
    """
    cases = CaseIndex(torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), ("a", "b", "c", "d"), ("x", "x", "y", ""))
    truth = strips([2, 4] * 4)
    images = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return TensorData(images, truth, None, cases), strips([2, 4, 2, 3, 2, 1, 2, 2])


def test_ranks_cases_by_global_model(patients: tuple[TensorData, torch.Tensor]) -> None:
    test, masks = patients
    outputs = {"student": certain(masks), "north": certain(masks.flip(0))}
    chosen = choose_example_predictions(segmentation(), test, outputs, *ONE)
    assert chosen is not None
    # Dice over the pixels of both slices: 12/12; 10/11; 6/9; 8/10. The median of four is the upper one.
    result = [(case["rank"], case["case"], case["site"]) for case in chosen[1]]
    assert result == [("best", "a", "x"), ("median", "b", "x"), ("worst", "c", "y")]
    scores = [{model["name"]: model["score"] for model in case["models"]} for case in chosen[1]]
    assert [each["student"] for each in scores] == pytest.approx([100, 1000 / 11, 600 / 9])
    # the prediction for d, compared with the truth of a
    assert scores[0]["north"] == pytest.approx(100 * 2 * 4 / (6 + 4))
    # Ranking by the other model gives another order.
    by_north = choose_example_predictions(segmentation(), test, dict(reversed(outputs.items())), *ONE)
    assert by_north is not None
    assert [case["case"] for case in by_north[1]] != [case["case"] for case in chosen[1]]


def test_shows_slice_with_largest_truth(
    patients: tuple[TensorData, torch.Tensor],
) -> None:
    test, masks = patients
    chosen = choose_example_predictions(segmentation(), test, {"student": certain(masks)}, *ONE)
    assert chosen is not None
    worst = chosen[1][2]
    assert (worst["part"], worst["parts"]) == (1, 2)
    assert torch.equal(chosen[0]["2/truth"], strips([4])[0].int())
    assert torch.equal(chosen[0]["2/output/0"], strips([1])[0].int())
    white = test.inputs[5].double().quantile(0.998)
    image = (test.inputs[5] / white).clamp(0, 1).mul(255).round().to(torch.uint8)
    assert torch.equal(chosen[0]["2/image"], image)


def test_skips_case_without_score() -> None:
    assert best_median_and_worst([math.nan, 1.0, 3.0, 2.0]) == [("best", 2), ("median", 3), ("worst", 1)]
    assert best_median_and_worst([math.nan]) == []
    # Cases that are not in this part have no score, and are never chosen.
    cases = CaseIndex(torch.tensor([2, 4]), tuple("abcde"), ("",) * 5)
    test = TensorData(torch.zeros(2, 1, 8, 8), strips([2, 2]), None, cases)
    chosen = choose_example_predictions(segmentation(), test, {"student": certain(strips([1, 2]))}, *ONE)
    assert chosen is not None
    assert [case["case"] for case in chosen[1]] == ["e", "c"]


def test_stitches_patches_and_crops_to_truth() -> None:
    """Four patches of a slide of 400 x 400; all nuclei are in its lower right corner."""
    side = 200
    objects = np.zeros((400, 400), np.int32)
    for number, (row, column) in enumerate(((220, 220), (250, 300), (330, 240)), start=1):
        objects[row : row + 30, column : column + 30] = number
    corners = [(row, column) for row in (0, side) for column in (0, side)]
    patches = [objects[row : row + side, column : column + side] for row, column in corners]
    classes = torch.tensor(np.stack(patches) > 0).long()  # inside classes only, no contour
    cases = CaseIndex(
        torch.zeros(4, dtype=torch.int64),
        ("s",),
        ("liver",),
        torch.tensor(corners),
        ((400, 400),),
        (objects,),
    )
    test = TensorData(torch.zeros(4, 3, side, side), classes, None, cases)
    logits = torch.nn.functional.one_hot(classes, 3).movedim(-1, 1).float() * 20
    chosen = choose_example_predictions(
        InstancesConfig().make(3), test, {"student": logits}, (0.5,) * 3, (0.5,) * 3
    )
    assert chosen is not None
    [case] = chosen[1]
    top, left, height, width = case["window"]
    assert (case["rank"], case["part"], case["size"], height, width) == ("only", None, [400, 400], SIDE, SIDE)
    truth = chosen[0]["0/truth"]
    assert torch.equal(truth, torch.tensor(objects)[top : top + SIDE, left : left + SIDE])
    assert set(truth.unique().tolist()) == {0, 1, 2, 3}  # the truth is complete
    output = chosen[0]["0/output/0"]
    assert torch.equal(output > 0, truth > 0)
    assert len(output.unique()) == 4  # three separate objects
    assert chosen[0]["0/image"].unique().tolist() == [128]  # 0 * 0.5 + 0.5


def test_scales_images_by_white_of_truth() -> None:
    task = ReconstructionConfig().make(1)
    truth = torch.full((1, 1, 16, 16), -1.0)
    truth[..., 4:12, 4:12] = 0.0  # half of the full range: white here
    made = truth + 0.1  # 0.05 in pixels, a tenth of that white
    chosen = choose_example_predictions(
        task, TensorData(truth - 0.2, truth), {"student": made}, (0.5,), (0.5,)
    )
    assert chosen is not None
    names = sorted(chosen[0])
    assert names == ["0/output/0", "0/seen", "0/truth"]
    assert chosen[0]["0/truth"].max() == 1
    error = chosen[0]["0/output/0"].float() - chosen[0]["0/truth"].float()
    assert error.allclose(torch.full_like(error, 0.1), atol=2e-3)
    assert chosen[1][0]["case"] == "example 1"


def test_tasks_without_pictures_have_none() -> None:
    task = ClassificationConfig().make(3)
    test = TensorData(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]))
    assert choose_example_predictions(task, test, {"student": torch.zeros(2, 3)}, *ONE) is None


def test_tensors_can_be_written_together(patients: tuple[TensorData, torch.Tensor]) -> None:
    """safetensors does not write two names for the same memory."""
    test, masks = patients
    same = certain(masks)
    chosen = choose_example_predictions(segmentation(), test, {"student": same, "north": same}, *ONE)
    assert chosen is not None
    memory = {tensor.untyped_storage().data_ptr() for tensor in chosen[0].values()}
    assert len(memory) == len(chosen[0])
    assert all(tensor.is_contiguous() for tensor in chosen[0].values())
