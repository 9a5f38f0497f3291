"""Tasks with one class per pixel: data checks, loss, counts and encoded label maps."""

from __future__ import annotations

import math

import pytest
import torch

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.tasks.instances import Instances
from fedstill.tasks.map_task import MapTask, soft_dice_loss
from fedstill.tasks.segmentation import Segmentation

G, B, C, H, W = 2, 3, 3, 4, 8


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    outputs = torch.randn(G, B, C, H, W, generator=draw, dtype=torch.float64)
    return outputs, torch.randint(0, C, (G, B, H, W), generator=draw)


TASKS: list[MapTask] = [
    Segmentation(C),
    Segmentation(C, (1.0, 2.0, 0.5), dice=0.0),
    Segmentation(C, (1.0, 2.0, 0.5), dice=0.3),
    Instances(),
]


# --- the loss --------------------------------------------------------------------------------------


def test_weighted_cross_entropy_by_hand() -> None:
    # Two pixels, one image: p(true) is 1/2 for a pixel of class 0, 1/4 for one of class 1 that weighs 3.
    outputs = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]]).view(1, 1, 2, 1, 2)
    targets = torch.tensor([[[[0, 1]]]])
    task = Segmentation(2, (1.0, 3.0), dice=0.0)
    torch.testing.assert_close(
        task.loss(outputs, targets), torch.tensor([(math.log(2) + 3 * math.log(4)) / 2])
    )


def test_soft_dice_by_hand() -> None:
    # Four pixels: one of class 1 with p = 0.8, and three others with p = 0.5, 0.5, 0 for class 1.
    p = torch.tensor([0.8, 0.5, 0.5, 1e-9])
    outputs = torch.stack([(1 - p).log(), p.log()]).view(1, 2, 2, 2)
    loss = soft_dice_loss(outputs, torch.tensor([[[1, 0], [0, 0]]]))
    torch.testing.assert_close(loss, torch.tensor([1 - (2 * 0.8 + 1) / (1.8 + 1 + 1)]))


@pytest.mark.parametrize("seed", range(3))
def test_soft_dice_equals_monai(seed: int) -> None:
    losses = pytest.importorskip("monai.losses")
    outputs, targets = batch(seed)
    theirs = losses.DiceLoss(
        include_background=False,
        to_onehot_y=True,
        softmax=True,
        smooth_nr=1.0,
        smooth_dr=1.0,
        reduction="none",
    )(outputs[0], targets[0].unsqueeze(1))
    torch.testing.assert_close(soft_dice_loss(outputs[0], targets[0]), theirs.flatten(1).mean(1))


@pytest.mark.parametrize("task", TASKS)
def test_loss_is_mean_over_examples(task: MapTask) -> None:
    outputs, targets = batch()
    alone = task.loss(outputs[0].unsqueeze(1), targets[0].unsqueeze(1))  # as private training asks
    assert alone.shape == (B,)
    torch.testing.assert_close(alone.mean(), task.loss(outputs, targets)[0])


@pytest.mark.parametrize("task", TASKS)
def test_minimizing_loss_fits_targets(task: MapTask) -> None:
    _, targets = batch()
    outputs = torch.zeros(G, B, C, H, W, requires_grad=True)
    optimizer = torch.optim.SGD([outputs], 50.0)
    for _ in range(30):
        optimizer.zero_grad()
        task.loss(outputs, targets).sum().backward()
        optimizer.step()
    assert torch.equal(outputs.argmax(2), targets)


# --- data ------------------------------------------------------------------------------------------


def data(targets: torch.Tensor) -> TensorData:
    return TensorData(torch.zeros(len(targets), 1, 4, 8), targets)


def test_counts_are_pixel_shares_summing_to_examples() -> None:
    targets = torch.zeros(3, 4, 8, dtype=torch.int64)
    targets[0, :, :2] = 2  # a quarter
    targets[1] = 1
    counts = TASKS[0].counts(data(targets))
    assert counts.tolist() == [1.75, 1.0, 0.25]
    assert counts.dtype == torch.float64  # a sum of many, rounded to float32, moves by more than one's share


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0, 1.0, 1.0)])
def test_rejects_wrong_number_of_class_weights(weights: tuple[float, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"task.class_weights .* one for each of 3 classes"):
        Segmentation(3, weights)


# --- conditions ------------------------------------------------------------------------------------


def test_encoded_map_has_one_channel_per_code() -> None:
    condition = Instances().encode_maps(torch.tensor([[[0, 1], [2, 1]]], dtype=torch.uint8))
    assert condition.dtype == torch.float32
    assert condition.tolist() == [[[[1, -1], [-1, -1]], [[-1, 1], [-1, 1]], [[-1, -1], [1, -1]]]]


def test_balance_loss_is_zero_with_label_maps() -> None:
    assert Instances().balance_loss(torch.randn(2, 3, 4, 4)) == 0
